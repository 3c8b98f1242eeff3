"""`python -m tuner.torch.example`: a small transformer learns a small text, with PyTorch's modules and with the tuned ones.

The text is the body of the Constitution of the United States as signed in 1787, without Article II's superseded rules of election
and what follows Article III, section 3; it is in the public domain.
"""
