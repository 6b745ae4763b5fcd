"""A model on our kernel is watched in the pass that computes it: its bits are the same."""

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
    return count_queries(monkeypatch, _implementation)


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
    assert {site.kernel for site in watch.sites()} == {IN_THE_CALL}


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


def test_what_is_left_to_torch_is_watched_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the thresholds as they are: all is too small
    model, batch = _model("Llama"), _batch("Llama", "right")
    with torch.no_grad():
        plain = model(**batch)[0]
    outs, watch = _watched(model, batch, Request())
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


def _of_floats(batch: dict[str, Any]) -> dict[str, Any]:
    hidden = ~batch["attention_mask"].bool()[:, None, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return batch | {"attention_mask": mask.expand(-1, 1, hidden.shape[-1], -1)}


BESIDE: dict[str, tuple[Any, Any]] = {
    "autocast": (partial(torch.autocast, "cpu", torch.bfloat16), dict),
    "gradients": (torch.enable_grad, dict),
    "mask of floats": (torch.no_grad, _of_floats),
    "weights": (torch.no_grad, lambda batch: batch | {"output_attentions": True}),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_the_kernel_does_not_compute_at_once_is_watched_beside_the_call(case: str) -> None:
    context, change = BESIDE[case]
    model, batch = _model("Bert"), change(_batch("Bert", "right"))
    with torch.no_grad(), context():
        plain = model(**batch)[0]
        with observe(model) as watch:
            outs = [model(**batch)[0] for _ in range(3)]
    assert all(torch.equal(out, plain) for out in outs)
    assert {site.kernel for site in watch.sites()} == {"headwise"}
    assert (watch.table().count("lse") == 3 * sum(map(len, TEXTS))).all()


@pytest.mark.parametrize(
    "kind", ["t5", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("siglip", "whisper"))]
)
def test_every_bit_of_other_kinds_of_models_is_the_same(kind: str) -> None:
    make, batch, _ = MODELS[kind]
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        plain = [x for x in model(**batch).to_tuple() if isinstance(x, Tensor)]
        with observe(model) as watch:
            for _ in range(3):
                outs = [x for x in model(**batch).to_tuple() if isinstance(x, Tensor)]
                assert all(torch.equal(one, other) for one, other in zip(outs, plain, strict=True))
    kernels = {site.kernel for site in watch.sites()}
    # The pooling layer of SigLIP is torch's own module.
    assert kernels - {"nn.MultiheadAttention, outside its fast path"} == {IN_THE_CALL}
