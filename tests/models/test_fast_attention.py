"""Models that call torch's fused attention, on our kernels for as long as a block runs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_name

import headwise as hw
from headwise.attention import _fast_attention as _fast
from headwise.errors import UnsupportedError
from headwise.watch import observe
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import count_queries
from oracles import modules_of, padded

pytestmark = pytest.mark.usefixtures("at_any_size")

TORCHS = F.scaled_dot_product_attention
BATCH = dict(padded([[5, 9, 7, 3, 11, 8, 4, 2, 6, 1], [4, 6, 13]], "right"))


class FusedCaller(nn.Module):
    """A block of a model of one's own."""

    def __init__(self, function: Callable[..., Tensor] | None = None, **how: Any) -> None:
        super().__init__()
        self.proj, self.function, self.how = nn.Linear(12, 36), function, how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.proj(x).unflatten(-1, (3, 4, 3)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attention = F.scaled_dot_product_attention if self.function is None else by_name
        return attention(q, k, v, **self.how).transpose(1, 2).flatten(2)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call that went to `attend`."""
    return count_queries(monkeypatch, _fast)


MASK = torch.rand(2, 1, 10, 10).lt(0.5) | torch.eye(10, dtype=torch.bool)
CALLS: dict[str, dict[str, Any]] = {
    "every key": {},
    "causal": {"is_causal": True},
    "booleans": {"attn_mask": MASK},
    "floats": {"attn_mask": torch.randn(10, 10), "scale": 0.3},
}


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_same_heads_and_gradients(call: str, imported: bool, computed: list[int]) -> None:
    model, x = FusedCaller(by_name if imported else None, **CALLS[call]), torch.randn(2, 10, 12)
    results = []
    for is_fast in (False, True):
        model.zero_grad()
        if is_fast:
            with hw.fast_attention(model):
                out = model(x)
        else:
            out = model(x)
        out.square().sum().backward()
        results.append((out.detach(), model.proj.weight.grad))
    assert computed == [10]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert F.scaled_dot_product_attention is TORCHS
    assert by_name is TORCHS


@pytest.mark.parametrize("name", ["Falcon", "FalconMultiQuery"])
def test_a_model_outside_the_interface(name: str, computed: list[int]) -> None:
    model = zoo.make(name)
    batch = {key: BATCH[key] for key in ("input_ids", "attention_mask")}
    before = modules_of(model)
    with torch.no_grad():
        plain = model(**batch)[0]
        with hw.fast_attention(model):
            fast = model(**batch)[0]
    assert computed == [10, 10]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(fast[real], plain[real], rtol=1e-4, atol=1e-5)
    assert modules_of(model) == before


@pytest.mark.parametrize("kind", ["layer", "encoder"])
def test_layers_of_torch(kind: str, computed: list[int]) -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True)
    model = (layer if kind == "layer" else nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(2, 10, 12)
    with torch.no_grad():
        plain = model(x)
        with hw.fast_attention(model):
            fast = model(x)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    assert computed == [10] * (1 if kind == "layer" else 2)


@pytest.mark.parametrize("how", [{"dropout_p": 0.5}, {"attn_mask": MASK, "is_causal": True}])
def test_what_stays_with_torch(how: dict[str, Any], computed: list[int]) -> None:
    model, x = FusedCaller(**how), torch.randn(2, 10, 12)
    outs = []
    for is_fast in (False, True):
        torch.manual_seed(3)
        if is_fast:
            with hw.fast_attention(model):
                outs.append(model(x))
        else:
            outs.append(model(x))
    assert torch.equal(*outs)
    assert not computed


def test_other_models_and_threads_do_not_change(computed: list[int]) -> None:
    model, other, x = FusedCaller(), FusedCaller(), torch.randn(2, 10, 12)
    plain = other(x)
    with hw.fast_attention(model):
        model(x)
        computed.clear()
        assert torch.equal(other(x), plain)
        outs: list[Tensor] = []
        thread = threading.Thread(target=lambda: outs.append(other(x)))
        thread.start()
        thread.join()
    assert torch.equal(outs[0], plain)
    assert not computed


def test_blocks_may_be_nested_and_end_by_an_exception(computed: list[int]) -> None:
    one, two, x = FusedCaller(), FusedCaller(), torch.randn(2, 10, 12)
    with hw.fast_attention(one):
        with pytest.raises(TypeError), hw.fast_attention(two):
            two(x) + two(None)
        one(x)
        assert len(computed) == 2
    assert F.scaled_dot_product_attention is TORCHS
    assert not _fast._running.uses


def test_recomputed_layers_are_computed_alike(computed: list[int]) -> None:
    inner, x = FusedCaller(), torch.randn(2, 10, 12, requires_grad=True)

    class _Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    model = _Checkpointed()
    with hw.fast_attention(model):
        model(x).square().sum().backward()
    assert computed == [10, 10]


@pytest.mark.parametrize("watch_first", [False, True])
def test_it_can_be_watched(watch_first: bool, computed: list[int]) -> None:
    model, x = FusedCaller(is_causal=True), torch.randn(2, 10, 12)
    with torch.no_grad():
        with hw.fast_attention(model):
            fast = model(x)
        if watch_first:
            with observe(model) as watch, hw.fast_attention(model):
                outs = [model(x) for _ in range(3)]
        else:
            with hw.fast_attention(model), observe(model) as watch:
                outs = [model(x) for _ in range(3)]
    assert len(computed) == 4
    assert all(torch.equal(out, fast) for out in outs)
    assert (watch.table().count("lse") == 3 * 2 * 10).all()


def test_a_model_without_such_calls_is_refused() -> None:
    model = zoo.make("GPTNeoForCausalLM")
    with (
        pytest.raises(UnsupportedError, match=r"GPTNeoForCausalLM ran and never called"),
        torch.no_grad(),
        hw.fast_attention(model),
    ):
        model(BATCH["input_ids"])
