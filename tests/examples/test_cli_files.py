"""What all commands do alike: examples in their help, standard input, overwriting, wrong files."""

import io
import shlex
import sys
from pathlib import Path

import pytest
import typer

from command import headwise
from folders import write_llama
from headwise.cli._app import EXAMPLES, app

WORDS = ("<pad>", "<s>", "</s>", "I", "work", "you", "he", "works", "they")
TEXT = "I work you work\nhe works\nthey work he works I work\nyou work they work\nhe works I\n"
COMMANDS = {command.callback.__name__: command for command in app.registered_commands}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    (place / "some.txt").write_text(TEXT, "utf-8")
    write_llama(
        place / "model", WORDS, hidden_size=12, num_attention_heads=6, num_key_value_heads=3
    )
    return place


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_the_command_can_read(name: str) -> None:
    done = headwise(name, "--help")
    assert " ".join(done.out.split()).endswith(f"Example: {EXAMPLES[name]}")
    program, command, *arguments = shlex.split(EXAMPLES[name])
    assert (program, command) == ("headwise", name)
    group = typer.main.get_command(app)
    with group.make_context("headwise", [command], resilient_parsing=True) as context:
        parsed = group.commands[name].make_context(name, arguments, parent=context)
    assert parsed.params.get("out", True)


def test_texts_come_from_standard_input(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for source in (place / "some.txt", "-"):
        stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()), "utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        done = headwise("observe", place / "model", "--text", source, "--json")
        assert done.code == 0, done.err
        outputs.append(done.out)
    assert outputs[0] == outputs[1]


def test_a_figure_is_replaced_with_force(place: Path, tmp_path: Path) -> None:
    (tmp_path / "map.svg").write_text("mine", "utf-8")
    text = ("--text", place / "some.txt", "--figure", tmp_path / "map.svg")
    done = headwise("observe", place / "model", *text, "--force", "--json")
    assert done.code == 0, done.err
    assert (tmp_path / "map.svg").read_text("utf-8") != "mine"
