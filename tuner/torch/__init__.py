"""Linear(LayerNorm(x)) for PyTorch, whose backward pass is a tuned kernel. Needs the extra `torch`."""

try:
    from tuner.torch.conversion import convert, unconvert
    from tuner.torch.function import layer_norm_linear
    from tuner.torch.module import LayerNormLinear
    from tuner.torch.tuning import autotune
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("tuner.torch needs PyTorch, which is not installed; install the extra `torch`") from error

__all__ = ["LayerNormLinear", "autotune", "convert", "layer_norm_linear", "unconvert"]
