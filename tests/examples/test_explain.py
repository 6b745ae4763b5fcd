"""`headwise explain` shows each step and escapes control characters of a user's file."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from command import headwise
from headwise.cli._explain import figures, render
from headwise.example import WorkedExample, worked_example


def shown(example: WorkedExample, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    render(example, console)
    return console.file.getvalue()


def an_example(tokens: tuple[str, ...], n_heads: int = 2, head_dim: int = 3) -> WorkedExample:
    weights = np.full((n_heads, len(tokens)), 1 / len(tokens))
    values = np.arange(n_heads * len(tokens) * head_dim, dtype=float)
    return WorkedExample(tokens, 0, weights, values.reshape(n_heads, len(tokens), head_dim))


def test_every_step_is_shown_with_its_shape():
    lines = shown(worked_example()).splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == [
        "What 'it' attends to   heads 2 x width 4 = d_model 8",
        "1. Weights: how much, in each head   weights [2, 9]",
        "2. Heads: values times weights, added up   heads [2, 4]",
        "3. Concatenation: side by side   concat [8]",
        "4. W_O = identity: the heads stay apart   W_O [8, 8]",
        "5. W_O that mixes: each feature reads every head   W_O [8, 8]",
    ]
    text = "\n".join(lines)
    assert "=       [.62 .19 .085 .21]" in text
    assert "=       [.355 .41 .12 .275]" in text
    assert text.count("[.62 .19 .085 .21 .355 .41 .12 .275]") == 2
    assert "[.975 .6 .205 .485 .265 -.22 -.035 -.065]" in text


@pytest.mark.parametrize(("width", "full_bar"), [(200, 20), (80, 20), (46, 10)])
def test_bars_are_as_long_as_the_weights(width: int, full_bar: int):
    example = worked_example()
    lines = shown(example, width).splitlines()
    start = lines.index("  Head 1") + 1
    for line, token, weight in zip(lines[start:], example.tokens, example.weights[0], strict=False):
        assert line.split()[0] == token
        assert line.count("█") == int(full_bar * weight + 1e-9)


def test_json_equals_what_python_computes():
    held = json.loads(headwise("explain", "--json").out)
    assert held == figures(worked_example())
    assert held["heads"] == [[0.62, 0.19, 0.085, 0.21], [0.355, 0.41, 0.12, 0.275]]
    assert held["concat"] == held["out"] == [*held["heads"][0], *held["heads"][1]]
    assert held["out_mixed"] == [0.975, 0.6, 0.205, 0.485, 0.265, -0.22, -0.035, -0.065]
    assert (held["query"], len(held["tokens"])) == ("it", 9)
    assert np.shape(held["W_mix"]) == (8, 8)


def test_files_of_the_user_are_shown(tmp_path: Path):
    weights, values = tmp_path / "w.json", tmp_path / "v.json"
    weights.write_text('{"tokens": "yo trabajo", "query": "yo", "heads": [{"trabajo": 1}]}')
    values.write_text('{"trabajo": [-0.5, 12]}')
    text = headwise("explain", "--weights", weights, "--values", values).out
    assert "What 'yo' attends to   heads 1 x width 2 = d_model 2" in text
    assert "[-.5 12]" in text
    assert "nothing to mix" in text


@pytest.mark.parametrize(
    ("token", "printed"),
    [
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        ("[/]", "[/]"),
        (":smile:", ":smile:"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J", "\\x9b2J"),
        ("a\r\nb\tc\x07", "a\\r\\nb\\tc\\x07"),
        ("\u202egnal", "\\u202egnal"),
        ("\ud800", "\\ud800"),
        ("日本", "日本"),
    ],
)
def test_text_of_the_user_is_escaped(token: str, printed: str):
    text = shown(an_example((token, "b")))
    assert text.count(printed) == 6  # in the title, the sentence, two cards and two sums
    assert all(c.isprintable() for c in text.replace("\n", ""))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_unicode_gets_what_it_can_show(encoding: str):
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding))
    render(an_example(("日本", "b", "c", "d")), console)
    console.file.seek(0)
    text = console.file.read()
    assert "#####  " in text
    assert "\\u65e5\\u672c" in text


@pytest.mark.parametrize("n_heads", [1, 3, 7])
def test_any_number_of_heads_is_drawn(n_heads: int):
    text = shown(an_example(("a", "b"), n_heads))
    assert text.count(f"Head {n_heads}\n") == 2
    assert ("W_O [21, 21]" in text) == (n_heads == 7)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_no_line_is_wider_than_the_terminal(width: int):
    text = shown(worked_example(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert width < 40 or "…" not in text
