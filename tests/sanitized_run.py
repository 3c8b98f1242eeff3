"""Runs one config of every variant and reduction on the GPU; started under compute-sanitizer by test_sanitizer.py."""

from __future__ import annotations

from codegen.problem import ALL_GRADIENTS, Problem, Shape
from codegen.render import render
from tests.variant_cases import EVERY, accuracy_of, fitted
from tuner.inputs import random_inputs

SHAPES = (Shape(1, 70, 20, 12), Shape(1, 33, 37, 7), Shape(1, 300, 64, 64))


def main() -> None:
    from tuner.executors.cuda import CudaExecutor  # only where a GPU is

    executor = CudaExecutor()
    runs = 0
    for shape in SHAPES:
        inputs = random_inputs(shape.rows, shape.hidden, shape.out)
        for config in EVERY:
            chosen = fitted(config, shape)
            assert chosen is not None
            executor.compile(render(Problem.of(shape, accuracy=accuracy_of(chosen)), chosen)).run(inputs, ALL_GRADIENTS)
            runs += 1
    executor.close()
    print(f"{runs} runs")


if __name__ == "__main__":
    main()
