"""Linear(LayerNorm(x)) for PyTorch, whose backward pass is a tuned kernel. Needs the extra `torch`."""

from tuner.torch.function import layer_norm_linear
from tuner.torch.module import LayerNormLinear, convert

__all__ = ["LayerNormLinear", "convert", "layer_norm_linear"]
