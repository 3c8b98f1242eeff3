"""What goes between the processes of a run, and how long one waits for the other."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from codegen.limits import target
from codegen.problem import Problem
from codegen.space import make_config
from tuner.workers.messages import Device, Job, Place
from tuner.workers.patience import Patience

PROBLEM = Problem(16, 8, 16)


def test_what_crosses_between_processes_comes_out_as_it_went_in() -> None:
    problem = replace(PROBLEM, dtype="bfloat16", param_dtype="float32", accuracy="bf16", wants=frozenset({"dx", "dw"}))
    job = Job(problem, 1e-3, 7, "cold")
    place = Place("cuda", "sm_90", Path("/somewhere"), 1, target("sm_80"))
    device = Device("cuda", "NVIDIA Test", "test", target("sm_90"), True, "measured", "0000:3b:00.0")
    assert Job.from_json(json.loads(json.dumps(job.as_json()))) == job
    assert Place.from_json(json.loads(json.dumps(place.as_json()))) == place
    assert Place.from_json(json.loads(json.dumps(replace(place, limits=None).as_json()))) == replace(place, limits=None)
    assert Device.from_json(json.loads(json.dumps(asdict(device)))) == device


def test_patience_grows_with_what_there_is_to_do() -> None:
    gpu = Device("cuda", "NVIDIA Test", "test", target("sm_90"), True, "table", None)
    small, large = PROBLEM, Problem(8192, 4096, 12288)
    config = make_config("row_warp")
    limits = [Patience().for_candidate(gpu, problem, config) for problem in (small, large)]
    assert 10.0 <= limits[0] < 15.0 and limits[1] > 60.0
    cpu = replace(gpu, measures=False)
    assert Patience().for_candidate(cpu, large, config) < 300.0
