"""What a monitor cannot do is refused by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.monitor import Above, Below, HeadMonitor, QKClip

X = torch.zeros(1, 3, 4)


def _layer() -> MultiHeadAttention:
    return MultiHeadAttention(4, 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"every": 0}, "HeadMonitor: every=0"),
        ({"every": 1.5}, r"HeadMonitor: every=1\.5"),
        ({"layers": 3}, "HeadMonitor: layers=3"),
        ({"statistics": []}, r"statistics=\[\]. Give a list of names"),
        ({"statistics": "entropy"}, "statistics='entropy'. Give a list of names"),
        ({"rules": ["entropy < 0.1"]}, r"rules=\['entropy < 0.1'\].*Above\(...\) and Below"),
        ({"rules": Above("entropy", 1.0)}, r"rules=Above\(statistic='entropy'"),
        ({"log": "runs"}, "log='runs'.*SummaryWriter, or a function"),
        ({"on_alarm": "print"}, "on_alarm='print'"),
        ({"statistics": ["entropie"]}, "'entropie'.*Choose from entropy"),
        ({"statistics": ["first"] * 2}, "'first' is requested twice"),
        ({"rules": [Above("sink", 0.5)]}, r"'sink', which is not watched.*'entropy', 'max_logit'"),
    ],
)
def test_impossible_monitors_are_refused(how: dict[str, Any], message: str) -> None:
    model = _layer()
    with pytest.raises(ArgumentError, match=message):
        HeadMonitor(model, **how)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("rule", "how", "message"),
    [
        (Above, ("entropie", 1), "Above: no statistic 'entropie'.*Choose from entropy"),
        (Below, ("entropy", 1, 0), "Below: patience is 0"),
        (Below, ("entropy", float("nan")), "Below: threshold is nan"),
    ],
)
def test_impossible_rules_are_refused(rule: Any, how: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rule(*how)


def test_a_closed_monitor_is_refused_but_can_be_read() -> None:
    model = _layer()
    with HeadMonitor(model) as monitor:
        model(X)
        monitor.step()
    with pytest.raises(ArgumentError, match=r"HeadMonitor.step: the monitor is closed"):
        monitor.step()
    with pytest.raises(ArgumentError, match=r"HeadMonitor.resume: the monitor is closed"):
        monitor.resume(3)
    assert monitor.alarms == []


@pytest.mark.parametrize("steps", [-1, 2.0, float("nan"), True, "3", None])
def test_one_cannot_go_on_from_what_is_no_number_of_steps(steps: Any) -> None:
    with (
        HeadMonitor(_layer()) as monitor,
        pytest.raises(ArgumentError, match=rf"resume: steps={steps!r}\. Give a whole number, 0 or"),
    ):
        monitor.resume(steps)
    assert monitor.steps == 0


@pytest.mark.parametrize("how", ["evaluation", "no gradients", "no pass", "no attention"])
def test_a_watched_step_without_attention_is_refused(how: str) -> None:
    model: nn.Module = nn.Linear(4, 4) if how == "no attention" else _layer()
    with HeadMonitor(model) as monitor:
        model.train(how != "evaluation")
        with torch.set_grad_enabled(how != "no gradients"):
            if how != "no pass":
                model(X)
        kind = type(model).__name__
        with pytest.raises(
            UnsupportedError, match=f"no attention was captured in step 1 of {kind}"
        ):
            monitor.step()
    assert not model._forward_pre_hooks


def test_a_layer_that_is_not_there_is_refused() -> None:
    model = _layer()
    with HeadMonitor(model, layers=[0, 7]) as monitor:
        model(X)
        with pytest.raises(
            ArgumentError, match=r"layers \[7\] were not captured in step 1.*from 0"
        ):
            monitor.step()


# What QK-clip refuses: by name, and before a weight has changed.


WIDE = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def _monitor(model: nn.Module | None = None, **options: Any) -> HeadMonitor:
    return HeadMonitor(model or MultiHeadAttention(8, 2), 1, **options)


@pytest.mark.parametrize("bar", [0, -1.0, float("nan"), float("inf"), True, "100", None])
def test_the_bar_is_a_positive_number(bar: Any) -> None:
    with (
        _monitor() as monitor,
        pytest.raises(ArgumentError, match=rf"QKClip: max_logit={bar!r}\. Give a number above 0"),
    ):
        QKClip(monitor, bar)


def test_it_takes_an_open_monitor_of_max_logit() -> None:
    with pytest.raises(ArgumentError, match=r"QKClip: monitor is a str\. Give a"):
        QKClip("m")  # type: ignore[arg-type]
    with (
        _monitor(statistics=["first"]) as monitor,
        pytest.raises(ArgumentError, match=r"watches first, not max_logit.*\('first', 'max_logit'"),
    ):
        QKClip(monitor)
    with pytest.raises(ArgumentError, match="QKClip: the monitor is closed"):
        QKClip(monitor)


def test_a_step_follows_one_of_the_monitor() -> None:
    layer = MultiHeadAttention(8, 2)
    with _monitor(layer) as monitor:
        clip = QKClip(monitor)
        with pytest.raises(ArgumentError, match=r"QKClip\.step: the monitor is still at step 0"):
            clip.step()
        layer(WIDE)
        monitor.step()
        clip.step()
        with pytest.raises(ArgumentError, match="the monitor is still at step 1"):
            clip.step()
        assert "watched=1>" in repr(clip)
    with pytest.raises(ArgumentError, match=r"QKClip\.step: the monitor is closed"):
        clip.step()


def test_the_reference_is_a_batch() -> None:
    with _monitor() as monitor:
        with pytest.raises(ArgumentError, match="QKClip: reference holds no batch"):
            QKClip(monitor, reference=[])
        with pytest.raises(ArgumentError, match="QKClip: reference holds the text 'a text'"):
            QKClip(monitor, reference="a text")


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_refused(value: float) -> None:
    layer = MultiHeadAttention(8, 2)
    with _monitor(layer) as monitor:
        clip = QKClip(monitor, 1e-3)
        with torch.no_grad():
            layer.q_proj.weight[5] = value
        before = layer.q_proj.weight.clone()
        layer(WIDE)
        monitor.step()
        with pytest.raises(UnsupportedError, match=r"of L0\.H1 \(attention\) is (nan|inf)\. Noth"):
            clip.step()
        assert layer.q_proj.weight.equal(before) or value != value
        assert torch.equal(layer.q_proj.weight[:4], before[:4])
        assert "watched=0>" in repr(clip)


def test_a_layer_that_the_reference_did_not_reach_is_refused() -> None:
    class SharedTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([MultiHeadAttention(8, 2), MultiHeadAttention(8, 2)])

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            for layer in self.layers[:depth]:
                x = layer(x)
            return x

    model = SharedTwice()
    with _monitor(model) as monitor:
        clip = QKClip(monitor, 1e-6, reference={"x": WIDE, "depth": 1})
        before = model.layers[0].q_proj.weight.clone()
        model(WIDE)
        monitor.step()
        with pytest.raises(UnsupportedError, match=r"layers\.1\.attention has 2 heads, where none"):
            clip.step()
    assert torch.equal(model.layers[0].q_proj.weight, before)


def test_a_weight_that_was_changed_since_is_refused() -> None:
    layer = MultiHeadAttention(8, 2)
    with _monitor(layer) as monitor:
        clip = QKClip(monitor, 1e-6)
        layer(WIDE)
        monitor.step()
        layer.k_proj = nn.Linear(8, 4, bias=False)
        before = layer.q_proj.weight.clone()
        with pytest.raises(
            UnsupportedError, match=r"k_proj\.weight has shape \(4, 8\), expected \(8, 1\)"
        ):
            clip.step()
    assert torch.equal(layer.q_proj.weight, before)
