"""Watching a training: its numbers are those of a table, and nothing of the training changes."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, train
from headwise.layer import ALiBi, MultiHeadAttention, RoPE
from headwise.monitor import (
    Above,
    Alarm,
    AlarmedHead,
    AlarmRule,
    Below,
    ClipReport,
    HeadMonitor,
    QKClip,
)
from headwise.tables import Head, HeadTable
from headwise.watch import Request, observe
from oracles import modules_of, padded
from oracles_layer import AttentionWith
from small_attention import SmallAttention
from tiers import tiers

CONFIG = MiniGPTConfig(vocab_size=13, context=12, d_model=12, n_heads=4, n_kv_heads=2, n_layers=2)
STATISTICS = ("entropy", "max_logit", "first")
TEXTS = [
    [3, 1, 4, 1, 5],
    [9, 2, 6],
    [5, 3, 5, 8, 9, 7, 9],
    [3, 2],
    [3, 8, 4, 6],
    [2, 6, 4, 3, 3, 8],
]
BATCHES = [padded(TEXTS[at : at + 2], "right") for at in (0, 2, 4)]
Batch = dict[str, Tensor]


def _model(config: MiniGPTConfig = CONFIG) -> MiniGPT:
    torch.manual_seed(1)
    return MiniGPT(config)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits.mT.float(), batch["input_ids"])


def _train(
    model: nn.Module,
    batches: Sequence[Batch],
    after: Callable[[], Any],
    rate: float = 0.1,
    accumulate: int = 1,
) -> Iterator[Any]:
    """Train, and give what `after` says of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    torch.manual_seed(2)
    for number, batch in enumerate(batches, 1):
        _loss(model, batch).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield after()


def _table(model: nn.Module, batches: Sequence[Batch]) -> HeadTable:
    # With gradients, as in training: without them a layer may choose another kernel.
    with observe(model, Request(STATISTICS)) as watch:
        for batch in batches:
            model(**batch)
    return watch.table()


def _assert_says(scalars: dict[str, float], table: HeadTable, rtol: float = 0.0) -> None:
    for name in STATISTICS:
        expected = table.maximum(name) if name == "max_logit" else table.mean(name)
        found = [scalars[f"attn/{head}/{name}"] for head in table.heads]
        np.testing.assert_allclose(found, expected, rtol=rtol, err_msg=name)
        layers = {"": expected} | {f"L{n}/": expected[4 * n : 4 * n + 4] for n in (0, 1)}
        for place, values in layers.items():
            for what in ("min", "mean", "max"):
                of = getattr(np, what)(values)
                np.testing.assert_allclose(scalars[f"attn/{place}{name}/{what}"], of, rtol=rtol)


def test_a_step_says_what_a_table_says() -> None:
    model = _model()
    with HeadMonitor(model, every=1) as monitor:
        # At a rate of 0 the model that trains stays the one that is observed.
        reports = list(_train(model, BATCHES, monitor.step, rate=0.0))
    for scalars, batch in zip(reports, BATCHES, strict=True):
        _assert_says(scalars, _table(model, [batch]))
        assert len(scalars) == 3 * (8 + 3 * 2 + 3)
        assert all(type(value) is float for value in scalars.values())


def test_micro_batches_of_a_step_are_taken_together() -> None:
    model = _model()
    with HeadMonitor(model, every=1) as monitor:
        reports = list(_train(model, BATCHES, monitor.step, rate=0.0, accumulate=3))
    assert len(reports) == 1
    _assert_says(reports[0], _table(model, BATCHES), rtol=1e-12)


def test_watched_are_the_first_step_and_every_nth() -> None:
    model = _model()
    with HeadMonitor(model, every=np.int64(3), layers=np.arange(1)) as monitor:
        reports = list(_train(model, BATCHES * 3, monitor.step))
        assert [n for n, scalars in enumerate(reports, 1) if scalars] == [1, 3, 6, 9]
        monitor.resume(20)
        reports = list(_train(model, BATCHES * 2, monitor.step))
        assert [n for n, scalars in enumerate(reports, 21) if scalars] == [21, 24]
        assert monitor.steps == 26


def test_training_is_the_same_to_the_last_bit() -> None:
    config = MiniGPTConfig(vocab_size=13, context=12, d_model=12, n_heads=4, dropout=0.3)
    plain, watched = _model(config), _model(config)
    list(_train(plain, BATCHES * 2, lambda: None))
    after = torch.random.get_rng_state()
    with HeadMonitor(watched, every=2) as monitor:
        list(_train(watched, BATCHES * 2, monitor.step))
    assert torch.equal(torch.random.get_rng_state(), after)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name


def test_between_watched_steps_nothing_is_on_the_model() -> None:
    model = _model()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    before = modules_of(model)
    with HeadMonitor(model, every=3) as monitor:
        for step, batch in enumerate(BATCHES * 2, 1):
            assert (modules_of(model) == before) == (step not in (1, 3, 6))
            _loss(model, batch).backward()
            assert not _get_current_function_mode_stack()
            monitor.step()
    assert modules_of(model) == before


@pytest.mark.parametrize("where", ["model", "head"])
def test_an_exception_leaves_nothing(where: str) -> None:
    model = _model()
    before = modules_of(model)
    broken = model if where == "model" else model.blocks[1].attention

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    with HeadMonitor(model, every=1) as monitor:
        handle = broken.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            _loss(model, BATCHES[0])
        handle.remove()
        # Nothing but what waits for the next pass of this step.
        assert not any(module._forward_hooks for module in model.modules())
        assert not _get_current_function_mode_stack()
        _loss(model, BATCHES[0])
        assert monitor.step()
    assert modules_of(model) == before
    assert torch.compiler.set_stance("default").prev.stance == "default"


def test_evaluation_between_steps_does_not_count() -> None:
    model = _model()
    with HeadMonitor(model, every=1) as monitor:
        _loss(model, BATCHES[0]).backward()
        with torch.no_grad():
            model(**BATCHES[1])
        model.eval()(**BATCHES[2])
        model.train()
        scalars = monitor.step()
    _assert_says(scalars, _table(model, BATCHES[:1]))


def test_a_compiled_model_is_compiled_once_and_watched_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The compiler cannot trace through the checks of annotations.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    inner = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))
    model, x = torch.compile(inner, backend=backend), torch.randn(2, 5, 8)
    plain = inner(x)
    with HeadMonitor(model, every=4) as monitor:
        reports = []
        for _ in range(9):
            torch.testing.assert_close(model(x), plain)
            reports.append(monitor.step())
    assert [n for n, scalars in enumerate(reports, 1) if scalars] == [1, 4, 8]
    assert reports[0] == reports[3] == reports[7]
    first = len(compiled)
    assert first >= 1
    model(x)
    assert len(compiled) == first


def test_a_module_that_attends_itself_is_watched_like_any() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 3, 5, 7, requires_grad=True)
    for model, inputs in (
        (Attends(), (x,)),
        (MultiHeadAttention(8, 2), (torch.randn(1, 5, 8),)),
        (nn.MultiheadAttention(8, 2, batch_first=True), (torch.randn(2, 5, 8),) * 3),
    ):
        before = modules_of(model)
        with HeadMonitor(model) as monitor:
            model(*inputs)
            scalars = monitor.step()
        with observe(model, Request(STATISTICS)) as watch:
            model(*inputs)
        assert scalars["attn/L0.H1/entropy"] == watch.table().mean("entropy")[1]
        assert modules_of(model) == before


def test_chosen_layers_and_statistics() -> None:
    model = _model()
    with HeadMonitor(model, statistics=["sink", "lse"], layers=[1]) as monitor:
        _loss(model, BATCHES[0])
        scalars = monitor.step()
    assert {name.split("/")[1] for name in scalars} == {
        *(f"L1.H{n}" for n in range(4)), "L1", "sink", "lse",
    }  # fmt: skip
    assert np.isnan(scalars["attn/L1.H0/sink"])
    assert np.isnan(scalars["attn/sink/mean"])
    assert np.isfinite(scalars["attn/lse/mean"])


def test_the_lab_takes_a_monitor(tmp_path: Path) -> None:
    settings = TrainSettings(steps=5, batch_size=2, d_model=8, n_layers=1)
    plain = train(settings, tmp_path / "plain", lines_judged=1)
    hung: list[HeadMonitor] = []
    reports = []

    def hang_up(model: MiniGPT, steps: int) -> None:
        hung.append(HeadMonitor(model, every=2))
        hung[0].resume(steps)

    watched = train(
        settings,
        tmp_path / "watched",
        on_start=hang_up,
        on_progress=lambda *_: reports.append(len(hung[0].step())),
        lines_judged=1,
    )
    hung[0].close()
    assert [n for n, scalars in enumerate(reports, 1) if scalars] == [1, 2, 4]
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, watched.model.state_dict()[name]), name


def test_sites_say_whose_layers_they_are() -> None:
    model = _model()
    with HeadMonitor(model) as monitor:
        assert {(site.watched, site.reason) for site in monitor.sites()} == {("", "not called")}
        _loss(model, BATCHES[0])
        monitor.step()
    found = {site.layer: model.get_submodule(site.name) for site in monitor.sites()}
    assert found == {n: block.attention.attention for n, block in enumerate(model.blocks)}


def test_a_log_is_a_writer_or_a_function() -> None:
    class Writer:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.rows.append((tag, scalar_value, global_step))

    writer, rows, model = Writer(), [], _model()
    for log in (writer, lambda *row: rows.append(row)):
        with HeadMonitor(model, every=2, log=log) as monitor:
            reports = list(_train(model, BATCHES, monitor.step, rate=0.0))
    assert rows == [(reports[0], 1), (reports[1], 2)]
    assert writer.rows == [(*item, 1) for item in reports[0].items()] + [
        (*item, 2) for item in reports[1].items()
    ]


class _Dial(nn.Module):
    """Two heads whose largest logits are what the test says."""

    def forward(self, logits: Sequence[float]) -> Tensor:
        q = (
            torch.tensor(logits, dtype=torch.float)
            .view(1, 2, 1, 1)
            .expand(1, 2, 3, 1)
            .requires_grad_()
        )
        k = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1).expand(1, 2, 3, 1)
        return F.scaled_dot_product_attention(q, k, k, scale=1.0)


def _alarms(rule: AlarmRule, rows: Sequence[Sequence[float]]) -> tuple[list[str], list[list[str]]]:
    """The alarms raised, and those active after each step."""
    raised: list[Alarm] = []
    active = []
    model = _Dial()
    with HeadMonitor(model, every=1, rules=[rule], on_alarm=raised.append) as monitor:
        for row in rows:
            model(row)
            scalars = monitor.step()
            heads = [alarmed for alarm in monitor.alarms for alarmed in alarm.heads]
            assert scalars["attn/alarms"] == len(heads)
            active.append([f"{alarmed.head} {alarmed.since}" for alarmed in heads])
    return [str(alarm) for alarm in raised], active


def test_an_alarm_goes_off_after_its_patience_and_says_since_when() -> None:
    raised, active = _alarms(
        Above("max_logit", 10.0, patience=2),
        [(5, 50), (50, 5), (50, 50), (50, 5), (5, 50), (5, 50)],
    )
    assert active == [[], [], ["L0.H0 2"], ["L0.H0 2"], [], ["L0.H1 5"]]
    assert raised == [
        "step 3: max_logit above 10: L0.H0 (50 since step 2)",
        "step 6: max_logit above 10: L0.H1 (50 since step 5)",
    ]


def test_nan_triggers_every_rule() -> None:
    for rule in (Above("max_logit", 10.0), Below("entropy", 0.1), Above("entropy", 5.0)):
        raised, active = _alarms(rule, [(1, 1), (1, float("nan"))])
        assert active == [[], ["L0.H1 2"]]
        assert raised == [f"step 2: {rule}: L0.H1 (nan since step 2)"]


def test_a_statistic_that_no_query_has_breaks_no_rule() -> None:
    model = _Dial()
    with HeadMonitor(model, statistics=["sink"], rules=[Above("sink", 0.5)]) as monitor:
        model((1, 1))
        assert monitor.step()["attn/alarms"] == 0
    assert monitor.alarms == []


def test_alarms_are_shown_in_a_short_line() -> None:
    rule = Below("entropy", 0.1, patience=3)
    heads = tuple(AlarmedHead(Head("", 1, head), 630, 0.08) for head in range(200))
    assert repr(heads[2]) == "<AlarmedHead L1.H2 (0.08 since step 630)>"
    assert repr(Alarm(rule, 640, heads[:1])) == "<Alarm at step 640: entropy below 0.1, L1.H0>"
    many = Alarm(rule, 640, heads)
    assert repr([many]) == "[<Alarm at step 640: entropy below 0.1, 200 heads>]"
    assert str(many).count("since") == 8


# QK-clip: heads over the bar come down to it exactly, and nothing else changes by a bit.


CLIPPED_BY = ("max_logit",)
IDS = torch.randint(0, 13, (3, 9), generator=torch.Generator().manual_seed(0))
X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))


@contextmanager
def _clipped(
    model: nn.Module, bar: float, every: int = 1, reference: Any = None
) -> Iterator[tuple[HeadMonitor, QKClip]]:
    with HeadMonitor(model, every, statistics=CLIPPED_BY) as monitor:
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


def _softcapped(cap: float) -> MultiHeadAttention:
    layer = _layer()
    layer.attention = AttentionWith(softcap=cap)
    return layer


def _sharpened(layer: Any) -> Any:
    with torch.no_grad():
        layer.qkv.weight.mul_(4.0)
    return layer


def _small(**how: bool) -> nn.Module:
    torch.manual_seed(3)
    return _sharpened(SmallAttention(**how))


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
    "softcapped": lambda: _softcapped(20.0),
    "a position bias": lambda: _layer(position_bias=ALiBi(4)),
    "bfloat16": lambda: _layer(n_kv_heads=2).bfloat16(),
    "one matrix": lambda: _small(causal=True),
    "by hand": lambda: _small(by_hand=True),
    "torch's": _Torch,
    "torch's of several widths": lambda: _Torch(kdim=12, vdim=12, bias=False),
}

_FEW = ("grouped", "softcapped", "bfloat16", "by hand", "torch's")  # the others in the long run


def _passes(layer: nn.Module) -> tuple[Tensor, Any]:
    """What a layer is called with, and an input to find its rows by."""
    x = X.to(next(layer.parameters()).dtype)
    return x, None if isinstance(layer, MultiHeadAttention) else (x,)


def _uncapped(layer: nn.Module, logits: np.ndarray) -> np.ndarray:
    cap = getattr(getattr(layer, "attention", None), "options", {}).get("softcap")
    return logits if cap is None else cap * np.arctanh(logits / cap)


@pytest.mark.parametrize("name", tiers(_FEW, LAYERS))
def test_after_a_clip_the_same_batch_is_at_the_bar(name: str) -> None:
    layer = LAYERS[name]()
    x, reference = _passes(layer)
    with HeadMonitor(layer, 1, statistics=CLIPPED_BY) as monitor:
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
        assert "watched=2>" in repr(clip)
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
    class Normed(SmallAttention):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.LayerNorm((4, 3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 3).permute(2, 0, 1, 3, 4)
            q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), k, v))
            heads = F.scaled_dot_product_attention(q, k, v)
            return self.out_proj(heads.transpose(1, 2).flatten(2))

    torch.manual_seed(3)
    layer = _sharpened(Normed())
    before = copy.deepcopy(layer.state_dict())
    with _clipped(layer, 0.5, reference=[(X,), (X,)]) as (monitor, clip):
        for _ in range(2):
            layer(X)
            monitor.step()
            report = clip.step()
            assert bool(report.heads) == (report.step == 1)
    changed = {name for name, x in layer.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"q_norm.weight", "qkv.weight", "qkv.bias"}  # the norm's bias is 0
    assert torch.equal(layer.qkv.weight[:12], before["qkv.weight"][:12])


def test_only_watched_layers_are_clipped() -> None:
    torch.manual_seed(1)
    model = MiniGPT(MiniGPTConfig(13, 12, 12, 4, 2, 2))
    before = copy.deepcopy(model.state_dict())
    with HeadMonitor(model, 1, statistics=CLIPPED_BY, layers=[1]) as monitor:
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


def test_it_is_a_callback_after_its_monitor() -> None:
    layer = _layer()
    with _clipped(layer, 1e-3) as (monitor, clip):
        layer(X)
        monitor.step()
        clip.on_step_end(None, None, None)
        clip.on_some_event_of_a_later_version(None, None, None)
        assert "watched=1>" in repr(clip)
        with pytest.raises(AttributeError, match="'QKClip' object has no attribute 'steps_seen'"):
            clip.steps_seen  # noqa: B018
