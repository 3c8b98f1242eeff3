"""Makes one call of one kernel, for Nsight Compute to count in.

    python -m tuner.bench.profiled CONFIG B,S,H,O BUS_ID JOB PLACE

JOB and PLACE are those of tuner.workers.messages, as JSON. Calls before the counted one wake the GPU and fill its caches, as
those in a row do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from codegen.problem import Shape
from codegen.render import render
from codegen.space import parse_config
from tuner.errors import TunerError
from tuner.inputs import random_inputs
from tuner.store import Store
from tuner.workers.messages import Job, Place

CALLS_BEFORE = 3


def main(arguments: Sequence[str]) -> int:
    """Makes the calls and returns the exit status: 1 where they cannot be made."""
    config, sizes, bus_id, job_text, place_text = arguments
    job, place = Job.from_json(json.loads(job_text)), Place.from_json(json.loads(place_text))
    problem, shape = job.problem, Shape.parse(sizes)
    data = random_inputs(shape.rows, shape.hidden, shape.out, dtype=problem.dtype, param_dtype=problem.param_dtype, seed=job.seed)

    from tuner.executors.cuda import CudaExecutor  # only where a GPU is
    from tuner.executors.cuda_context import gpu_index

    try:
        executor = CudaExecutor(gpu_index(bus_id), Store(place.store), place.limits)
        program = executor.compile(render(problem, parse_config(config)))
        for _ in range(CALLS_BEFORE):
            program.execute(data, problem.wants)
        with executor.profiled():
            program.execute(data, problem.wants)
    except TunerError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
