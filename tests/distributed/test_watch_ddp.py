"""Two processes: gradients are unchanged, and tables add up to that of the whole batch."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(__file__).with_name("watch_ddp.py")


def test_two_processes_observe_the_same_table_as_one(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    messages = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(messages)
