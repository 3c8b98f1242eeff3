"""Size expressions: what Python evaluates and what the printed C++ computes are the same number."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from codegen.expr import ROWS, SMS, Expr, ceil_div, const, maximum, minimum
from codegen.problem import Problem
from codegen.render import render_template
from codegen.variants import VARIANTS
from tuner.executors.host_toolchain import find_compiler

ROW_COUNTS = (*range(301), 65535, 65536, 2**31 + 1)
SM_COUNTS = (1, 108, 132)
POINTS = list(product(ROW_COUNTS, SM_COUNTS))
CORNERS = list(product((0, 1, ROW_COUNTS[-1]), (SM_COUNTS[0], SM_COUNTS[-1])))
LARGEST = 2**63 - 1


def of_plans(each: int = 2000) -> list[Expr]:
    """The sizes of plans, each once: grids, splits, buffers. Of so many random configs of each variant, for two problems."""
    found: set[Expr] = set()
    rng = random.Random(0)
    for variant, problem in product(VARIANTS.values(), (Problem(512, 8, 16), Problem(1, 229, 33))):
        for _ in range(each):
            plan = variant.plan(problem, {name: rng.choice(values) for name, values in variant.choices.items()})
            found |= {plan.splits, *(launch.grid for launch in plan.launches), *(buffer.size for buffer in plan.workspace)}
    return sorted(found, key=str)


def random_tree(rng: random.Random, depth: int) -> Expr:
    """A tree of any operators and leaves; divisors are at least 1."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice([ROWS, SMS, const(rng.choice([0, 1, 2, 31, 32, 1000, 65536]))])
    left, right = random_tree(rng, depth - 1), random_tree(rng, depth - 1)
    operations = [lambda: left + right, lambda: left * right, lambda: minimum(left, right), lambda: maximum(left, right),
                  lambda: ceil_div(left, maximum(right, 1))]
    return rng.choice(operations)()


def fits(expr: Expr) -> bool:
    """Whether no part of it leaves int64 at CORNERS; between them, -ftrapv would tell."""
    parts = [expr]
    for part in parts:
        parts += [child for child in (part.left, part.right) if child is not None]
    return all(part.evaluate(rows, sms) <= LARGEST for part in parts for rows, sms in CORNERS)


def random_trees(count: int = 150) -> list[Expr]:
    rng = random.Random(0)
    trees: list[Expr] = []
    while len(trees) < count:
        tree = random_tree(rng, 5)
        if tree.op is not None and fits(tree):
            trees.append(tree)
    return trees


def computed_by_cxx(exprs: list[Expr], at: list[tuple[int, int]], folder: Path) -> np.ndarray:
    """[expression, point]: what a program with the printed expressions and the artifact's own helpers prints."""
    functions = "".join(f"int64_t f{i}(int64_t rows, int64_t sms) {{ return {expr.cxx()}; }}\n" for i, expr in enumerate(exprs))
    table = ", ".join(f"f{i}" for i in range(len(exprs)))
    points = ", ".join(f"{{INT64_C({rows}), INT64_C({sms})}}" for rows, sms in at)
    (folder / "sizes.cpp").write_text(
        "#include <cstdint>\n#include <cstdio>\n" + render_template("_artifact_sizes.cu.j2", uses_sms=True) + functions
        + f"int64_t (*const table[])(int64_t, int64_t) = {{{table}}};\nconst int64_t points[][2] = {{{points}}};\n"
        "int main() {\n"
        "  for (auto size : table) for (auto& p : points) {\n"
        "    const int64_t value = size(p[0], p[1]);\n    fwrite(&value, sizeof value, 1, stdout);\n  }\n}\n")
    find_compiler().run(["-std=c++17", "-ftrapv", "sizes.cpp", "-o", "sizes"], folder, "the size expressions")
    said = subprocess.run([str(folder / "sizes")], capture_output=True, check=True).stdout
    return np.frombuffer(said, np.int64).reshape(len(exprs), len(at))


@pytest.mark.parametrize("make", [of_plans, random_trees], ids=["plans", "random trees"])
def test_python_and_cxx_agree(make: Callable[[], list[Expr]], tmp_path: Path) -> None:
    exprs = make()
    assert len(exprs) > 100
    right = np.array([[expr.evaluate(rows, sms) for rows, sms in POINTS] for expr in exprs])
    np.testing.assert_array_equal(computed_by_cxx(exprs, POINTS, tmp_path), right)


def test_rounding_up_does_not_overflow(tmp_path: Path) -> None:
    assert computed_by_cxx([ceil_div(ROWS, 2)], [(LARGEST, 1)], tmp_path).item() == 2**62


def test_operations_mean_what_they_say() -> None:
    for rows, sms in ((0, 1), (7, 108), (2**31 + 1, 132)):
        assert (ROWS + 3).evaluate(rows, sms) == (3 + ROWS).evaluate(rows, sms) == rows + 3
        assert (SMS * 5).evaluate(rows, sms) == (5 * SMS).evaluate(rows, sms) == 5 * sms
        assert minimum(ROWS, 100).evaluate(rows, sms) == min(rows, 100)
        assert maximum(ROWS, SMS).evaluate(rows, sms) == max(rows, sms)
        assert ceil_div(ROWS, 32).evaluate(rows, sms) == (rows + 31) // 32


def test_constants_fold_and_variables_are_known() -> None:
    folded = ceil_div(const(100) * 2 + 1, 32)
    assert folded == const(7) and not folded.uses("rows") and not folded.uses("sms")
    size = minimum(64, ceil_div(ROWS, 8)) * 160
    assert size.uses("rows") and not size.uses("sms")
    assert (size + SMS).uses("sms")
