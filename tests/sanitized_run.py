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
from tests.configs import OF_FLOAT32
from tests.variant_cases import EVERY, TYPED, accuracy_of, fitted
from tuner.executors.cuda import CudaProgram
from tuner.inputs import random_inputs
from tuner.pipeline import workers

ODD = Shape(1, 33, 37, 7)
SHAPES = (Shape(1, 70, 20, 12), ODD, Shape(1, 300, 64, 64))

CASES = [(config, "float32", "float32") for config in EVERY] + [case for case in TYPED if case[0].variant not in OF_FLOAT32]
"""Configs with the data types of their data and of its parameters; 16 bits where a variant takes no others."""


def main(variant: str, shapes: tuple[Shape, ...]) -> None:
    from tuner.executors.cuda import CudaExecutor  # only where a GPU is
    from tuner.executors.cuda_apart import ApartMemory

    executor = CudaExecutor(memory=ApartMemory)

    def compiled(case: tuple[Shape, Config, str, str]) -> CudaProgram:
        shape, config, dtype, param_dtype = case
        chosen = fitted(config, shape, dtype, param_dtype)
        assert chosen is not None
        problem = Problem.of(shape, dtype=dtype, param_dtype=param_dtype, accuracy=accuracy_of(chosen, dtype))
        return executor.compile(render(problem, chosen))

    # One shape each, in turn: the tools make a kernel a hundred times slower.
    cases = [(shapes[number % len(shapes)], *case) for number, case in enumerate(CASES) if case[0].variant == variant]
    runs = 0
    with ThreadPoolExecutor(workers()) as pool:
        for (shape, _, dtype, param_dtype), program in zip(cases, pool.map(compiled, cases), strict=True):
            inputs = random_inputs(shape.rows, shape.hidden, shape.out, dtype=dtype, param_dtype=param_dtype)
            program.execute(inputs, ALL_GRADIENTS)
            runs += 1
    executor.close()
    print(f"{runs} runs")


if __name__ == "__main__":
    main(sys.argv[1], (ODD,) if sys.argv[2:] == ["odd"] else SHAPES)
