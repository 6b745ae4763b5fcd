"""Each refusal of the lab says what is wrong, and leaves no files."""

import json
import re
from collections.abc import Callable
from functools import partial
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
from headwise.errors import ArgumentError, HeadwiseError, InputError, OutputError, ShapeError
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer, sample, save, train
from headwise.lab._train import TrainingRun

TOKENIZER = make_tokenizer(Grammar().vocabulary)
SMALL = TrainSettings(steps=2, batch_size=3, d_model=6, n_heads=2, n_layers=1, mlp_ratio=1)


def _model() -> MiniGPT:
    return MiniGPT(MiniGPTConfig(len(Grammar().vocabulary), context=7, d_model=6, n_heads=2))


# Sizes, settings and prompts.


SIZES = ("vocab_size", "context", "d_model", "n_heads", "n_layers", "mlp_ratio")
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, r"steps is 0\. Give 1 or more"),
    ({"batch_size": -1}, r"batch_size is -1\. Give 1 or more"),
    ({"seed": -7}, r"seed is -7\. Give 0 or more"),
    ({"warmup": -2}, r"warmup is -2\. Give 0 or more"),
    ({"weight_decay": -0.5}, r"weight_decay is -0\.5\. Give 0 or more"),
    ({"context": 32}, r"context is 32\. Give 33 or more"),
    ({"steps": 10**18}, r"steps is 10+\. .* up to 1,000,000,000"),
    ({"steps": 2.5}, r"steps is 2\.5"),
    ({"n_heads": True}, "n_heads is True"),
    ({"batch_size": 10**9}, "batch_size is 1000000000"),
    ({"n_layers": 10**8, "d_model": 1, "n_heads": 1}, "n_layers is 100000000"),
    ({"d_model": 10**8}, "d_model=100000000, .* give 240,000,004,000,000,000 w"),
    ({"context": 10**9}, "context=1000000000 give"),
    ({"learning_rate": 0.0}, "learning_rate is 0.0"),
    ({"learning_rate": float("nan")}, "learning_rate is nan"),
]
SAMPLES: list[tuple[dict[str, Any], type[HeadwiseError], str]] = [
    *(
        ({"prompt": f"I {word} always"}, InputError, f"does not know the word '{word}'")
        for word in ("frobnicate", "work,", "<unk>")
    ),
    (
        {"prompt": "I work , you work , he"},
        InputError,
        "the prompt has 8 tokens but the context holds 7",
    ),
    ({"max_new_tokens": -1}, ArgumentError, "sample: max_new_tokens is -1"),
]


def _sample(prompt: str = "I", **options: Any) -> str:
    return sample(_model(), prompt, tokenizer=TOKENIZER, **options)


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(MiniGPTConfig, **{"vocab_size": 5} | {name: 0}), ArgumentError,
       f"MiniGPTConfig: {name} is 0") for name in SIZES),
    (partial(MiniGPTConfig, 5, n_heads=-3), ArgumentError, "MiniGPTConfig: n_heads is -3"),
    *((partial(MiniGPTConfig, 5, dropout=share), ArgumentError, f"dropout is {share}")
      for share in (-0.1, 1.0)),
    *((partial(TrainSettings, **given), ArgumentError, message) for given, message in SETTINGS),
    *((partial(_sample, **given), *said) for given, *said in SAMPLES),
    (lambda: _model()(torch.zeros(1, 8, dtype=torch.int64)), ShapeError,
     "8 tokens do not fit a context of 7"),
])  # fmt: skip
def test_impossible_sizes_settings_and_prompts(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


# Files: what is done to a folder, and what then fails.


def _train(folder: Path, lines_judged: int = 3) -> None:
    train(SMALL, folder, lines_judged=lines_judged)


def _cut_a_training(folder: Path) -> None:
    _train(folder)
    path = folder / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def _write(name: str, text: str, folder: Path) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))


def _remove(name: str, folder: Path) -> None:
    (folder / name).unlink()


def _change(folder: Path, **changes: Any) -> None:
    path = folder / "headwise.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _config(**sizes: Any) -> Callable[[Path], object]:
    return partial(_change, config={"vocab_size": 5} | sizes)


def _nothing(folder: Path) -> None: ...


FOREIGN = {"w": torch.zeros(2)}
SIZES_OF = "sizes in .* cannot be read"
FILES: list[tuple[Callable[[Path], object], Callable[[Path], object], type[HeadwiseError], str]] = [
    (_nothing, partial(_train, lines_judged=0), ArgumentError, "lines_judged is 0"),
    (lambda folder: save_file(FOREIGN, folder / "training.safetensors"), _train, InputError,
     r"training\.safetensors is of headwise_training=None, not"),
    (_cut_a_training, _train, InputError, r"training\.safetensors holds no training \(.*\)\."),
    (_nothing, lambda folder: save(prune(_model(), (0, 1)), folder / "cut"), ArgumentError,
     r"_proj.weight is \(.*\), .*heads may have been pruned"),
    (lambda folder: (folder / "new" / "model.safetensors").mkdir(parents=True),
     lambda folder: save(_model(), folder / "new", tokenizer=TOKENIZER), OutputError,
     r"model\.safetensors is a folder"),
    (partial(_remove, "headwise.json"), load, InputError,
     r"neither headwise\.json nor config\.json"),
    (partial(_remove, "model.safetensors"), load, InputError, r"has no \.safetensors file"),
    (partial(_remove, "tokenizer.json"), load_tokenizer, InputError,
     r"tokenizer\.json is not a tokenizer \(No such file"),
    *((partial(_write, "headwise.json", text), load, InputError, r"headwise\.json is not JSON")
      for text in ("{", "\udce9", "")),
    (partial(_write, "headwise.json", "[3]"), load, InputError, r"holds no object but \[3\]"),
    (partial(_write, "tokenizer.json", '{"model": 3}'), load_tokenizer, InputError,
     r"tokenizer\.json is not a tokenizer"),
    (partial(_change, format="headwise/9"), load, InputError, "the format 'headwise/9'"),
    (partial(_change, format=None), load, InputError, "the format None"),
    (partial(_change, architecture="Llama"), load, InputError, "the architecture 'Llama'"),
    (_config(wings=2), load, InputError, "unexpected keyword argument 'wings'"),
    (_config(n_heads=0), load, InputError, "n_heads is 0"),
    (_config(vocab_size="many"), load, InputError, SIZES_OF),
    (partial(_change, config=[1]), load, InputError, SIZES_OF),
    (_config(n_heads=3), load, InputError, "d_model=128"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "call", "kind", "message"), FILES)
def test_files_that_cannot_be_read_or_written(
    spoil: Callable[[Path], object], call: Callable[[Path], object], kind: type[HeadwiseError],
    message: str, tmp_path: Path,
) -> None:  # fmt: skip
    folder = save(_model(), tmp_path / "saved", tokenizer=TOKENIZER)
    spoil(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(kind, match=message):
        call(folder)
    assert sorted(folder.rglob("*")) == before


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
