"""What a command advises, a command line can do: each message, in the words of each command."""

import ast
import re
from collections.abc import Iterator

import pytest
from typer.main import get_command

from headwise.cli._app import app
from headwise.cli._arguments import in_words_of
from house.source import Source, sources

COMMANDS = get_command(app).commands
OWN = {
    name: {option for param in command.params for option in param.opts}
    for name, command in COMMANDS.items()
}
OPTION = re.compile(r"(?<!\w)--[a-z][a-z-]*")
PYTHON = re.compile(r"\b\w+=|\b\w+\(|\bheadwise\.[a-z_]+\b(?<!\.json)")


def _text(node: ast.AST) -> str:
    """A string as it stands in the code, with X for each value in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "X"


def _raised(source: Source) -> Iterator[tuple[str, str]]:
    """The class and the message of every error that a file raises."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield ast.unparse(node.exc.func), _text(node.exc.args[0])


LIBRARY = {raised for source in sources() if source.part != "cli" for raised in _raised(source)}
COMMAND_LINE = {text for source in sources() for _, text in _raised(source) if "--" in text}


def _advice(text: str) -> list[str]:
    return re.split(r"(?<=[.?]) (?=[A-Z])", text)[1:]


@pytest.mark.parametrize("name", COMMANDS)
def test_advice_names_an_option_of_the_command_or_is_for_python(name: str) -> None:
    command = COMMANDS[name]
    for kind, text in LIBRARY:  # an InputError may quote a file, so it stays as it is
        shown = text if kind == "InputError" else command.in_its_words(text)
        assert {*OPTION.findall(shown)} - {*OPTION.findall(text)} <= OWN[name], shown
        for sentence in _advice(shown):
            assert not PYTHON.search(sentence) or sentence.startswith("In Python: "), shown


def test_a_command_advises_its_own_options_or_names_the_command() -> None:
    texts = [text for text in COMMAND_LINE if text.partition(":")[0] in OWN]
    assert len(texts) > 10
    for text in texts:
        named = [text.partition(":")[0], *re.findall(r"headwise (\w+)", text)]
        assert {*OPTION.findall(text)} <= {option for name in named for option in OWN[name]}, text


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "observe: L0 pools its keys. Leave the layer out with layers=.",
            "observe: L0 pools its keys. In Python: leave the layer out with layers=.",
        ),
        (
            "importance: method='gates' fits no loss. Give method='half-gate', or another loss=.",
            "do: --method gates fits no loss. Give --method half-gate, or another --loss.",
        ),
        (
            "load: sinks=2 in headwise.json. Call prepare() first. Save it anew.",
            "load: sinks=2 in headwise.json. In Python: call prepare() first. Save it anew.",
        ),
        ("load: no model. Name a headwise.json.", "load: no model. Name a headwise.json."),
    ],
)
def test_advice_for_python_alone_is_marked(message: str, expected: str) -> None:
    assert in_words_of("do", {"method": "--method", "loss": "--loss"}, message) == expected
