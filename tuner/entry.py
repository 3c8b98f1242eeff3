"""`tuner.tune`: a tuning run for a caller in Python, whose arguments are taken as people write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext

from codegen.problem import Shape
from tuner.arguments import as_dtype, as_flag, as_seconds, as_shape, as_text, as_whole, parse_names
from tuner.choose import checked_executor, open_isolated
from tuner.errors import NoValidKernel
from tuner.executors import Executor
from tuner.outcome import Event, TuneResult, why_no_winner
from tuner.request import Request
from tuner.store import Store
from tuner.tuning import TuningRun
from tuner.wisdom.recall import remember


def tune(shape: Shape | str | Sequence[int], *, executor: str | Executor = "auto", target: str = "sm_90",
         dtype: str | type = "float32", eps: float = 1e-5, deterministic: bool = False,
         variants: Iterable[str] | str | None = None, trials: int | None = None,
         timeout: float | None = None, seed: int = 0, wants: Iterable[str] | str | None = None, store: Store | None = None,
         on_event: Callable[[Event], None] = lambda event: None, param_dtype: str | type = "", accuracy: str = "",
         regime: str = "warm") -> TuneResult:
    """Finds the fastest valid kernel for a shape.

    Args:
        shape: "B,S,H,O", the four numbers, or a Shape.
        executor: "auto", "cuda", "host", or one that is open already. By name, kernels run in processes of their own, where one
            that hangs or crashes ends only itself; with an open executor they run in this process.
        target: the architecture to predict for where there is no GPU.
        dtype: data type of x, dy and dx, its name or NumPy's own.
        eps: of the LayerNorm.
        deterministic: only kernels whose results are bitwise reproducible.
        variants: the variants to try, a list of names or "row_warp,row_shared"; None: all.
        trials: the most candidates to try; None: 500 on a GPU, without one the best 16 (each variant's default comes on top).
        timeout: seconds the run may take; None: 180 on a GPU, without one no limit. What still runs then is given up, where
            kernels run in processes of their own; where they do not, it is waited for.
        seed: of the data and the search.
        wants: the gradients to compute, a list of names or "dx,dw"; None: all five.
        store: where compiled kernels are kept; None: the default store.
        on_event: called after each step.
        param_dtype: data type of gamma, beta, w and their gradients, `dtype` or float32; empty: `dtype`.
        accuracy: the class every kernel must meet, fp32, tf32, fp16 or bf16; empty: that of `dtype`.
        regime: "warm" or "cold": in which the fastest is sought; the finalists are timed in both.

    Raises:
        NoValidKernel: every candidate was rejected; the message names the most common reason.
        InvalidProblem, UnsupportedDtype, InvalidConfig, InputError, InputTypeError: the arguments make no sense.
        ToolchainError: a compiler or library is missing.
    """
    began = time.monotonic()
    request = Request(
        as_shape(shape), as_dtype("dtype", dtype), eps, as_flag("deterministic", deterministic),
        None if variants is None else parse_names(variants), None if trials is None else as_whole("trials", trials),
        None if timeout is None else as_seconds("timeout", timeout), as_whole("seed", seed),
        None if wants is None else frozenset(parse_names(wants)), param_dtype=as_dtype("param_dtype", param_dtype),
        accuracy=as_text("accuracy", accuracy), regime=as_text("regime", regime))
    request.problem()
    target = as_text("target", target)
    with (closing(open_isolated(executor, target, store)) if isinstance(executor, str)
          else nullcontext(checked_executor(executor))) as opened:
        run = TuningRun(request, opened, store=store, began=began, on_event=on_event)
        run.execute()
    result = run.result()
    if result.winner is None:
        raise NoValidKernel(why_no_winner(result))
    if request.variants is None:
        remember(result)
    return result
