"""What cannot be scored is refused by name, and the model is unchanged."""

from collections.abc import Callable
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


def _refused(
    kind: type[HeadwiseError], message: str, *args: Any, name: str = "Bert", **options: Any
) -> None:
    model = zoo.make(name)
    before = modules_of(model)
    with pytest.raises(kind, match=message):
        importance(model, *(args or ([BATCH],)), **options)
    assert modules_of(model) == before


def constant(output: Any, batch: Any) -> Tensor:
    return output[0].sum((1, 2)) * 0


def infinite(output: Any, batch: Any) -> Tensor:
    return output[0].sum((1, 2)) * torch.tensor([1.0, torch.inf]) * 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": constant, "method": Gates()}, "'constant' grows by 0 without any head"),
        ({"loss": infinite}, "scores are not finite in 1 of 2 texts"),
        ({"method": "magic"}, "method='magic' is not one of half-gate, gradient"),
        ({"rounds": 0}, "rounds=0 for 8 heads"),
        ({"rounds": 9}, "rounds=9 for 8 heads"),
        ({"method": "gradient"}, "loss 'embedding' is least at the full model"),
        ({"method": "curvature", "loss": "lm", "name": "Llama"}, "the loss is 'lm'"),
        ({"loss": "perplexity"}, "'perplexity' is not one of lm, masked-lm, label, embedding"),
        ({"loss": "label"}, "has no logits"),
        ({"loss": "masked-lm", "name": "Llama"}, "input_ids, attention_mask, no labels"),
        ({"loss": "embedding", "name": "Llama"}, "CausalLMOutputWithPast has no vector"),
    ],
)
def test_impossible_settings_and_losses_are_refused(options: dict[str, Any], message: str) -> None:
    _refused(ArgumentError, message, **options)


@pytest.mark.parametrize(("batches", "message"), [
    ([], "0 given"),
    (["some text"], "1 texts without a tokenizer"),
    ([torch.zeros(1, 2)], "batches: a batch is of type Tensor"),
    ([{"inputs_embeds": torch.randn(1, 3, 24)}], "lm: the batch has inputs_embeds, no input_ids"),
    ([ONE_TOKEN], "loss lm: 1 of 2 texts have no token"),
])  # fmt: skip
def test_unusable_batches_are_refused(batches: Any, message: str) -> None:
    _refused(ArgumentError, message, batches, name="Llama")


def test_a_batch_without_a_tensor_has_no_loss() -> None:
    loss = find_loss(constant, nn.Identity(), {"return_dict": True})
    with pytest.raises(ArgumentError, match=r"no tensor in \['return_dict'\]"):
        loss.per_text((torch.zeros(1, 1, 1),), {"return_dict": True})


def test_a_tokenizer_without_a_mask() -> None:
    with pytest.raises(InputError, match="Tokenizer has no mask token"):
        importance(transformers.BertForMaskedLM(BERT.config), ["a"], tokenizer=word_tokenizer("ab"))


def whole(output: Any, batch: Any) -> Tensor:
    return output[0].sum()


def a_list(output: Any, batch: Any) -> Any:
    return [1.0, 2.0]


BERT = zoo.make("Bert")
ONE = Curves(np.array([0, 1]), 8, {"one": np.zeros((1, 2, 3))})
MINE: dict[str, Any] = {"mine": [["L0.H0"]]}


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda: Gates(penalty=0.0), ArgumentError, r"Gates: penalty=0\.0"),
        (lambda: Gates(penalty=float("nan")), ArgumentError, "Gates: penalty=nan"),
        (lambda: Gates(steps=0), ArgumentError, "Gates: steps=0"),
        (lambda: Gates(seeds=-1), ArgumentError, "Gates: seeds=-1"),
        (lambda: Gates(rate=0.0), ArgumentError, r"Gates: rate=0\.0"),
        (lambda: importance(BERT, [BATCH], loss=whole), ShapeError, r"shape \(\) for 2 texts"),
        (lambda: importance(BERT, [BATCH], loss=a_list), ShapeError, "a_list: it returns a list"),
        (
            lambda: find_loss(None, nn.Linear(2, 2), {"x": torch.zeros(1, 2)}),
            ArgumentError,
            "no default loss fits Linear with inputs x",
        ),
        (lambda: ONE.mean("two"), ArgumentError, "no order 'two'.*There are one"),
        *(
            (lambda x=x: ONE.elbow("one", x), ArgumentError, f"allowed={x}")
            for x in (0.0, -1.0, float("nan"))
        ),
        (lambda: prune_curves(BERT, [BATCH], {"mine": [["L7.H0"]]}), HeadError, r"no head L7\.H0"),
        (lambda: prune_curves(BERT, [BATCH], {}), ArgumentError, "prune_curves: 0 orders"),
        (
            lambda: prune_curves(BERT, [BATCH], MINE, reference=[BATCH], cut=lambda _: None),
            ArgumentError,
            "prune_curves: 1 orders, cut=.*a reference: True",
        ),
        (
            lambda: paired([SentencePair("a", "b", 1.0)], nn.Linear(1, 1), None),
            ArgumentError,
            "paired: 1 pairs",
        ),
    ],
)
def test_what_cannot_be_asked(
    ask: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ask()


@pytest.mark.parametrize("removed", [[], [1, 2], [0, 2, 2], [0, 1, 2]])
def test_points_that_do_not_rise_from_zero(removed: list[int]) -> None:
    values = np.zeros((1, 2 if removed == [0, 1, 2] else len(removed), 4))
    with pytest.raises(ShapeError, match=r"points at \["):
        Curves(np.array(removed, dtype=np.int64), 8, {"one": values})
