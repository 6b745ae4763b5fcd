"""How tests run: with checks of types and shapes, and in CI without most skips."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from headwise.files import is_unicode
from headwise.kernels import attend

TESTS = """
import pytest

@pytest.mark.skip(reason="no browser")
def test_marked(): ...

def test_within():
    pytest.skip("no package")

@pytest.mark.skipif(True, reason="needs a GPU with 80 GB")
def test_excused(): ...

@pytest.mark.xfail(reason="known")
def test_expected():
    raise AssertionError

def test_runs(): ...
"""
FILE = "import pytest\npytest.importorskip('no_such_package')\n"


def test_only_a_missing_gpu_excuses_a_skip(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    env = os.environ | {"PYTEST_PLUGINS": "no_skips", "PYTHONPATH": str(Path(__file__).parent)}
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=env, capture_output=True,
        text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in done.stdout
    assert "no browser, but nothing may be skipped here" in done.stdout
    assert "no_such_package" in done.stdout  # a file that skips itself
    assert done.returncode == 1


@pytest.mark.full
def test_types_are_checked_in_the_long_tier() -> None:
    with pytest.raises(BeartypeCallHintViolation, match="text"):
        is_unicode(8)  # type: ignore[arg-type]


def test_shapes_are_checked() -> None:
    q = torch.zeros(2, 2, 4, 8)
    for k in (q[0], q[..., 1:]):  # another number of axes, and an axis of another size
        with pytest.raises(BeartypeCallHintViolation, match=r"headwise\.kernels"):
            attend(q, k, q)
