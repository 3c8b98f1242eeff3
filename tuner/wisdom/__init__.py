"""What tuning runs found, kept from one run to the next: the fastest kernel known at some row counts, for each kind of problem."""
