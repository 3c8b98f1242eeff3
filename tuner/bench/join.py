"""Several bench.json as one: `python -m tuner.bench.join FILE FILE... --out DIR`.

For a benchmark whose rows were measured at the same time on several GPUs of one kind, each by a process with a folder of its own.
The files must agree in what changes times, as the pieces of a resumed benchmark must; of two rows of one case the later file's
stays. Needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tuner.arguments import OK, Parser, exit_status
from tuner.bench.report import bench_json, bench_markdown
from tuner.bench.results import Results
from tuner.bench.sheet import JSON, MARKDOWN, check_folder, read_results, why_apart
from tuner.errors import InputError
from tuner.records import write_text


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit status: 0, or 2 where the files are no results or cannot stand in one file."""
    parser = Parser(prog="join", allow_abbrev=False, description="Puts the rows of several bench.json into one.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="bench.json of one kind of GPU and the same sources")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    options = parser.parse_args(arguments)
    return exit_status("join", lambda: _join(options.files, options.out))


def _join(files: Sequence[Path], out: Path) -> int:
    whole = join(files)
    check_folder(out)
    write_text(out / JSON, bench_json(whole))
    write_text(out / MARKDOWN, bench_markdown(whole))
    print(f"written: {out / MARKDOWN}, {out / JSON}, {len(whole.rows)} rows" +
          (f"; missing: {'; '.join(whole.missing)}" if whole.missing else ""))
    return OK


def join(files: Sequence[Path]) -> Results:
    """The parts and rows of all files, in their order.

    Raises:
        InputError: one is not there or no result of this program, or two differ in what changes times.
    """
    whole = Results()
    for path in files:
        results = read_results(path)
        if results is None:
            raise InputError(f"there is no {path}")
        for part in results.parts:
            for why in filter(None, (why_apart(earlier, part) for earlier in whole.parts)):
                raise InputError(f"{path} and {files[0]} cannot stand in one file: {why}")
        before = len(whole.parts)
        whole = replace(whole, parts=(*whole.parts, *results.parts))
        for row in results.rows:
            whole = whole.with_row(replace(row, part=row.part + before))
    return whole


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
