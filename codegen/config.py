"""One kernel choice: a variant and a value for each of its parameters, with a text form that round-trips."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.errors import InvalidConfig

Value = int | str


@dataclass(frozen=True, slots=True)
class Config:
    """`row_warp:warps=4,rows=1,...` as a value. Parameters stand in the order in which the variant declares them."""

    variant: str
    params: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        return f"{self.variant}:" + ",".join(f"{name}={value}" for name, value in self.params)

    def __getitem__(self, name: str) -> Value:
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(name)

    def as_dict(self) -> dict[str, Value]:
        """The parameters by name."""
        return dict(self.params)


def split_text(text: str) -> tuple[str, dict[str, str]]:
    """Takes "variant:name=value,..." apart, without knowing the variant.

    Raises:
        InvalidConfig: the text has another form.
    """
    variant, _, rest = text.strip().partition(":")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name in values:
            raise InvalidConfig(f"{part!r} is not one name=value of a config such as row_warp:warps=4,vector=2")
        values[name.strip()] = value.strip()
    return variant, values
