"""One of several processes that share a study: `python -m tests.sharing_process WHO ALL FOLDER ARGUMENTS...`.

Its GPU has made-up times. It begins to try candidates when ALL processes have come so far; what it does there for the first time
it writes to FOLDER/WHO. $LNL_TEST_KILLS names what ends it, and $LNL_TEST_KILLED who is ended: a config's text, or a number of
candidates.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from codegen.config import Config
from tests.fake_gpu import FakeGpu, rugged, stub_artifact
from tuner import cli, publish
from tuner.study import members

KILLS, KILLED = "LNL_TEST_KILLS", "LNL_TEST_KILLED"

CALL_S = 0.01


def main(who: str, count: str, folder: str, *arguments: str) -> int:
    members.BEAT_S = 0.6
    seen: list[str] = []

    def times(config: Config) -> float:
        text = str(config)
        if not seen:
            (Path(folder) / who).touch()
            while len([path for path in Path(folder).iterdir() if path.is_file()]) < int(count):
                time.sleep(0.01)
        if text not in seen:
            seen.append(text)
            with (Path(folder) / who).open("a") as file:
                file.write(text + "\n")
        if who in os.environ.get(KILLED, "").split(",") and os.environ[KILLS] in (text, str(len(seen))):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(CALL_S)
        return rugged(config)

    gpu = FakeGpu(times)
    cli.open_isolated = lambda name, target: gpu  # type: ignore[assignment, return-value]
    publish.write_artifact = stub_artifact
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
