"""Candidates in processes of their own, which a hang, a crash or a dead GPU context ends without ending the run.

    this process: searches, compiles into the store, writes records
      nursery (main.py): one process that has imported everything and holds the data and the references; touches no device
        worker (worker.py): forked from the nursery in milliseconds; owns the GPU context or loads host programs, runs candidates

Requests and replies are JSON over a socket that nothing else writes to (messages.py). This process waits for each reply as long
as patience.py allows; then the worker is killed, the candidate gets its record, and the next worker takes the next candidate.

No process outlives the one above it: the nursery ends when its socket closes, and the kernel kills a worker whose nursery ended.
"""
