"""What cannot be scored is refused by name, and the model is unchanged."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn

from folders import word_tokenizer
from headwise.corpora import SentencePair
from headwise.errors import ArgumentError, HeadError, HeadwiseError, InputError, ShapeError
from headwise.scoring import Gates, find_loss, importance, paired, prune_curves
from headwise.tables import Curves
from oracles import modules_of, padded

BATCH = {k: v for k, v in padded([[5, 9, 7], [4, 6]], "right").items() if k != "position_ids"}
ONE_TOKEN = {
    "input_ids": torch.tensor([[5, 3], [7, 1]]),
    "attention_mask": torch.tensor([[1, 1], [1, 0]]),
}
X, BERT, LLAMA = torch.zeros(1, 1, 1), zoo.make("Bert"), zoo.make("Llama")


def constant(output: Any, batch: Any) -> Tensor:
    return output[0].sum((1, 2)) * 0


def infinite(output: Any, batch: Any) -> Tensor:
    return output[0].sum((1, 2)) * torch.tensor([1.0, torch.inf]) * 0


def whole(output: Any, batch: Any) -> Tensor:
    return output[0].sum()


def a_list(output: Any, batch: Any) -> Any:
    return [1.0, 2.0]


def _scored(model: nn.Module, batches: Any = (BATCH,), **options: Any) -> None:
    before = modules_of(model)
    try:
        importance(model, list(batches), **options)
    finally:
        assert modules_of(model) == before


def _masked() -> None:
    model = transformers.BertForMaskedLM(BERT.config)
    importance(model, ["a"], tokenizer=word_tokenizer("ab"))


def _points(*removed: int, n: int | None = None) -> Curves:
    values = np.zeros((1, len(removed) if n is None else n, 4))
    return Curves(np.array(removed, dtype=np.int64), 8, {"half-gate": values})


OPTIONS: list[tuple[nn.Module, dict[str, Any], str]] = [
    (BERT, {"loss": constant, "method": Gates()}, "'constant' grows by 0 without any head"),
    (BERT, {"loss": infinite}, "scores are not finite in 1 of 2 texts"),
    (BERT, {"method": "magic"}, "method='magic' is not one of half-gate, gradient"),
    (BERT, {"rounds": 0}, "rounds=0 for 8 heads"),
    (BERT, {"rounds": 9}, "rounds=9 for 8 heads"),
    (BERT, {"method": "gradient"}, "loss 'embedding' is least at the full model"),
    (LLAMA, {"method": "curvature", "loss": "lm"}, "the loss is 'lm'"),
    (BERT, {"loss": "perplexity"}, "'perplexity' is not one of lm, masked-lm, label, embedding"),
    (BERT, {"loss": "label"}, "has no logits"),
    (LLAMA, {"loss": "masked-lm"}, "input_ids, attention_mask, no labels"),
    (LLAMA, {"loss": "embedding"}, "CausalLMOutputWithPast has no vector"),
    (LLAMA, {"batches": []}, "0 given"),
    (LLAMA, {"batches": ["some text"]}, "1 text without a tokenizer"),
    (LLAMA, {"batches": [torch.zeros(1, 2)]}, "batches: a batch is of type Tensor"),
    (LLAMA, {"batches": [{"inputs_embeds": torch.randn(1, 3, 24)}]},
     "lm: the batch has inputs_embeds, no input_ids"),
    (LLAMA, {"batches": [ONE_TOKEN]}, "loss lm: 1 of 2 texts have no token"),
]  # fmt: skip
GATES: list[tuple[dict[str, Any], str]] = [
    ({"penalty": 0.0}, r"Gates: penalty=0\.0"),
    ({"penalty": float("nan")}, "Gates: penalty=nan"),
    ({"steps": 0}, "Gates: steps=0"),
    ({"seeds": -1}, "Gates: seeds=-1"),
    ({"rate": 0.0}, r"Gates: rate=0\.0"),
]
ONE = Curves(np.array([0, 1]), 8, {"one": np.zeros((1, 2, 3))})
MINE: dict[str, Any] = {"mine": [["L0.H0"]]}


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(_scored, model, **options), ArgumentError, message)
      for model, options, message in OPTIONS),
    (lambda: _scored(BERT, loss=whole), ShapeError, r"shape \(\) for 2 texts"),
    (lambda: _scored(BERT, loss=a_list), ShapeError, "a_list: it returns a list"),
    (_masked, InputError, "Tokenizer has no mask token"),
    *((partial(Gates, **given), ArgumentError, message) for given, message in GATES),
    (lambda: find_loss(None, nn.Linear(2, 2), {"x": torch.zeros(1, 2)}), ArgumentError,
     "no default loss fits Linear with inputs x"),
    (lambda: find_loss(constant, nn.Identity(), {"a": True}).per_text((X,), {"a": True}),
     ArgumentError, r"no tensor in \['a'\]"),
    (lambda: ONE.mean("two"), ArgumentError, "no order 'two'.*There are one"),
    *((partial(ONE.elbow, "one", x), ArgumentError, f"allowed={x}")
      for x in (0.0, -1.0, float("nan"))),
    (lambda: prune_curves(BERT, [BATCH], {"mine": [["L7.H0"]]}), HeadError, r"no head L7\.H0"),
    (lambda: prune_curves(BERT, [BATCH], {}), ArgumentError, "prune_curves: 0 orders"),
    (lambda: prune_curves(BERT, [BATCH], MINE, reference=[BATCH], cut=lambda _: None),
     ArgumentError, "prune_curves: 1 orders, cut=.*a reference: True"),
    (lambda: paired([SentencePair("a", "b", 1.0)], nn.Linear(1, 1), None), ArgumentError,
     "paired: 1 pair. Give at least 2"),
    *((partial(_points, *removed), ShapeError, r"points at \[")
      for removed in ((), (1, 2), (0, 2, 2))),
    (lambda: _points(0, 1, 2, n=2), ShapeError, r"points at \["),
])  # fmt: skip
def test_what_cannot_be_scored(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()
