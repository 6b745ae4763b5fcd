"""The display of tables: a summary and some rows, no wider than the terminal."""

import re
from io import StringIO

import numpy as np
import pandas as pd
import pytest
import torch

import headwise as hw
from headwise._display import counted, first_line
from headwise.cli._print import print_table
from headwise.tables import Curves, Scores
from studies import make_study


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> hw.HeadTable:
    monkeypatch.setenv("COLUMNS", "60")
    layer = hw.MultiHeadAttention(60, 30)
    request = hw.Request(relations={}, classes={}, top=("first",))
    with torch.no_grad(), hw.observe(layer, request) as watch:
        layer(torch.randn(2, 5, 60), causal=True)
    assert repr(watch) == "Watch of MultiHeadAttention: 1 layer captured"
    return watch.table()


def test_a_table_shows_some_rows_as_wide_as_the_terminal(table: hw.HeadTable) -> None:
    title, *lines = repr(table).splitlines()
    assert title == f"HeadTable of 30 heads, model {table.model}"
    assert max(map(len, lines)) <= 60
    names = [line.split()[0] for line in lines if line.startswith("L")]
    blocks = names.count("L0.H0")
    assert blocks > 1
    assert names == [f"L0.H{head}" for head in (*range(6), *range(24, 30))] * blocks
    first = next(line for line in lines if line.startswith("L0.H0"))
    assert first.split()[1] == f"{table.mean('entropy')[0]:.3g}"


def test_scores_and_curves_have_a_short_repr(table: hw.HeadTable) -> None:
    values = np.arange(60.0).reshape(2, 30)
    scores = Scores(table.heads, table.kv_heads, values, method="ablation", loss="lm")
    title, header, first, *_ = repr(scores).splitlines()
    assert title == "Scores of 30 heads by ablation of the loss lm, over 2 texts"
    assert header.split() == ["importance", "ci_low", "ci_high"]
    assert first.split() == ["L0.H0", "15", "0", "30"]
    curves = Curves(np.array([0, 3]), 12, {"mine": np.array([[[0.0, 0.0], [0.5, 1.5]]])}, "lm")
    title, header, *rows = repr(curves).splitlines()
    assert title == "Curves of the loss lm, as some of 12 heads are removed"
    assert rows[1].split()[:3] == ["mine", "3", "1"]


def test_no_object_prints_all_its_arrays() -> None:
    study = make_study()
    for thing in (
        study,
        study.table,
        study.roles,
        hw.costs(hw.MultiHeadAttention(8, 2), torch.randn(1, 3, 8)),
    ):
        assert len(repr(thing)) < 4000
        assert "array(" not in repr(thing)


def test_terminal_control_characters_are_escaped() -> None:
    hostile = "\x1b[31mred\n"
    rows = pd.DataFrame({"name": ["L0.H0"], "role": [hostile], "\x9b2J": [1.0]})
    evidence = {"effect": 0.5, "baseline": 0.1, "lift": 0.4, "p_adj": 0.01, "n": 20, "texts": 30}
    roles = hw.Roles(
        rows.assign(found=True, label=hostile, outcome="found", null="", **evidence), {}
    )
    shown = repr(roles)
    assert "red" in shown
    assert not re.search("[\x1b\x9b]", shown)


def test_only_a_terminal_limits_the_width(
    table: hw.HeadTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for stream, most in ((Terminal(), 60), (StringIO(), 1000)):
        monkeypatch.setattr("sys.stdout", stream)
        print_table(table.frame())
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= most
        assert (len(lines) == 31) == (most == 1000)


def test_nouns_agree_with_their_numbers() -> None:
    assert counted(1, "text") == "1 text"
    assert counted(0, "text") == "0 texts"
    assert counted(1200, "query", "queries") == "1,200 queries"
    assert counted(1, "query", "queries") == "1 query"


def test_an_error_in_another_message_is_its_first_line_or_its_type() -> None:
    said = [first_line(ValueError(text)) for text in ("no shape.\nmore", "", " \n")]
    assert said == ["no shape", "ValueError", "ValueError"]
