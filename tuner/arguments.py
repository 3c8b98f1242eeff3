"""Arguments as users write them, on the command line and in Python alike."""

from __future__ import annotations

import argparse
import contextlib
import errno
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from codegen.arguments import USAGE as USAGE
from codegen.arguments import Parser as Parser
from codegen.arguments import abandon_output
from codegen.config import Config
from codegen.errors import CodegenError
from codegen.problem import Shape
from codegen.space import parse_config
from tuner.errors import InputError, InputTypeError, TunerError, why

OK, FAILED, INTERRUPTED = 0, 1, 130
"""Exit codes beside USAGE: done; nothing was found, or this machine lacks something; Ctrl-C."""


def exit_status(program: str, work: Callable[[], int], debug: bool = False, interrupted: str = "interrupted") -> int:
    """What a program's work returns; where it raises what a user can cause, that is said in a sentence on stderr.

    What was printed is flushed, so that a console that takes no more is said too; a reader who has gone (`| head`) needs no word.

    Args:
        program: what the sentence begins with.
        work: returns the exit status.
        debug: whether errors pass through, for their traceback.
        interrupted: what is said after Ctrl-C.
    """
    try:
        status = work()
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        abandon_output()
        return FAILED
    except (CodegenError, TunerError, OSError, MemoryError) as error:
        if debug:
            raise
        if _is_full(error):
            abandon_output()
        print(f"{program}: {_sentence(error)}", file=sys.stderr)
        return USAGE if isinstance(error, CodegenError | InputError | InputTypeError) else FAILED


def _is_full(error: Exception) -> bool:
    """Whether something takes no more that is no file this knows of: the console's, or one that was open."""
    return isinstance(error, OSError) and error.filename is None and error.errno == errno.ENOSPC


def _sentence(error: Exception) -> str:
    """What went wrong, and what to do."""
    said = str(error)
    if isinstance(error, MemoryError):
        return f"this machine has not enough memory for the shape ({said or 'no figure is known'}); use a smaller one"
    if not isinstance(error, OSError) or isinstance(error, TunerError):
        return said
    if error.filename is not None:
        return f"{error.filename} cannot be used ({why(error)}); mend that, or choose another place"
    if _is_full(error):
        return f"what this prints or writes finds no room ({why(error)}); make some, or choose another place"
    return f"the operating system refuses what this needs ({why(error)}); mend that, and try again"


def run_recorded(parser: argparse.ArgumentParser, work: Callable[[argparse.Namespace, str], int], arguments: Sequence[str],
                 interrupted: str) -> int:
    """What the work of `python -m tuner NAME` returns, where results say which command made them; errors as `exit_status`.

    Args:
        parser: its `prog` is NAME; it has an option --debug.
        work: of the options and the command.
        arguments: what follows NAME.
        interrupted: as of exit_status.
    """
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "tuner", parser.prog, *arguments])
    return exit_status(parser.prog, lambda: work(options, command), options.debug, interrupted)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """In the block, a process that is told to end (SIGTERM, as by `timeout`) ends as at Ctrl-C: what was finished is written. Not
    outside of the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def as_shape(shape: Shape | str | Sequence[int]) -> Shape:
    """A Shape from any of its spellings.

    Raises:
        InvalidProblem: it is none.
        InputTypeError: it is neither a text nor numbers.
    """
    if isinstance(shape, Shape):
        return shape
    if not isinstance(shape, str | Iterable):
        raise InputTypeError(f"a shape is a text such as '4,4,8,16', four whole numbers or a Shape, not {_kind(shape)}")
    return Shape.parse(shape if isinstance(shape, str) else ",".join(str(size) for size in shape))


def parse_names(names: Iterable[str] | str) -> tuple[str, ...]:
    """Names from a list of them or from one text with commas: "dx, dw".

    Raises:
        InputTypeError: they are neither.
    """
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    listed = tuple(names) if isinstance(names, Iterable) else None
    if listed is None or not all(isinstance(name, str) for name in listed):
        raise InputTypeError(f"names are a list of them or one text with commas, 'dx,dw', not {names!r}")
    return listed


def parse_gpus(text: str) -> tuple[int, ...]:
    """Numbers of GPUs, "0,1"; none for "all".

    Raises:
        ArgumentTypeError: they are neither.
    """
    if text == "all":
        return ()
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers) or len(set(map(int, numbers))) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'all' nor different numbers of GPUs such as '0,1'")
    return tuple(map(int, numbers))


def parse_folder(text: str) -> Path:
    """The path of a folder.

    Raises:
        ArgumentTypeError: it is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("an empty text names no folder; for the current one write .")
    return Path(text)


def check_folder(folder: Path) -> None:
    """Makes the folder if need be.

    Raises:
        InputError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {folder} ({error.strerror}); choose another folder with --out") from error


def as_dtype(name: str, value: object) -> str:
    """The name of a data type given by its name, as NumPy's type or dtype, or as that of ml_dtypes; empty stays empty.

    Raises:
        InputTypeError: it is none of these.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, type | np.dtype):
        with contextlib.suppress(TypeError):
            return np.dtype(value).name
    raise InputTypeError(f"{name} must be a data type such as 'float32', not {_kind(value)}")


def as_text(name: str, value: object) -> str:
    """The value itself.

    Raises:
        InputTypeError: it is no text.
    """
    if not isinstance(value, str):
        raise InputTypeError(f"{name} must be a text, not {_kind(value)}")
    return value


def as_whole(name: str, value: object) -> int:
    """A whole number of Python or NumPy.

    Raises:
        InputTypeError: it is none; a float is none, nor is a truth value.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(f"{name} must be a whole number, not {_kind(value)}")
    return int(value)


def as_seconds(name: str, value: object) -> float:
    """A number of Python or NumPy.

    Raises:
        InputTypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InputTypeError(f"{name} must be a number of seconds, not {_kind(value)}")
    return float(value)


def as_flag(name: str, value: object) -> bool:
    """A truth value of Python or NumPy.

    Raises:
        InputTypeError: it is anything else, however true.
    """
    if not isinstance(value, bool | np.bool_):
        raise InputTypeError(f"{name} must be True or False, not {_kind(value)}")
    return bool(value)


def as_config(config: Config | str) -> Config:
    """A Config from its text, or itself, whose parts were perhaps put together by hand.

    Raises:
        InvalidConfig: there is no such config.
        InputTypeError: it is neither.
    """
    return parse_config(str(config) if isinstance(config, Config) else as_text("config", config))


def _kind(value: object) -> str:
    """What a value of the wrong type is, for a sentence: "3.5 (float)"."""
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:37] + '...'} ({type(value).__name__})"
