"""Judging what Python cannot call: tensors that come from files, and tensors that go into them.

bits.py       tensors as files hold them, with the bit patterns of dtypes that NumPy lacks
files.py      .npz, .safetensors and raw files, read without trusting them, and written
export.py     `refattn cases export DIR`: inputs of cases, for a program in any language
returned.py   `refattn compare DIR`: what that program put beside them, judged
dump.py       `refattn compare FILE`: inputs and results that were dumped together
replay.py     `refattn check --save-failures DIR`: a failing case as a file and a script that repeats it
words.py      what is wrong with a result, in words
"""
