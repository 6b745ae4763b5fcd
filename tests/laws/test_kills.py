"""Work killed at random moments loses nothing: a sample of `make soak`."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from soak.kills import Killer
from soak.verbs import VERBS, Verb

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")
TESTS = Path(__file__).parents[1]


@pytest.mark.full
def test_a_kill_of_each_verb_loses_nothing(tmp_path: Path) -> None:
    results = tmp_path / "kills.json"
    command = [sys.executable, str(TESTS / "soak" / "kills.py"), str(len(VERBS)), str(results)]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'models'}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    tallies = json.loads(results.read_text())
    assert not [tally["problems"] for tally in tallies.values() if tally["problems"]]
    assert {name: tally["kills"] for name, tally in tallies.items()} == dict.fromkeys(VERBS, 1)
    assert sum(
        tally["old"] + tally["new"] + tally["unreadable"] for tally in tallies.values()
    ) == len(VERBS)


def _write_slowly(folder: Path) -> None:
    with (folder / "result").open("w") as file:
        for part in ("new ", "result"):
            file.write(part)
            file.flush()
            time.sleep(0.2)


def test_a_write_that_is_not_atomic_is_noticed(tmp_path: Path) -> None:
    verb = Verb(
        _write_slowly,
        lambda folder: (folder / "result").read_text(),
        lambda folder: (folder / "result").write_text("old result"),
    )
    killer = Killer(verb, tmp_path, random.Random(0))
    for _ in range(4):
        killer.kill(in_write=False)
    assert any("neither the old result nor the new" in text for text in killer.tally.problems)
