"""Conversions between float and the formats of matrix operands on the host: all values of 16 bits, floats at every rounding."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.host_laws import kernel_text
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels

Words = NDArray[np.uint32]

PARAMS = "struct Params { const unsigned* x; unsigned* y; int64_t n; };\n"

# y of x, a word each; floats are words of the same bits.
FUNCTIONS = {
    "f16_to_float": "__float_as_uint(f16_to_float(x))",
    "bf16_to_float": "__float_as_uint(bf16_to_float(x))",
    "float_to_f16": "float_to_f16(__uint_as_float(x))",
    "float_to_bf16": "float_to_bf16(__uint_as_float(x))",
    "round_tf32": "round_tf32(__uint_as_float(x))",
    "pack_f16": "pack_f16(__uint_as_float(x), 1.0f)",
    "pack_bf16": "pack_bf16(1.0f, __uint_as_float(x))",
    "low_f16": "__float_as_uint(low_f16(x))",
    "high_f16": "__float_as_uint(high_f16(x))",
    "low_bf16": "__float_as_uint(low_bf16(x))",
    "high_bf16": "__float_as_uint(high_bf16(x))",
}
SHORT: dict[str, type[Any]] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def kernels(host_executor: HostExecutor) -> Kernels:
    bodies = {name: "for (int64_t i = threadIdx.x; i < p.n; i += blockDim.x) {\n"
                    f"  const unsigned x = p.x[i];\n  p.y[i] = {value};\n}}" for name, value in FUNCTIONS.items()}
    return host_executor.load(PARAMS + "".join(kernel_text(*item) for item in bodies.items()), tuple(bodies))


def convert(kernels: Kernels, name: str, words: Words) -> Words:
    with kernels.memory() as memory:
        x = memory.add_input("x", words)
        y = memory.add_output("y", words.shape)
        kernels.launch(name, grid=1, block=32, params=struct.pack("<QQq", x, y, words.size), memory=memory)
        return memory.read("y").view(np.uint32)


def all_words() -> Words:
    return np.arange(1 << 16, dtype=np.uint32)


def floats_at_roundings(dtype: type[Any]) -> NDArray[np.float32]:
    """Every value of the type, the points half-way between them, the floats next to these, and 200,000 random bit patterns."""
    values = all_words().astype(np.uint16).view(dtype).astype(np.float32)
    finite = np.sort(values[np.isfinite(values)])
    half_way = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    beyond = np.float32(2.0) * finite[[0, -1]] - finite[[1, -2]]  # where the next value would be
    points = np.concatenate([values, half_way, beyond, (beyond + finite[[0, -1]]) / 2])
    bits = points.view(np.uint32)
    random = np.random.default_rng(6).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    return np.concatenate([bits, bits + 1, bits - 1, random]).view(np.float32)


def assert_same(got: NDArray[Any], expected: NDArray[Any]) -> None:
    """Bit for bit; a NaN is any NaN."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(f"u{got.itemsize}"), expected[~nan].view(f"u{expected.itemsize}"))


@pytest.mark.parametrize("name", SHORT)
def test_every_short_float_becomes_the_same_float(name: str, kernels: Kernels) -> None:
    got = convert(kernels, f"{name}_to_float", all_words()).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert_same(got, all_words().astype(np.uint16).view(SHORT[name]).astype(np.float32))


@pytest.mark.parametrize("name", SHORT)
def test_floats_are_rounded_to_nearest_even(name: str, kernels: Kernels) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        x = floats_at_roundings(SHORT[name])
        expected = x.astype(SHORT[name])
    got = convert(kernels, f"float_to_{name}", x.view(np.uint32))
    assert_same(got.astype(np.uint16).view(SHORT[name]).astype(np.float32), expected.astype(np.float32))
    assert (got[np.isnan(x)] == 0x7FFF).all()  # the NaN of the device


def test_tf32_is_rounded_to_nearest_and_away_from_zero(kernels: Kernels) -> None:
    # Ties are 2^-11 of a power of two apart from values of 11 significant bits.
    rng = np.random.default_rng(7)
    exact = rng.integers(1 << 10, 1 << 11, 20_000) * np.where(rng.random(20_000) < 0.5, -1.0, 1.0)
    offset = rng.integers(-4096, 4097, 20_000) / 8192.0  # in units of the last bit
    power = 2.0 ** rng.integers(-130, 110, 20_000)
    offset = np.where(np.abs(exact) == 1 << 10, np.abs(offset) * np.sign(exact), offset)  # below a power of two the unit halves
    x = ((exact + offset) * power).astype(np.float32)
    assert np.array_equal(x.astype(np.float64), (exact + offset) * power)
    away = np.where(np.abs(offset) == 0.5, np.trunc(exact + offset) + np.sign(exact), exact) * power
    got = convert(kernels, "round_tf32", x.view(np.uint32)).view(np.float32)
    assert np.array_equal(got.astype(np.float64), away) and (np.abs(offset) == 0.5).any()
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(np.float32).max], np.float32)
    assert_same(convert(kernels, "round_tf32", special.view(np.uint32)).view(np.float32),
                np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, np.inf], np.float32))


@pytest.mark.parametrize("name", SHORT)
def test_pairs(name: str, kernels: Kernels) -> None:
    x = np.random.default_rng(8).standard_normal(1000).astype(np.float32)
    short = x.astype(SHORT[name])
    one, halves = np.ones(1000, SHORT[name]), (short, np.ones(1000, SHORT[name]))
    low, high = halves if name == "f16" else (one, short)
    pairs = low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)
    assert np.array_equal(convert(kernels, f"pack_{name}", x.view(np.uint32)), pairs)
    assert np.array_equal(convert(kernels, f"low_{name}", pairs).view(np.float32), low.astype(np.float32))
    assert np.array_equal(convert(kernels, f"high_{name}", pairs).view(np.float32), high.astype(np.float32))
