"""Two processes: gradients are unchanged, and tables add up to that of the whole batch."""

from pathlib import Path

import pytest

from ranks import run_ranks

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(__file__).with_name("watch_ddp.py")


def test_two_processes_observe_the_same_table_as_one(tmp_path: Path) -> None:
    run_ranks(SCRIPT, tmp_path / "store")
