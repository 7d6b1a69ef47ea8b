"""What the fast paths cost, beside their peers: `python -m refattn_backends.bench`.

A benchmark, not a timed test: single times mean little on a busy machine, ratios taken in one run do.
"""
