"""The shared conformance suite: cases for every clause, run on refattn itself and on anyone else's implementation.

    case.py       what a case is, and the problem that it hands out
    plain.py      data, and visibility written out plainly, independent of refattn.masks
    cases/        the cases, one module per chapter
    targets/      how implementations are called, one module per convention
    judge.py      the one place where a result is compared with the golden value and its bound
    runner.py     `refattn check`; captured.py makes cases of tensors in a file
    recording.py  what a report keeps of each call
    reports/      the verdicts shown: on a terminal, as JSON, JUnit XML and one HTML page with pictures
    exchange/     files for what Python cannot call: `refattn cases`, `refattn compare`
    plugin.py     `pytest --pyargs refattn.conformance --refattn-target NAME`

Nothing heavy is imported here: the package doubles as a pytest plugin.
"""
