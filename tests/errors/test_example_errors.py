"""What `load_example` refuses: one line that names the file, the value and the remedy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import InputError
from headwise.example import load_example

GOOD: dict[str, Any] = {"tokens": "a b c", "query": "b", "heads": [{"a": 1}, [0, 0.5, 0.5]]}
ROWS = {"a": [1, 2], "b": [3, 4], "c": [5, 6]}
LONG = "9" * 5000


def refused(said: str, weights: Path | None, values: Path | None = None) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        load_example(weights, values)
    line = str(caught.value)
    assert line.startswith("explain: ")
    assert "\n" not in line
    assert line.endswith((".", "}."))
    assert len(line) < 400


def file(folder: Path, held: object) -> Path:
    path = folder / "f.json"
    path.write_text(held if isinstance(held, str) else json.dumps(held), "utf-8")
    return path


@pytest.mark.parametrize("position", [0, 1])
def test_files_that_cannot_be_read(tmp_path: Path, position: int):
    def given(path: Path) -> list[Path | None]:
        return [path, None] if position == 0 else [None, path]

    missing = tmp_path / "missing.json"
    refused(f"{missing} cannot be read (No such file", *given(missing))
    refused(f"{tmp_path} cannot be read (it is a folder)", *given(tmp_path))
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"tokens": "él"}'.encode("latin-1"))
    refused(f"{latin} is not JSON (byte 12 is 0xe9, which is not UTF-8)", *given(latin))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f.json is not JSON (Expecting value: line 1 column 1"),
        ('{"tokens": ', "not JSON (Expecting value"),
        ("[" * 100_000, "not JSON (maximum recursion depth"),
        (LONG, "not JSON (an integer of 5000 digits"),
        ('{"a": 1, "a": 2}', "'a' is repeated in one object"),
    ],
    ids=["empty", "cut", "deep", "long", "twice"],
)
def test_text_that_is_not_json(tmp_path: Path, text: str, said: str):
    refused(said, file(tmp_path, text))
    refused(said, None, file(tmp_path, text))


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([1, 2], "f.json holds [1, 2], not the keys tokens, query and heads"),
        ({"tokens": "a"}, "['tokens'], not the keys"),
        ({**GOOD, "headz": []}, "'headz'"),
        ({**GOOD, "tokens": 7}, "tokens 7. Give a sentence"),
        ({**GOOD, "tokens": ""}, "tokens []. Give a sentence"),
        ({**GOOD, "tokens": ["a", 7]}, "tokens ['a', 7]"),
        ({**GOOD, "heads": []}, "heads []. Give a list"),
        ({**GOOD, "heads": {"a": 1}}, "heads {'a': 1}. Give a list"),
        ({**GOOD, "query": "d"}, "the query 'd' is not one of the 3 tokens"),
        ({**GOOD, "query": 3}, "the query 3 is not one of the 3 tokens"),
        ({**GOOD, "query": -1}, "the query -1 is not one of the 3 tokens"),
        ({**GOOD, "query": True}, "the query True is not one of"),
        ({**GOOD, "query": ["b"]}, "the query ['b'] is not one of"),
        ({**GOOD, "tokens": "a b b"}, "the query 'b' occurs 2 times among the tokens. Give its"),
    ],
)
def test_weights_of_another_shape(tmp_path: Path, held: object, said: str):
    refused(said, file(tmp_path, held))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ([0.5, 0.5], "head 2: 2 weights for 3 tokens"),
        ([0.25, 0.25, 0.25, 0.25], "head 2: 4 weights for 3 tokens"),
        ([0.5, 0.2, 0.2], "head 2: the weights sum to 0.9. Make them sum to 1 (within 0.001)"),
        ({"a": 0.998}, "head 2: the weights sum to 0.998."),
        ([1.5, -0.5, 0], "head 2: the weight -0.5. Weights are 0 or more"),
        ([float("nan"), 0, 1], "head 2: nan among the numbers"),
        ([float("inf"), 0, 1], "head 2: inf among the numbers"),
        ([True, 0, 0], "head 2: True among the numbers"),
        (["1", 0, 0], "head 2: '1' among the numbers"),
        ([10**400, 0, 0], "an integer of 401 digits"),
        ({"a": None}, "head 2: None among the numbers"),
        ({"d": 1}, "head 2: 'd' is not one of the 3 tokens"),
        ([], "head 2: []. Give a list of numbers"),
        (1, "head 2: 1. Give a list of numbers"),
    ],
)
def test_weights_that_are_no_numbers(tmp_path: Path, head: object, said: str):
    refused(said, file(tmp_path, {**GOOD, "heads": [{"a": 1}, head]}))


def test_a_word_that_occurs_twice_cannot_be_named(tmp_path: Path):
    held = {"tokens": "a b a", "query": "b", "heads": [{"a": 1}]}
    refused("head 1: 'a' occurs 2 times among the tokens", file(tmp_path, held))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (7, "head 1: 7 for 3 tokens"),
        ([], "head 1: 0 rows of values for 3 tokens"),
        ([[1], [2]], "head 1: 2 rows of values for 3 tokens"),
        ([[[1]] * 3], "values for 1 heads, weights for 2"),
        ([ROWS, [[1, 2]]], "head 2: 1 rows of values for 3 tokens"),
        ({**ROWS, "c": [5]}, "rows of [1, 2] values. Make all of them equally wide"),
        ([ROWS, [[1], [2], [3]]], "rows of [1, 2] values"),
        ({"a": [1], "b": [2]}, "head 2 gives 'c' the weight 0.5, but it has no value"),
        ({}, "head 1 gives 'a' the weight 1, but it has no value"),
        ({**ROWS, "d": [1, 2]}, "head 1: 'd' is not one of the 3 tokens"),
        ({**ROWS, "b": [1, None]}, "head 1, 'b': None among the numbers"),
        ({**ROWS, "b": []}, "head 1, 'b': []. Give a list"),
        ({**ROWS, "b": 5}, "head 1, 'b': 5. Give a list"),
        ([[1], [2], {"a": [1]}], "head 1, 'c': {'a': [1]}. Give a list"),
        ([[[1], [2], [3]], 5], "head 2: 5 for 3 tokens"),
        ({**ROWS, "b": [float("nan"), 1]}, "head 1, 'b': nan among the numbers"),
    ],
)
def test_values_that_are_no_numbers(tmp_path: Path, values: object, said: str):
    weights = tmp_path / "weights.json"
    weights.write_text(json.dumps(GOOD), "utf-8")
    refused(said, weights, file(tmp_path, values))


def test_own_words_need_own_values(tmp_path: Path):
    refused("head 1 gives 'a' the weight 1, but it has no value. Add", file(tmp_path, GOOD))
