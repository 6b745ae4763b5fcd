"""Bad input to a command: one clear line, exit code 2, no traceback, nothing written."""

from pathlib import Path

import pytest

from command import headwise

GOOD = "I work , you work\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, which the command must leave as it was."""
    (tmp_path / "good.txt").write_text(GOOD, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(place: Path, *arguments: object) -> str:
    """The one line of a command that fails and leaves everything as it was."""
    before = sorted(place.rglob("*"))
    done = headwise(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert sorted(place.rglob("*")) == before
    return done.err


def test_training_does_not_overwrite_a_model_of_other_origin(place: Path) -> None:
    (place / "theirs").mkdir()
    (place / "theirs" / "model.safetensors").write_bytes(b"precious")
    for command in (("train", "--out"), ("report", "--lab-folder")):
        line = refused(place, *command, "theirs")
        assert "theirs holds model.safetensors, which would be overwritten" in line
    assert (place / "theirs" / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize("facts", ["{", "{}", '{"settings": {"wings": 2}}'])
def test_facts_that_cannot_be_read(place: Path, facts: str) -> None:
    (place / "lab").mkdir()
    (place / "lab" / "training.json").write_text(facts, "utf-8")
    assert "lab/training.json" in refused(place, "report", "--lab-folder", "lab")


def test_a_terminal_without_unicode(place: Path) -> None:
    done = headwise("report", "./Größe", encoding="ascii")
    assert done.err == "report: ./Gr\\xf6\\xdfe needs texts to read. Add --text FILE.\n"


def test_control_characters_in_a_name_are_escaped(place: Path) -> None:
    line = refused(place, "report", "./\x1b[31m[bold]\nred\u202e", "--text", "good.txt")
    assert "\x1b" not in line
    assert "\u202e" not in line
    assert "[bold]" in line
