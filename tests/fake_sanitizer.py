"""compute-sanitizer as tests plant it: a program on the PATH that says what a test has written down for a config and a tool."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PLANS = "LNL_TEST_SANITIZER"
"""Names the file: config text -> tool -> one of the below."""

OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at row_warp(Params)+0x70 in kernel.cu:310
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""

RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at row_warp(Params)+0x90 and Read access at row_warp(Params)+0xa0 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def main(arguments: list[str]) -> int:
    tool = arguments[arguments.index("--tool") + 1]
    config, rows, bus_id, *_ = arguments[arguments.index("-m") + 2:]
    with Path(os.environ[PLANS] + ".log").open("a") as log:
        log.write(f"{tool} {config} {bus_id}\n")
    behaviour = json.loads(Path(os.environ[PLANS]).read_text()).get(config, {}).get(tool)
    if behaviour == "out of bounds":
        print(OUT_OF_BOUNDS)
        return 99
    if behaviour == "race, status 0":
        print(RACE)
        return 0
    if behaviour == "hangs":
        if os.fork() == 0:
            time.sleep(1000)
        os.wait()
    if behaviour == "fails":
        print("========= COMPUTE-SANITIZER\n========= Error: cannot attach to the device\n=========")
        return 1
    if behaviour == "runs nothing":
        print("========= ERROR SUMMARY: 0 errors")
        return 0
    print(f"========= COMPUTE-SANITIZER\nran at {', '.join(rows.split(','))} rows\n========= ERROR SUMMARY: 0 errors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
