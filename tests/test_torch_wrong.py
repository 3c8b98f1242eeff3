"""Direct calls of the backward operation with tensors that do not go together: an error in words, and no kernel has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fake_driver import FakeDriver
from tests.torch_extension import gradients
from tests.torch_on_host import LIMITS, close, exact, leaves
from tuner.torch import layer_norm_linear, ops

pytestmark = [pytest.mark.filterwarnings("error:PyTorch's own kernels"), pytest.mark.usefixtures("seeded_torch")]

CALL = torch.ops.lnl.layer_norm_linear_backward.default
NEEDS = [True] * 5


def right() -> dict[str, Tensor]:
    """What goes together, 36 rows of 24 and 16 values."""
    x, weight, bias, linear_weight, _ = (tensor.detach() for tensor in leaves() if tensor is not None)
    _, mean, rstd = ops.forward(x, weight, bias, linear_weight, None, 1e-5, None)
    return {"grad": torch.randn(4, 9, 16), "x": x, "weight": weight, "bias": bias, "linear_weight": linear_weight, "mean": mean,
            "rstd": rstd}


def call(given: dict[str, Tensor], needs: list[bool] = NEEDS) -> list[Tensor]:
    found: list[Tensor] = CALL(*given.values(), 1e-5, None, needs)
    return found


WRONG: list[tuple[str, Any]] = [
    ("grad", torch.randn(4, 9, 15)), ("grad", torch.randn(36, 16)), ("grad", torch.randn(9, 4, 16)), ("grad", torch.randn(16)),
    ("x", torch.randn(4, 8, 24)), ("x", torch.randn(4, 9, 25)), ("x", torch.randn(())), ("x", torch.randn(36, 24)),
    ("weight", torch.randn(23)), ("weight", torch.randn(1, 24)), ("bias", torch.randn(25)), ("bias", torch.randn(())),
    ("linear_weight", torch.randn(24, 16)), ("linear_weight", torch.randn(16)), ("linear_weight", torch.randn(2, 8, 24)),
    ("mean", torch.randn(4, 8, 1)), ("rstd", torch.randn(1)), ("mean", torch.randn(4, 9, 1).bfloat16()),
    ("rstd", torch.randn(4, 9, 1).double())]


@pytest.mark.parametrize(("name", "tensor"), WRONG, ids=[f"{name}-{list(one.shape)}-{one.dtype}" for name, one in WRONG])
def test_tensors_that_do_not_go_together_are_a_sentence(way: bool, torch_driver: FakeDriver, name: str, tensor: Tensor) -> None:
    given = right()
    for _ in range(2):
        call(given)  # its kernel is known now, and those of calls with other shapes may be the same
    torch_driver.log.clear()
    with pytest.raises(RuntimeError, match="layer_norm_linear_backward: the tensors must be on one device") as said:
        call({**given, name: tensor})
    assert f"{name} {list(tensor.shape)} {tensor.dtype} cpu" in str(said.value)
    assert torch_driver.log == []


@pytest.mark.parametrize("count", [0, 4, 6])
def test_another_number_of_needs_is_a_sentence(way: bool, torch_driver: FakeDriver, count: int) -> None:
    given = right()
    for _ in range(2):
        call(given)
    with pytest.raises(RuntimeError, match="needs"):
        call(given, [True] * count)


def test_tensors_of_two_devices_are_a_sentence() -> None:
    given = right()
    with pytest.raises(RuntimeError, match=r"they are grad .* linear_weight \[16, 24\] torch.float32 meta, mean"):
        ops.backward(**{**given, "linear_weight": given["linear_weight"].to("meta")}, eps=1e-5, cast=None, needs=NEEDS)


def test_statistics_of_any_strides_and_leading_sizes_serve(way: bool, torch_driver: FakeDriver) -> None:
    given = right()
    expected = call(given)
    given["mean"] = torch.stack([given["mean"].flatten(), torch.zeros(36)], 1)[:, 0]
    assert not given["mean"].is_contiguous()
    for _ in range(2):
        assert all(map(torch.equal, call(given), expected))


def test_a_parameter_that_became_another_since_the_forward_pass_is_a_sentence(way: bool, torch_driver: FakeDriver) -> None:
    """As code that swaps the memory of parameters does where it forgets to swap it back; autograd does not see it."""
    arguments, grad = leaves(), torch.randn(4, 9, 16)
    found, values = gradients(arguments, grad), exact(arguments, grad)
    assert all(close(one, value, LIMITS[torch.float32]) for one, value in zip(found, values, strict=True))
    y = layer_norm_linear(*arguments)
    assert arguments[3] is not None
    arguments[3].data = torch.randn(16, 3)
    with pytest.raises(RuntimeError, match=r"linear_weight \[16, 3\]"):
        y.backward(grad)


@pytest.mark.cuda
def test_a_tensor_on_the_cpu_beside_those_on_a_gpu_is_a_sentence() -> None:
    given = {name: tensor.cuda() for name, tensor in right().items()}
    for _ in range(2):
        call(given)
    for name in ("x", "weight", "linear_weight", "mean"):
        with pytest.raises(RuntimeError, match=f"{name} .* cpu"):
            call({**given, name: given[name].cpu()})
    torch.cuda.synchronize()
