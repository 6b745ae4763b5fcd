"""The worked example has its published figures, and its page shows them."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from command import headwise
from headwise import reference
from headwise.example import worked_example

PAGE = Path(__file__).parents[2] / "docs" / "worked-example.md"

HEADS = [[0.62, 0.19, 0.085, 0.21], [0.355, 0.41, 0.12, 0.275]]
MIXED = [0.975, 0.6, 0.205, 0.485, 0.265, -0.22, -0.035, -0.065]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_example_has_its_published_figures():
    example = worked_example()
    assert " ".join(example.tokens) == "The animal crossed the road because it was tired"
    assert example.tokens[example.query] == "it"
    np.testing.assert_allclose(example.weights.sum(axis=1), 1)
    np.testing.assert_array_equal(example.values[0], example.values[1])
    np.testing.assert_allclose(example.heads, HEADS, rtol=1e-15)
    np.testing.assert_array_equal(example.out, example.concat)
    np.testing.assert_allclose(example.out_mixed, MIXED, atol=1e-15)
    # Every mixed feature reads every head, and nothing is lost.
    np.testing.assert_array_equal(np.abs(example.W_mix).reshape(2, 4, 8).sum(axis=1), 1)
    assert np.linalg.matrix_rank(example.W_mix) == 8


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


def test_the_command_prints_every_step_and_what_the_page_shows():
    text = headwise("explain").out
    assert [line[0] for line in text.splitlines() if line[:1].strip()] == [*"W12345"]
    assert text.count("[.62 .19 .085 .21 .355 .41 .12 .275]") == 2
    assert text.endswith("[.975 .6 .205 .485 .265 -.22 -.035 -.065]\n")
    assert all(picture in text for picture in blocks("console"))


def test_json_has_every_figure():
    facts = json.loads(headwise("explain", "--json").out)
    assert (facts["query"], len(facts["tokens"])) == ("it", 9)
    assert facts["heads"] == HEADS
    assert facts["concat"] == facts["out"] == [*HEADS[0], *HEADS[1]]
    assert facts["out_mixed"] == MIXED
    assert np.shape(facts["W_mix"]) == (8, 8)
