"""`python -m tuner verify`: the forward and the backward pass on each device of this machine, against an independent result."""
