"""`headwise effects` on a small untrained model."""

import json
from pathlib import Path

import pytest
import torch

import headwise as hw
from command import headwise
from headwise.corpora import Grammar, read_answers
from headwise.errors import InputError
from headwise.head_effects import HeadEffects
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save


def test_effects_are_written_printed_and_drawn(tmp_path: Path) -> None:
    vocabulary = Grammar().vocabulary
    torch.manual_seed(0)
    config = MiniGPTConfig(len(vocabulary), n_layers=2, n_heads=2, d_model=16)
    save(MiniGPT(config), tmp_path / "model", tokenizer=make_tokenizer(vocabulary))
    words = [word for word in vocabulary if word.isalpha()]
    lines = [
        {"text": " ".join(words[n : n + 4]), "right": f" {words[n + 5]}", "other": f" {words[n]}"}
        for n in range(21)
    ]
    del lines[7]["other"]
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    out, figure = tmp_path / "effects.json", tmp_path / "effects.svg"
    line = ("effects", tmp_path / "model", "--examples", file)
    done = headwise(*line, "-o", out, "--figure", figure, "--json")
    assert done.code == 0, done.err
    model, tokenizer = hw.load(tmp_path / "model"), hw.load_tokenizer(tmp_path / "model")
    expected = hw.effects(model, read_answers(file), tokenizer=tokenizer)
    assert HeadEffects.load(out).frame().equals(expected.frame())
    rows = json.loads(done.out)
    assert [row["name"] for row in rows] == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    assert "of 21 examples 10 chose directions, 11 were held out" in done.err
    assert "total effect" in figure.read_text("utf-8")
    done = headwise(*line, "--total", "none", "--max-texts", "5")
    assert done.code == 0, done.err
    assert "5 examples, too few for a test: give 20" in done.err
    assert done.out.split()[:3] == ["direct", "ci_low", "ci_high"]


@pytest.mark.parametrize(
    "line", ["[1]", '{"text": "a"}', '{"text": 1, "right": " b"}', '{"text": "a", "right": " b", '
             '"wrong": " c"}', '{"text": "a", "right": " b", "other": 0}']
)  # fmt: skip
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "a", "right": " b"}\n' + line, "utf-8")
    with pytest.raises(InputError, match=r"lines.jsonl, line 2: .* is not an object with the str"):
        read_answers(path)
