"""Watching a training: gradients are unchanged, and no token is counted twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from test_written_out import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from folders import tiny_llama
from headwise.errors import ArgumentError
from headwise.layer import MultiHeadAttention
from headwise.monitor import Above, HeadMonitor, QKClip
from headwise.watch import Request, observe
from oracles import modules_of, padded

TEXTS = [[5, 9, 7, 3, 11, 8, 2], [4, 6], [10, 3, 3, 12, 9]]


class Learner(nn.Module):
    """Two blocks of one kind, each recomputed in the backward pass."""

    def __init__(self, kind: Callable[[], nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 20), nn.Linear(20, 13)
        self.layers = nn.ModuleList([kind() for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(20, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x, need_weights=False)[0]


class OurBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(20, 4, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, causal=True)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "ours": OurBlock,
    "torchs": TorchBlock,
    "written": lambda: Block(dropout=0.1),
    "fused": lambda: Block(dropout=0.1, flash=True),
}


def _gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    torch.manual_seed(5)  # the same dropout
    model.zero_grad()
    loss().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _assert_learns_alike(model: nn.Module, loss: Callable[[], Tensor], tokens: int) -> Any:
    plain = _gradients(model, loss)
    with observe(model) as watch:
        watched = _gradients(model, loss)
        again = _gradients(model, loss)
    assert len(plain) > 5
    for x, y, three in zip(plain, watched, again, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, three)
    assert (watch.table().count("lse") == 2 * tokens).all()
    return watch.table()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_train_alike_when_watched(kind: str, reentrant: bool | None) -> None:
    model = Learner(KINDS[kind], reentrant).train()
    batch = padded(TEXTS, "right")
    table = _assert_learns_alike(model, lambda: model(**batch).square().mean(), 14)
    assert [str(head) for head in table.heads[::4]] == ["L0.H0", "L1.H0"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "GPTNeoForCausalLM"])
def test_hugging_face_models_with_checkpoints_train_alike_when_watched(
    name: str, reentrant: bool
) -> None:
    model: Any = zoo.make(name).train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = padded(TEXTS, "right")

    def loss() -> Tensor:
        return model(**batch, labels=batch["input_ids"], use_cache=False).loss

    _assert_learns_alike(model, loss, 14)


@pytest.mark.parametrize("kind", ["written", "fused"])
def test_a_step_under_autocast_trains_alike_when_watched(kind: str) -> None:
    model = Learner(KINDS[kind], None).train()
    batch = padded(TEXTS, "right")

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).float().square().mean()

    table = _assert_learns_alike(model, loss, 14)
    with torch.no_grad(), observe(model.eval()) as exact:
        model(**batch)
    for name in ("entropy", "lse", "max_logit"):
        np.testing.assert_allclose(table.mean(name), exact.table().mean(name), atol=0.05)


# A monitor in the hands of `transformers.Trainer`.


TRAINED_ON = [
    {"input_ids": ids, "labels": ids}
    for ids in torch.randint(0, 17, (12, 7), generator=torch.Generator().manual_seed(0))
]


def _model() -> transformers.LlamaForCausalLM:
    return tiny_llama(hidden_size=16, intermediate_size=16, vocab_size=17)


def _train(model: Any, folder: Path, monitor: Any, **options: Any) -> Any:
    settings = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 0.1, "seed": 3, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "steps", "save_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "dataloader_pin_memory": False,
    }  # fmt: skip
    resume = options.pop("resume_from_checkpoint", None)
    kind = options.pop("kind", transformers.Trainer)
    trainer = kind(
        model=model,
        args=transformers.TrainingArguments(**settings | options),
        train_dataset=TRAINED_ON,
        eval_dataset=TRAINED_ON[:3],
        callbacks=monitor if isinstance(monitor, list) else [monitor] if monitor else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.full)])
def test_steps_of_a_trainer_are_counted(tmp_path: Path, checkpointing: bool) -> None:
    plain, model = _model(), _model()
    if checkpointing:
        plain.activation_checkpointing_enable()
        model.activation_checkpointing_enable()
    _train(plain, tmp_path / "plain", None)
    before = modules_of(model).keys()
    logged: list[tuple[dict[str, float], int]] = []
    with HeadMonitor(model, every=2, log=lambda *row: logged.append(row)) as monitor:
        _train(model, tmp_path, monitor)
        assert [step for _, step in logged] == [1, 2]
        assert monitor.steps == 3
        assert not model._forward_pre_hooks  # all hooks are removed at the end of training
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    # The remaining hooks belong to the trainer.
    assert modules_of(model).keys() == before | modules_of(plain).keys()

    # Training resumed from the checkpoint at step 2 is watched from step 3 on.
    again = _model()
    logged.clear()
    with HeadMonitor(again, every=2, log=lambda *row: logged.append(row)) as monitor:
        folder = str(tmp_path / "checkpoint-2")
        _train(again, tmp_path, monitor, resume_from_checkpoint=folder, max_steps=5)
    assert [step for _, step in logged] == [3, 4]


def test_the_batches_of_a_step_are_those_of_the_trainer(tmp_path: Path) -> None:
    model = _model()
    read: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            read.append(kwargs["input_ids"].clone())

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    logged: list[dict[str, float]] = []
    with HeadMonitor(model, every=1, log=lambda scalars, _: logged.append(scalars)) as monitor:
        _train(model, tmp_path, monitor, max_steps=1, learning_rate=0.0)
    handle.remove()
    assert len(read) == 2
    with observe(model, Request(("entropy", "first"))) as watch:
        for ids in read:
            model(input_ids=ids)
    table = watch.table()
    for name in table.statistics:
        actual = [logged[0][f"attn/{head}/{name}"] for head in table.heads]
        assert actual == pytest.approx(table.mean(name), rel=1e-6)


def test_the_numbers_of_the_model_are_in_the_trainers_history(tmp_path: Path) -> None:
    model = _model()
    logged: list[dict[str, float]] = []
    rules = [Above("entropy", 0.0)]
    monitor = HeadMonitor(model, 2, rules=rules, log=lambda scalars, _: logged.append(scalars))
    with monitor:
        trainer = _train(model, tmp_path, monitor)
        rows = [row for row in trainer.state.log_history if "attn/alarms" in row]
        assert repr(monitor) == (
            "<HeadMonitor of LlamaForCausalLM: every=2, steps=3, alarmed heads=8>"
        )
    assert [row["step"] for row in rows] == [1, 2]
    for row, scalars in zip(rows, logged, strict=True):
        names = row.keys() - {"step", "epoch"}
        assert {row[name] for name in names} <= {*scalars.values()}
        assert len(names) == 3 * 3 + 1
        assert row["attn/alarms"] == 8
        assert row["attn/entropy/mean"] == scalars["attn/entropy/mean"]


@pytest.mark.parametrize("log", [None, lambda scalars, step: None])
def test_a_trainer_reports_a_monitor_without_a_log(
    tmp_path: Path, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[int, set[str], bool]] = []

    class Board(transformers.TrainerCallback):
        logging_dir: str | None = None  # as TensorBoard's

        def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            is_apart = str(self.logging_dir).endswith(str(Path("runs", "heads")))
            reported.append((state.global_step, {*named["logs"]}, is_apart))

    integrations = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    monkeypatch.setitem(integrations, "board", Board)
    monitor = HeadMonitor(_model(), 2, statistics=["entropy"], log=log)
    _train(monitor.model, tmp_path, monitor, report_to="board")
    steps = {
        step for step, names, is_apart in reported if is_apart and "attn/L1/entropy/min" in names
    }
    assert steps == ({1, 2} if log is None else set())
    heads = [names for _, names, _ in reported if any(".H" in name for name in names)]
    assert not heads
    assert any("eval_loss" in names and not is_apart for _, names, is_apart in reported)


def test_a_monitor_reports_through_its_trainer(tmp_path: Path) -> None:
    model, reported = _model(), []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            reported.append({**named["logs"], "step": state.global_step})

    def watched_trainer(**named: Any) -> Any:
        trainer = transformers.Trainer(**named)
        log = lambda scalars, _: trainer.log(scalars)  # noqa: E731
        trainer.add_callback(HeadMonitor(model, 2, log=log))
        return trainer

    trainer = _train(model, tmp_path, Reporter(), kind=watched_trainer, logging_steps=1)
    heads = [row["step"] for row in reported if "attn/L0.H0/entropy" in row]
    losses = [row["step"] for row in reported if "loss" in row]
    evaluated = [row["step"] for row in reported if "eval_loss" in row]
    assert (heads, losses, evaluated) == ([1, 2], [1, 2, 3], [1, 2, 3])
    assert trainer.state.log_history == reported


@pytest.mark.full
def test_a_clip_is_a_callback(tmp_path: Path) -> None:
    model = _model()
    with HeadMonitor(model, 1, statistics=["max_logit"]) as monitor:
        clip = QKClip(monitor, 0.05)
        _train(model, tmp_path, [monitor, clip], max_steps=4)
        assert "watched=4>" in repr(clip)


def test_every_event_of_a_trainer_is_handled() -> None:
    monitor = HeadMonitor(_model())
    with monitor:
        events = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]
        assert len(events) > 10
        for event in {*events} - {"on_train_begin", "on_step_end", "on_train_end"}:
            assert getattr(monitor, event)(None, None, None, logs={}) is None
        with pytest.raises(AttributeError, match="'HeadMonitor' object has no attribute 'steap'"):
            getattr(monitor, "steap")  # noqa: B009
        assert monitor.steps == 0


def test_a_trainer_of_another_model(tmp_path: Path) -> None:
    with (
        HeadMonitor(_model()) as monitor,
        pytest.raises(ArgumentError, match="the trainer trains another LlamaForCausalLM, which is"),
    ):
        _train(_model(), tmp_path, monitor)
