"""Loaded by each Python process that a test starts while `make tiers` measures: see recorder.py."""

import os

if "PYTEST_CURRENT_TEST" in os.environ:
    from tiers.recorder import watch_process

    watch_process()
