"""A PostgreSQL server of the tests' own, in a temporary folder, on a socket in it."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from urllib.parse import quote

PASSWORD = "p@ss/word:%41"
"""One that a URL has to escape."""

USER = "tuner"

PROGRAMS = ("initdb", "pg_ctl", "postgres")


@cache
def _programs() -> Path | None:
    """The folder of initdb, pg_ctl and postgres: on the PATH, or where Debian puts them."""
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if all((folder / name).exists() for name in PROGRAMS)), None)


@cache
def has_postgres() -> bool:
    return _programs() is not None and importlib.util.find_spec("psycopg") is not None


class Postgres:
    """A running server; a context manager. The server refuses to run as root, so there it runs as `nobody`."""

    def __init__(self) -> None:
        self._owner = pwd.getpwnam("nobody") if os.getuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="lnl-postgres-"))
        self._databases = 0

    def __enter__(self) -> Postgres:
        word = self.folder / "password"
        word.write_text(PASSWORD)
        if self._owner is not None:
            for path in (self.folder, word):
                os.chown(path, self._owner.pw_uid, self._owner.pw_gid)
        self._run("initdb", "-D", "data", "-U", USER, "-E", "UTF8", "--locale=C", "--auth=scram-sha-256", "--pwfile=password",
                  "--no-sync")
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        self._run("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", f"-c listen_addresses='' -k {self.folder} -F", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def url(self, password: str = PASSWORD) -> str:
        """Of a database that nobody else uses."""
        import psycopg

        self._databases += 1
        name = f"study{self._databases}"
        server = {"host": str(self.folder), "user": USER, "password": PASSWORD, "dbname": "postgres"}
        with psycopg.connect(**server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://{USER}:{quote(password, safe='')}@/{name}?host={quote(str(self.folder), safe='')}"

    def _run(self, program: str, *arguments: str) -> None:
        programs = _programs()
        assert programs is not None
        said = subprocess.PIPE if program == "initdb" else subprocess.DEVNULL  # what stays running must not hold a pipe open
        done = subprocess.run([programs / program, *arguments], cwd=self.folder, text=True, stdin=subprocess.DEVNULL, stdout=said,
                              stderr=subprocess.STDOUT, user=self._owner and self._owner.pw_uid,
                              group=self._owner and self._owner.pw_gid)
        assert done.returncode == 0, done.stdout
