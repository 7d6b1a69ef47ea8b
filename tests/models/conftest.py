"""Settings of the tests that run whole models."""

import os

# Everything these tests need is installed with their packages; nothing may be fetched.
os.environ["HF_HUB_OFFLINE"] = "1"
