"""Spans that do not fit the request, the texts or the tokenizer are refused."""

from typing import Any

import pytest
import torch
from torch import nn

from headwise.corpora import SPECIALS
from headwise.errors import ArgumentError, HeadError, HeadwiseError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.layer import MultiHeadAttention
from headwise.watch import Request, Watch, observe

CONFIG = MiniGPTConfig(vocab_size=13, context=12, d_model=12, n_heads=4, n_kv_heads=2, n_layers=2)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
TOKENIZER = make_tokenizer([*SPECIALS, "a", "b", "c", "d"])
TEXTS = ["a b c d a", "b c d a b"]
GOOD = [(0, 1), (0, 1)]


def _model() -> nn.Module:
    torch.manual_seed(1)
    return MiniGPT(CONFIG).eval()


def _run(given: dict[str, Any], *arguments: Any, **more: Any) -> Watch:
    model = _model()
    with torch.no_grad(), observe(model, Request(spans=("doc",), **more)) as watch:
        watch.spans(*arguments, **given)
        model(IDS)
    return watch


REFUSED: list[tuple[dict[str, Any], tuple[Any, ...], type[HeadwiseError], str]] = [
    ({}, (), ArgumentError, "no stretches"),
    ({"passage": GOOD}, (), ArgumentError, "passage given"),
    ({"doc": 3}, (), ArgumentError, "doc=3"),
    ({"doc": []}, (), ArgumentError, r"doc=\[\]"),
    ({"doc": "ab"}, (), ArgumentError, "doc='ab'"),
    ({"doc": [(2, 2), (0, 1)]}, (), ArgumentError, r"\(2, 2\)"),
    ({"doc": [(-1, 2), (0, 1)]}, (), ArgumentError, r"\(-1, 2\)"),
    ({"doc": [(0.5, 2), (0, 1)]}, (), ArgumentError, r"\(0.5, 2\)"),
    ({"doc": GOOD, "queries": "first"}, (), ArgumentError, "'queries' has 'first'"),
    ({"doc": GOOD, "queries": [(0, 1)]}, (), ArgumentError, "for 2 texts"),
    ({"doc": GOOD, "queries": [(0, 1), (3, 1)]}, (), ArgumentError, r"\(3, 1\)"),
    ({"doc": [(0, 1), (4, 6)]}, (), ArgumentError, r"'doc' has \(4, 6\) in a text of 5 tokens"),
    ({"doc": [(0, 1)]}, (), ArgumentError, "stretches of 1 texts where the model reads 2"),
    ({"doc": GOOD}, (TEXTS, TOKENIZER), ArgumentError, "text 0 has 6 tokens by the tokenizer"),
    ({"doc": GOOD}, (TEXTS,), ArgumentError, "tokenizer=NoneType"),
    ({"doc": GOOD}, (TEXTS[:1], TOKENIZER), ArgumentError, "2 texts where 1 texts"),
    ({"doc": [(1, 2), (0, 1)]}, (TEXTS, TOKENIZER), ArgumentError,
     r"has \(1, 2\), ' ', in a text of 9 characters"),
    ({"doc": GOOD}, (TEXTS, object()), UnsupportedError, "slow tokenizer"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "arguments", "error", "message"), REFUSED)
def test_spans_that_do_not_fit_are_refused(
    given: dict[str, Any], arguments: tuple[Any, ...], error: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(error, match=message):
        _run(given, *arguments)


def test_new_texts_need_new_spans() -> None:
    model = _model()
    with torch.no_grad(), observe(model, Request(spans=("doc",))) as watch:
        with pytest.raises(ArgumentError, match="no spans were given for the texts of forward pas"):
            model(IDS)
        watch.spans(doc=GOOD)
        model(IDS)
        with pytest.raises(ArgumentError, match=r"no spans were given .* forward pass 3"):
            model(IDS)


def test_characters_of_a_model_without_ids_are_refused() -> None:
    layer = MultiHeadAttention(12, 4).eval()
    with torch.no_grad(), observe(layer, Request(spans=("doc",))) as watch:
        watch.spans(["a b"], TOKENIZER, doc=[(0, 1)])
        with pytest.raises(UnsupportedError, match="need whole texts as input_ids"):
            layer(torch.randn(1, 2, 12))


def test_single_queries_that_were_not_kept_are_refused() -> None:
    with pytest.raises(ArgumentError, match="per_query=False"):
        _run({"doc": GOOD}).per_query("doc", (0, 0))
    kept = _run({"doc": GOOD}, per_query=True)
    heads: Any
    for name, heads, error, message in (
        ("passage", (0, 0), ArgumentError, "'passage' with spans"),
        ("doc", (7, 0), HeadError, r"\(7, 0\)"),
        ("doc", [(0, 0), (0, 1)], ArgumentError, "are several heads"),
    ):
        with pytest.raises(error, match=message):
            kept.per_query(name, heads)
