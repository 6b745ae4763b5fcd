"""`headwise importance`, from the weights of a tiny model to its table of scores."""

import json
from pathlib import Path

import pytest
import torch

import headwise as hw
from command import headwise
from headwise.tables import Head

TINY = ("--steps", 3, "--d-model", 8, "--layers", 2, "--heads", 2)
TEXT = "I work , you work\nhe works\nthey work\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab") / "tiny"
    assert headwise("train", "--out", folder, *TINY).code == 0
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT, "utf-8")
    return path


@pytest.mark.parametrize(
    "method",
    [
        "half-gate",
        "gradient",
        "ablation",
        "zero-ablation",
        pytest.param("gates", marks=pytest.mark.full),
    ],
)
def test_the_scores_equal_those_of_the_library(folder: Path, text: Path, method: str) -> None:
    out = text.parent / "scores.parquet"
    done = headwise("importance", folder, "--text", text, "-o", out, "--method", method)
    assert done.code == 0, done.err
    scores = hw.Scores.load(out)
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    expected = hw.importance(model, TEXT.splitlines(), method, tokenizer=tokenizer)
    assert torch.equal(torch.tensor(scores.per_text), torch.tensor(expected.per_text))
    assert (scores.model, scores.loss, scores.method) == (expected.model, "lm", method)
    over = "3 seeds" if method == "gates" else "3 texts"
    assert f"4 heads by {method} of the loss lm, over {over}" in done.err
    assert (
        f"The least important heads are {', '.join(map(str, expected.order()))}: {out}" in done.err
    )


def test_without_an_output_the_scores_are_printed_in_order(folder: Path, text: Path) -> None:
    done = headwise("importance", folder, "--text", text)
    assert done.code == 0, done.err
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    expected = hw.importance(model, TEXT.splitlines(), tokenizer=tokenizer)
    header, *rows = done.out.splitlines()
    assert header.split() == ["importance", "ci_low", "ci_high"]
    assert [row.split()[0] for row in rows] == [str(head) for head in expected.order()]


@pytest.mark.parametrize("ending", [".svg", ".gif"])
def test_the_scores_are_drawn_or_refused_before_any_work(
    folder: Path, text: Path, ending: str
) -> None:
    figure = text.parent / f"scores{ending}"
    done = headwise("importance", folder, "--text", text, "--figure", figure)
    if ending == ".gif":
        assert done.code == 2
        assert done.err.strip().endswith("does not end in .svg, .png, .pdf. Rename it.")
        assert not figure.exists()
        return
    assert done.code == 0, done.err
    drawn = figure.read_text("utf-8")
    assert "importance (half-gate, lm)" in drawn
    assert f"A map of the scores: {figure}" in done.err


def test_pairs_are_read_as_sentences(folder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text('"I work , you work",he works,3.5\nthey work,he works,1\n', "utf-8")
    done = headwise("importance", folder, "--pairs", pairs, "--json", "--rounds", 2)
    rows = json.loads(done.out)
    assert [row["name"] for row in rows] == [
        str(Head("", layer, head)) for layer in range(2) for head in range(2)
    ]
    assert sorted(row["round"] for row in rows) == [0, 0, 1, 1]
    assert all(row["ci_low"] <= row["importance"] <= row["ci_high"] for row in rows)
    text = tmp_path / "same.txt"
    text.write_text("I work , you work\nhe works\nthey work\n", "utf-8")
    same = headwise("importance", folder, "--text", text, "--json", "--rounds", 2)
    assert json.loads(same.out) == rows
    capped = headwise("importance", folder, "--text", text, "--json", "--max-texts", 1)
    assert all(row["ci_low"] is None for row in json.loads(capped.out))
