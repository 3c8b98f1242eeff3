"""Nsight Compute as tests plant it: a program on the PATH that prints what $LNL_TEST_NCU names, a JSON file.

"says": lines to print, "status": the exit status, "sleeps": seconds before that, "argv": where to write down the arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PLAN = "LNL_TEST_NCU"


def main(arguments: list[str]) -> int:
    plan = json.loads(Path(os.environ[PLAN]).read_text())
    with Path(plan["argv"]).open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    time.sleep(plan.get("sleeps", 0))
    print("\n".join(plan["says"]))
    return int(plan.get("status", 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
