"""Files of recorded spaces that are broken, cut, huge or edited, and how a file is named: one sentence, no traceback."""

from __future__ import annotations

import copy
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.fake_gpu import rugged
from tests.recorded import made_up
from tuner import cli
from tuner.arguments import INTERRUPTED, OK, USAGE
from tuner.errors import InputError
from tuner.replay import cli as replay_cli
from tuner.replay import compare, fit, recorded
from tuner.replay.recorded import load


def saved() -> bytes:
    with TemporaryDirectory() as name:
        path = Path(name) / "space"
        made_up(rugged, ("row_thread", "row_warp"), 40).save(path)
        return path.read_bytes()


SHIPPED = sorted((Path(__file__).parents[1] / "reports/h200/spaces").glob("*.json.xz"))
SAVED = saved()
CONTENT = json.loads(lzma.decompress(SAVED))


def edited(change: Callable[[Any], None]) -> bytes:
    """The file with its content changed."""
    content = copy.deepcopy(CONTENT)
    change(content)
    return lzma.compress(json.dumps(content).encode())


def at(*path: str | int) -> Callable[[object], Callable[[Any], None]]:
    """Puts a value at a place of the content."""
    def put(value: object) -> Callable[[Any], None]:
        def change(content: Any) -> None:
            for step in path[:-1]:
                content = content[step]
            content[path[-1]] = value

        return change

    return put


BROKEN = {
    "empty": b"", "cut": SAVED[:-20], "half": SAVED[:len(SAVED) // 2], "noise": bytes(byte ^ 0xA5 for byte in SAVED),
    "not packed": lzma.decompress(SAVED), "deep": lzma.compress(b"[" * 100_000), "a list": lzma.compress(b"[]"),
    "null": lzma.compress(b"null"), "a text": lzma.compress(b'"space"'), "long number": lzma.compress(b"1" * 5000),
    "NaN": edited(at("columns", "time_us", 0)(float("nan"))), "infinite": edited(at("columns", "time_us", 0)(float("inf"))),
    **{f"time {value!r}": edited(at("columns", "time_us", 0)(value)) for value in (0, -1.5, "3", True, [], 1 << 2000, None)},
    "again": edited(at("columns", "again_us", 0)(-3.0)), "reason": edited(at("columns", "reason", 0)(99)),
    "from the end": edited(at("columns", "reason", 0)(-1)), "resources": edited(at("columns", "resources", 0)(1.0)),
    "status": edited(at("columns", "status", 0)("fine")), "config": edited(at("columns", "config", 0)(7)),
    "short": edited(at("columns", "time_us")([1.0])), "sizes": edited(at("sizes")(7)),
    "few": edited(at("sizes", "row_warp")(1)), "no variant": edited(at("sizes")({})),
    "twice": edited(at("columns", "config", 0)(CONTENT["columns"]["config"][1])),
    "shape": edited(at("origin", "shape")("4,4,8")), "shape type": edited(at("origin", "shape")(4)),
    "dtype": edited(at("origin", "dtype")("float8")), "eps": edited(at("origin", "eps")("1e-5")),
    "wants": edited(at("origin", "wants")(None)), "sms": edited(at("origin", "limits", "sms")(-1)),
    "clock": edited(at("origin", "limits", "clock_ghz")("fast")), "columns": edited(at("columns")([])),
    "registers": edited(at("resources")([[["row_warp", "many", 0, 0, 0]]])), "slices": edited(at("slices")([3])),
    "other": edited(at("origin", "more")(3)),
    "sources": edited(at("origin", "sources")("0123")), "a digest": edited(at("origin", "sources")({"row_warp": 1})),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    path.write_bytes(BROKEN[name])
    assert cli.main(["--replay", str(path)]) == USAGE
    said = capsys.readouterr().err
    assert said.startswith("tuner: ") and said.count("\n") == 1 and "record" in said


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_spaces_of_the_repository_can_be_read(path: Path) -> None:
    found = load(path)
    assert len(found.times) > 100 and all(config.variant in found.origin.variants for config in found.results)


def test_a_huge_file_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "space.json.xz"
    path.write_bytes(SAVED)
    assert load(path).results
    monkeypatch.setattr(recorded, "MOST_BYTES", 1000)
    with pytest.raises(InputError, match="damaged"):
        load(path)


def test_the_file_may_be_named_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.json.xz"
    path.write_bytes(SAVED)
    said = []
    for words in ([f"--replay={path}", "--trials", "5"], ["--trials", "5", "--replay", str(path)],
                  ["--trials=5", f"--replay={path}", "--seed", "0"]):
        assert cli.main(words) == OK
        said.append(capsys.readouterr().out)
    assert len(set(said)) == 1 and "5 tried" in said[0]


@pytest.mark.parametrize("module", [fit, compare, replay_cli])
def test_ctrl_c_is_no_traceback(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load", interrupt)
    path = str(tmp_path / "space")
    assert module.main(["--replay", path] if module is replay_cli else [path]) == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
