"""Hugging Face models on our kernel: every architecture, against float64 and against `sdpa`."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import zoo
from architectures import CASES
from test_stacks import MODELS
from test_zoo import PRECISIONS
from torch import Tensor, nn

from headwise.kernels import AttentionProblem
from headwise.models.attention.huggingface import _implementation
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch
from oracles import padded

pytestmark = pytest.mark.usefixtures("at_any_size")

TEXTS = [[5, 9, 7, 3, 11, 8, 4, 6, 12, 17, 2, 21], [4, 6, 13], [10, 3, 3, 12, 9, 20, 7]]
FEW = ("Bert", "Gemma2", "GptOss", "Llama", "Mistral")
THROUGH_THE_INTERFACE = [
    name for name in sorted(zoo.TEXT)
    if name not in zoo._WRITTEN_OUT and not name.startswith("Falcon")
]  # fmt: skip
EACH = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.full)
    for name in THROUGH_THE_INTERFACE
]
# What `sdpa` does not compute: beside the eager function of the model.
ONLY_EAGER = ("Gemma2", "GptOss")


def _batch(model_name: str, side: str) -> dict[str, Any]:
    batch: dict[str, Any] = padded(TEXTS, side)
    if model_name in zoo.COUNT_THEMSELVES or side == "right":
        batch.pop("position_ids", None)
    return batch


def _run(model: nn.Module, batch: dict[str, Tensor], implementation: str) -> Tensor:
    """What the model says of real tokens."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**batch)[0][batch["attention_mask"].bool()].double()


def _error(out: Tensor, exact: Tensor) -> float:
    return float((out - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", EACH)
def test_errors_are_those_of_sdpa(name: str, dtype: torch.dtype, left_to_torch: list[str]) -> None:
    model = zoo.make(name, dtype)
    theirs = "eager" if name in ONLY_EAGER else "sdpa"
    _, in_float64, _ = PRECISIONS["float64"]
    for side in ("right", "left"):
        batch = _batch(name, side)
        with in_float64():
            exact = _run(deepcopy(model).double(), batch, theirs)
        ours, known = _run(model, batch, "headwise"), _run(model, batch, theirs)
        assert _error(ours, exact) <= 2 * _error(known, exact)
    assert not left_to_torch


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_those_of_sdpa(name: str) -> None:
    model, batch = zoo.make(name), _batch(name, "right")
    theirs = "eager" if name in ONLY_EAGER else "sdpa"
    gradients = []
    _, in_float64, _ = PRECISIONS["float64"]
    for implementation, double in ((theirs, True), (theirs, False), ("headwise", False)):
        one = deepcopy(model).double() if double else deepcopy(model)
        one.set_attn_implementation(implementation)
        with in_float64() if double else nullcontext():
            one(**batch)[0][batch["attention_mask"].bool()].square().mean().backward()
        parts = [p.grad.double().flatten() for p in one.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    exact, known, ours = gradients
    assert _error(ours, exact) <= 2 * _error(known, exact)


KINDS = ("t5", "bart", "whisper", "clip", "siglip", "llava", "wav2vec")
WAYS = (("sdpa", torch.float64), ("sdpa", None), ("headwise", None))
IN_BFLOAT16 = ["t5", *(pytest.param(name, marks=pytest.mark.full) for name in KINDS[1:])]


def _outputs(
    model: nn.Module, batch: dict[str, Tensor], implementation: str, dtype: torch.dtype
) -> list[Tensor]:
    """All floating-point outputs of a model that computes in this dtype."""
    model.to(dtype).set_attn_implementation(implementation)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}
    _, in_float64, _ = PRECISIONS["float64"]
    with in_float64() if dtype == torch.float64 else nullcontext():
        outs = model(**inputs).to_tuple()
    return [x for x in outs if isinstance(x, Tensor)]


def _check_other_kind(name: str, dtype: torch.dtype) -> None:
    make, batch, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    outs = []
    for implementation, other in WAYS:
        with torch.no_grad():
            found = _outputs(deepcopy(model), batch, implementation, other or dtype)
        outs.append([x.double() for x in found])
    for exact, known, ours in zip(*outs, strict=True):
        floor = torch.finfo(dtype).eps * exact.norm()
        assert (ours - exact).norm() <= 2 * (known - exact).norm() + floor


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_models(name: str, left_to_torch: list[str]) -> None:
    _check_other_kind(name, torch.float32)
    assert not left_to_torch


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_other_kinds_of_models_in_bfloat16(name: str) -> None:
    _check_other_kind(name, torch.bfloat16)


@pytest.mark.parametrize("name", ["clip", pytest.param("t5", marks=pytest.mark.full)])
def test_gradients_of_other_kinds_of_models(name: str) -> None:
    make, batch, _ = MODELS[name]
    torch.manual_seed(0)
    model, gradients = make().eval(), []
    for implementation, dtype in WAYS:
        one = deepcopy(model)
        outs = _outputs(one, batch, implementation, dtype or torch.float32)
        sum(x.square().mean() for x in outs if x.requires_grad).backward()
        parts = [p.grad.double().flatten() for p in one.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    exact, known, ours = gradients
    assert _error(ours, exact) <= 2 * _error(known, exact)


def test_a_prefix_is_read_from_both_sides(left_to_torch: list[str]) -> None:
    model, batch = CASES["PaliGemmaForConditionalGeneration"].make()
    prefix = 6
    batch["token_type_ids"][:, prefix:] = 1

    def run(implementation: str, changed: int | None = None) -> Tensor:
        model.set_attn_implementation(implementation)
        ids = batch["input_ids"].clone()
        if changed is not None:
            ids[:, changed] = torch.where(ids[:, changed] == 5, 6, 5)
        with torch.no_grad():
            return model(**batch | {"input_ids": ids}).logits

    ours = run("headwise")
    torch.testing.assert_close(ours, run("eager"), rtol=1e-4, atol=1e-6)
    assert not torch.equal(run("headwise", prefix - 1)[:, 0], ours[:, 0])
    assert torch.equal(run("headwise", prefix)[:, :prefix], ours[:, :prefix])
    assert not left_to_torch


def _biases(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a model's attention, whether there was a bias to add."""
    found: list[bool] = []
    problem = _implementation.Call.problem

    def recorded(call: _implementation.Call, *needs: Any) -> AttentionProblem:
        result = problem(call, *needs)
        found.append(result.rule.bias is not None)
        return result

    monkeypatch.setattr(_implementation.Call, "problem", recorded)
    ids = torch.tensor([TEXTS[0]])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(input_ids=ids, decoder_input_ids=ids[:, :5])
    return found


def test_a_bias_of_zeros_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["t5"][0]().eval()
    model.set_attn_implementation("headwise")
    layers = model.config.num_layers, model.config.num_decoder_layers
    found = _biases(model, monkeypatch)
    once = [True] * layers[0] + [True, False] * layers[1]  # T5's cross-attention has no bias
    assert found == 2 * once
