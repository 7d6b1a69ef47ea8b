"""Settings of the tests of public implementations."""

import os

# Keras reads it when it is imported.
os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
