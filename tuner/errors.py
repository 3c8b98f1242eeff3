"""What can go wrong while kernels are compiled, run and chosen; each message says what to do."""

from __future__ import annotations

from pathlib import Path


def why(error: BaseException) -> str:
    """What an error says, as part of a sentence that names the file itself: "Is a directory" of an OSError."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class TunerError(Exception):
    """Root of everything this package raises on purpose."""


class InputError(TunerError, ValueError):
    """Arrays or arguments that do not describe one LayerNorm+Linear backward pass."""


class InputTypeError(TunerError, TypeError):
    """An argument of a type that is not supported; it is never reinterpreted."""


class ToolchainError(TunerError):
    """A compiler or library this machine needs is not there, or does not know the target."""


class NoSuchDevice(ToolchainError):
    """This machine has fewer GPUs than the number that was asked for says."""


class CompileError(TunerError):
    """The compiler refused a kernel; the message holds its first error."""


class LaunchError(TunerError):
    """A kernel could not be launched, or broke a rule while it ran."""


class OutOfMemory(LaunchError):
    """A call needs more memory than its device has left."""


class DeviceLost(LaunchError):
    """A kernel took its process's GPU context with it, or no process can use the device any more: nothing can run there."""


class RunEnded(DeviceLost):
    """The run that asked for something has ended, or been stopped: nothing more is run for it."""


class StorageLost(TunerError):
    """A storage that processes share cannot be opened, or not be reached any more."""


class CannotWrite(TunerError, OSError):
    """A file cannot be written; it has errno, strerror and filename as every OSError."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(error.errno, error.strerror or str(error), str(path))

    def __str__(self) -> str:
        return f"{self.filename} cannot be written ({self.strerror}); make room for it, or choose another place"


class NoValidKernel(TunerError):
    """Every candidate was rejected; the message gives the most common reason."""
