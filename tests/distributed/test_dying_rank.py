"""A rank that dies fails the job with its name; what the others have saved stays."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwise import HeadTable

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(__file__).with_name("dying.py")


def test_a_rank_that_dies_fails_the_job_with_its_name(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node=3", str(SCRIPT), str(tmp_path), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s+exitcode\s*: -9", done.stderr), done.stderr
    names = ["table-0.parquet", "table-2.parquet"]
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == names
    for name in names:
        assert HeadTable.load(tmp_path / name).heads
