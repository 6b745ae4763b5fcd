"""Compiled models are watched in their graphs, in a process that has no checks of shapes."""

from pathlib import Path

import pytest

from children import run_laws


@pytest.mark.full
def test_the_laws_of_graphs_hold() -> None:
    run_laws(Path(__file__).with_name("graphs_followed.py"))
