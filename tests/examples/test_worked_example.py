"""The worked example has its published figures, and its page shows them."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from headwise import reference
from headwise.cli._explain import render
from headwise.example import load_example, mixing_matrix, worked_example

PAGE = Path(__file__).parents[2] / "docs" / "worked-example.md"

HEADS = [[0.62, 0.19, 0.085, 0.21], [0.355, 0.41, 0.12, 0.275]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_sentence_and_its_query():
    example = worked_example()
    assert " ".join(example.tokens) == "The animal crossed the road because it was tired"
    assert example.tokens[example.query] == "it"
    np.testing.assert_allclose(example.weights.sum(axis=1), 1)
    assert example.values.shape == (2, 9, 4)
    np.testing.assert_array_equal(example.values[0], example.values[1])


def test_the_identity_keeps_the_heads_apart():
    example = worked_example()
    np.testing.assert_array_equal(example.out, example.concat)
    np.testing.assert_allclose(example.concat, HEADS[0] + HEADS[1], rtol=1e-15)


def test_the_mixing_matrix_gives_sum_and_difference():
    example = worked_example()
    first, second = np.array(HEADS)
    np.testing.assert_allclose(
        example.out_mixed, [*(first + second), *(first - second)], atol=1e-15
    )


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5])
def test_every_mixed_feature_reads_every_head_and_nothing_is_lost(n_heads: int):
    W = mixing_matrix(n_heads, 3)
    reads = np.abs(W).reshape(n_heads, 3, n_heads * 3).sum(axis=1)
    np.testing.assert_array_equal(reads, 1)
    assert np.linalg.matrix_rank(W) == n_heads * 3


def test_the_definition_gives_the_same_heads():
    example = worked_example()
    with np.errstate(divide="ignore"):
        logits = np.log(example.weights)[None, :, None, :]
    q, k = np.zeros((1, 2, 1, 4)), np.zeros((1, 2, 9, 4))
    out = reference.attention(q, k, example.values[None], bias=logits)
    np.testing.assert_allclose(out[0, :, 0], HEADS, rtol=1e-14)


def test_the_code_of_the_page_prints_what_the_page_says():
    page = PAGE.read_text("utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", page, re.DOTALL)
    assert len(pairs) == len(blocks("python")) == len(blocks("text")) > 0
    names: dict[str, object] = {}
    for code, said in pairs:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), names)
        assert printed.getvalue() == said


def test_the_pictures_of_the_page_are_those_of_the_command():
    console = Console(file=io.StringIO(), width=80)
    render(worked_example(), console)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    for picture in blocks("console"):
        assert "\n".join(picture.rstrip().splitlines()) in "\n".join(printed)


def test_the_files_of_the_page_can_be_read(tmp_path: Path):
    weights, values = (tmp_path / name for name in ("weights.json", "values.json"))
    for path, text in zip((weights, values), blocks("json"), strict=True):
        path.write_text(text, "utf-8")
    example = load_example(weights, values)
    np.testing.assert_allclose(example.heads, [[0.95, 0.05], [0.15, 0.65]])


# Files of the user


def write(path: Path, held: object) -> Path:
    path.write_text(json.dumps(held), "utf-8")
    return path


def test_all_forms_of_a_file_give_the_same_result(tmp_path: Path):
    tokens, rows = ["a", "b", "c"], [[1, 2], [3, 4], [5, 6]]
    by_token = dict(zip(tokens, rows, strict=True))
    forms = [
        ("a b c", "b", [{"b": 1}, {"a": 0.25, "c": 0.75}], rows),
        (tokens, 1, [[0, 1, 0], [0.25, 0, 0.75]], by_token),
        (tokens, "b", [[0, 1, 0], {"c": 0.75, "a": 0.25}], [rows, by_token]),
        (tokens, "b", [{"b": 1.0005}, [0.25, 0, 0.75]], [by_token, {"a": [1, 2], "c": [5, 6]}]),
    ]
    for tokens_form, query, heads, values in forms:
        held = {"tokens": tokens_form, "query": query, "heads": heads}
        example = load_example(write(tmp_path / "w", held), write(tmp_path / "v", values))
        assert (example.tokens, example.query) == (("a", "b", "c"), 1)
        np.testing.assert_allclose(example.heads, [[3, 4], [4, 5]], rtol=1e-3)


def test_omitted_inputs_come_from_the_worked_example(tmp_path: Path):
    same = load_example()
    np.testing.assert_array_equal(same.heads, worked_example().heads)
    held = {"tokens": "it was tired", "query": "it", "heads": [{"was": 0.5, "tired": 0.5}]}
    own_weights = load_example(write(tmp_path / "w", held))
    np.testing.assert_allclose(own_weights.heads, [[0.2, 0.35, 0.15, 0.5]])
    named = ("animal", "road", "because", "was", "tired")
    own_values = load_example(values_path=write(tmp_path / "v", {token: [2] for token in named}))
    np.testing.assert_allclose(own_values.heads, [[2], [2]])


def test_a_word_that_occurs_twice_has_one_value_and_two_weights(tmp_path: Path):
    held = {"tokens": "a b a", "query": 2, "heads": [[0.5, 0.25, 0.25]]}
    example = load_example(write(tmp_path / "w", held), write(tmp_path / "v", {"a": [1], "b": [2]}))
    np.testing.assert_allclose(example.heads, [[1.25]])


def test_a_byte_order_mark_is_ignored(tmp_path: Path):
    held = {"tokens": "it was", "query": "it", "heads": [{"was": 1}]}
    (tmp_path / "w").write_text(json.dumps(held), "utf-8-sig")
    assert load_example(tmp_path / "w").tokens == ("it", "was")
