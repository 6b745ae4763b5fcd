"""Hugging Face models on our kernel: every architecture, against float64 and against `sdpa`."""

import inspect
import pkgutil
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from architectures import CASES, SAMPLE
from architectures.cases import text
from architectures.decoders import CLASSES, TOKENS, VOCABULARY, make_decoder
from test_stacks import QUERIES, make_towers
from torch import Tensor, nn
from transformers import DynamicCache

import headwise as hw
from double import Double
from headwise.attention import set_attention
from headwise.attention.huggingface import _call, _transformers
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.kernels import AttentionProblem
from headwise.models import cache_argument
from headwise.watch import Request, Watch, observe
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import count_queries
from on_our_kernel import left_to_torch as left_to_torch
from oracles import modules_of, padded
from tiers import tiers

pytestmark = pytest.mark.usefixtures("at_any_size")

TEXTS = [[5, 9, 7, 3, 11, 8, 4, 6, 12, 17, 2, 21], [4, 6, 13], [10, 3, 3, 12, 9, 20, 7]]
FEW = ("Bert", "Gemma2", "GptOss", "Llama", "Mistral")
NOT_THROUGH_THE_INTERFACE = [
    name for name in zoo.TEXT if name in zoo._WRITTEN_OUT or name.startswith("Falcon")
]
EACH = zoo.each(FEW, NOT_THROUGH_THE_INTERFACE)
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
    for side in ("right", "left"):
        batch = _batch(name, side)
        with Double():
            exact = _run(deepcopy(model).double(), batch, theirs)
        ours, known = _run(model, batch, "headwise"), _run(model, batch, theirs)
        assert _error(ours, exact) <= 2 * _error(known, exact)
    assert not left_to_torch


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_those_of_sdpa(name: str) -> None:
    model, batch = zoo.make(name), _batch(name, "right")
    theirs = "eager" if name in ONLY_EAGER else "sdpa"
    gradients = []
    for implementation, double in ((theirs, True), (theirs, False), ("headwise", False)):
        one = deepcopy(model).double() if double else deepcopy(model)
        one.set_attn_implementation(implementation)
        with Double() if double else nullcontext():
            one(**batch)[0][batch["attention_mask"].bool()].square().mean().backward()
        parts = [p.grad.double().flatten() for p in one.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    exact, known, ours = gradients
    assert _error(ours, exact) <= 2 * _error(known, exact)


KINDS = tuple(QUERIES)
WAYS = (("sdpa", torch.float64), ("sdpa", None), ("headwise", None))


def _outputs(
    model: nn.Module, batch: dict[str, Tensor], implementation: str, dtype: torch.dtype
) -> list[Tensor]:
    """All floating-point outputs of a model that computes in this dtype."""
    model.to(dtype).set_attn_implementation(implementation)
    inputs = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}
    with Double() if dtype == torch.float64 else nullcontext():
        outs = model(**inputs).to_tuple()
    return [x for x in outs if isinstance(x, Tensor)]


def _check_other_kind(name: str, dtype: torch.dtype) -> None:
    model, batch = make_towers(name)
    model, outs = model.to(dtype), []
    for implementation, other in WAYS:
        with torch.no_grad():
            found = _outputs(deepcopy(model), batch, implementation, other or dtype)
        outs.append([x.double() for x in found])
    # The numbers of all outputs together, each relative to the size of its output: of the four
    # logits of two texts and two images alone, torch's rounding may be small by chance.
    sizes = [x.square().mean().sqrt() for x in outs[0]]
    exact, known, ours = (
        torch.cat([(x / size).flatten() for x, size in zip(each, sizes, strict=True)])
        for each in outs
    )
    assert _error(ours, exact) <= 2 * _error(known, exact) + torch.finfo(dtype).eps


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_models(name: str, left_to_torch: list[str]) -> None:
    _check_other_kind(name, torch.float32)
    assert not left_to_torch


@pytest.mark.parametrize("name", tiers(KINDS[:1], KINDS))
def test_other_kinds_of_models_in_bfloat16(name: str) -> None:
    _check_other_kind(name, torch.bfloat16)


@pytest.mark.parametrize("name", tiers(["CLIPModel"], ["T5ForConditionalGeneration"]))
def test_gradients_of_other_kinds_of_models(name: str) -> None:
    (model, batch), gradients = make_towers(name), []
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
    problem = _call.Call.problem

    def recorded(call: _call.Call, *needs: Any) -> AttentionProblem:
        result = problem(call, *needs)
        found.append(result.rule.bias is not None)
        return result

    monkeypatch.setattr(_call.Call, "problem", recorded)
    ids = torch.tensor([TEXTS[0]])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(input_ids=ids, decoder_input_ids=ids[:, :5])
    return found


def test_a_bias_of_zeros_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make_towers("T5ForConditionalGeneration")
    model.set_attn_implementation("headwise")
    layers = model.config.num_layers, model.config.num_decoder_layers
    found = _biases(model, monkeypatch)
    once = [True] * layers[0] + [True, False] * layers[1]  # T5's cross-attention has no bias
    assert found == 2 * once


# A model on our kernel is watched in the pass that computes it: its bits are the same.


IN_THE_CALL = f"{zoo.KERNEL}, in the call itself"
REQUESTS = {
    "default": Request(),
    "received": Request(received=True),
    "all": Request(
        statistics=(*Request().statistics, "participation", "output_norm"),
        received=True, maps=True,
    ),
}  # fmt: skip


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call that the implementation computed itself."""
    return count_queries(monkeypatch, _call, "attend_by_rule")


def _model(name: str) -> nn.Module:
    model = zoo.make(name)
    model.set_attn_implementation("headwise")
    return model


def _watched(model: nn.Module, batch: dict[str, Any], request: Request) -> tuple[list[Any], Watch]:
    with torch.no_grad(), observe(model, request) as watch:
        outs = [model(**batch)[0] for _ in range(3)]
    return outs, watch


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", tiers(["Bert", "Llama"], ["Gemma2", "GptOss", "Mistral"]))
def test_every_bit_is_the_same(
    name: str, side: str, request_name: str, computed: list[int]
) -> None:
    model, batch = _model(name), _batch(name, side)
    before = modules_of(model)
    with torch.no_grad():
        plain = model(**batch)[0]
    computed.clear()
    outs, watch = _watched(model, batch, REQUESTS[request_name])
    assert len(computed) == 2  # the first call of each layer, which is compared with our own
    for out in outs:
        assert torch.equal(out, plain)
    assert modules_of(model) == before
    assert {site.kernel for site in watch.sites() if site.kernel} == {IN_THE_CALL}


@pytest.mark.parametrize("received", [False, True], ids=["default", "received"])
@pytest.mark.parametrize("name", tiers(["T5ForConditionalGeneration", "CLIPModel"], KINDS))
def test_every_bit_of_other_kinds_of_models_is_the_same(name: str, received: bool) -> None:
    model, batch = make_towers(name)
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        plain = _tensors(model(**batch))
        with observe(model, Request(received=received)) as watch:
            for _ in range(3):
                for out, known in zip(_tensors(model(**batch)), plain, strict=True):
                    assert torch.equal(out, known)
    sites = watch.sites()
    assert {site.stack for site in sites} == set(QUERIES[name])
    if not received:
        through = [site for site in sites if site.watched == "the attention interface"]
        assert {site.kernel for site in through} == {IN_THE_CALL}


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in outputs.to_tuple() if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", tiers(["Bert", "Llama"], ["Gemma2", "GptOss", "Mistral"]))
def test_statistics_are_those_of_eager_attention(name: str) -> None:
    model, batch = _model(name), _batch(name, "right")
    _, ours = _watched(model, batch, REQUESTS["received"])
    model.set_attn_implementation("eager")
    _, known = _watched(model, batch, REQUESTS["received"])
    for statistic in known.table().statistics:
        np.testing.assert_array_equal(ours.table().count(statistic), known.table().count(statistic))
        np.testing.assert_allclose(
            ours.table().mean(statistic), known.table().mean(statistic), rtol=1e-3, atol=1e-4
        )
    np.testing.assert_allclose(ours.received("L1.H2"), known.received("L1.H2"), atol=1e-4)


@pytest.mark.parametrize("request_name", ["default", "received"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_gives_the_same_tokens_and_scores(cache: str, request_name: str) -> None:
    model = _model("Llama")
    prompt = {k: x for k, x in padded(TEXTS, "left").items() if k != "position_ids"}
    how: dict[str, Any] = {
        "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_scores": True,
        "return_dict_in_generate": True, "cache_implementation": cache, "disable_compile": True,
    }  # fmt: skip
    plain = model.generate(**prompt, **how)
    with observe(model, REQUESTS[request_name]) as watch:
        watched = model.generate(**prompt, **how)
    assert torch.equal(plain.sequences, watched.sequences)
    for one, other in zip(plain.scores, watched.scores, strict=True):
        assert torch.equal(one, other)
    assert (watch.table().count("lse") == sum(map(len, TEXTS)) + 3 * 5).all()


CAUSAL = torch.zeros(3, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
SHORT = {"input_ids": torch.tensor([[5, 9, 7, 3, 11, 8, 4, 6]]), "attention_mask": None}
# What the call itself does not compute: changes of the batch, the request and the context.
BESIDE_THE_CALL: dict[str, tuple[dict[str, Any], Request, Any]] = {
    "autocast": ({}, Request(), partial(torch.autocast, "cpu", torch.bfloat16)),
    "float mask": ({"attention_mask": CAUSAL}, Request(), nullcontext),
    "gradients": ({}, Request(), torch.enable_grad),
    "output_attentions": ({"output_attentions": True}, Request(), nullcontext),
    "received by 8 queries": (SHORT, Request(received=True), nullcontext),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE_THE_CALL)
def test_what_is_computed_beside_the_call_is_the_same(case: str) -> None:
    more, request, context = BESIDE_THE_CALL[case]
    _check_beside_the_call(_batch("Llama", "right") | more, request, context())


def test_what_is_left_to_torch_is_watched_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the thresholds as they are: all is too small
    _check_beside_the_call(_batch("Llama", "right"), Request(), nullcontext())


def _check_beside_the_call(
    batch: dict[str, Any], request: Request, context: AbstractContextManager[Any]
) -> None:
    model = _model("Llama")
    with torch.no_grad(), context:
        plain = model(**batch)[0]
        with observe(model, request) as watch:
            outs = [model(**batch)[0] for _ in range(3)]
    assert all(torch.equal(out, plain) for out in outs)
    assert {site.kernel for site in watch.sites()} == {"headwise"}


def test_gradients_are_the_same() -> None:
    gradients = []
    for is_watched in (False, True):
        model, batch = _model("Llama").train(), _batch("Llama", "right")
        if is_watched:
            with observe(model) as watch:
                model(**batch)[0].square().mean().backward()
            assert (watch.table().count("lse") == sum(map(len, TEXTS))).all()
        else:
            model(**batch)[0].square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# Our kernel under its name: what `eager` gives, and causal where `eager` is, or a refusal.


_PREFIX = TOKENS // 2
# Sparse layers, compressed keys, sinks of queries, shared keys, masks by name, and a plain one.
_FEW = ("deepseek_v32", "deepseek_v4", "gemma4_text", "glm5_next_text", "inkling2_text", "llama")


def _floats(output: Any) -> list[Tensor]:
    """All tensors of floats in the output of a model."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if hasattr(output, "values") else output
    is_nested = isinstance(output, tuple | list) or hasattr(output, "values")
    return [x for part in parts for x in _floats(part)] if is_nested else []


@torch.no_grad()
def _floats_of(model: nn.Module, implementation: str, batch: dict[str, Any]) -> list[Tensor]:
    set_attention(model, implementation)
    torch.manual_seed(0)
    return _floats(model(**batch))


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    gap = (ours - theirs).nan_to_num().abs().max() if ours.numel() else torch.zeros(())
    return float(gap / theirs.nan_to_num().abs().max().clamp(min=1e-9)) if gap else 0.0


@torch.no_grad()
def _in_pieces(model: nn.Module, implementation: str, ids: Tensor) -> Tensor:
    """The logits of a text that is read over a cache: piece by piece, then token by token."""
    set_attention(model, implementation)
    cache = {str(cache_argument(model)): DynamicCache(config=model.config)}
    pieces = ids.split([_PREFIX, TOKENS - _PREFIX - 2, 1, 1], 1)
    return torch.cat([model(piece, **cache)[0] for piece in pieces], 1)


def _wrong(model: nn.Module, *, own_cache: bool = False) -> dict[str, float]:
    """What is not as under `eager` in a decoder of text, and by how much.

    Args:
        own_cache: Whether the model may need a cache of its own kind.
    """
    ids = torch.randint(3, VOCABULARY, (2, TOKENS))
    padded = torch.ones_like(ids)
    padded[1, :5] = 0
    # To keys that the past does not see, which would change nothing if they were hidden.
    other = torch.cat([ids[:, :_PREFIX], ids[:, _PREFIX:].flip(1)], 1)
    batches: dict[str, dict[str, Any]] = {
        "whole": {"input_ids": ids}, "other future": {"input_ids": other},
        "padded": {"input_ids": ids, "attention_mask": padded},
    }  # fmt: skip
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        batches["last"] = {"input_ids": ids, "logits_to_keep": 3}
    eager, ours = (
        {name: _floats_of(model, by, batch)[0] for name, batch in batches.items()}
        for by in ("eager", "headwise")
    )
    real = padded.bool()
    eager["padded"], ours["padded"] = eager["padded"][real], ours["padded"][real]
    gaps = {name: _gap(ours[name], eager[name]) for name in batches}
    moved, moved_eager = (
        _gap(x["other future"][:, :_PREFIX], x["whole"][:, :_PREFIX]) for x in (ours, eager)
    )
    gaps["the future moves the past"] = moved if moved_eager < 1e-6 else 0.0
    if cache_argument(model) and getattr(model.config, "is_decoder", True):
        try:
            in_pieces = _in_pieces(model, "eager", ids)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            assert own_cache  # the model does not take a cache that was made for any decoder
        else:
            gaps["in pieces"] = _gap(_in_pieces(model, "headwise", ids), in_pieces)
    return {name: gap for name, gap in gaps.items() if not gap <= 1e-5}


@pytest.mark.parametrize("model_type", _FEW)
def test_a_decoder_is_as_under_eager(model_type: str) -> None:
    model = make_decoder(model_type)
    assert model is not None
    assert _wrong(model) == {}


@pytest.mark.full
@pytest.mark.zoo
def test_every_decoder_is_as_under_eager_or_refused() -> None:
    wrong, refused, n_right = {}, {}, 0
    for model_type in sorted(CLASSES):
        model = make_decoder(model_type)
        if model is None:
            continue
        try:
            _floats_of(model, "eager", {"input_ids": torch.full((1, TOKENS), 5)})
        except HeadwiseError:  # does not call its attention through the interface
            with pytest.raises(HeadwiseError):
                set_attention(model, "headwise")
            continue
        except (RuntimeError, ValueError):  # does not run at these sizes, or needs more inputs
            continue
        try:
            gaps = _wrong(model, own_cache=True)
        except HeadwiseError as error:
            refused[model_type] = str(error)
            continue
        wrong |= {model_type: gaps} if gaps else {}
        n_right += not gaps
    assert wrong == {}
    assert refused.keys() == {"minimax_m3_vl_text"}
    assert n_right >= 110


@pytest.mark.parametrize("name", tiers(["AltCLIPModel", "SplinterModel"], SAMPLE, CASES))
def test_every_architecture_is_as_under_eager_or_refused(name: str) -> None:
    model, batch = CASES[name].make()
    if CASES[name].inputs is text:
        batch = {"input_ids": torch.randint(5, 23, (2, 37))}
    try:
        theirs = _floats_of(model, "eager", batch)
    except HeadwiseError:  # does not call its attention through the interface
        with pytest.raises(HeadwiseError):
            set_attention(model, "headwise")
        return
    ours = _floats_of(model, "headwise", batch)
    assert len(ours) == len(theirs) > 0
    assert max(map(_gap, ours, theirs)) <= 1e-5


def test_a_layer_that_selects_blocks_is_refused() -> None:
    model = make_decoder("minimax_m3_vl_text")
    assert model is not None
    with pytest.raises(UnsupportedError, match=r"MiniMaxM3VLAttention passes block_indices.*sdpa"):
        _floats_of(model, "headwise", {"input_ids": torch.full((1, 5), 7)})


@pytest.mark.full
def test_every_model_that_chooses_by_name_is_known() -> None:
    found = set()
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = f"{transformers.models.__path__[0]}/{package.name}"
        try:
            with open(f"{folder}/modeling_{package.name}.py", encoding="utf-8") as file:
                found |= {package.name} if _transformers._CHOICE.search(file.read()) else set()
        except FileNotFoundError:  # tokenizers alone
            continue
    assert len(found) > 5
    assert found - {"falcon"} <= _transformers.KNOWN_CHOICES.keys()  # Falcon calls no interface


@pytest.mark.parametrize("implementation", ["eager", "headwise"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "inkling2_text"])
def test_a_watch_sees_what_is_selected(model_type: str, implementation: str) -> None:
    model, ids = make_decoder(model_type), torch.randint(3, VOCABULARY, (1, TOKENS))
    assert model is not None
    set_attention(model, "eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0][0]
    set_attention(model, implementation)
    with torch.no_grad(), hw.observe(model, layers=[0]) as watch:
        model(ids, attention_mask=torch.ones_like(ids))
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)[:, 1:].mean(-1)
    ours = torch.tensor(watch.table().mean("entropy"), dtype=torch.float32)
    torch.testing.assert_close(ours, entropy, rtol=1e-4, atol=1e-5)
