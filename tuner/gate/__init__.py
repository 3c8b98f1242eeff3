"""The safety gate: what the winner of a run must pass, beyond what every candidate did, before it is written and remembered.

    gate.py       takes the fastest in turn until one passes; what was run, and what was not, stays with the result
    recheck.py    validation on other data, at other row counts; the audit of bit-equality
    sanitizer.py  compute-sanitizer's tools, each a process that can be killed
    sanitized.py  what runs under them: the winner's binary, on tensors that each have memory of their own
"""
