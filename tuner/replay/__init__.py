"""Recorded spaces: every candidate of one problem with its measured time, and searches tried out on them without a GPU."""
