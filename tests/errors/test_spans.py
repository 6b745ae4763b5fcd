"""Spans that do not fit the request, the texts or the tokenizer are refused."""

from collections.abc import Callable
from functools import partial
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


def _single(name: str, heads: Any, per_query: bool = True) -> Any:
    return _run({"doc": GOOD}, per_query=per_query).per_query(name, heads)


def _of_vectors() -> None:
    layer = MultiHeadAttention(12, 4).eval()
    with torch.no_grad(), observe(layer, Request(spans=("doc",))) as watch:
        watch.spans(["a b"], TOKENIZER, doc=[(0, 1)])
        layer(torch.randn(1, 2, 12))


GIVEN: list[tuple[dict[str, Any], tuple[Any, ...], str]] = [
    ({}, (), "no stretches"),
    ({"passage": GOOD}, (), "passage given"),
    ({"doc": 3}, (), "doc=3"),
    ({"doc": []}, (), r"doc=\[\]"),
    ({"doc": "ab"}, (), "doc='ab'"),
    ({"doc": [(2, 2), (0, 1)]}, (), r"\(2, 2\)"),
    ({"doc": [(-1, 2), (0, 1)]}, (), r"\(-1, 2\)"),
    ({"doc": [(0.5, 2), (0, 1)]}, (), r"\(0.5, 2\)"),
    ({"doc": GOOD, "queries": "first"}, (), "'queries' has 'first'"),
    ({"doc": GOOD, "queries": [(0, 1)]}, (), "for 2 texts"),
    ({"doc": GOOD, "queries": [(0, 1), (3, 1)]}, (), r"\(3, 1\)"),
    ({"doc": [(0, 1), (4, 6)]}, (), r"'doc' has \(4, 6\) in a text of 5 tokens"),
    ({"doc": [(0, 1)]}, (), "stretches of 1 text where the model reads 2"),
    ({"doc": GOOD}, (TEXTS, TOKENIZER), "text 0 has 6 tokens by the tokenizer"),
    ({"doc": GOOD}, (TEXTS,), "tokenizer=None"),
    ({"doc": GOOD}, (TEXTS[:1], TOKENIZER), "2 texts beside 1 text of texts="),
    ({"doc": [(1, 2), (0, 1)]}, (TEXTS, TOKENIZER),
     r"has \(1, 2\), ' ', in a text of 9 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(_run, given, *arguments), ArgumentError, message)
      for given, arguments, message in GIVEN),
    (lambda: _run({"doc": GOOD}, TEXTS, object()), UnsupportedError, "slow tokenizer"),
    (_of_vectors, UnsupportedError, "need whole texts as input_ids"),
    (lambda: _single("doc", (0, 0), per_query=False), ArgumentError, "per_query=False"),
    (lambda: _single("passage", (0, 0)), ArgumentError, "'passage' with spans"),
    (lambda: _single("doc", (7, 0)), HeadError, r"\(7, 0\)"),
    (lambda: _single("doc", [(0, 0), (0, 1)]), ArgumentError, "are several heads"),
])  # fmt: skip
def test_spans_that_do_not_fit_are_refused(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_new_texts_need_new_spans() -> None:
    model = _model()
    with torch.no_grad(), observe(model, Request(spans=("doc",))) as watch:
        with pytest.raises(ArgumentError, match="no spans were given for the texts of forward pas"):
            model(IDS)
        watch.spans(doc=GOOD)
        model(IDS)
        with pytest.raises(ArgumentError, match=r"no spans were given .* forward pass 3"):
            model(IDS)
