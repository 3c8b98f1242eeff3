"""A content-addressed store of compiled kernels, safe for many threads and processes at once.

Every outcome lies in `<root>/<2 hex>/<digest>/`: the sources, what was built from them, and `key.json`, which holds in clear what
the digest was taken of and the checksum of every file. A folder appears whole, by a rename, or not at all; one that was damaged
afterwards is built again.

The store is bounded: processes that add to it take away what was not used for longest, once it is larger than LIMIT_BYTES.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from tuner.errors import ToolchainError

LIMIT_BYTES = 4 << 30
"""What all entries may take together: some 25,000 kernels, or fifty long runs."""

IN_USE_SECONDS = 3600.0
"""What was used so lately is never taken away, as somebody may be about to load it. So the store can be larger than its limit by
what is built in that time."""

TRIM_SHARE = 16
"""A process looks at the size of the store when it first adds to it, and after each such part of the limit that it added."""

_KEY_FILE = "key.json"


@dataclass(frozen=True, slots=True)
class BuildKey:
    """All that the outcome of one build depends on, and nothing else.

    Attributes:
        kind: what is built and for which processor: "cubin sm_90a", "host kernel x86_64".
        files: name and text of every source file, the names relative to the entry's folder ("kernel.cu"). The store writes
            them there before the build, and they stay beside what is built.
        flags: compiler flags in order, free of paths that differ from one build to the next.
        compiler: name and version as the compiler states them.
        needs: digests of other entries whose files this build includes or links.
    """

    kind: str
    files: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    compiler: str
    needs: tuple[str, ...] = ()

    def in_clear(self) -> dict[str, object]:
        """The key as JSON data; a file's text is represented by its SHA-256."""
        return {
            "kind": self.kind,
            "files": {name: _sha256(text.encode()) for name, text in self.files},
            "flags": list(self.flags),
            "compiler": self.compiler,
            "needs": list(self.needs),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the key, hexadecimal: the name of the entry's folder."""
        return _sha256(json.dumps(self.in_clear(), sort_keys=True).encode())


class Store:
    """Entries under one root folder, which need not exist yet. Threads and processes may share it.

    Args:
        root: the folder; None: `default_root()`.
        limit_bytes: what all entries may take together.
    """

    def __init__(self, root: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.root = default_root() if root is None else root
        self._limit = limit_bytes
        self._added = limit_bytes  # as if much had been: so the first addition looks at the size
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def get_or_build(self, key: BuildKey, build: Callable[[Path], None]) -> Path:
        """The folder of a complete entry.

        Args:
            key: what to look for.
            build: called when no sound entry is there, with a folder that holds the key's files; adds its products to it. It
                runs once at a time per key and process. What it raises passes through, and leaves no entry.

        Raises:
            ToolchainError: the root cannot be written.
        """
        folder = self.root / key.digest[:2] / key.digest
        with self._lock(key.digest):
            if _is_sound(folder, key):
                self._touch(key)
                return folder
            with self._writing():
                working = _new_folder(folder.parent, key)
            try:
                build(working)
                with self._writing():
                    _seal(working, key)
                    _publish(working, folder, key)
            finally:
                shutil.rmtree(working, ignore_errors=True)
        self._touch(key)
        self._count(folder)
        return folder

    def trim(self) -> None:
        """Takes entries away, those not used for longest first, until the rest is within the limit; what was used within
        IN_USE_SECONDS stays. Folders that killed processes left behind go as well. One process at a time does this; where another
        is at it, nothing happens."""
        with contextlib.suppress(OSError), (self.root / ".trim").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _trim(self.root, self._limit, time.time() - IN_USE_SECONDS)

    def _lock(self, digest: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(digest, threading.Lock())

    def _touch(self, key: BuildKey) -> None:
        """Marks an entry, and those it needs, as used now."""
        for digest in (key.digest, *key.needs):
            with contextlib.suppress(OSError):  # taken away by hand, or a store that can only be read
                os.utime(self.root / digest[:2] / digest / _KEY_FILE)

    def _count(self, folder: Path) -> None:
        """Counts what this process added, and trims the store now and then."""
        size = _bytes(folder)
        with self._guard:
            self._added += size
            due = self._added >= self._limit // TRIM_SHARE
            if due:
                self._added = 0
        if due:
            self.trim()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ToolchainError(
                f"cannot write compiled kernels to {self.root} ({error.strerror}); set LNL_STORE to a folder that can be written"
            ) from error


def default_root() -> Path:
    """$LNL_STORE where that is set, else a folder in the user's cache."""
    chosen = os.environ.get("LNL_STORE")
    # Absolute, as compilers run in folders of their own.
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("layernorm-linear-backward")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _new_folder(parent: Path, key: BuildKey) -> Path:
    """A folder beside the entries that holds the key's files."""
    parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=".building-", dir=parent))
    for name, text in key.files:
        path = working / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return working


def _checksums(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / _KEY_FILE)
    return {path.relative_to(folder).as_posix(): _sha256(path.read_bytes()) for path in sorted(files)}


def _seal(folder: Path, key: BuildKey) -> None:
    """Writes key.json; an entry without it counts as damaged."""
    content = {"key": key.in_clear(), "checksums": _checksums(folder)}
    (folder / _KEY_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_sound(folder: Path, key: BuildKey) -> bool:
    try:
        content = json.loads((folder / _KEY_FILE).read_text(encoding="utf-8"))
        return bool(content == {"key": key.in_clear(), "checksums": _checksums(folder)})
    except (OSError, ValueError):
        return False


def _publish(working: Path, folder: Path, key: BuildKey) -> None:
    """Moves a sealed entry to its place. If another process was faster, its sound entry stays; a damaged one makes room."""
    while True:
        try:
            working.rename(folder)
            return
        except OSError:
            if _is_sound(folder, key):
                return
            if not folder.exists():
                raise
        _drop(folder)


def _trim(root: Path, limit: int, used_before: float) -> None:
    """Takes away what was not used since a time, in seconds since the epoch, until the rest is within the limit."""
    sized = [(_last_use(folder), _bytes(folder), folder) for folder in root.glob("??/*")]
    total = sum(size for _, size, _ in sized)
    for used, size, folder in sorted(sized):
        if used >= used_before:
            break
        left_behind = folder.name.startswith(".")
        if (total > limit or left_behind) and _last_use(folder) < used_before:
            _drop(folder)
            total -= size


def _drop(folder: Path) -> None:
    """Takes a folder away: out of everybody's sight at once, then file by file."""
    aside = Path(tempfile.mkdtemp(prefix=".dropped-", dir=folder.parent))
    with contextlib.suppress(OSError):  # another process took it away
        folder.rename(aside / "entry")
    shutil.rmtree(aside, ignore_errors=True)


def _last_use(folder: Path) -> float:
    """When an entry was last asked for; where it is none, when it was last changed. 0 where it is gone."""
    for path in (folder / _KEY_FILE, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _bytes(folder: Path) -> int:
    """The size of all files below a folder; what disappears meanwhile does not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
