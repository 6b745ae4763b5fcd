"""`headwise heads` on a small untrained model."""

import json
import re
from pathlib import Path

import pytest
import torch

from command import headwise
from headwise.corpora import Grammar
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save
from headwise.roles import load_heads


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    vocabulary = Grammar().vocabulary
    torch.manual_seed(0)
    config = MiniGPTConfig(len(vocabulary), n_layers=2, n_heads=2, d_model=16)
    save(MiniGPT(config), make_tokenizer(vocabulary), folder / "model")
    lines = [
        {"ids": [1, 5 + n % 7, 6, 7, 8 + n % 5, 9], "query": [5, 6], "right": [1, 3],
         "wrong": [[3, 4], [4, 5]], "answer": [10]}
        for n in range(64)
    ]  # fmt: skip
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return folder


def test_heads_are_written_and_printed(place: Path) -> None:
    out = place / "heads.json"
    arguments = ("heads", place / "model", "--examples", place / "examples.jsonl")
    done = headwise(*arguments, "--nulls", "permuted", "-o", out, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == []  # untrained
    assert "64 examples: the set and the strongest baselines chosen on 32" in done.err
    found = load_heads(out)
    assert found.frame()["name"].tolist() == ["L0.H0", "L0.H1", "L1.H0", "L1.H1"]
    assert found.frame()["null.random"].isna().all()
    assert found.answers is not None
    printed = headwise(*arguments, "--nulls", "none", "--max-texts", "20")
    assert printed.code == 0, printed.err
    assert "no head was tested: 10 held-out examples" in printed.err


def test_a_set_that_was_not_found_is_not_exported(place: Path) -> None:
    done = headwise(
        "heads", place / "model", "--examples", place / "examples.jsonl", "--nulls", "none",
        "--vllm-hook", place / "hook.json",
    )  # fmt: skip
    assert done.code == 2
    assert re.search(r"the set was not found \(p = \S+ among 4 tested.*\)\. Give heads=", done.err)
    assert not (place / "hook.json").exists()


def test_examples_are_needed(place: Path) -> None:
    done = headwise("heads", place / "model")
    assert done.code == 2
    assert "Missing option '--examples'. Try headwise heads --help." in done.err
    done = headwise(
        "heads", place / "model", "--examples", place / "examples.jsonl", "-o", place / "heads.csv"
    )
    assert done.code == 2
    assert "does not end in .json" in done.err
