"""The store of compiled kernels: what its keys tell apart, what survives damage, and who may use it at once."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest

from tuner.errors import ToolchainError
from tuner.store import IN_USE_SECONDS, BuildKey, Store, default_root

KEY = BuildKey("cubin sm_90a", (("kernel.cu", "// a kernel\n"), ("parts/shim.cpp", "// a shim\n")), ("-O3",), "nvcc 13.0")


class Builder:
    """Writes `kernel.bin`, and counts how often it was asked to."""

    def __init__(self, product: bytes = b"binary" * 100) -> None:
        self.product = product
        self.calls = 0
        self._guard = threading.Lock()

    def __call__(self, folder: Path) -> None:
        with self._guard:
            self.calls += 1
        time.sleep(0.01)
        (folder / "kernel.bin").write_bytes(self.product)


def entries(store: Store) -> list[Path]:
    return sorted(store.root.glob("*/*"))


def test_entry_holds_sources_product_and_key(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    folder = store.get_or_build(KEY, Builder(b"product"))
    assert folder == store.root / KEY.digest[:2] / KEY.digest
    assert (folder / "kernel.cu").read_text() == "// a kernel\n"
    assert (folder / "parts/shim.cpp").read_text() == "// a shim\n"
    assert (folder / "kernel.bin").read_bytes() == b"product"
    content = json.loads((folder / "key.json").read_text())
    assert content["key"] == KEY.in_clear() and set(content["checksums"]) == {"kernel.cu", "parts/shim.cpp", "kernel.bin"}


def test_sources_are_there_when_the_build_begins(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "kernel.bin").write_text((folder / "kernel.cu").read_text().upper())

    assert (Store(tmp_path).get_or_build(KEY, build) / "kernel.bin").read_text() == "// A KERNEL\n"


def test_second_request_builds_nothing(tmp_path: Path) -> None:
    builder = Builder()
    first = Store(tmp_path).get_or_build(KEY, builder)
    assert Store(tmp_path).get_or_build(KEY, builder) == first and builder.calls == 1


@pytest.mark.parametrize("other", [
    replace(KEY, kind="cubin sm_80"),
    replace(KEY, files=(("kernel.cu", "// a kernel \n"), KEY.files[1])),
    replace(KEY, files=(("kernel2.cu", "// a kernel\n"), KEY.files[1])),
    replace(KEY, files=KEY.files[:1]),
    replace(KEY, flags=("-O2",)),
    replace(KEY, flags=("-O3", "-g")),
    replace(KEY, compiler="nvcc 13.1"),
    replace(KEY, needs=("0" * 64,)),
], ids=lambda key: key.digest[:8])
def test_every_field_tells_keys_apart(other: BuildKey, tmp_path: Path) -> None:
    store, builder = Store(tmp_path), Builder()
    assert store.get_or_build(KEY, builder) != store.get_or_build(other, builder) and builder.calls == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))


@pytest.mark.parametrize("name", ["kernel.bin", "kernel.cu", "key.json"])
@pytest.mark.parametrize("damage", [cut, empty, noise, Path.unlink])
def test_damaged_entry_is_built_again(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    store, builder = Store(tmp_path), Builder()
    folder = store.get_or_build(KEY, builder)
    damage(folder / name)
    assert store.get_or_build(KEY, builder) == folder and builder.calls == 2
    assert (folder / "kernel.bin").read_bytes() == builder.product
    assert store.get_or_build(KEY, builder) == folder and builder.calls == 2
    assert entries(store) == [folder]


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    store, builder = Store(tmp_path), Builder()

    def fail(folder: Path) -> None:
        (folder / "kernel.bin").write_bytes(b"half")
        raise KeyError("refused")

    with pytest.raises(KeyError, match="refused"):
        store.get_or_build(KEY, fail)
    assert entries(store) == []
    store.get_or_build(KEY, builder)
    assert builder.calls == 1


def test_threads_build_a_key_once(tmp_path: Path) -> None:
    store, builder = Store(tmp_path), Builder()
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: store.get_or_build(KEY, builder), range(16)))
    assert builder.calls == 1 and set(folders) == {folders[0]}


def test_threads_build_different_keys_at_once(tmp_path: Path) -> None:
    store, meeting = Store(tmp_path), threading.Barrier(2, timeout=10)

    def build(folder: Path) -> None:
        meeting.wait()  # passes only if both builds are under way
        (folder / "kernel.bin").write_bytes(b"binary")

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(store.get_or_build, key, build) for key in (KEY, replace(KEY, flags=()))]
        assert len({job.result() for job in jobs}) == 2


PROCESS = """
import sys, time
from pathlib import Path
from tuner.store import BuildKey, Store

def build(folder):
    time.sleep(0.3)  # so that the processes' builds overlap
    (folder / "kernel.bin").write_bytes(b"binary" * 1000)

sys.stdin.read()
for number in range(3):
    folder = Store(Path(sys.argv[1])).get_or_build(BuildKey("test", (("kernel.cu", str(number)),), (), "none"), build)
    assert (folder / "kernel.bin").read_bytes() == b"binary" * 1000
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_share_a_cold_store(damaged: bool, tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = [BuildKey("test", (("kernel.cu", str(number)),), (), "none") for number in range(3)]
    if damaged:
        for key in keys:
            empty(store.get_or_build(key, Builder()) / "kernel.bin")
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  cwd=Path(__file__).parent.parent) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait(timeout=60)) == ("", 0)
        process.stderr.close()
    builder = Builder()
    assert entries(store) == sorted(store.get_or_build(key, builder) for key in keys) and builder.calls == 0


def test_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ToolchainError) as caught:
        Store(tmp_path / "file").get_or_build(KEY, Builder())
    says = f"cannot write compiled kernels to {tmp_path / 'file'} (Not a directory)"
    assert str(caught.value) == f"{says}; set LNL_STORE to a folder that can be written"


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LNL_STORE", str(tmp_path))
    assert default_root() == tmp_path and Store().root == tmp_path
    monkeypatch.delenv("LNL_STORE")
    assert default_root().is_relative_to(platformdirs.user_cache_path())


@pytest.mark.parametrize("instead", ["a file", "an empty folder", "a folder for key.json"])
def test_something_else_where_an_entry_should_be(instead: str, tmp_path: Path) -> None:
    store, builder = Store(tmp_path), Builder()
    folder = tmp_path / KEY.digest[:2] / KEY.digest
    if instead == "a file":
        folder.parent.mkdir()
        folder.write_text("")
    else:
        (folder / ("key.json" if "key" in instead else "")).mkdir(parents=True)
    assert store.get_or_build(KEY, builder) == folder and builder.calls == 1
    assert (folder / "kernel.bin").read_bytes() == builder.product and entries(store) == [folder]


# --- a bounded size ----------------------------------------------------------------------------------------------------------


def numbered(number: int) -> BuildKey:
    return replace(KEY, flags=(str(number),))


def age(folder: Path, seconds: float) -> None:
    """Makes an entry look unused for so long."""
    os.utime(folder / "key.json", (then := time.time() - seconds, then))


def filled(root: Path) -> list[Path]:
    """Ten entries of 100,000 bytes and a little each, the first not used for longest, the last two in use."""
    folders = [Store(root).get_or_build(numbered(number), Builder(bytes(100_000))) for number in range(10)]
    for number, folder in enumerate(folders[:8]):
        age(folder, 2 * IN_USE_SECONDS - number)
    return folders


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    folders = filled(tmp_path)
    Store(tmp_path, limit_bytes=520_000).trim()
    assert entries(Store(tmp_path)) == sorted(folders[5:])


def test_what_is_used_stays(tmp_path: Path) -> None:
    folders, builder = filled(tmp_path), Builder()
    Store(tmp_path).get_or_build(numbered(0), builder)
    needing = replace(KEY, needs=(numbered(1).digest,))
    Store(tmp_path).get_or_build(needing, builder)
    age(folders[1], 2 * IN_USE_SECONDS)
    Store(tmp_path).get_or_build(needing, builder)
    Store(tmp_path, limit_bytes=0).trim()
    assert builder.calls == 1
    left = [folders[0], folders[1], *folders[8:], tmp_path / needing.digest[:2] / needing.digest]
    assert entries(Store(tmp_path)) == sorted(left)


def test_nothing_is_taken_away_within_the_limit(tmp_path: Path) -> None:
    folders = filled(tmp_path)
    Store(tmp_path, limit_bytes=1_100_000).trim()
    assert entries(Store(tmp_path)) == sorted(folders)


def test_additions_keep_the_size_within_the_limit(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=520_000)
    for number in range(20):
        age(store.get_or_build(numbered(number), Builder(bytes(100_000))), 2 * IN_USE_SECONDS - number)
        assert len(entries(store)) <= 6
    store.get_or_build(numbered(19), builder := Builder())
    assert builder.calls == 0


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    folder = Store(tmp_path).get_or_build(KEY, Builder())
    old, new = (folder.parent / f".building-{name}" for name in ("old", "new"))
    for left in (old, new):
        left.mkdir()
        (left / "kernel.cu").write_text("")
    os.utime(old, (then := time.time() - 2 * IN_USE_SECONDS, then))
    age(folder, 2 * IN_USE_SECONDS)
    Store(tmp_path).trim()
    assert entries(Store(tmp_path)) == sorted([folder, new])


def test_one_process_trims_at_a_time(tmp_path: Path) -> None:
    folders = filled(tmp_path)
    with (tmp_path / ".trim").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Store(tmp_path, limit_bytes=0).trim()
        assert entries(Store(tmp_path)) == sorted(folders)
    Store(tmp_path, limit_bytes=0).trim()
    assert entries(Store(tmp_path)) == sorted(folders[8:])
