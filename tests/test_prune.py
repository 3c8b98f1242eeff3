"""A rendered source holds no helper that nothing uses, and all that something does."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from codegen.config import Config
from codegen.problem import ALL_GRADIENTS, GRADIENTS, Problem
from codegen.prune import prune
from codegen.render import render
from codegen.space import make_config
from tests.variant_cases import EVERY, SMALL_SHAPE, TYPED

HEAD = "constexpr int HIDDEN = 8;  // not for unused()\n\n"
KERNEL = 'extern "C" __global__ void kernel(Params p) {\n  if (p.dx) used(p);\n}\n'
USED = "// Of the kernel.\n__device__ void used(Params p) { deep<1>(p); }\n\n"
DEEP = "// Two lines\n// on deep.\ntemplate <int N>\n__device__ void deep(Params p) {\n  p.dx[0] = N;\n}\n\n"
UNUSED = "// Nobody's, whatever unused() says.\n__device__ float unused(float v) {\n  return v > 0 ? unused(-v) : v;\n}\n\n"


def test_what_nothing_reaches_goes_with_its_comment() -> None:
    assert prune(HEAD + UNUSED + DEEP + USED + KERNEL) == HEAD + DEEP + USED + KERNEL


def test_what_only_the_unused_use_goes_too() -> None:
    helper = "__device__ void helper() {}\n\n"
    other = "template <class T>\n__device__ void other() { helper(); }\n\n"
    assert prune(HEAD + helper + other + KERNEL) == HEAD + KERNEL


def test_a_comment_on_several_stays_with_those_that_stay() -> None:
    pair = "// Both.\n__device__ void other() {}\n__device__ void used(Params p) {}\n"
    assert prune(pair + "\n" + KERNEL) == "// Both.\n__device__ void used(Params p) {}\n\n" + KERNEL


def test_a_comment_within_a_paragraph_goes_with_its_own() -> None:
    text = "// Used.\n__device__ void used(Params p) {}\n// Other.\n__device__ void other() {}\n\n"
    assert prune(text + KERNEL) == "// Used.\n__device__ void used(Params p) {}\n\n" + KERNEL


def test_structures_are_helpers_too() -> None:
    row, pair = "struct Row {\n  float sum;\n};\n\n", "template <class T>\nstruct alignas(8) Pair {\n  T first;\n};\n\n"
    user = "__device__ void used(Params p) { Row row; }\n\n"
    assert prune(row + pair + user + KERNEL) == row + user + KERNEL


def test_functions_for_compilers_are_helpers_too() -> None:
    kept, lost = "constexpr int up(int value) { return value; }\n", "constexpr int down(int value) { return value; }\n"
    use = "constexpr int SIZE = up(3);\n\n"
    assert prune(kept + lost + use + KERNEL) == kept + use + KERNEL


def test_a_section_with_nothing_left_goes() -> None:
    asm = "#ifdef __CUDACC__\n// For nvcc.\n\n__device__ void other() {}\n#endif\n\n"
    assert prune(HEAD + asm + KERNEL) == HEAD + KERNEL
    assert prune(HEAD + asm.replace("other", "used") + KERNEL) == HEAD + asm.replace("other", "used") + KERNEL


def test_lines_that_are_no_definitions_stay() -> None:
    text = "// Alone.\n\nusing index_t = int;  // counts\n\n// On the constants.\nconstexpr int A = 1;\n\n"
    assert prune(text + KERNEL) == text + KERNEL


ALL = [*((config, "float32", "float32") for config in EVERY), *TYPED]


@pytest.mark.parametrize(("config", "dtype", "param_dtype"), ALL, ids=str)
def test_every_helper_of_every_variant_is_used(config: Config, dtype: str, param_dtype: str) -> None:
    for wants in (ALL_GRADIENTS, *(frozenset((name,)) for name in GRADIENTS)):
        problem = Problem(300, SMALL_SHAPE.hidden, SMALL_SHAPE.out, dtype, wants, param_dtype=param_dtype)
        text = re.sub("//.*", "", render(problem, config).text)
        defined = re.findall(r"^(?:__device__|constexpr) [^=\n]*?(\w+)\(|^struct (?:alignas\(.*\) )?(\w+)", text, re.MULTILINE)
        names = [function or structure for function, structure in defined]
        assert names
        words = Counter(re.findall(r"\w+", text))
        assert not [name for name, count in Counter(names).items() if words[name] == count]


def test_rendering_prunes() -> None:
    text = render(Problem(300, 40, 24), make_config("row_thread")).text
    assert "to_float" in text and "dynamic_shared" not in text and "lane_sum" not in text
