"""What the attention implementation refuses, by name and value."""

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
import zoo
from torch import nn

import headwise as hw
from headwise.attention.huggingface import attention_forward
from headwise.cli import _inputs
from headwise.cli._app import app
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig


def _mini_gpt() -> nn.Module:
    return MiniGPT(MiniGPTConfig(13, 8, 12, 4))


@pytest.mark.parametrize(("make", "name", "kind", "message"), [
    (partial(zoo.make, "Llama"), "no such", ArgumentError,
     r"attn_implementation='no such' is not known\. Choose one of eager, "),
    (partial(zoo.make, "Gemma2"), "sdpa", ArgumentError,
     r"Gemma2ForCausalLM cannot use .*'sdpa'"),
    *((partial(zoo.make, name), "headwise", UnsupportedError,
       rf"{name} does not call .*fast_attention")
      for name in ("GPTNeoForCausalLM", "BloomForCausalLM")),
    (_mini_gpt, "eager", ArgumentError, r"MiniGPT computes .* not by 'eager'"),
])  # fmt: skip
def test_implementations_that_a_model_cannot_use(
    make: Callable[[], nn.Module], name: str, kind: type[HeadwiseError], message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    hw.save(make(), tmp_path / "model")
    with pytest.raises(kind, match=message):
        hw.load(tmp_path / "model", attn_implementation=name)


def test_a_layer_of_ours_is_of_our_implementation(tmp_path: Path) -> None:
    hw.save(_mini_gpt(), tmp_path / "mini")
    assert isinstance(hw.load(tmp_path / "mini", attn_implementation="headwise"), MiniGPT)


def _call(module: nn.Module, mask: Any = None, **more: Any) -> None:
    q = torch.zeros(1, 2, 3, 4)
    attention_forward(module, q, q, q, mask, **more)


@pytest.mark.parametrize(("mask", "more", "message"), [
    (None, {"tree": 3, "cache": object()}, "Linear passes cache, tree, which .*'sdpa'"),
    (torch.ones(1, 1, 3, 3, dtype=torch.int64), {},
     r"Linear has a mask of torch\.int64\. Give booleans"),
    ([1], {}, r"Linear has a mask of list\. Give booleans"),
])  # fmt: skip
def test_arguments_that_are_not_known(mask: Any, more: dict[str, Any], message: str) -> None:
    _call(nn.Linear(2, 2), tree=None, sliding_window=5)
    with pytest.raises(UnsupportedError, match=message):
        _call(nn.Linear(2, 2), mask, sliding_window=5, **more)


CHOICES = {
    "attribute": 'config._attn_implementation in ("eager", "sdpa")',
    "variable": "(implementation := config._attn_implementation) == 'sdpa'",
    "turned": '"sdpa" != config._attn_implementation',
    "lines": 'config._attn_implementation not in (\n    "eager",\n    "sdpa",\n)',
    "beside": 'config._attn_implementation == "flash_attention_2" or name in ["sdpa"]',
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("part", ["Layer", "Config"])
def test_a_source_that_chooses_by_name(
    part: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"chooses_{part}_{abs(hash(choice))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\nclass Layer(nn.Linear): pass\nclass Config: pass\n"
        f"def adds_a_bias(config, name):\n    return {choice}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parts = importlib.import_module(name)
    module = parts.Layer(2, 2) if part == "Layer" else nn.Linear(2, 2)
    module.config = parts.Config() if part == "Config" else None
    with pytest.raises(UnsupportedError, match=r"source of (Layer|Linear) treats .*'sdpa'"):
        _call(module)


def test_continuous_batching_refuses_it_by_name() -> None:
    hw.register_attention()
    model = zoo.make("Llama")
    model.set_attn_implementation("headwise")
    with pytest.raises(ValueError, match="Implementation headwise is not supported for continuous"):
        model.generate_batch([[5, 6, 7]], generation_config=transformers.GenerationConfig())


@pytest.mark.parametrize(("name", "argument"), [("Gemma2", "softcap"), ("GptOss", "s_aux")])
def test_what_sdpa_leaves_out(name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sdpa = zoo.make(name), transformers.AttentionInterface._global_mapping["sdpa"]

    def of_an_early_version(*args: Any, softcap: Any = None, **kwargs: Any) -> Any:
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(
        transformers.AttentionInterface._global_mapping, "sdpa", of_an_early_version
    )
    model.config._attn_implementation = "sdpa"
    advice = (
        rf"{name}Attention passes {argument}, which 'sdpa' leaves out\. .*'eager' or 'headwise'"
    )
    with hw.observe(model), pytest.raises(UnsupportedError, match=advice):
        model(torch.tensor([[5, 9, 7]]))


def test_each_command_with_a_model_has_the_option() -> None:
    commands = typer.main.get_command(app).commands
    options = {name: {x.name for x in command.params} for name, command in commands.items()}
    named = {name for name, given in options.items() if given & {"model", "before"}}
    assert len(named) > 8
    assert {name for name, given in options.items() if "attention" in given} == named


class Opened(Exception):
    """The model is to be opened by this implementation."""


def test_the_option_is_handed_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, attn_implementation: str | None, **__: object) -> None:
        raise Opened(attn_implementation)

    monkeypatch.setattr(_inputs, "load", load)
    with pytest.raises(Opened, match="eager"):
        _inputs.open_model("x", None, None, "eager")
