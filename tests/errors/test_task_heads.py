"""Examples and files of task heads that cannot be used are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headwise as hw
from headwise.corpora import Example, read_examples
from headwise.errors import ArgumentError, HeadError, InputError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.roles import TaskHeads
from planted import TOKENIZER

CONFIG = MiniGPTConfig(vocab_size=60, context=24, d_model=12, n_heads=4, n_kv_heads=2, n_layers=1)
GOOD: dict[str, Any] = {
    "text": [3, 4, 5, 6, 7, 8],
    "query": (5, 6),
    "right": (0, 2),
    "wrong": (2, 4),
}


def _model() -> MiniGPT:
    torch.manual_seed(0)
    return MiniGPT(CONFIG).eval()


def _found() -> TaskHeads:
    examples = [Example(**GOOD | {"text": [n % 7, 4, 5, 6, 7, 8]}) for n in range(8)]
    return hw.find_heads(_model(), examples, evidence=hw.Evidence(nulls=()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": []}, r"has the text \[\]"),
        ({"text": [1.5, 2, 3, 4, 5, 6]}, "has the text"),
        ({"text": "a b"}, "strings without a tokenizer"),
        ({"answer": "a"}, "the answer 'a', and no tokenizer"),
        ({"query": (5, 7)}, r"query has \(5, 7\) in a text of 6 tokens"),
        ({"right": []}, r"right=\[\]"),
        ({"right": (2, 1)}, r"right has \(2, 1\)"),
        ({"wrong": 3}, "wrong has 3"),
        ({"wrong": (1, 3)}, r"\(0, 2\) and \(1, 3\) of right and wrong share a token"),
        ({"text": [1] * 30}, "30 tokens and an answer of 0, and the model reads 24"),
    ],
)
def test_a_malformed_example_is_refused(change: dict[str, Any], message: str) -> None:
    examples = [Example(**GOOD), Example(**GOOD | change)]
    with pytest.raises(ArgumentError, match=message):
        hw.find_heads(_model(), examples)


def test_too_few_examples_and_other_models_are_refused() -> None:
    with pytest.raises(ArgumentError, match="1 examples"):
        hw.find_heads(_model(), Example(**GOOD))
    with pytest.raises(ArgumentError, match="examples is 'a'"):
        hw.find_heads(_model(), "a")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"Evidence\(splits=3\)"):
        hw.find_heads(_model(), [Example(**GOOD)] * 2, evidence=hw.Evidence(splits=3))
    with pytest.raises(ArgumentError, match="most=0"):
        hw.find_heads(_model(), [Example(**GOOD)] * 2, most=0)
    with pytest.raises(ArgumentError, match="the model reads 5"):
        hw.find_heads(_model(), [Example(**GOOD)] * 2, max_tokens=5)
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    with pytest.raises(UnsupportedError, match="T5Model reads two texts"):
        hw.find_heads(transformers.T5Model(config), [Example(**GOOD)] * 2)


def test_answers_of_a_model_without_logits_are_refused() -> None:
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        vocab_size=40,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    with pytest.raises(UnsupportedError, match="BertModel gives no logits"):
        hw.find_heads(model, [Example(**GOOD, answer=[3])] * 4, evidence=hw.Evidence(nulls=()))


def test_characters_without_a_token_are_refused() -> None:
    example = Example("w1 w2 w3", query=(6, 8), right=(2, 3), wrong=(0, 2))
    with pytest.raises(ArgumentError, match=r"right has \(2, 3\), ' '"):
        hw.find_heads(_model(), [example] * 2, tokenizer=TOKENIZER)


def test_exports_that_no_tool_reads_are_refused(tmp_path: Path) -> None:
    found = _found()
    path, heads = tmp_path / "a.json", ["L0.H0"]
    with pytest.raises(ArgumentError, match="no format 'onnx'"):
        found.export(path, "onnx", model_name="a/b", heads=heads)
    with pytest.raises(ArgumentError, match="model_name=None"):
        found.export(path, "vllm-hook", heads=heads)
    with pytest.raises(ArgumentError, match="the set was not tested"):
        found.export(path, "vllm-hook", model_name="a/b")
    with pytest.raises(ArgumentError, match=r"ends in '\.json'"):
        found.export(path, "qrhead", model_name="a/b", heads=heads)
    with pytest.raises(ArgumentError, match=r"ends in '\.txt'"):
        found.save(tmp_path / "heads.txt")
    with pytest.raises(HeadError, match=r"no head L7\.H0"):
        found.export(path, "vllm-hook", model_name="a/b", heads="L7.H0")
    assert not list(tmp_path.iterdir())


def test_a_head_of_a_stack_is_not_exported(tmp_path: Path) -> None:
    found = _found()
    rows = found.frame().assign(name=[f"decoder.{name}" for name in found.frame()["name"]])
    stacked = TaskHeads(rows, found.heads, found.set_row)
    with pytest.raises(HeadError, match=r"decoder\.L0\.H0 belongs to a stack"):
        stacked.export(tmp_path / "a.json", "vllm-hook", model_name="a/b", heads="decoder.L0.H0")


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda c: c.pop("set"),
    lambda c: c.update(format="headwise-heads/2"),
    lambda c: c["heads"][0].update(name="L9"),
    lambda c: c["heads"][0].update(layer=3),
    lambda c: c["heads"].append(c["heads"][0]),
    lambda c: c["heads"][0].update(found="yes"),
    lambda c: c["heads"][0].update(effect="much"),
    lambda c: c["heads"][0].update(effect=True),
    lambda c: c["set"].update(heads=["L5.H0"]),
    lambda c: c["set"].update(heads="L0.H0"),
    lambda c: c["texts"].update(examples=1.5),
    lambda c: c["model"].update(name=None),
    lambda c: c.update(heads=[3]),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_changed_file_is_refused(number: int, tmp_path: Path) -> None:
    path = _found().save(tmp_path / "heads.json")
    content = json.loads(path.read_text())
    CHANGES[number](content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"load_heads: .* holds no heads"):
        hw.load_heads(path)


LINE: dict[str, Any] = {"text": "ab cd", "query": [3, 5], "right": [[0, 1]], "wrong": [[1, 2]]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON \(Expecting .* at character 2\)\. Give one"),
        ("[]", "line 2: '\\[\\]' is not an object"),
        (json.dumps({k: v for k, v in LINE.items() if k != "query"}), "is not an object with text"),
        (json.dumps(LINE | {"ids": [1]}), "is not an object with text or ids"),
        (json.dumps(LINE | {"doc": 1}), "'doc' is not a key"),
        (json.dumps(LINE | {"text": 3}), "its text is 3"),
        (json.dumps(LINE | {"answer": 3.5}), "its answer is 3.5"),
        (json.dumps(LINE | {"query": [3.5, 5]}), r"query is \[3.5, 5\]"),
        (json.dumps(LINE | {"right": [3]}), r"right is \[3\]"),
    ],
)
def test_a_malformed_line_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n", "utf-8")
    with pytest.raises(InputError, match=message):
        read_examples(path)


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no example"):
        read_examples(tmp_path / "empty.jsonl")
    (tmp_path / "one.jsonl").write_text(json.dumps(LINE | {"answer": "x"}))
    assert read_examples(tmp_path / "one.jsonl") == [
        Example("ab cd", [(3, 5)], [(0, 1)], [(1, 2)], "x")
    ]
