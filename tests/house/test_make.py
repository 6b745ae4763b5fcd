"""Every make command that the documents, the hooks and the workflows name is in the Makefile."""

import re
from pathlib import Path

import pytest

from house.source import ROOT

TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_make_alone(path: Path) -> None:
    commands = re.findall(r"^\s*(?:- )?run: (.*)$", path.read_text("utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        make, target, python = command.split()
        assert (make, python) == ("make", "PYTHONS=python")
        assert target in TARGETS, command


def test_hooks_run_make_alone() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    entries = re.findall(r"^\s*entry: (.*)$", text, re.MULTILINE)
    assert entries
    assert {entry.removeprefix("make ") for entry in entries} <= TARGETS


def test_documents_name_commands_that_exist() -> None:
    named = {
        (target, path.name)
        for path in DOCUMENTS
        for target in re.findall(r"(?:`|^    )make ([a-z][\w-]*)", path.read_text("utf-8"), re.M)
    }
    assert len(named) > 10
    assert {(target, name) for target, name in named if target not in TARGETS} == set()
