"""Each refusal of the lab says what is wrong, and leaves no files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise import load, load_tokenizer, prune
from headwise.corpora import Grammar
from headwise.errors import ArgumentError, InputError, OutputError, ShapeError
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer, sample, save, train
from headwise.lab._train import TrainingRun

TOKENIZER = make_tokenizer(Grammar().vocabulary)
SMALL = TrainSettings(steps=2, batch_size=3, d_model=6, n_heads=2, n_layers=1, mlp_ratio=1)


@pytest.fixture
def model():
    return MiniGPT(MiniGPTConfig(len(Grammar().vocabulary), context=7, d_model=6, n_heads=2))


@pytest.fixture
def folder(model, tmp_path):
    return save(model, tmp_path / "saved", tokenizer=TOKENIZER)


# Sizes and settings.


def test_a_text_longer_than_the_context(model):
    with pytest.raises(ShapeError, match="8 tokens do not fit a context of 7"):
        model(torch.zeros(1, 8, dtype=torch.int64))


SIZES = ("vocab_size", "context", "d_model", "n_heads", "n_layers", "mlp_ratio")


@pytest.mark.parametrize(("made", "sizes", "message"), [
    *((MiniGPTConfig, {name: 0}, f"MiniGPTConfig: {name} is 0") for name in SIZES),
    *((MiniGPTConfig, {name: -3}, f"MiniGPTConfig: {name} is -3") for name in SIZES),
    (MiniGPTConfig, {"dropout": -0.1}, "dropout is -0.1"),
    (MiniGPTConfig, {"dropout": 1.0}, "dropout is 1.0"),
    (TrainSettings, {"steps": 0}, r"steps is 0\. Give 1 or more"),
    (TrainSettings, {"batch_size": -1}, r"batch_size is -1\. Give 1 or more"),
    (TrainSettings, {"seed": -7}, r"seed is -7\. Give 0 or more"),
    (TrainSettings, {"warmup": -2}, r"warmup is -2\. Give 0 or more"),
    (TrainSettings, {"weight_decay": -0.5}, r"weight_decay is -0\.5\. Give 0 or more"),
    (TrainSettings, {"context": 32}, r"context is 32\. Give 33 or more"),
    (TrainSettings, {"steps": 10**18}, r"steps is 10+\. .* up to 1,000,000,000"),
    (TrainSettings, {"steps": 2.5}, r"steps is 2\.5"),
    (TrainSettings, {"n_heads": True}, "n_heads is True"),
    (TrainSettings, {"batch_size": 10**9}, "batch_size is 1000000000"),
    (TrainSettings, {"n_layers": 10**8, "d_model": 1, "n_heads": 1}, "n_layers is 100000000"),
    (TrainSettings, {"d_model": 10**8}, "d_model=100000000, .* give 240,000,004,000,000,000 w"),
    (TrainSettings, {"context": 10**9}, "context=1000000000 give"),
    (TrainSettings, {"learning_rate": 0.0}, "learning_rate is 0.0"),
    (TrainSettings, {"learning_rate": -1.0}, "learning_rate is -1.0"),
    (TrainSettings, {"learning_rate": float("nan")}, "learning_rate is nan"),
])  # fmt: skip
def test_impossible_sizes_and_settings(made, sizes, message):
    with pytest.raises(ArgumentError, match=message):
        made(**({"vocab_size": 5} if made is MiniGPTConfig else {}) | sizes)


def test_less_than_one_line_to_judge(tmp_path):
    with pytest.raises(ArgumentError, match="lines_judged is 0"):
        train(SMALL, tmp_path, lines_judged=0)


# Training in a folder.


def test_a_file_that_is_no_checkpoint(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "training.safetensors")
    with pytest.raises(
        InputError, match=r"training\.safetensors is of headwise_training=None, not"
    ):
        train(SMALL, tmp_path)


def test_a_truncated_checkpoint(tmp_path):
    train(SMALL, tmp_path, lines_judged=3)
    path = tmp_path / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"training\.safetensors holds no training \(.*\)\."):
        train(SMALL, tmp_path)


def test_a_model_that_does_not_fit_its_sizes(model, tmp_path):
    resized = prune(model, (0, 1))
    with pytest.raises(
        ArgumentError, match=r"_proj.weight is \(.*\), .*heads may have been pruned"
    ):
        save(resized, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


def test_a_file_that_cannot_be_written(model, tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OutputError, match=r"model\.safetensors is a folder"):
        save(model, tmp_path, tokenizer=TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


# Loading.


@pytest.mark.parametrize(
    ("name", "reader", "message"),
    [
        ("headwise.json", load, r"neither headwise\.json nor config\.json"),
        ("model.safetensors", load, r"has no \.safetensors file"),
        ("tokenizer.json", load_tokenizer, r"tokenizer\.json is not a tokenizer \(No such file"),
    ],
)
def test_a_missing_file(folder, name, reader, message):
    (folder / name).unlink()
    with pytest.raises(InputError, match=message):
        reader(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "headwise/9"}, "the format 'headwise/9'"),
        ({"format": None}, "the format None"),
        ({"architecture": "Llama"}, "the architecture 'Llama'"),
        ({"config": {"vocab_size": 5, "wings": 2}}, "unexpected keyword argument 'wings'"),
        ({"config": {"vocab_size": 5, "n_heads": 0}}, "n_heads is 0"),
        ({"config": {"vocab_size": "many"}}, "sizes in .* cannot be read"),
        ({"config": [1]}, "sizes in .* cannot be read"),
        ({"config": {"vocab_size": 5, "n_heads": 3}}, "d_model=128"),
    ],
)
def test_an_unknown_format_or_impossible_sizes(folder, change, says):
    path = folder / "headwise.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=says):
        load(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("headwise.json", "{", r"headwise\.json is not JSON"),
        ("headwise.json", "\udce9", r"headwise\.json is not JSON"),
        ("headwise.json", "", r"headwise\.json is not JSON"),
        ("headwise.json", "[3]", r"holds no object but \[3\]"),
        ("tokenizer.json", '{"model": 3}', r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_broken_json(folder, name, text, message):
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=message):
        load(folder), load_tokenizer(folder)


# Sampling.


@pytest.mark.parametrize("word", ["frobnicate", "work,", "<unk>"])
def test_a_word_that_the_model_does_not_know(model, word):
    with pytest.raises(InputError, match=f"does not know the word '{word}'"):
        sample(model, f"I {word} always", tokenizer=TOKENIZER)


def test_a_prompt_that_is_too_long(model):
    with pytest.raises(InputError, match="the prompt has 8 tokens but the context holds 7"):
        sample(model, "I work , you work , he", tokenizer=TOKENIZER)


def test_a_negative_number_of_tokens(model):
    with pytest.raises(ArgumentError, match="sample: max_new_tokens is -1"):
        sample(model, "I", tokenizer=TOKENIZER, max_new_tokens=-1)


# A broken checkpoint is refused by name before the optimizer sees it, of a training or a recovery.


THREE_STEPS = TrainSettings(steps=3, batch_size=2, d_model=6, n_heads=2, n_layers=1, mlp_ratio=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run after its second step."""
    path = tmp_path_factory.mktemp("run") / "training.safetensors"
    run = TrainingRun(THREE_STEPS, path)
    run.advance()
    run.advance()
    run.checkpoint.save()
    return path


def _state(run: TrainingRun) -> list[Any]:
    moments = run.optimizer.state_dict()["state"]
    numbers = [run.step, run.checkpoint.seconds, len(moments)]
    return [*numbers, *[x.clone() for x in run.model.parameters()]]


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tensor_of_another_shape_or_without_numbers_is_refused_and_changes_nothing(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    with safe_open(whole, "pt") as file:
        about = dict(file.metadata())
    tensors = load_file(whole)
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
    broken = torch.zeros(shape)
    if tuple(shape) == tensors[name].shape:
        broken = tensors[name] * torch.nan
    path = tmp_path / "training.safetensors"
    save_file(tensors | {name: broken}, path, about)
    run = TrainingRun(THREE_STEPS, path)
    before = _state(run)
    with pytest.raises(InputError, match=rf"training in .* is broken \(.*{name}"):
        run.checkpoint.resume(THREE_STEPS.steps)
    assert all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(before, _state(run), strict=True)
    )


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("seconds", None, "seconds is missing, not () float64"),
    ("exp_avg.0", None, "exp_avg.0 is missing, not (396, 6) float32"),
    ("losses", None, "losses is () float32, of 3 steps"),
    ("losses", lambda x: x[0], "losses is () float64, of 3 steps"),
    ("more", lambda x: torch.zeros(2), "more is (2,) float32, not of this training"),
    ("exp_avg.99", lambda x: torch.zeros(2), "exp_avg.99 is (2,) float32, not of this training"),
    ("step.0", lambda x: x + 1, "step.0 is 3.0 after 2 losses"),
    ("exp_avg_sq.0", lambda x: -x - 1, "exp_avg_sq.0 is not finite, or below 0"),
])  # fmt: skip
def test_a_checkpoint_of_another_form(
    whole: Path, tmp_path: Path, name: str, damage: Any, message: str
) -> None:
    with safe_open(whole, "pt") as file:
        about = dict(file.metadata())
    tensors = load_file(whole)
    before = tensors.pop(name, None)
    tensors |= {name: damage(before).clone()} if damage else {}
    path = tmp_path / "training.safetensors"
    save_file(tensors, path, about)
    with pytest.raises(InputError, match=re.escape(message)):
        TrainingRun(THREE_STEPS, path).checkpoint.resume(THREE_STEPS.steps)


def test_an_intact_state_is_resumed(whole: Path) -> None:
    run = TrainingRun(THREE_STEPS, whole)
    run.checkpoint.resume(THREE_STEPS.steps)
    assert run.step == 2
    assert run.checkpoint.seconds > 0
    assert run.advance() > 0
