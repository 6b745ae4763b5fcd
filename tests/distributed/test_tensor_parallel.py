"""Processes that share heads equal one: outputs, gradients, decoding, and what is watched."""

from pathlib import Path

import pytest

from ranks import run_ranks

pytestmark = pytest.mark.full  # each process imports everything anew


@pytest.mark.parametrize(
    ("name", "world"),
    [("tensor_parallel", 1), ("tensor_parallel", 2), ("watch_ddp", 2), ("compiled", 1)],
)
def test_processes_agree_with_one(name: str, world: int, tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name(f"{name}.py"), tmp_path / "store", world)
