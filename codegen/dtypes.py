"""The data types of tensors and the accuracy classes of results."""

from __future__ import annotations

from codegen.errors import InvalidProblem, UnsupportedDtype

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""

DTYPES = tuple(ITEMSIZE)

CXX_TYPES = {"float32": "float", "bfloat16": "bfloat16_t", "float16": "float16_t"}
"""The C++ type of one element in a rendered source; the two 16-bit ones are declared in templates/_types.cu.j2."""

ELEMENT_BYTES = {**ITEMSIZE, "uint8": 1, "int32": 4}
"""Bytes of one element of scratch memory, which may hold more types than tensors do."""

ELEMENT_TYPES = {**CXX_TYPES, "uint8": "unsigned char", "int32": "int"}
"""The C++ type of one element of scratch memory."""

CLASS_ERRORS = {"fp32": 2e-6, "tf32": 1e-3, "fp16": 1.5e-3, "bf16": 8e-3}
"""Accuracy classes, finest first: the largest relative Frobenius error of each gradient on well-conditioned random data."""

ACCURACIES = tuple(CLASS_ERRORS)

OPERAND_ROUNDOFF = {"fp32": 0.0, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""What an accuracy class allows the operands of a product to lose, relative: half the distance of its numbers just above 1."""

OWN_CLASS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The class of a data type: the finest that results rounded to it can meet."""


def dtype_words(dtype: str, param_dtype: str) -> str:
    """Both data types in words: "float32", or "bfloat16 with float32 parameters"."""
    return dtype if param_dtype == dtype else f"{dtype} with {param_dtype} parameters"


def check_dtypes(dtype: str, param_dtype: str) -> None:
    """Raises UnsupportedDtype unless x, dy and dx may have `dtype` beside parameters of `param_dtype`."""
    for name in (dtype, param_dtype):
        if name not in ITEMSIZE:
            raise UnsupportedDtype(f"dtype {name!r} is not supported; use {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if param_dtype not in (dtype, "float32"):
        both = dtype if dtype == "float32" else f"{dtype} or float32"
        raise UnsupportedDtype(f"parameters of {param_dtype} beside data of {dtype} are not supported; use {both}")


def check_accuracy(accuracy: str, dtype: str) -> None:
    """Raises InvalidProblem unless `accuracy` is a class that results of this data type can meet."""
    if accuracy not in CLASS_ERRORS:
        raise InvalidProblem(f"there is no accuracy class {accuracy!r}; choose from {', '.join(ACCURACIES)}")
    own = OWN_CLASS[dtype]
    if CLASS_ERRORS[accuracy] < CLASS_ERRORS[own]:
        raise InvalidProblem(f"results rounded to {dtype} cannot meet the accuracy class {accuracy}; ask for {own}")
