"""What a monitor and its QK-clip cannot do is refused by name, before a weight has changed."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

from headwise.errors import ArgumentError, HeadwiseError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.monitor import Above, Below, HeadMonitor, QKClip

WIDE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def _monitor(model: nn.Module | None = None, **options: Any) -> HeadMonitor:
    return HeadMonitor(model or MultiHeadAttention(8, 2), 1, **options)


def _closed() -> HeadMonitor:
    monitor = _monitor()
    monitor.close()
    return monitor


def _resume(steps: Any) -> None:
    with _monitor() as monitor:
        try:
            monitor.resume(steps)
        finally:
            assert monitor.steps == 0


def _step(
    model: nn.Module | None = None, training: bool = True, learns: bool = True, **options: Any
) -> None:
    """A step of a monitor after a pass of its model."""
    model = model or MultiHeadAttention(8, 2)
    try:
        with _monitor(model, **options) as monitor, torch.set_grad_enabled(learns):
            model.train(training)(WIDE)
            monitor.step()
    finally:
        assert not model._forward_pre_hooks


def _clip(model: nn.Module, monitored: bool = True, steps: int = 1) -> None:
    """Steps of a clip, after one of its monitor or none."""
    with _monitor(model) as monitor:
        clip = QKClip(monitor)
        model(WIDE)
        if monitored:
            monitor.step()
        for _ in range(steps):
            clip.step()
            assert "watched=1>" in repr(clip)


def _clip_of_a_closed_monitor() -> None:
    with _monitor() as monitor:
        clip = QKClip(monitor)
    clip.step()


MONITORS: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every=0"),
    ({"every": 1.5}, r"every=1\.5"),
    ({"layers": 3}, "layers=3"),
    ({"statistics": []}, r"statistics=\[\]. Give a list of names"),
    ({"statistics": "entropy"}, "statistics='entropy'. Give a list of names"),
    ({"statistics": ["entropie"]}, "'entropie'.*Choose from entropy"),
    ({"statistics": ["first"] * 2}, "'first' is requested twice"),
    ({"rules": ["entropy < 0.1"]}, r"rules=\['entropy < 0.1'\].*Above\(...\) and Below"),
    ({"rules": Above("entropy", 1.0)}, r"rules=Above\(statistic='entropy'"),
    ({"rules": [Above("sink", 0.5)]}, r"'sink', which is not watched.*'entropy', 'max_logit'"),
    ({"log": "runs"}, "log='runs'.*SummaryWriter, or a function"),
    ({"on_alarm": "print"}, "on_alarm='print'"),
]
NOTHING_CAPTURED = "HeadMonitor: no attention was captured in step 1 of "
REFUSED: list[tuple[Callable[[], object], type[HeadwiseError], str]] = [
    *((partial(HeadMonitor, MultiHeadAttention(4, 2), **how), ArgumentError, message)
      for how, message in MONITORS),
    (lambda: Above("entropie", 1), ArgumentError,
     "Above: no statistic 'entropie'.*Choose from entropy"),
    (lambda: Below("entropy", 1, 0), ArgumentError, "Below: patience is 0"),
    (lambda: Below("entropy", float("nan")), ArgumentError, "Below: threshold is nan"),
    (lambda: _closed().step(), ArgumentError, r"HeadMonitor\.step: the monitor is closed"),
    (lambda: _closed().resume(3), ArgumentError, r"HeadMonitor\.resume: the monitor is closed"),
    *((partial(_resume, steps), ArgumentError, rf"resume: steps={steps}\. Give a whole number, 0")
      for steps in (-1, 2.0, True)),
    (lambda: _step(training=False), UnsupportedError, NOTHING_CAPTURED + "MultiHead"),
    (lambda: _step(learns=False), UnsupportedError, NOTHING_CAPTURED + "MultiHead"),
    (lambda: _step(nn.Linear(8, 8)), UnsupportedError, NOTHING_CAPTURED + "Linear"),
    (lambda: _monitor().step(), UnsupportedError, NOTHING_CAPTURED + "MultiHead"),
    (lambda: _step(layers=[0, 7]), ArgumentError, r"layers \[7\] were not captured in step 1.* 0"),
    *((lambda bar=bar: QKClip(_monitor(), bar), ArgumentError,
       rf"QKClip: max_logit={bar!r}\. Give a number above 0")
      for bar in (0, float("nan"), float("inf"), True, "100")),
    (lambda: QKClip("m"), ArgumentError, r"QKClip: monitor is a str\. Give a"),
    (lambda: QKClip(_monitor(statistics=["first"])), ArgumentError,
     r"watches first, not max_logit.*\('first', 'max_logit'"),
    (lambda: QKClip(_closed()), ArgumentError, "QKClip: the monitor is closed"),
    (lambda: QKClip(_monitor(), reference=[]), ArgumentError, "QKClip: reference holds no batch"),
    (lambda: QKClip(_monitor(), reference="a text"), ArgumentError,
     "QKClip: reference holds the text 'a text'"),
    (_clip_of_a_closed_monitor, ArgumentError, r"QKClip\.step: the monitor is closed"),
    (lambda: _clip(MultiHeadAttention(8, 2), monitored=False), ArgumentError,
     r"QKClip\.step: the monitor is still at step 0"),
    (lambda: _clip(MultiHeadAttention(8, 2), steps=2), ArgumentError, "still at step 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_what_cannot_be_monitored_or_clipped(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


# What QK-clip refuses in a model.


class SeparateProjections(nn.Module):
    """Two heads whose queries and keys the test makes of those of one matrix."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).view(2, 5, 2, 4).transpose(1, 2) for p in (self.q, self.k))
        return F.scaled_dot_product_attention(*self.change(q, k), k)


def _of(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> nn.Module:
    return SeparateProjections(change)


def _with_a_shared_norm() -> nn.Module:
    model = SeparateProjections(lambda q, k: (model.norm(q), k))
    return model


def _with_a_shifted_gain() -> nn.Module:
    class ShiftedNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias)

    norm = ShiftedNorm((2, 4))
    model = SeparateProjections(lambda q, k: (norm(q.transpose(1, 2)).transpose(1, 2), k))
    model.norm = norm
    return model


def _with_borrowed_keys() -> nn.Module:
    class Lender(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k)

    lender = Lender()
    model = SeparateProjections(lambda q, k: (q + 0.0 * lender(q, k), k))
    model.lender = lender
    return model


def _clamped() -> nn.Module:
    model = SeparateProjections(lambda q, k: (q.clamp(-8, 8), k))
    model.config = SimpleNamespace(attn_config=SimpleNamespace(clip_qkv=8.0))
    return model


def _tied() -> nn.Module:
    layer = MultiHeadAttention(8, 2)
    layer.k_proj.weight = layer.q_proj.weight
    return layer


def _frozen() -> nn.Module:
    layer = MultiHeadAttention(8, 2)
    layer.k_proj.weight.requires_grad_(False)
    return layer


def _adapted() -> nn.Module:
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"])
    return peft.get_peft_model(zoo.make("Llama").train(), config)


class ByHand(SeparateProjections):
    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).view(2, 5, 2, 4).transpose(1, 2) for p in (self.q, self.k))
        return torch.softmax(q @ k.mT + torch.arange(5.0), -1) @ k


MIXED = r"the heads of .* share the weights of q \(Linear\), .* scale their queries"
UNSCALED = "scaling the queries and keys of head 0 of .* does not scale its logits"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in peft
@pytest.mark.parametrize(("make", "message"), [
    (lambda: _of(lambda q, k: (q + q.flip(1), k)), MIXED),
    (lambda: _of(lambda q, k: (F.normalize(q, dim=-1), k)), UNSCALED),
    (lambda: _of(lambda q, k: (q + 1.0, k)), UNSCALED),
    (lambda: MultiHeadAttention(8, 2, qk_norm=True), r"q_norm \(HeadNorm\).*gain of a norm over"),
    (_with_a_shared_norm, r"of norm \(LayerNorm\).*gain of a norm over all"),
    (_with_a_shifted_gain, UNSCALED),
    (_with_borrowed_keys, UNSCALED),
    (_clamped, r"SeparateProjections clamps .* at clip_qkv=8\.0"),
    (_tied, r"is tied to q_proj\.weight and k_proj\.weight"),
    (_frozen, r"k_proj\.weight, .* attention, is frozen"),
    (_adapted, r"[qk]_proj\.base_layer\.weight, .*, is frozen"),
    (lambda: ByHand(lambda q, k: (q, k)), r"largest logit of .* is unknown.*position bias"),
    (lambda: nn.Linear(8, 8), "QKClip: no attention was captured in Linear"),
])  # fmt: skip
def test_heads_that_weights_cannot_scale_alone_are_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    batch = {"input_ids": torch.tensor([[5, 9, 7]])} if make is _adapted else (WIDE,)
    with _monitor(model) as monitor, pytest.raises(UnsupportedError, match=message):
        QKClip(monitor, reference=batch)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_queries_take_the_whole_factor_of_keys_that_heads_mix() -> None:
    with _monitor(_of(lambda q, k: (q, k + k.flip(1)))) as monitor:
        QKClip(monitor, reference=(WIDE,))


class SharedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MultiHeadAttention(8, 2), MultiHeadAttention(8, 2)])

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


def _spoil(value: float, model: Any) -> None:
    model.layers[0].q_proj.weight.data[5] = value


def _replace(model: Any) -> None:
    for name in ("k_proj", "v_proj"):
        setattr(model.layers[0], name, nn.Linear(8, 4, bias=False))


@pytest.mark.parametrize(("depth", "change", "message"), [
    (2, partial(_spoil, float("nan")), r"of L0\.H1 \(layers\.0\.attention\) is nan\. Nothing was"),
    (2, partial(_spoil, float("inf")), r"of L0\.H1 \(layers\.0\.attention\) is (nan|inf)\. Noth"),
    (1, lambda model: None, r"layers\.1\.attention has 2 heads, where none"),
    (2, _replace, r"k_proj\.weight has shape \(4, 8\), expected \(8, 1\)"),
])  # fmt: skip
def test_what_a_step_cannot_scale_is_refused_before_any_weight_changes(
    depth: int, change: Callable[[nn.Module], object], message: str
) -> None:
    model = SharedTwice()
    with _monitor(model) as monitor:
        clip = QKClip(monitor, 1e-6, reference={"x": WIDE, "depth": depth})
        change(model)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        model(WIDE)
        monitor.step()
        with pytest.raises(UnsupportedError, match=message):
            clip.step()
        assert "watched=0>" in repr(clip)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True)
