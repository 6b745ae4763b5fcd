"""A model on our kernel is watched in the pass that computes it: its bits are the same."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from test_stacks import MODELS
from torch import Tensor, nn

from headwise.models.attention.huggingface import _implementation
from headwise.watch import Request, Watch, observe
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import count_queries
from oracles import modules_of, padded

pytestmark = pytest.mark.usefixtures("at_any_size")

TEXTS = [[5, 9, 7, 3, 11, 8, 4, 6, 12, 17, 2, 21], [4, 6, 13]]
IN_THE_CALL = f"{zoo.KERNEL}, in the call itself"
FEW = [
    "Bert", "Llama",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("Gemma2", "GptOss", "Mistral")),
]  # fmt: skip
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
    return count_queries(monkeypatch, _implementation, "attend_by_rule")


def _model(name: str) -> nn.Module:
    model = zoo.make(name)
    model.set_attn_implementation("headwise")
    return model


def _batch(name: str, side: str) -> dict[str, Any]:
    batch: dict[str, Any] = padded(TEXTS, side)
    if name in zoo.COUNT_THEMSELVES or side == "right":
        batch.pop("position_ids", None)
    return batch


def _watched(model: nn.Module, batch: dict[str, Any], request: Request) -> tuple[list[Any], Watch]:
    with torch.no_grad(), observe(model, request) as watch:
        outs = [model(**batch)[0] for _ in range(3)]
    return outs, watch


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", FEW)
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
@pytest.mark.parametrize(
    "name", ["t5", "clip", *(pytest.param(name, marks=pytest.mark.full) for name in ("whisper",))]
)
def test_every_bit_of_other_kinds_of_models_is_the_same(name: str, received: bool) -> None:
    make, batch, queries = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        plain = _tensors(model(**batch))
        with observe(model, Request(received=received)) as watch:
            for _ in range(3):
                for out, known in zip(_tensors(model(**batch)), plain, strict=True):
                    assert torch.equal(out, known)
    sites = watch.sites()
    assert {site.stack for site in sites} == set(queries)
    if not received:
        assert {site.kernel for site in sites} == {IN_THE_CALL}


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in outputs.to_tuple() if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", FEW)
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
    assert (watch.table().count("lse") == sum(map(len, TEXTS)) + 2 * 5).all()


CAUSAL = torch.zeros(2, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
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
