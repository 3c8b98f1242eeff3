"""What tuning runs found, kept from one to the next: the fastest kernels known at some row counts, for each kind of problem."""
