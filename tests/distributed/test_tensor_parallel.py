"""Heads sharded over processes equal one process: outputs, gradients, decoding."""

from pathlib import Path

import pytest

from ranks import run_ranks

pytestmark = pytest.mark.full  # each process imports everything anew
SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_heads_give_the_same_output(world: int, tmp_path: Path) -> None:
    run_ranks(SCRIPT, tmp_path / "store", world)
