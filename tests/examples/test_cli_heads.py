"""`headwise heads` on a small untrained model."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headwise as hw
from command import headwise
from headwise.corpora import Grammar, read_examples
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save
from headwise.roles import find_heads, load_heads, task_examples


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    vocabulary = Grammar().vocabulary
    torch.manual_seed(0)
    config = MiniGPTConfig(len(vocabulary), n_layers=2, n_heads=2, d_model=16)
    save(MiniGPT(config), folder / "model", tokenizer=make_tokenizer(vocabulary))
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


def test_a_task_generates_its_examples(place: Path) -> None:
    """They are saved as --examples reads them, and the heads are those of the library."""
    saved, out = place / "needles.jsonl", place / "needle.json"
    arguments = ("heads", place / "model", "--nulls", "none", "--max-texts", 60, "--json")
    done = headwise(*arguments, "--task", "needle", "--save-examples", saved, "-o", out)
    assert done.code == 0, done.err
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "model")
    examples = task_examples("needle", tokenizer=tokenizer, n=60, n_tokens=40)
    assert [vars(one) | {"source": ""} for one in read_examples(saved)] == [
        vars(one) for one in map(_lists, examples)
    ]
    found = load_heads(out)
    expected = find_heads(
        model, examples, tokenizer=tokenizer, evidence=hw.Evidence(nulls=()), max_tokens=40
    )
    assert found.texts == expected.texts
    assert found.frame().equals(expected.frame())
    assert found.answers == expected.answers
    assert not found.set_row["found"]  # untrained
    again = headwise(*arguments, "--examples", saved)
    assert (again.code, again.out) == (0, done.out)


def _lists(example: hw.Example) -> hw.Example:
    return replace(example, query=[example.query])
