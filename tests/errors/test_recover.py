"""What cannot be recovered is refused by name, and both models are unchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from headwise import group_heads, prune, recover
from headwise._tensors import read_with_metadata, write_tensors
from headwise.errors import ArgumentError, HeadwiseError, InputError, OutputError, ShapeError
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


def test_the_full_model_in_place_of_the_smaller_one() -> None:
    full = zoo.make("Llama")
    layers = full.config.num_hidden_layers
    n_heads, kv_heads = (
        layers * full.config.num_attention_heads, layers * full.config.num_key_value_heads,
    )  # fmt: skip
    small = prune(full, ["L0.H0", "L0.H1"])
    message = rf"the model to train has {n_heads} heads, and its teacher {n_heads - 2}\. Give the"
    _refused(ArgumentError, message, full, small)
    grouped = group_heads(full, n_kv_heads=1)
    message = rf"the model to train has {kv_heads} kv heads, and its teacher {layers}\. Give the"
    _refused(ArgumentError, message, full, grouped)
    for student in (small, grouped):
        assert len(recover(student, full, [BATCH], steps=1)) == 1


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


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    teacher = zoo.make("Bert")
    small = prune(teacher, "L0.H1")
    recover(small, teacher, [BATCH], steps=2, resume=tmp_path / "part")
    return tmp_path / "part"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "of steps='2', not '3'"),
        ({"rate": 1e-3}, r"of rate='0\.0001', not '0\.001'"),
        ({"seed": 5}, "of seed='0', not '5'"),
        ({"batches": [{"input_ids": BATCH["input_ids"] + 1}]}, "of texts='[0-9a-f]+', not"),
    ],
)
def test_a_file_of_another_recovery(
    unfinished: Path, options: dict[str, Any], message: str
) -> None:
    teacher = zoo.make("Bert")
    settings = {"steps": 2, "resume": unfinished} | options
    _refused(InputError, message, prune(teacher, "L0.H1"), teacher, **settings)


def test_a_file_of_another_model(unfinished: Path) -> None:
    teacher = zoo.make("Bert")
    message = "of model='[0-9a-f]+', not '[0-9a-f]+'"
    _refused(InputError, message, prune(teacher, "L0.H2"), teacher, steps=2, resume=unfinished)


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["weight.3"]


def _infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight.3"].fill_(torch.inf)


def _transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["exp_avg.0"] = tensors["exp_avg.0"].T


def _negative(tensors: dict[str, torch.Tensor]) -> None:
    tensors["exp_avg_sq.0"].fill_(-1.0)


def _late(tensors: dict[str, torch.Tensor]) -> None:
    tensors["step.0"].fill_(9.0)


def _longer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["losses"] = torch.ones(3, dtype=torch.float64)


def _foreign(tensors: dict[str, torch.Tensor]) -> None:
    tensors["another"] = torch.ones(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, r"is broken \(it lacks weight\.3\)"),
        (_infinite, r"weight\.3 is not finite"),
        (_transposed, r"exp_avg\.0 is \(\d+, \d+\) float32, not"),
        (_negative, r"exp_avg_sq\.0 holds -1\.0"),
        (_late, "its optimizer is not at step 2"),
        (_longer, r"its losses are \(3,\) float64, of 2 steps at most"),
        (_foreign, "it holds another besides"),
    ],
)
def test_a_damaged_file(
    unfinished: Path, damage: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    tensors, about = read_with_metadata(unfinished)
    damage(tensors)
    write_tensors(tensors, unfinished, about)
    teacher = zoo.make("Bert")
    small = prune(teacher, "L0.H1")
    _refused(InputError, message, small, teacher, steps=2, resume=unfinished)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    teacher, path = zoo.make("Bert"), tmp_path / "part"
    path.write_text("no tensors")
    message = "part holds no unfinished recovery"
    _refused(InputError, message, prune(teacher, "L0.H1"), teacher, steps=2, resume=path)
    message = "no/such/part cannot be written"
    small = prune(teacher, "L0.H1")
    missing = tmp_path / "no/such/part"
    _refused(OutputError, message, small, teacher, steps=2, resume=missing)
