"""What cannot be recovered is refused by name, and both models are unchanged."""

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from headwise import prune, recover
from headwise.errors import ArgumentError, HeadwiseError, ShapeError
from headwise.models import fingerprint

BATCH = {"input_ids": torch.tensor([[5, 9, 7], [4, 6, 3]])}


def _refused(
    kind: type[HeadwiseError], message: str, small: nn.Module, teacher: nn.Module, **options: Any
) -> None:
    before = fingerprint(small), fingerprint(teacher)
    batches = options.pop("batches", [BATCH])
    with pytest.raises(kind, match=message):
        recover(small, teacher, batches, **options)
    assert (fingerprint(small), fingerprint(teacher)) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, r"steps=2\.5"),
        ({"steps": True}, "steps=True"),
        ({"rate": 0.0}, r"rate=0\.0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"batches": []}, "0 given"),
        ({"batches": ["a text"]}, "1 texts without a tokenizer"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    teacher = zoo.make("Bert")
    _refused(ArgumentError, message, prune(teacher, "L0.H1"), teacher, **options)


def test_the_full_model_itself() -> None:
    teacher = zoo.make("Bert")
    message = r"embeddings\.word_embeddings\.weight is a weight of both models"
    _refused(ArgumentError, message, teacher, teacher)
    small = prune(teacher, "L0.H1")
    small.pooler = teacher.pooler
    _refused(ArgumentError, r"pooler\.dense\.weight is a weight of both", small, teacher)


def test_frozen_weights() -> None:
    teacher = zoo.make("Bert")
    small = prune(teacher, "L0.H1").requires_grad_(False)
    _refused(ArgumentError, "all weights of Bert.* are frozen", small, teacher)


def test_a_teacher_of_another_vocabulary() -> None:
    teacher, small = zoo.make("Llama"), zoo.make("Llama")
    small.lm_head = nn.Linear(24, 7)
    message = r"gives logits \(2, 3, 7\), the full one \(2, 3, 23\)"
    _refused(ShapeError, message, small, teacher)


def test_a_diverging_rate() -> None:
    teacher = zoo.make("GPT2")
    small = prune(teacher, "L0.H1")
    _refused(
        ArgumentError, r"the loss of step \d+ is (nan|inf).*lower rate than 1e\+30", small, teacher,
        rate=1e30, steps=9,
    )  # fmt: skip


class _Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.weight}


def test_outputs_that_cannot_be_compared() -> None:
    _refused(ArgumentError, "dict has neither logits nor a vector", _Strange(), _Strange())
