"""What runs under compute-sanitizer in place of tuner.gate.sanitized, with a fault in each kernel: $LNL_TEST_FAULT names it."""

from __future__ import annotations

import os
import sys

from codegen.render import Source
from tests.planted_worker import ENTRY
from tests.test_a1 import text_fault
from tuner.gate import sanitized

FAULT = "LNL_TEST_FAULT"

# Each reads something and does nothing with it that shows in the results.
FAULTS = {
    "memcheck": "if (blockIdx.x == 0 && threadIdx.x == 0 && p.x[p.rows * HIDDEN] == 123.25f) return;",
    "racecheck": "__shared__ volatile float raced[1]; raced[0] = static_cast<float>(threadIdx.x); "
                 "if (raced[0] == -1.0f) return;",
    "initcheck": "if (blockIdx.x == 0 && threadIdx.x == 0 && p.dx[0] == 123.25f) return;",
}
"""By the tool that finds it, what each kernel begins with."""


def planted(source: Source) -> Source:
    return text_fault(f"({ENTRY})", rf"\1 {FAULTS[os.environ[FAULT]]}")(source)


if __name__ == "__main__":
    sys.exit(sanitized.main(sys.argv[1:], planted))
