"""What cannot be weighed is refused by name, and the model stays as it was."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn

from headwise.curves import Curves
from headwise.errors import ArgumentError, HeadError, HeadwiseError, InputError, ShapeError
from headwise.gauge import embedding, find_loss, importance, prune_curves
from oracles import modules_of, padded

BATCH = {k: v for k, v in padded([[5, 9, 7], [4, 6]], "right").items() if k != "position_ids"}


def _refused(
    kind: type[HeadwiseError], told: str, *args: Any, name: str = "Bert", **how: Any
) -> None:
    model = zoo.make(name)
    before = modules_of(model)
    with pytest.raises(kind, match=told):
        importance(model, *(args or ([BATCH],)), **how)
    assert modules_of(model) == before


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"method": "magic"}, "method='magic' is none of half-gate, gradient"),
        ({"rounds": 0}, "rounds=0 for 8 heads"),
        ({"rounds": 9}, "rounds=9 for 8 heads"),
        ({"method": "gradient"}, "loss 'embedding' is least at the full model"),
        ({"method": "curvature", "loss": "lm", "name": "Llama"}, "the loss is 'lm'"),
        ({"loss": "perplexity"}, "'perplexity' is none of lm, masked-lm, label, embedding"),
        ({"loss": "label"}, "has no logits"),
        ({"loss": "masked-lm", "name": "Llama"}, "input_ids, attention_mask, no labels"),
        ({"loss": "embedding", "name": "Llama"}, "CausalLMOutputWithPast has no vector"),
    ],
)
def test_what_does_not_fit_is_refused(how: dict[str, Any], told: str) -> None:
    _refused(ArgumentError, told, **how)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "0 batches"),
        (["some text"], "1 texts without a tokenizer"),
        ([torch.zeros(1, 2)], "a batch is a Tensor"),
        ([{"return_dict": True}], r"no tensor in \['return_dict'\]"),
    ],
)
def test_what_cannot_be_read_is_refused(given: Any, told: str) -> None:
    def loss(output: Any, batch: Any) -> Tensor:
        return output[0].sum((1, 2))

    if "no tensor" in told:
        with pytest.raises(ArgumentError, match=told):
            find_loss(loss, nn.Identity(), given[0]).per_text((torch.zeros(1, 1, 1),), given[0])
    else:
        _refused(ArgumentError, told, given)


def test_a_loss_of_another_shape_is_refused() -> None:
    def whole(output: Any, batch: Any) -> Tensor:
        return output[0].sum()

    _refused(ShapeError, r"loss whole: shape \(\) for 2 texts", loss=whole)


def test_a_loss_that_is_no_number_is_refused() -> None:
    def log(output: Any, batch: Any) -> Tensor:
        return (output[0].sum((1, 2)) * torch.tensor([1.0, torch.inf])) * 0

    _refused(ArgumentError, "half-gate is not finite in 1 of 2 texts", loss=log)


def test_a_text_of_one_token_predicts_nothing() -> None:
    batch = {"input_ids": torch.tensor([[5, 3], [7, 1]])}
    batch["attention_mask"] = torch.tensor([[1, 1], [1, 0]])
    _refused(ArgumentError, "loss lm: 1 of 2 texts have no token", [batch], name="Llama")


def test_a_pooling_that_does_not_exist() -> None:
    with pytest.raises(ArgumentError, match="pooling='max'"):
        embedding("max")  # type: ignore[arg-type]


def test_a_class_without_a_loss_of_its_own() -> None:
    with pytest.raises(ArgumentError, match="no loss goes with Linear and inputs x"):
        find_loss(None, nn.Linear(2, 2), {"x": torch.zeros(1, 2)})


def test_a_tokenizer_without_a_mask() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = transformers.BertConfig(
        vocab_size=3, hidden_size=12, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=8,
    )  # fmt: skip
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(InputError, match="Tokenizer has no mask token"):
        importance(transformers.BertForMaskedLM(config), ["a"], tokenizer=tokenizer)


def test_an_order_of_heads_that_do_not_exist() -> None:
    with pytest.raises(HeadError, match=r"no head L7\.H0"):
        prune_curves(zoo.make("Bert"), [BATCH], {"mine": [["L7.H0"]]})


@pytest.mark.parametrize("removed", [[], [1, 2], [0, 2, 2], [0, 1, 2]])
def test_points_that_do_not_rise_from_zero(removed: list[int]) -> None:
    values = np.zeros((1, 2 if len(removed) == 3 and removed[1] == 1 else len(removed), 4))
    with pytest.raises(ShapeError, match=r"points at \["):
        Curves(np.array(removed, dtype=np.int64), 8, {"one": values})


def test_an_order_without_a_curve() -> None:
    with pytest.raises(ArgumentError, match=r"no order 'two'.*There are one"):
        Curves(np.array([0]), 8, {"one": np.zeros((1, 1, 1))}).mean("two")
