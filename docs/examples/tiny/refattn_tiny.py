"""refattn's plugin for tiny."""

import numpy as np

from refattn.backend import Plugin


class TinyBackend(Plugin):
    name = "tiny"  # as users type it, and as the entry point is called
    library = "tiny"  # as it is imported
    distributions = ("refattn-tiny",)  # as pip installs it
    features = frozenset()
    float_dtypes = ("float16", "float32", "float64")

    def _array(self, tiny, host, dtype, device):
        return tiny.Array(np.array(host, dtype=dtype))

    def _host(self, tiny, x):
        return x.inner


BACKEND = TinyBackend()
