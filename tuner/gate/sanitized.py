"""Runs one kernel on few rows, for compute-sanitizer to watch.

    python -m tuner.gate.sanitized CONFIG ROWS,ROWS,... BUS_ID JOB PLACE

JOB and PLACE are those of tuner.workers.messages, as JSON: what the kernel computes, and where its binary is kept. It is the very
binary that a run has made; where it is not there any more, it is compiled again from the same source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from codegen.render import Source, render
from codegen.space import parse_config
from tuner.errors import TunerError
from tuner.inputs import random_inputs
from tuner.store import Store
from tuner.workers.messages import Job, Place


def done(rows: Sequence[int]) -> str:
    """What is printed at the end."""
    return f"ran at {', '.join(map(str, rows))} rows"


def main(arguments: Sequence[str], change: Callable[[Source], Source] = lambda source: source) -> int:
    """Runs it and returns the exit status: 1 where it cannot be run.

    Args:
        arguments: as above.
        change: what to make of the source.
    """
    config, counts, bus_id, job_text, place_text = arguments
    problem = Job.from_json(json.loads(job_text)).problem
    place = Place.from_json(json.loads(place_text))
    rows = [int(count) for count in counts.split(",")]
    data = random_inputs(max(rows), problem.hidden, problem.out, dtype=problem.dtype, param_dtype=problem.param_dtype)

    from tuner.executors.cuda import CudaExecutor  # only where a GPU is
    from tuner.executors.cuda_apart import ApartMemory
    from tuner.executors.cuda_context import gpu_index

    try:
        executor = CudaExecutor(gpu_index(bus_id), Store(place.store), place.limits, ApartMemory)
        program = executor.compile(change(render(problem, parse_config(config))))
        for count in rows:
            program.execute(data.first(count), problem.wants)
    except TunerError as error:
        print(error)
        return 1
    print(done(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
