"""QK-clip: heads over the bar come down to it exactly, and nothing else changes by a bit."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.layer import MultiHeadAttention, RoPE, T5Bias
from headwise.models.ownership import find_logit_rows
from headwise.monitor import ClipReport, HeadMonitor, QKClip

STATISTICS = ("max_logit",)
IDS = torch.randint(0, 13, (3, 9), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))


@contextmanager
def _clipped(
    model: nn.Module, bar: float, every: int = 1, reference: Any = None
) -> Iterator[tuple[HeadMonitor, QKClip]]:
    with HeadMonitor(model, every, statistics=STATISTICS) as monitor:
        yield monitor, QKClip(monitor, bar, reference=reference)


def _largest(monitor: HeadMonitor) -> np.ndarray:
    assert monitor.latest is not None
    return monitor.latest.values["max_logit"]


def _layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(3)
    layer = MultiHeadAttention(12, 4, **options)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.mul_(4.0)
    return layer


class _Fused(nn.Module):
    """Queries, keys and values from one matrix, and torch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        with torch.no_grad():
            self.qkv.weight.mul_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 3).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class _ByHand(_Fused):
    """The same with a softmax in plain sight, whose queries and keys nobody captures."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 3).permute(2, 0, 3, 1, 4)
        heads = torch.softmax(q @ k.mT * 0.5, -1) @ v
        return self.out(heads.transpose(1, 2).flatten(2))


class _Torch(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(9.0 * x, 9.0 * x, x, need_weights=False)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "heads of their own": _layer,
    "biases": lambda: _layer(bias=True),
    "grouped": lambda: _layer(n_kv_heads=2),
    "one key head": lambda: _layer(n_kv_heads=1),
    "rotated": lambda: _layer(n_kv_heads=2, head_dim=4, rope=RoPE(4)),
    "softcapped": lambda: _layer(softcap=20.0),
    "a position bias": lambda: _layer(position_bias=T5Bias(4)),
    "bfloat16": lambda: _layer(n_kv_heads=2).bfloat16(),
    "one matrix": _Fused,
    "by hand": _ByHand,
    "torch's": _Torch,
    "torch's of several widths": lambda: _Torch(kdim=12, vdim=12, bias=False),
}

_FEW = ("grouped", "softcapped", "bfloat16", "by hand", "torch's")  # the others in the long run


def _passes(layer: nn.Module) -> tuple[Tensor, Any]:
    """What a layer is called with, and an input to find its rows by."""
    x = X.to(next(layer.parameters()).dtype)
    return x, None if isinstance(layer, MultiHeadAttention) else (x,)


def _uncapped(layer: nn.Module, logits: np.ndarray) -> np.ndarray:
    cap = getattr(getattr(layer, "attention", None), "softcap", None)
    return logits if cap is None else cap * np.arctanh(logits / cap)


@pytest.mark.parametrize(
    "name",
    [name if name in _FEW else pytest.param(name, marks=pytest.mark.full) for name in LAYERS],
)
def test_after_a_clip_the_same_batch_is_at_the_bar(name: str) -> None:
    layer = LAYERS[name]()
    x, reference = _passes(layer)
    with HeadMonitor(layer, 1, statistics=STATISTICS) as monitor:
        layer(x)
        monitor.step()
        before = _uncapped(layer, _largest(monitor))
    bar = float(np.sort(before)[1:3].mean())  # two heads pass it, two do not
    with _clipped(layer, bar, reference=reference) as (monitor, clip):
        layer(x)
        monitor.step()
        report = clip.step()
        layer(x)
        monitor.step()
        after = _uncapped(layer, _largest(monitor))
        again = clip.step()
    half = next(layer.parameters()).dtype == torch.bfloat16
    factors = {clipped.head.head: clipped.factor for clipped in report.heads}
    assert [*factors] == [head for head in range(4) if before[head] > bar] != []
    assert (after <= bar).all()
    assert again.heads == ()
    expected = [before[head] * factors.get(head, 1.0) for head in range(4)]
    # A capped logit loses digits on its way back.
    np.testing.assert_allclose(after, expected, rtol=2e-2 if half else 1e-4)
    for clipped in report.heads:
        assert clipped.max_logit == pytest.approx(before[clipped.head.head])
        assert bar * (0.99 if half else 0.9999) < clipped.max_logit * clipped.factor <= bar


def test_queries_and_keys_take_a_square_root_each() -> None:
    layer = _layer(bias=True)
    old = copy.deepcopy(layer.state_dict())
    with _clipped(layer, 1e-3) as (monitor, clip):
        layer(X)
        monitor.step()
        report = clip.step()
    assert len(report.heads) == 4
    roots = torch.tensor([clipped.factor for clipped in report.heads]).sqrt().repeat_interleave(3)
    for part in "qk":
        for kind, factor in (("weight", roots[:, None]), ("bias", roots)):
            name = f"{part}_proj.{kind}"
            torch.testing.assert_close(layer.state_dict()[name], old.pop(name) * factor)
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in old.items())


def test_shared_keys_take_what_all_of_their_heads_need() -> None:
    layer = _layer(n_kv_heads=2)
    with torch.no_grad():  # of the first group one head passes, of the second both
        layer.q_proj.weight.view(4, 3, 12).mul_(torch.tensor([9.0, 0.1, 9.0, 5.0])[:, None, None])
    q, k = (p.weight.detach().clone() for p in (layer.q_proj, layer.k_proj))
    with _clipped(layer, 5.0) as (monitor, clip):
        layer(X)
        monitor.step()
        factors = {x.head.head: x.factor for x in clip.step().heads}
    assert sorted(factors) == [0, 2, 3]
    g = torch.tensor([factors.get(head, 1.0) for head in range(4)])
    keys = torch.stack([g[:2].max(), g[2:].max()]).sqrt()
    queries = g / keys.repeat_interleave(2)
    torch.testing.assert_close(layer.k_proj.weight, k * keys.repeat_interleave(3)[:, None])
    torch.testing.assert_close(layer.q_proj.weight, q * queries.repeat_interleave(3)[:, None])
    assert torch.equal(layer.k_proj.weight[:3], k[:3])
    assert torch.equal(layer.q_proj.weight[3:6], q[3:6])


def test_while_nothing_passes_no_bit_changes() -> None:
    torch.manual_seed(1)
    plain = MiniGPT(MiniGPTConfig(13, 12, 12, 4, 2, 2))
    clipped = copy.deepcopy(plain)
    random = torch.random.get_rng_state()
    with _clipped(clipped, 100.0) as (monitor, clip):
        assert torch.equal(torch.random.get_rng_state(), random)
        reports = []
        for model in (plain, clipped):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(IDS).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if model is clipped:
                    monitor.step()
                    reports.append(clip.step())
    assert reports == [ClipReport(step, True, ()) for step in (1, 2, 3)]
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, clipped.state_dict()[name]), name


def test_making_a_clip_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(1)
    model = MiniGPT(MiniGPTConfig(13, 12, 12, 4, 2, 2, dropout=0.1))
    model.blocks[0].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    with _clipped(model, 100.0):
        hooks = [len(module._forward_hooks) for module in model.modules()]
        assert hooks == [0] * len(hooks)
    assert [module.training for module in model.modules()] == modes
    assert all(x.grad is None and x.requires_grad for x in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_clip_says_which_steps_it_saw() -> None:
    layer = _layer()
    with _clipped(layer, 1e-3, every=3) as (monitor, clip):
        reports = []
        for _ in range(4):
            layer(X)
            monitor.step()
            reports.append(clip.step())
        assert [report.watched for report in reports] == [True, False, True, False]
        assert [len(report.heads) for report in reports] == [4, 0, 0, 0]
        assert clip.watched_steps == (1, 3)
        assert str(reports[1]) == "step 2: not watched"
        assert str(reports[2]) == "step 3: clipped no head"
        assert str(reports[0]).startswith("step 1: clipped L0.H0 (")
        assert repr(clip) == "<QKClip of MultiHeadAttention: max_logit=0.001, steps=4, watched=2>"


def test_layers_that_share_their_weights_take_the_smallest_factor() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = _layer(), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(3.0 * x)

    model = Twice()
    with _clipped(model, 1.0, reference=(X,)) as (monitor, clip):
        model(X)
        monitor.step()
        before = _largest(monitor)
        report = clip.step()
        model(X)
        monitor.step()
        after = _largest(monitor)
    assert {clipped.head.layer for clipped in report.heads} == {0, 1}
    assert (after[4:] <= 1.0).all()
    np.testing.assert_allclose(before[4:] / before[:4], after[4:] / after[:4], rtol=1e-4)


def test_gains_of_single_heads_are_scaled_behind_a_norm() -> None:
    class Normed(_Fused):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.LayerNorm((4, 3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 3).permute(2, 0, 1, 3, 4)
            q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), k, v))
            heads = F.scaled_dot_product_attention(q, k, v)
            return self.out(heads.transpose(1, 2).flatten(2))

    layer = Normed()
    rows = find_logit_rows(layer, (X,))[""].rows
    assert [(share, part.parameter) for share, part in rows] == [
        ("query", "q_norm.weight"), ("query", "q_norm.bias"),
        ("key", "qkv.weight"), ("key", "qkv.bias"),
    ]  # fmt: skip
    with _clipped(layer, 0.5, reference=[(X,), (X,)]) as (monitor, clip):
        for _ in range(2):
            layer(X)
            monitor.step()
            report = clip.step()
            assert bool(report.heads) == (report.step == 1)


def test_only_watched_layers_are_clipped() -> None:
    torch.manual_seed(1)
    model = MiniGPT(MiniGPTConfig(13, 12, 12, 4, 2, 2))
    before = copy.deepcopy(model.state_dict())
    with HeadMonitor(model, 1, statistics=STATISTICS, layers=[1]) as monitor:
        clip = QKClip(monitor, 1e-6)
        model(IDS)
        monitor.step()
        assert {clipped.head.layer for clipped in clip.step().heads} == {1}
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    assert changed == [f"blocks.1.attention.{part}_proj.weight" for part in "qk"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_exception_scales_all_or_nothing(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(bias=True)
    before = copy.deepcopy(layer.state_dict())
    calls = []
    multiply = Tensor.mul_

    def failing(x: Tensor, factor: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == fails_at:
            multiply(x, factor)
            raise MemoryError("on purpose")
        return multiply(x, factor)

    with _clipped(layer, 1e-3) as (monitor, clip):
        layer(X)
        monitor.step()
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "mul_", failing)
            with pytest.raises(MemoryError, match="on purpose"):
                clip.step()
        assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
        assert len(clip.step().heads) == 4  # a second try
    assert not torch.equal(layer.q_proj.weight, before["q_proj.weight"])


def test_a_compiled_or_wrapped_model_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    layer = _layer()
    model = torch.compile(layer, backend="eager")
    with _clipped(model, 1e-3) as (monitor, clip):
        model(X)
        monitor.step()
        assert len(clip.step().heads) == 4
        model(X)
        monitor.step()
        assert clip.step().heads == ()


def test_it_is_a_callback_after_its_monitor() -> None:
    layer = _layer()
    with _clipped(layer, 1e-3) as (monitor, clip):
        layer(X)
        monitor.step()
        clip.on_step_end(None, None, None)
        clip.on_some_event_of_a_later_version(None, None, None)
        assert clip.watched_steps == (1,)
        with pytest.raises(AttributeError, match="'QKClip' object has no attribute 'steps_seen'"):
            clip.steps_seen  # noqa: B018


def test_it_has_a_name_at_the_door() -> None:
    assert headwise.QKClip is QKClip
