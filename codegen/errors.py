"""The mistakes a caller of the generator can make; each message says what to do instead."""


class CodegenError(Exception):
    """Root of everything this package raises on purpose."""


class InvalidProblem(CodegenError, ValueError):
    """Sizes or wanted gradients that describe no problem."""


class InvalidConfig(CodegenError, ValueError):
    """A config string or parameter set that names no kernel, or one the target cannot run."""


class UnsupportedDtype(CodegenError, TypeError):
    """A data type no template is written for."""
