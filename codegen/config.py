"""One kernel choice: a variant and a value for each of its parameters, with a text form that round-trips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codegen.errors import InvalidConfig

Value = int | str

UNSAID: Mapping[tuple[str, str], Value] = {
    ("gemm_wgmma", "cluster"): 1,
    **{(variant, "launches"): "apart" for variant in ("row_shared", "weight_ahead", "weight_mma", "tile_wgmma")}}
"""By variant and parameter, a value that texts of configs leave out: what all kernels of the variant had before there was the
parameter. So the texts of before still name the same kernels, and those say the same of themselves."""


@dataclass(frozen=True, slots=True)
class Config:
    """`row_warp:warps=4,rows=1,...` as a value. Parameters stand in the order in which the variant declares them, and the text
    names all of them but those that have their value of UNSAID."""

    variant: str
    params: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        said = (pair for pair in self.params if UNSAID.get((self.variant, pair[0])) != pair[1])
        return f"{self.variant}:" + ",".join(f"{name}={value}" for name, value in said)

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
