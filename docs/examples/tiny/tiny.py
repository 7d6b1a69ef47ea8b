"""An array library: NumPy's arrays behind a class of their own. Its functions are those of the module."""

import sys

import numpy as np

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
BITWISE, UNARY = ("and", "or", "xor", "lshift", "rshift"), ("neg", "pos", "abs", "invert")
COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")


class Array:
    def __init__(self, inner):
        self.inner = inner

    shape, ndim, size, dtype, device = (
        property(lambda x, n=n: getattr(x.inner, n)) for n in ("shape", "ndim", "size", "dtype", "device")
    )
    mT = property(lambda x: Array(x.inner.mT))
    __hash__ = None

    def __array_namespace__(self, *, api_version=None):
        return sys.modules[__name__]

    def __getitem__(self, key):
        return wrapped(self.inner[unwrapped(key)])

    def __repr__(self):
        return f"Array({self.inner!r})"


def wrapped(x):
    """What NumPy returned, as this library has it."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(wrapped, x))
    return Array(np.asarray(x)) if isinstance(x, (np.ndarray, np.generic)) else x


def unwrapped(x):
    """What NumPy takes."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(unwrapped, x))
    return x.inner if isinstance(x, Array) else x


def method(name):
    return lambda *args: wrapped(getattr(args[0].inner, name)(*map(unwrapped, args[1:])))


def plain(name):
    return lambda x: getattr(x.inner, name)()


for one in (*ARITHMETIC, *BITWISE, *UNARY, *COMPARISONS, *(f"r{name}" for name in (*ARITHMETIC, *BITWISE))):
    setattr(Array, f"__{one}__", method(f"__{one}__"))
for one in ("bool", "int", "float", "complex", "index"):
    setattr(Array, f"__{one}__", plain(f"__{one}__"))


def __getattr__(name):
    found = getattr(np, name)
    if not callable(found) or isinstance(found, type):  # pi and float32
        return found
    return lambda *args, **options: wrapped(
        found(*map(unwrapped, args), **{key: unwrapped(value) for key, value in options.items()})
    )
