"""Spans that do not fit the request, the texts or the tokenizer are refused."""

from typing import Any

import pytest
import torch
from torch import nn

from headwise.corpora import SPECIALS
from headwise.errors import ArgumentError, HeadError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.layer import MultiHeadAttention
from headwise.watch import Request, Watch, observe

CONFIG = MiniGPTConfig(vocab_size=13, context=12, d_model=12, n_heads=4, n_kv_heads=2, n_layers=2)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def _model() -> nn.Module:
    torch.manual_seed(1)
    return MiniGPT(CONFIG).eval()


@pytest.mark.parametrize("name", ["queries", "entropy", "layer", "name"])
def test_a_reserved_name_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{name}' is reserved"):
        Request(spans=(name,))


def test_single_queries_need_spans() -> None:
    with pytest.raises(ArgumentError, match="per_query=True without spans"):
        Request(per_query=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no stretches"),
        ({"passage": [(0, 1), (0, 1)]}, "passage given"),
        ({"doc": 3}, "doc=3"),
        ({"doc": []}, r"doc=\[\]"),
        ({"doc": "ab"}, "doc='ab'"),
        ({"doc": [(2, 2), (0, 1)]}, r"\(2, 2\)"),
        ({"doc": [(-1, 2), (0, 1)]}, r"\(-1, 2\)"),
        ({"doc": [(0.5, 2), (0, 1)]}, r"\(0.5, 2\)"),
        ({"doc": [(0, 1), (0, 1)], "queries": "first"}, "'queries' has 'first'"),
        ({"doc": [(0, 1), (0, 1)], "queries": [(0, 1)]}, "for 2 texts"),
        ({"doc": [(0, 1), (0, 1)], "queries": [(0, 1), (3, 1)]}, r"\(3, 1\)"),
    ],
)
def test_malformed_stretches_are_refused(given: dict[str, Any], message: str) -> None:
    with (
        observe(_model(), Request(spans=("doc",))) as watch,
        pytest.raises(ArgumentError, match=message),
    ):
        watch.spans(**given)


def _run(given: dict[str, Any], arguments: tuple[Any, ...] = ()) -> Watch:
    model = _model()
    with torch.no_grad(), observe(model, Request(spans=("doc",))) as watch:
        watch.spans(*arguments, **given)
        model(IDS)
    return watch


def test_stretches_outside_the_texts_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'doc' has \(4, 6\) in a text of 5 tokens"):
        _run({"doc": [(0, 1), (4, 6)]})
    with pytest.raises(ArgumentError, match="stretches of 1 texts where the model reads 2"):
        _run({"doc": [(0, 1)]})


def test_new_texts_need_new_spans() -> None:
    model = _model()
    with torch.no_grad(), observe(model, Request(spans=("doc",))) as watch:
        with pytest.raises(
            ArgumentError, match="no spans were given for the texts of forward pass"
        ):
            model(IDS)
        watch.spans(doc=[(0, 1), (0, 1)])
        model(IDS)
        with pytest.raises(ArgumentError, match=r"no spans were given .* forward pass 3"):
            model(IDS)


WORDS = [*SPECIALS, "a", "b", "c", "d"]


def test_characters_need_the_texts_that_the_model_reads() -> None:
    tokenizer = make_tokenizer(WORDS)
    texts = ["a b c d a", "b c d a b"]
    spans = {"doc": [(0, 1), (0, 1)]}
    with pytest.raises(ArgumentError, match="text 0 has 6 tokens by the tokenizer"):
        _run(spans, (texts, tokenizer))
    with pytest.raises(ArgumentError, match="tokenizer=NoneType"):
        _run(spans, (texts,))
    with pytest.raises(ArgumentError, match="2 texts where 1 texts"):
        _run(spans, (texts[:1], tokenizer))
    with pytest.raises(ArgumentError, match=r"has \(1, 2\), ' ', in a text of 9 characters"):
        _run({"doc": [(1, 2), (0, 1)]}, (texts, tokenizer))
    with pytest.raises(UnsupportedError, match="slow tokenizer"):
        _run(spans, (texts, object()))


def test_characters_of_a_model_without_ids_are_refused() -> None:
    layer = MultiHeadAttention(12, 4).eval()
    with torch.no_grad(), observe(layer, Request(spans=("doc",))) as watch:
        watch.spans(["a b"], make_tokenizer(WORDS), doc=[(0, 1)])
        with pytest.raises(UnsupportedError, match="need whole texts as input_ids"):
            layer(torch.randn(1, 2, 12))


def test_single_queries_that_were_not_kept_are_refused() -> None:
    watch = _run({"doc": [(0, 1), (0, 1)]})
    with pytest.raises(ArgumentError, match="per_query=False"):
        watch.per_query("doc", (0, 0))
    model = _model()
    with torch.no_grad(), observe(model, Request(spans=("doc",), per_query=True)) as kept:
        kept.spans(doc=[(0, 1), (0, 1)])
        model(IDS)
    with pytest.raises(ArgumentError, match="'passage' with spans"):
        kept.per_query("passage", (0, 0))
    with pytest.raises(HeadError, match=r"\(7, 0\)"):
        kept.per_query("doc", (7, 0))
    with pytest.raises(ArgumentError, match="are several heads"):
        kept.per_query("doc", [(0, 0), (0, 1)])  # type: ignore[arg-type]
