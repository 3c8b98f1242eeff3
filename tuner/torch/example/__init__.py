"""`python -m tuner.torch.example`: a small transformer learns a small text, with PyTorch's modules and with the tuned ones.

The text is the preamble and most of the first three articles of the Constitution of the United States, as written in 1787; it
is in the public domain.
"""
