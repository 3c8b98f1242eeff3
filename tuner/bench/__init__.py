"""`python -m tuner bench`: the tuned kernels beside what a user would run instead, timed in one process on the GPU."""
