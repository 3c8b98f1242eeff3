"""The files of wisdom: the user's own, which runs add to, and those that ship with the package, which nobody writes.

One file for each key. Files appear whole, by a rename; who changes one holds a lock on the folder, so that processes may add at
once and nothing is lost. A damaged one is put aside under another name, and that is said once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import platformdirs

from tuner.errors import InputError
from tuner.records import write_text
from tuner.wisdom.points import Entry, Key, OtherSchema, Point
from tuner.wisdom.source import is_current

SHIPPED = Path(__file__).resolve().parent / "shipped"

OFF = "off"
"""As $LNL_WISDOM: nothing is looked up, not even what ships, and nothing is kept."""

KEPT = 4
"""Points of one key and row count that are kept: the fastest of today's sources, then the fastest of others."""

Say = Callable[[str], None]


def warn(sentence: str) -> None:
    """Says something in a program that is not ours."""
    warnings.warn(sentence, stacklevel=2)


class Book:
    """All the wisdom there is.

    Args:
        root: the user's own folder, which need not exist yet; None: $LNL_WISDOM, else one in the user's data folder.
        shipped: what comes with the package.
        say: is told, in a sentence, of files that cannot be read.

    Attributes:
        root: the folder; None where $LNL_WISDOM is "off".
    """

    def __init__(self, root: Path | None = None, *, shipped: Path = SHIPPED, say: Say = warn) -> None:
        self.root = default_root() if root is None else root
        self._shipped = shipped
        self._say = say

    def points(self, key: Key) -> tuple[Point, ...]:
        """Own and shipped points of a key, each once."""
        found = [entry.points for folder in self._folders() if (entry := self._read(folder / key.path)) is not None]
        return tuple(dict.fromkeys(point for points in found for point in points))

    def akin(self, key: Key) -> list[Key]:
        """The keys with points for the same GPU, H, O and data types: other gradients, classes and regimes, and itself."""
        if self.root is None:
            return []
        paths = {path.relative_to(folder): path for folder in self._folders() for path in sorted(folder.glob(key.pattern))}
        entries = (self._read(path) for path in paths.values())
        return [entry.key for entry in entries if entry is not None and _kind(entry.key) == _kind(key)]

    def own(self) -> list[Entry]:
        """Everything in the user's folder, in the order of keys."""
        return [] if self.root is None else self._all(self.root)

    def shipped(self) -> list[Entry]:
        """Everything that comes with the package, in the order of keys."""
        return [] if self.root is None else self._all(self._shipped)

    def add(self, key: Key, points: Iterable[Point]) -> None:
        """Adds points to the user's own; see `merged`. Nothing happens where wisdom is off. A file that another version of this
        program has written stays as it is, and that is said.

        Raises:
            OSError: the folder cannot be written.
        """
        with self._changing():
            if self.root is not None:
                path = self.root / key.path
                try:
                    before = self._content(path, locked=True)
                except OtherSchema as error:
                    self._say(f"the wisdom in {path} is of another version of this program ({error}); it was left as it is, and "
                              "nothing was added")
                    return
                write(path, Entry(key, merged(key, () if before is None else before.points, points)))

    def forget(self, drop: Callable[[Key, Point], bool]) -> int:
        """Takes points out of the user's own, and returns how many.

        Raises:
            OSError: the folder cannot be written.
        """
        count = 0
        with self._changing():
            for entry in [] if self.root is None else self._all(self.root, locked=True):
                left = tuple(point for point in entry.points if not drop(entry.key, point))
                count += len(entry.points) - len(left)
                if self.root is not None and len(left) < len(entry.points):
                    path = self.root / entry.key.path
                    if left:
                        write(path, Entry(entry.key, left))
                    else:
                        path.unlink()
        return count

    def _folders(self) -> list[Path]:
        return [] if self.root is None else [self.root, self._shipped]

    def _all(self, folder: Path, locked: bool = False) -> list[Entry]:
        entries = (self._read(path, locked) for path in sorted(folder.glob("*/*.json")))
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.key)

    def _read(self, path: Path, locked: bool = False) -> Entry | None:
        """The entry of a file; None where there is none, it cannot be read, or it is another version's.

        Args:
            locked: whether this process holds the lock already.
        """
        try:
            return self._content(path, locked)
        except OtherSchema:
            return None

    def _content(self, path: Path, locked: bool) -> Entry | None:
        """As _read. Raises OtherSchema: it is another version's."""
        try:
            return _load(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OtherSchema:
            raise
        except OSError as error:
            self._say(f"the wisdom in {path} cannot be read ({error.strerror}) and is passed over")
        except _BROKEN:
            return self._put_aside(path, locked)
        return None

    def _put_aside(self, path: Path, locked: bool) -> Entry | None:
        """Renames a damaged file, so that it is in nobody's way and can still be looked at.

        Under the lock, where nobody else puts another in its place meanwhile; the one that somebody has put there is returned.
        """
        if self._shipped in path.parents:
            self._say(f"the wisdom in {path} is damaged and is passed over; install the package again")
            return None
        aside = next(name for number in range(1 << 30) if not (name := path.with_suffix(f".damaged-{number}")).exists())
        try:
            with contextlib.nullcontext() if locked else self._changing():
                try:
                    return _load(path)
                except (FileNotFoundError, OtherSchema):
                    return None
                except _BROKEN:
                    path.rename(aside)
        except OSError as error:
            self._say(f"the wisdom in {path} is damaged and is passed over; it cannot be put aside ({error.strerror})")
            return None
        self._say(f"the wisdom in {path} was damaged; it was put aside as {aside.name}, and is gathered anew")
        return None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Keeps other processes from changing the user's folder meanwhile; the lock goes with the process that holds it."""
        if self.root is None:
            yield
            return
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def default_root() -> Path | None:
    """$LNL_WISDOM where that is set, else a folder in the user's data; None: wisdom is off."""
    chosen = os.environ.get("LNL_WISDOM")
    if chosen == OFF:
        return None
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("layernorm-linear-backward") / "wisdom"


def merged(key: Key, before: Iterable[Point], added: Iterable[Point]) -> tuple[Point, ...]:
    """Points of one key put together, by row count; at each KEPT at most: those of today's sources first, then the faster first.

    Of one kernel at one row count the later measurement counts, and none without a source beside one with.
    """
    latest: dict[tuple[int, str, str], Point] = {}
    for point in (*before, *added):
        same = (point.rows, point.config, point.source)
        if same not in latest or point.date >= latest[same].date:
            latest[same] = point
    sourced = {(point.rows, point.config) for point in latest.values() if point.source}
    left = [point for point in latest.values() if point.source or (point.rows, point.config) not in sourced]
    ordered = sorted(left, key=lambda point: (point.rows, not is_current(key, point), point.us, point.config))
    kept: dict[int, list[Point]] = {}
    for point in ordered:
        kept.setdefault(point.rows, []).append(point)
    return tuple(point for points in kept.values() for point in points[:KEPT])


def write(path: Path, entry: Entry) -> None:
    """Writes one file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    write_text(path, json.dumps(entry.as_json(), indent=1, allow_nan=False) + "\n")


def _kind(key: Key) -> tuple[object, ...]:
    return key.gpu, key.arch, key.hidden, key.out, key.dtype, key.param_dtype


_BROKEN = (InputError, AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""What reading a file raises that is no wisdom."""


def _load(path: Path) -> Entry:
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=1024)
def _parse(path: Path, changed_ns: int, size: int, inode: int) -> Entry:
    """What else is given tells versions of a file apart."""
    entry = Entry.from_json(json.loads(path.read_text(encoding="utf-8")))
    if not path.as_posix().endswith(entry.key.path):
        raise InputError(f"it is about another key than {path.name} says")
    return entry
