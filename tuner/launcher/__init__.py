"""Plans replayed through the CUDA driver by a few lines of C++: a whole backward pass for the price of one call from Python.

It needs no PyCUDA, works in the device's primary context, on any thread and any stream, also while that is captured, and waits
for nothing. Tensors are addresses; whose they are is the caller's affair.
"""
