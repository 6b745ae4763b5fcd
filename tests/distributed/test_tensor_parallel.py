"""Heads sharded over processes equal one process: outputs, gradients, decoding."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_heads_give_the_same_output(world: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(world), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    messages = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(messages)
