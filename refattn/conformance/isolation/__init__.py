"""Targets in a process of their own, which holds inputs only: what they do to it is a verdict, not the end of the run.

    target.py       the target as the judge calls it
    process.py      the worker from outside: limits of time and memory, its death, what it leaves behind
    channel.py      messages as bytes: a header, then raw values; nothing in them is executed
    messages.py     which inputs cross, and what comes back
    worker.py       the worker from inside
    provenance.py   whether a target is built on refattn

This keeps honest verdicts honest, and careless targets apart from the judge. It is no sandbox: a target runs with the
rights of the user who names it. Nothing is imported here, because the worker needs only its half.
"""
