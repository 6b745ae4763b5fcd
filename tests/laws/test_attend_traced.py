"""`attend` compiled, exported and transformed, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

LAWS = Path(__file__).with_name("attend_traced.py")


@pytest.mark.full
def test_attend_can_be_compiled_exported_and_transformed() -> None:
    plain = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, str(LAWS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
