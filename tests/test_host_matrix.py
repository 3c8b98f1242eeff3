"""Matrix instructions on the host: layouts, arithmetic and laws of mma and ldmatrix, as the PTX ISA and the cards have them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.dtypes import CLASS_ERRORS
from tests.host_laws import ORDERS, Law, Run, best_rate, law_tests, load_laws
from tuner.executors.host import HostExecutor
from tuner.executors.host_runtime import Kernels, Layout

PARAMS = "struct Params { const void* a; const void* b; const float* c; void* d; int64_t n; int64_t promote; };\n"

WARPS = 2


@dataclass(frozen=True)
class Format:
    """Operands of one mma instruction.

    Attributes:
        name: its suffix.
        step: depth of one instruction.
        least: exponent of the smallest normal number.
        bits: element type of the words.
    """

    name: str
    step: int
    least: int
    bits: type[np.unsignedinteger[Any]]

    def words(self, values: NDArray[np.floating[Any]]) -> NDArray[Any]:
        """Rounded to the format; tf32 words carry digits that the format lacks, which no product may see."""
        if self.name == "tf32":
            return (values.astype(np.float32).view(np.uint32) & ~np.uint32(0x1FFF)) | np.uint32(0x1234)
        return values.astype(np.float16 if self.name == "f16" else ml_dtypes.bfloat16).view(np.uint16)

    def values(self, words: NDArray[Any]) -> NDArray[np.float64]:
        """What the words stand for."""
        if self.name == "tf32":
            return (words & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)
        return words.view(np.float16 if self.name == "f16" else ml_dtypes.bfloat16).astype(np.float64)


FORMATS = [Format("f16", 16, -14, np.uint16), Format("bf16", 16, -126, np.uint16), Format("tf32", 8, -126, np.uint32)]

# d = c + a @ b, for each warp its own a [16, n], b [n, 8], c and d [16, 8]. Rows and columns are the formulas of the PTX ISA,
# "Matrix Fragments for mma.m16n8k16" and ".m16n8k8": element i of a fragment, lanes in groups of four.
PRODUCT = """
const int lane = threadIdx.x % 32, group = lane >> 2, in_group = lane % 4;
const int64_t warp = threadIdx.x / 32, n = p.n;
const ELEMENT* a = static_cast<const ELEMENT*>(p.a) + warp * 16 * n;
const ELEMENT* b = static_cast<const ELEMENT*>(p.b) + warp * 8 * n;
float sum[4], total[4] = {};
for (int i = 0; i < 4; ++i) sum[i] = p.c[warp * 128 + (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)];
for (int64_t k = 0; k < n; k += STEP) {
  ELEMENT of_a[A_SIZE], of_b[B_SIZE];
  for (int i = 0; i < A_SIZE; ++i) of_a[i] = a[(A_ROW) * n + k + (A_COLUMN)];
  for (int i = 0; i < B_SIZE; ++i) of_b[i] = b[(k + (B_ROW)) * 8 + group];
  unsigned registers_a[4], registers_b[2];
  __builtin_memcpy(registers_a, of_a, 16);
  __builtin_memcpy(registers_b, of_b, 8);
  mma_NAME(sum, registers_a, registers_b);
  if (p.promote != 0 && (k + STEP) % p.promote == 0) {
    for (int i = 0; i < 4; ++i) total[i] += sum[i], sum[i] = 0.0f;
  }
}
for (int i = 0; i < 4; ++i) {
  static_cast<float*>(p.d)[warp * 128 + (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = total[i] + sum[i];
}"""

WORDS_16 = {
    "ELEMENT": "unsigned short", "A_SIZE": "8", "B_SIZE": "4", "A_ROW": "i < 2 || (4 <= i && i < 6) ? group : group + 8",
    "A_COLUMN": "i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8",
    "B_ROW": "i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8",
}
WORDS_32 = {
    "ELEMENT": "unsigned", "A_SIZE": "4", "B_SIZE": "2", "A_ROW": "i == 0 || i == 2 ? group : group + 8",
    "A_COLUMN": "i < 2 ? in_group : in_group + 4", "B_ROW": "i == 0 ? in_group : in_group + 4",
}


def product_text(form: Format) -> str:
    text = PRODUCT
    names = {"NAME": form.name, "STEP": str(form.step)} | (WORDS_32 if form.name == "tf32" else WORDS_16)
    for name, value in names.items():
        text = text.replace(name, value)
    return text


ONES = "const unsigned a[4] = {}, b[2] = {};\nfloat d[4] = {};\n"  # lines 1 and 2
SHARED_ROWS = "char* s = reinterpret_cast<char*>(dynamic_shared());\nunsigned r[4];\n"  # lines 1 and 2

LAWS = [
    Law("lane_left",
        f"{ONES}if (threadIdx.x == 39) return;\nmma_f16(d, a, b);",
        f"{ONES}if (threadIdx.x >= 32) return;\nmma_f16(d, a, b);",
        "block 0, thread 39: leaves the kernel while thread 32 waits for it at mma_f16 (line 4)"),
    Law("lane_had_left",
        f"{ONES}if (threadIdx.x == 32) return;\nmma_bf16(d, a, b);",
        f"{ONES}if (threadIdx.x / 32 == 1) return;\nmma_bf16(d, a, b);",
        "block 0, thread 33: calls mma_bf16 (line 4), but lane 0 (thread 32) has left the kernel"),
    Law("lanes_absent",
        f"{ONES}mma_tf32(d, a, b);",
        f"{ONES}if (threadIdx.x < 32) mma_tf32(d, a, b);",
        "block 0, thread 32: calls mma_tf32 (line 3), but the block of 40 threads has no lane 8 in this warp", block=40),
    Law("two_lines",
        f"{ONES}if (threadIdx.x < 16) mma_f16(d, a, b);\nelse mma_f16(d, a, b);",
        f"{ONES}if (threadIdx.x < 32) mma_f16(d, a, b);\nelse mma_f16(d, a, b);",
        "block 0, thread 0: waits at mma_f16 (line 3) for thread 16, which waits at mma_f16 (line 4)"),
    Law("two_instructions",
        f"{ONES}if (threadIdx.x == 7) mma_f16(d, a, b); else mma_bf16(d, a, b);",
        f"{ONES}mma_f16(d, a, b);\nmma_bf16(d, a, b);",
        "block 0, thread 0: waits at mma_bf16 (line 3) for thread 7, which waits at mma_f16 (line 3)", block=32),
    Law("product_against_barrier",
        f"{ONES}if (threadIdx.x == 3) __syncthreads();\nelse mma_f16(d, a, b);",
        f"{ONES}mma_f16(d, a, b);\n__syncthreads();",
        "block 0, thread 0: waits at mma_f16 (line 4) for thread 3, which waits at __syncthreads (line 3)", block=32),
    Law("product_against_shuffle",
        f"{ONES}if (threadIdx.x == 3) __syncwarp();\nelse mma_f16(d, a, b);",
        f"{ONES}mma_f16(d, a, b);\n__syncwarp();",
        "block 0, thread 0: waits at mma_f16 (line 4) for thread 3, which waits at __syncwarp (line 3) with mask 0xffffffff",
        block=32),
    Law("two_loads",
        f"{SHARED_ROWS}if (threadIdx.x == 9) load_matrices(r, s); else load_matrices_transposed(r, s);",
        f"{SHARED_ROWS}load_matrices(r, s);\nload_matrices_transposed(r, s);",
        "block 0, thread 0: waits at load_matrices_transposed (line 3) for thread 9, which waits at load_matrices (line 3)",
        block=32),
    Law("row_of_global_memory",
        f"{SHARED_ROWS}load_matrices(r, threadIdx.x == 5 ? static_cast<const char*>(p.a) + 32 : s);",
        f"{SHARED_ROWS}load_matrices(r, threadIdx.x == 5 ? s + 32 : s);",
        "block 0, thread 5: line 3: loads a row of a matrix from element 8 of a, not from shared memory"),
    Law("misaligned_row",
        f"{SHARED_ROWS}load_matrices(r, s + 8 * (threadIdx.x / 31));",
        f"{SHARED_ROWS}load_matrices(r, s + 16 * (threadIdx.x / 31));",
        "block 0, thread 31: line 3: loads a row of a matrix at element 2 of the dynamic shared memory, which is at no multiple "
        "of 16 bytes"),
    Law("row_past_the_end",
        f"{SHARED_ROWS}load_matrices_transposed(r, s + 16 * threadIdx.x);",
        f"{SHARED_ROWS}load_matrices_transposed(r, s + 16 * (threadIdx.x % 16));",
        "block 0, thread 16: reads element 64 of the dynamic shared memory, which has 64 elements"),
    Law("row_before_the_wait",
        f"{SHARED_ROWS}copy_async_bytes<16>(s + 16 * (threadIdx.x % 16), p.a);\nif (threadIdx.x >= 32) wait_for_copies();\n"
        "__syncthreads();\nload_matrices(r, s + 16 * (threadIdx.x % 8));\nwait_for_copies();",
        f"{SHARED_ROWS}copy_async_bytes<16>(s + 16 * (threadIdx.x % 16), p.a);\nwait_for_copies();\n"
        "__syncthreads();\nload_matrices(r, s + 16 * (threadIdx.x % 8));",
        "block 0, thread 0: line 6: loads a row of a matrix at element 0 of the dynamic shared memory, to which an asynchronous "
        "copy of thread 0 has not ended", block=32),
]

# Bodies of kernels by name.
LAWFUL = {f"product_{form.name}": product_text(form) for form in FORMATS} | {
    # Row i of 32, in an order of their own, and what every lane gets.
    f"load{suffix}": "char* s = reinterpret_cast<char*>(dynamic_shared());\n"
    "for (int i = threadIdx.x; i < 256; i += blockDim.x) {\n"
    "  reinterpret_cast<unsigned short*>(s)[i] = static_cast<const unsigned short*>(p.a)[i];\n}\n"
    "__syncthreads();\nunsigned r[4];\n"
    f"load_matrices{suffix}(r, s + 16 * (threadIdx.x * 13 % 32));\n"
    "for (int m = 0; m < 4; ++m) static_cast<unsigned*>(p.d)[m * 32 + threadIdx.x % 32] = r[m];"
    for suffix in ("", "_transposed")
} | {
    "unwaited": "float* s = dynamic_shared();\ns[threadIdx.x] = 1.0f;\n__syncwarp();\n"
    "const unsigned a[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};\n"
    "copy_async_bytes<4>(s + threadIdx.x, p.c);\n"
    "const unsigned b[2] = {__float_as_uint(s[threadIdx.x]), 0u};\nfloat d[4] = {};\nmma_f16(d, a, b);\n"
    "for (int i = 0; i < 4; ++i) static_cast<float*>(p.d)[4 * threadIdx.x + i] = d[i];\nwait_for_copies();",
    # A warp's product of 64 x 32, as kernels make them of fragments from shared memory.
    "speed": "char* s = reinterpret_cast<char*>(dynamic_shared());\n"
    "for (int i = threadIdx.x; i < 512; i += blockDim.x) dynamic_shared()[i] = __uint_as_float(0x3c003c00u);\n"
    "__syncthreads();\nfloat sum[4][4][4] = {};\n"
    "for (int64_t step = 0; step < p.n; ++step) {\n  unsigned a[4][4], b[2][4];\n"
    "  for (int m = 0; m < 4; ++m) load_matrices(a[m], s + 512 * m + 16 * (threadIdx.x % 32));\n"
    "  for (int n = 0; n < 2; ++n) load_matrices_transposed(b[n], s + 512 * n + 16 * (threadIdx.x % 32));\n"
    "  for (int m = 0; m < 4; ++m) {\n    for (int n = 0; n < 4; ++n) {\n"
    "      const unsigned pair[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};\n"
    "      mma_f16(sum[m][n], a[m], pair);\n    }\n  }\n}\n"
    "static_cast<float*>(p.d)[threadIdx.x] = sum[3][3][3];",
}


@pytest.fixture(scope="module")
def kernels(host_executor: HostExecutor) -> Kernels:
    """All kernels of this file, compiled at once."""
    return load_laws(host_executor, PARAMS, LAWS, LAWFUL)


def launch(kernels: Kernels, name: str, a: NDArray[Any], b: NDArray[Any], c: NDArray[np.float32], *, n: int = 0, promote: int = 0,
           block: int = 32 * WARPS, size: int = 128 * WARPS, **options: Any) -> NDArray[np.float32]:
    """d, which held NaN before."""
    layout: Layout = options.pop("layout", "end")
    with kernels.memory(layout) as memory:
        places = [memory.add_input("a", a), memory.add_input("b", b), memory.add_input("c", c), memory.add_output("d", (size,))]
        kernels.launch(name, block=block, params=struct.pack("<QQQQqq", *places, n, promote), memory=memory,
                       **({"grid": 1, "shared_bytes": 512} | options))
        return memory.read("d")


def product(kernels: Kernels, form: Format, a: NDArray[Any], b: NDArray[Any], c: NDArray[np.float32], *, promote: int = 0,
            order: str = "forward") -> NDArray[np.float32]:
    """c + a @ b of words a [warps, 16, n], b [warps, n, 8] and c [warps, 16, 8]."""
    size = c.size
    return launch(kernels, f"product_{form.name}", a, b, c, n=a.shape[2], promote=promote, block=size // 4, size=size,
                  order=order).reshape(c.shape)


@pytest.fixture
def run(kernels: Kernels) -> Run:
    """Runs a law's kernel."""

    def run_kernel(name: str, *, shared: int, **options: Any) -> NDArray[np.float32]:
        zeros = np.zeros(64, np.float32)
        return launch(kernels, name, zeros, zeros, zeros, shared_bytes=shared, **options)

    return run_kernel


TestLaws = law_tests(LAWS)


# --- Arithmetic -------------------------------------------------------------------------------------------------

EXTRA_BITS = 2  # kept below the last bit of the largest addend


def cut_off(total: int, exponent: int) -> float:
    """total * 2^exponent, toward zero to a float."""
    drop = max(total.bit_length() - 24, -149 - exponent, 0)
    exact = Fraction(abs(total) >> drop << drop) * Fraction(2) ** exponent
    return math.copysign(float(exact) if exact < 2**128 else math.inf, total)


def tensor_core_sum(c: float, a: NDArray[np.float64], b: NDArray[np.float64], least: int) -> float:
    """c + a @ b of finite vectors as one instruction works it out, in whole numbers."""
    def exponent(x: float, smallest: int) -> int:
        return max(math.frexp(x)[1] - 1, smallest)

    terms = [(Fraction(c), exponent(c, -126))] if c != 0 else []
    terms += [(Fraction(x) * Fraction(y), exponent(x, least) + exponent(y, least))
              for x, y in zip(a.tolist(), b.tolist(), strict=True) if x != 0 and y != 0]
    if not terms:
        return 0.0
    unit = max(scale for _, scale in terms) - 23 - EXTRA_BITS
    return cut_off(sum(math.trunc(value / Fraction(2) ** unit) for value, _ in terms), unit)


def wide(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int) -> NDArray[np.float64]:
    """Values of either sign over the powers of two from low to high, every ninth of them zero."""
    values: NDArray[np.float64] = rng.standard_normal(shape) * 2.0 ** rng.integers(low, high, shape)
    return np.where(rng.random(shape) < 1 / 9, 0.0, values)


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_sums_that_fit_are_exact(form: Format, order: str, kernels: Kernels) -> None:
    rng = np.random.default_rng(1)
    n = 5 * form.step
    a = rng.integers(-64, 65, (WARPS, 16, n)) / 8.0
    b = rng.integers(-64, 65, (WARPS, n, 8)) * 4.0
    c = (rng.integers(-(2**20), 2**20, (WARPS, 16, 8)) / 2.0).astype(np.float32)
    got = product(kernels, form, form.words(a), form.words(b), c, order=order)
    assert np.array_equal(got, c + a @ b)


@pytest.mark.parametrize(("form", "low", "high", "of_c"), [
    (FORMATS[0], -3, 3, (-3, 6)),
    (FORMATS[0], -25, 15, (-40, 30)),  # subnormal numbers too
    (FORMATS[1], -3, 3, (-3, 6)),
    (FORMATS[1], -60, 60, (-100, 100)),
    (FORMATS[1], -131, 0, (-140, -130)),
    (FORMATS[1], -75, -62, (-149, -130)),  # subnormal sums
    (FORMATS[1], 58, 65, (100, 126)),  # infinite sums
    (FORMATS[2], -3, 3, (-3, 6)),
    (FORMATS[2], -131, 0, (-140, -130)),
    (FORMATS[2], -60, 60, (-100, 100)),
], ids=lambda value: getattr(value, "name", str(value)))
def test_arithmetic_is_that_of_the_card(form: Format, low: int, high: int, of_c: tuple[int, int], kernels: Kernels) -> None:
    rng = np.random.default_rng(2)
    a, b = (form.words(wide(rng, (WARPS, *shape), low, high)) for shape in ((16, form.step), (form.step, 8)))
    c = wide(rng, (WARPS, 16, 8), *of_c).astype(np.float32)
    got = product(kernels, form, a, b, c)
    exact_a, exact_b = form.values(a), form.values(b)
    expected = [tensor_core_sum(float(c[w, i, j]), exact_a[w, i], exact_b[w, :, j], form.least)
                for w in range(WARPS) for i in range(16) for j in range(8)]
    assert np.array_equal(got.ravel().view(np.uint32), np.array(expected, np.float32).view(np.uint32))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_infinity_and_nan_go_where_they_belong(form: Format, kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((1, 16, form.step)), rng.standard_normal((1, form.step, 8))
    c = rng.standard_normal((1, 16, 8)).astype(np.float32)
    a[0, 3, 4], a[0, 9, form.step - 1], b[0, 2, 5], c[0, 1, 1], c[0, 2, 2], b[0, 4, 7] = (
        np.inf, np.nan, -np.inf, np.nan, np.inf, 0.0)  # and infinity times zero
    a, b = form.words(a), form.words(b)
    got = product(kernels, form, a, b, c)
    with np.errstate(invalid="ignore"):
        expected = c + form.values(a) @ form.values(b)
    lost = ~np.isfinite(expected)
    assert np.array_equal(got[lost], expected[lost], equal_nan=True) and 30 < lost.sum() < 60
    assert np.allclose(got[~lost], expected[~lost], rtol=1e-5, atol=1e-5)
    assert (got.view(np.uint32)[np.isnan(got)] == 0x7FFFFFFF).all()


def test_long_sums_lose_digits_unless_they_are_promoted(kernels: Kernels) -> None:
    rng = np.random.default_rng(4)
    form, n = FORMATS[0], 12288
    a, b = form.words(rng.standard_normal((4, 16, n))), form.words(rng.standard_normal((4, n, 8)))
    zeros = np.zeros((4, 16, 8), np.float32)
    exact = form.values(a) @ form.values(b)

    def error(promote: int) -> float:
        return float(np.linalg.norm(product(kernels, form, a, b, zeros, promote=promote) - exact) / np.linalg.norm(exact))

    assert error(0) > 2 * CLASS_ERRORS["fp32"]
    assert error(256) < CLASS_ERRORS["fp32"] / 2


def test_an_unwaited_operand_gives_nan(kernels: Kernels) -> None:
    zeros = np.zeros(64, np.float32)
    assert np.isnan(launch(kernels, "unwaited", zeros, zeros, zeros, block=32, size=128)).all()


# --- Loading matrices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_handed_out(transposed: bool, order: str, kernels: Kernels) -> None:
    values = np.random.default_rng(5).permutation(65536)[:256].astype(np.uint16)
    name = "load_transposed" if transposed else "load"
    got = launch(kernels, name, values, values, np.zeros(1, np.float32), block=32, size=128, order=order)
    matrices = values.reshape(32, 8)[np.arange(32) * 13 % 32].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    # Lane i holds elements 2 * (i % 4) and the next of row i / 4: a row after the other, in pairs.
    assert np.array_equal(got.view(np.uint16).reshape(4, 8, 8), matrices)


@pytest.mark.parametrize("block", [32, 128])
def test_a_hundred_million_multiply_adds_a_second(block: int, kernels: Kernels) -> None:
    zeros, steps = np.zeros(1, np.float32), 20
    d = launch(kernels, "speed", zeros, zeros, zeros, n=steps, block=block, size=128, shared_bytes=2048)
    assert (d[:block] == 16 * steps).all()
    work = block // 32 * steps * 64 * 32 * 16

    def once() -> None:
        launch(kernels, "speed", zeros, zeros, zeros, n=steps, block=block, size=128, shared_bytes=2048)

    assert best_rate(work, once) > 1e8
