"""What the attention implementation refuses, by name and value."""

from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

import headwise as hw
from command import headwise
from headwise.errors import ArgumentError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.models.attention.huggingface import attention_forward


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    zoo.make("Llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_an_unknown_implementation(llama: Path) -> None:
    with pytest.raises(ArgumentError, match=r"attn_implementation='no such' is not known"):
        hw.load(llama, attn_implementation="no such")


def test_a_kernel_of_the_hub_is_unknown(llama: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'kernels-community/flash-attn' is not known"):
        hw.load(llama, attn_implementation="kernels-community/flash-attn")


def test_an_implementation_that_the_model_cannot_use(tmp_path: Path) -> None:
    zoo.make("Gemma2").save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"Gemma2ForCausalLM cannot use .*'sdpa'"):
        hw.load(tmp_path, attn_implementation="sdpa")


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "BloomForCausalLM"])
def test_a_model_outside_the_interface(name: str, tmp_path: Path) -> None:
    zoo.make(name).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"{name} does not call .*fast_attention"):
        hw.load(tmp_path, attn_implementation="headwise")


def test_a_layer_of_ours_knows_no_other(tmp_path: Path) -> None:
    hw.save(MultiHeadAttention(12, 3), tmp_path / "layer")
    assert isinstance(hw.load(tmp_path / "layer", attn_implementation="headwise"), nn.Module)
    with pytest.raises(ArgumentError, match=r"MultiHeadAttention computes .* not by 'eager'"):
        hw.load(tmp_path / "layer", attn_implementation="eager")


def test_sinks_of_another_form() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=r"Linear has sinks of an unsupported form"):
        attention_forward(nn.Linear(2, 2), q, q, q, None, sinks=torch.zeros(1))


def test_the_option_names_the_three(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a", "utf-8")
    done = headwise("observe", llama, "--text", text, "--attention", "flash")
    assert done.code == 2
    assert "'flash' is not one of" in done.err
