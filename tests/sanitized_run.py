"""Runs one config of a variant for each of its reductions on the GPU; started under compute-sanitizer by test_sanitizer.py.

Each tensor has an allocation of its own, of which only inputs are set, so that initcheck sees whatever was never written.

    python -m tests.sanitized_run VARIANT [odd]     with "odd", all at the shape whose rows of the workspace end in padding
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from codegen.config import Config
from codegen.problem import ALL_GRADIENTS, Problem, Shape
from codegen.render import render
from tests.variant_cases import EVERY, accuracy_of, fitted
from tuner.executors.cuda import CudaProgram
from tuner.inputs import random_inputs
from tuner.pipeline import workers

ODD = Shape(1, 33, 37, 7)
SHAPES = (Shape(1, 70, 20, 12), ODD, Shape(1, 300, 64, 64))


def main(variant: str, shapes: tuple[Shape, ...]) -> None:
    from tuner.executors.cuda import CudaExecutor  # only where a GPU is
    from tuner.executors.cuda_apart import ApartMemory

    executor = CudaExecutor(memory=ApartMemory)

    def compiled(case: tuple[Shape, Config]) -> CudaProgram:
        shape, config = case
        chosen = fitted(config, shape)
        assert chosen is not None
        return executor.compile(render(Problem.of(shape, accuracy=accuracy_of(chosen)), chosen))

    # One shape each, in turn: the tools make a kernel a hundred times slower.
    cases = [(shapes[number % len(shapes)], config) for number, config in enumerate(EVERY) if config.variant == variant]
    runs = 0
    with ThreadPoolExecutor(workers()) as pool:
        for (shape, _), program in zip(cases, pool.map(compiled, cases), strict=True):
            program.execute(random_inputs(shape.rows, shape.hidden, shape.out), ALL_GRADIENTS)
            runs += 1
    executor.close()
    print(f"{runs} runs")


if __name__ == "__main__":
    main(sys.argv[1], (ODD,) if sys.argv[2:] == ["odd"] else SHAPES)
