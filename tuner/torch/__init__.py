"""Linear(LayerNorm(x)) for PyTorch, whose backward pass is a tuned kernel. Needs the extra `torch`."""

from tuner.torch.function import layer_norm_linear
from tuner.torch.module import LayerNormLinear, convert
from tuner.torch.tuning import autotune

__all__ = ["LayerNormLinear", "autotune", "convert", "layer_norm_linear"]
