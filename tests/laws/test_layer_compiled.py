"""The layer compiled and exported, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

LAWS = Path(__file__).with_name("layer_compiled.py")


@pytest.mark.full
def test_the_layer_can_be_compiled_and_exported() -> None:
    plain = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, str(LAWS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
