"""Recovery brings a smaller model closer to the full one, reproducibly; nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn

import headwise as hw
from headwise import _checkpoint
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import fingerprint
from headwise.ownership import find_attentions, heads_of
from headwise.recovery import recovering
from oracles import padded
from tiers import tiers

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
REMOVED = [(0, 0), (0, 1), (1, 2), (1, 3)]


def _batches() -> list[dict[str, Tensor]]:
    keys = ("input_ids", "attention_mask")
    batches = [padded(TEXTS[:2], "right"), padded(TEXTS[2:], "right")]
    return [{key: batch[key] for key in keys} for batch in batches]


def _make(kind: str) -> nn.Module:
    torch.manual_seed(2)
    if kind == "mini":
        return MiniGPT(MiniGPTConfig(13, 8, 12, 4, n_layers=2)).eval()
    if kind == "classes":
        model = transformers.BertForSequenceClassification(zoo.make("Bert").config).eval()
        for weight in model.parameters():  # so large that heads matter
            weight.data.mul_(8.0 if weight.ndim == 2 else 1.0)
        return model
    return zoo.make(kind)


def _distance(model: nn.Module, teacher: nn.Module, batch: dict[str, Tensor]) -> float:
    """The definition, token by token."""
    with torch.no_grad():
        outputs = [module(**batch) for module in (model, teacher)]
    real = batch["attention_mask"].bool()
    if hasattr(outputs[0], "last_hidden_state"):
        x, y = (output.last_hidden_state[real].double() for output in outputs)
        return float((1 - torch.cosine_similarity(x, y, dim=-1)).mean())
    logits = [getattr(output, "logits", output).double() for output in outputs]
    student, target = (x[real] if x.ndim == 3 else x for x in logits)
    p = target.softmax(-1)
    return (p * (p.log() - student.softmax(-1).log())).sum(-1).mean().item()


@pytest.mark.parametrize("kind", tiers(["Llama", "mini"], ["Bert", "GPT2", "classes"]))
def test_recovery_brings_the_smaller_model_closer_to_the_full_one(kind: str) -> None:
    teacher, batches = _make(kind), _batches()
    mark = fingerprint(teacher)
    small = hw.prune(teacher, REMOVED)
    before = [_distance(small, teacher, batch) for batch in batches]
    steps: list[tuple[int, int]] = []
    losses = hw.recover(
        small, teacher, batches, steps=60, rate=3e-3,
        on_progress=lambda done, total: steps.append((done, total)),
    )  # fmt: skip
    # The first loss is that of one batch, before anything was learned.
    assert np.abs(losses[0] - before).min() < 1e-5 * max(before)
    assert steps == [(step + 1, 60) for step in range(60)]
    after = [_distance(small, teacher, batch) for batch in batches]
    assert np.mean(after) < 0.5 * np.mean(before)
    assert fingerprint(teacher) == mark
    assert [part.site.n_heads for part in find_attentions(small)] == [2, 2]


def test_a_regression_head_recovers_too() -> None:
    teacher = _make("classes")
    teacher.classifier = nn.Linear(24, 1)
    teacher.classifier.weight.data.mul_(8.0)
    small = hw.prune(teacher, REMOVED)
    losses = hw.recover(small, teacher, _batches()[:1], steps=40, rate=3e-3)
    assert losses[-1] < 0.5 * losses[0]


def test_an_unpruned_model_has_nothing_to_recover() -> None:
    teacher, copy = _make("GPT2"), _make("GPT2")
    assert abs(hw.recover(copy, teacher, _batches(), steps=1)[0]) < 1e-6


def test_padding_does_not_count() -> None:
    teacher = _make("Bert")
    small = hw.prune(teacher, REMOVED)
    text = {"input_ids": torch.tensor([TEXTS[1]])}
    # One text of two beside padding, and alone.
    with torch.no_grad():
        expected = _distance(small, teacher, text | {"attention_mask": torch.ones(1, 2)})
    wide = {name: x[1:] for name, x in _batches()[0].items()}
    assert wide["input_ids"].shape == (1, 7)
    assert hw.recover(small, teacher, [wide], steps=1)[0] == pytest.approx(expected, rel=1e-4)


def test_the_same_seed_gives_the_same_weights() -> None:
    teacher = _make("GPT2").train()
    marks = []
    for seed in (0, 0, 1):
        small = hw.prune(teacher, REMOVED)  # in training mode, with dropout
        torch.rand(1)  # other random draws have no influence
        hw.recover(small, teacher, [*_batches(), *_batches()[:1]], steps=3, rate=1e-3, seed=seed)
        marks.append(fingerprint(small))
    assert marks[0] == marks[1] != marks[2]


def test_modes_flags_and_gradients_are_unchanged() -> None:
    teacher = _make("Bert").train()
    teacher.encoder.layer[0].eval()
    teacher.embeddings.requires_grad_(False)
    small = hw.prune(teacher, REMOVED)
    weight = small.encoder.layer[1].output.dense.weight
    weight.grad = torch.ones_like(weight)
    before = _state(small), _state(teacher)
    frozen = [x.clone() for x in small.embeddings.parameters()]
    hw.recover(small, teacher, _batches(), steps=3, rate=1e-2)
    assert (_state(small), _state(teacher)) == before
    assert all(map(torch.equal, frozen, small.embeddings.parameters()))


def _state(model: nn.Module) -> list[Any]:
    modes = [module.training for module in model.modules()]
    return [modes, [(x.requires_grad, id(x.grad)) for x in model.parameters()]]


def test_an_interrupt_restores_the_weights() -> None:
    teacher = _make("Bert")
    small = hw.prune(teacher, REMOVED)
    before = fingerprint(small)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.recover(small, teacher, _batches(), steps=5, rate=1e-2, on_progress=stop)
    assert fingerprint(small) == before
    assert all(weight.grad is None for weight in small.parameters())


@pytest.mark.full
def test_curves_of_recovered_models_lie_below_those_of_ablated_ones() -> None:
    model, batches = _make("Llama"), _batches()
    heads = heads_of(find_attentions(model))
    orders = {"mine": [[heads[0], heads[7], heads[2], heads[1], *heads[3:7]]]}
    gated = hw.prune_curves(model, batches, orders, reference=batches, points=[1, 3])
    cut = recovering(model, batches, steps=30, rate=3e-3)
    recovered = hw.prune_curves(model, batches, orders, points=[1, 3], cut=cut)
    assert recovered.removed.tolist() == [0, 1, 3]
    increases = [
        curves.mean("mine")[0] - curves.mean("mine")[0, 0] for curves in (gated, recovered)
    ]
    assert abs(increases[1][1:]).max() < abs(increases[0][1:]).max()


_RESUMED: dict[str, Any] = {"steps": 7, "rate": 3e-3, "seed": 1}


def _small(kind: str) -> tuple[nn.Module, nn.Module]:
    teacher = _make(kind)
    return hw.prune(teacher, REMOVED), teacher


def _stop_at(stop: int) -> Any:
    def report(done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    return report


@pytest.mark.full
@pytest.mark.parametrize(("kind", "stop"), [("mini", 1), ("Llama", 3), ("mini", 6)])
def test_an_interrupted_recovery_resumes_to_the_same_bits(
    kind: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checkpoint, "_SECONDS", -1.0)  # a write after every step
    monkeypatch.setattr(_checkpoint, "_COMPUTE_PER_WRITE", 0.0)
    plain, teacher = _small(kind)
    losses = hw.recover(plain, teacher, _batches(), **_RESUMED)
    small, teacher = _small(kind)
    mark, path = fingerprint(small), tmp_path / "recovery.part"
    with pytest.raises(KeyboardInterrupt):
        hw.recover(small, teacher, _batches(), resume=path, on_progress=_stop_at(stop), **_RESUMED)
    assert fingerprint(small) == mark
    steps: list[int] = []
    resumed = hw.recover(
        small, teacher, _batches(), resume=path, **_RESUMED,
        on_progress=lambda done, _: steps.append(done),
    )  # fmt: skip
    assert steps == list(range(stop + 1, 8))
    assert resumed.tobytes() == losses.tobytes()
    assert fingerprint(small) == fingerprint(plain) != mark
    again, teacher = _small(kind)  # the file stays, and holds the finished recovery
    assert hw.recover(again, teacher, _batches(), resume=path, **_RESUMED).tobytes() == (
        losses.tobytes()
    )
    assert fingerprint(again) == fingerprint(plain)
