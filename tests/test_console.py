"""What the command lines do where their output cannot be written: a sentence or nothing, and never a traceback."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.arguments import FAILED, exit_status

ROOT = Path(__file__).resolve().parent.parent
LISTING = [("codegen", "--list"), ("tuner", "wisdom", "list")]


def run(command: tuple[str, ...], redirected: str) -> subprocess.CompletedProcess[str]:
    """A command with its output redirected by a shell, which alone can close it."""
    words = " ".join((sys.executable, "-m", *command, redirected))
    return subprocess.run(["bash", "-c", f"{words}; exit ${{PIPESTATUS[0]}}"], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", LISTING, ids=" ".join)
def test_a_closed_output_is_no_error(command: tuple[str, ...]) -> None:
    done = run(command, ">&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", LISTING, ids=" ".join)
def test_a_full_output_is_one_sentence(command: tuple[str, ...]) -> None:
    done = run(command, ">/dev/full")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr and "[Errno" not in done.stderr and "LNL_WISDOM" not in done.stderr


class Broken(io.StringIO):
    """A buffer that finds when it is flushed that nobody reads any more."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_reader_who_has_gone_needs_no_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken())
    assert exit_status("name", lambda: 0) == FAILED
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("error", "said"), [
    (IsADirectoryError(errno.EISDIR, "Is a directory", "best.cu"), "name: best.cu cannot be used (Is a directory); "),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
     "name: the operating system refuses what this needs (Resource temporarily unavailable); "),
], ids=["of a file", "of nothing"])
def test_what_the_system_refuses_is_one_sentence(error: OSError, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert exit_status("name", fail) == FAILED
    assert capsys.readouterr().err.startswith(said)
