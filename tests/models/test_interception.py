"""After its first pass a model has hooks at its root alone, and nothing drops out."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from operator import add
from threading import Barrier, Thread
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from architectures import CASES
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import headwise as hw
from folders import tiny_bert
from headwise.capture._functions import FunctionCapture
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import hooked
from headwise.tables import HeadTable
from headwise.watch import Request, observe
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch
from oracles import assert_tables_close
from tiers import tiers

IDS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(5, 5, dtype=torch.bool).tril()


class Switching(nn.Module):
    """Attention by a fused kernel or by hand, by the flag `by_hand`."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor, by_hand: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        mask = MASK[: x.shape[1], : x.shape[1]]
        if by_hand or self.by_hand:
            logits = (q @ k.mT * 3**-0.5).masked_fill(~mask, -torch.inf)
            return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return heads.transpose(1, 2).flatten(2)


class ByHand(Switching):
    by_hand = True


class Model(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Switching(), Switching()])
        self.n_layers = 2

    def forward(self, x: Tensor, by_hand: bool = False) -> Tensor:
        for layer in self.layers[: self.n_layers]:
            x = layer(x, by_hand)
        return x


def _bert() -> Any:
    sizes = {"hidden_size": 12, "intermediate_size": 16, "max_position_embeddings": 16}
    return tiny_bert(**sizes, attn_implementation="sdpa")


def _torchs() -> nn.Module:
    block = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()


def _mini() -> nn.Module:
    config = MiniGPTConfig(vocab_size=13, context=12, d_model=12, n_heads=4, n_layers=2)
    return MiniGPT(config).eval()


KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "bert": (_bert, IDS),
    "albert": (partial(zoo.make, "Albert"), IDS),
    "fused": (lambda: Model().eval(), X),
    "torchs": (_torchs, X),
    "ours": (_mini, IDS),
}


@pytest.fixture
def intercepted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that the function mode saw."""
    seen: list[object] = []
    inner = FunctionCapture.__torch_function__

    def count(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return inner(self, func, types, args, kwargs)

    monkeypatch.setattr(FunctionCapture, "__torch_function__", count)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_later_passes_need_no_function_mode(kind: str, intercepted: list[object]) -> None:
    make, x = KINDS[kind]
    model = make()
    with torch.no_grad(), observe(model) as watch:
        model(x)
        assert intercepted  # the first pass finds out where the model attends
        once = watch.table()
        for _ in range(3):
            model(x)
            del intercepted[:]
        model(x)
        assert not intercepted
        assert not _get_current_function_mode_stack()
    table = watch.table()
    for name in table.statistics:
        np.testing.assert_array_equal(table.count(name), 5 * once.count(name))
        np.testing.assert_allclose(table.mean(name), once.mean(name), rtol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "albert", "fused"])
def test_later_passes_have_hooks_at_the_root_alone(kind: str) -> None:
    make, x = KINDS[kind]
    model, called = make(), set()
    with hooked(before=[(part, lambda part, _: called.add(part)) for part in model.modules()]):
        model(x)
    with torch.no_grad(), observe(model):
        model(x)
        hooks = {part for part in called if part._forward_pre_hooks or part._forward_hooks}
    assert hooks == {model}
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_attention_by_hand_keeps_the_function_mode(intercepted: list[object]) -> None:
    model = ByHand()
    with torch.no_grad(), observe(model) as watch:
        for _ in range(3):
            model(X)
    assert F.softmax in intercepted or Tensor.softmax in intercepted
    assert (watch.table().count("lse") == 30).all()


@contextmanager
def _known(model: nn.Module, x: Tensor = X) -> Iterator[Any]:
    with torch.no_grad(), observe(model) as watch:
        for _ in range(2):
            model(x)
        assert not _get_current_function_mode_stack()
        yield watch


BY_HAND = r"observe: Switching computes a softmax by hand, .* warm up with a pass that does"


def test_a_site_that_begins_to_attend_by_hand_is_refused_until_a_first_pass_shows_it() -> None:
    model = Model()
    with _known(model) as watch:
        for kwargs in ({}, {"by_hand": True}):
            model.layers[1].by_hand = not kwargs
            with pytest.raises(UnsupportedError, match=BY_HAND):
                model(X, **kwargs)
        model.layers[1].by_hand = False
        model(X)
    assert (watch.table().count("lse") == 30).all()  # a pass that fails counts nowhere
    with torch.no_grad(), observe(model) as watch:
        for by_hand in (True, False, True):
            model(X, by_hand=by_hand)
    assert (watch.table().count("lse") == 30).all()
    assert (watch.table().count("max_logit") == 30).all()


def test_a_softmax_that_is_no_attention_is_not_refused() -> None:
    class Gated(Model):
        gates = False

        def forward(self, x: Tensor, by_hand: bool = False) -> Tensor:
            x = super().forward(x, by_hand)
            return x * x.softmax(-1) if self.gates else x

    model = Gated()
    with _known(model) as watch:
        model.gates = True
        for _ in range(2):
            model(X)
    assert (watch.table().count("lse") == 40).all()


def test_a_module_that_is_called_for_the_first_time_is_watched() -> None:
    model = Model()
    model.n_layers = 1
    with _known(model) as watch:
        model.n_layers = 2
        for _ in range(3):
            model(X)
        assert not _get_current_function_mode_stack()
    counts = watch.table().count("lse").reshape(2, 4)
    np.testing.assert_array_equal(counts, [[50] * 4, [30] * 4])


def test_another_implementation_is_watched_like_the_first() -> None:
    model = _bert()
    with _known(model, IDS) as watch:
        before = watch.table()
        model.set_attn_implementation("eager")
        model(IDS)
    table = watch.table()
    np.testing.assert_array_equal(table.count("lse"), 30)
    np.testing.assert_allclose(table.mean("entropy"), before.mean("entropy"), rtol=1e-5)


class _Direct(nn.Module):
    """Calls the fused kernel itself, in place of a module that uses the interface."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        x = hidden_states.unflatten(-1, (4, 3)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2), None


def test_a_site_that_leaves_the_interface_is_watched() -> None:
    model = _bert()
    with _known(model, IDS) as watch:
        attention = model.encoder.layer[0].attention.self
        attention.forward = _Direct().forward
        model(IDS)
        del attention.forward
    assert (watch.table().count("lse") == 30).all()


# An encoder, a decoder, a pair of both, two towers, windows, shared layers, and attention by hand.
_FEW = ("Albert", "Bert", "CLIPModel", "Llama", "SwinModel", "T5ForConditionalGeneration")
_MORE = ("BartForConditionalGeneration", "DeepseekV3", "DetrForObjectDetection", "FunnelModel")
_MORE += ("FalconH1ForCausalLM", "MusicgenForCausalLM", "MvpForConditionalGeneration")
_MORE += ("ViTModel", "WhisperForConditionalGeneration", "XLNetModel")


@pytest.mark.parametrize("name", tiers(_FEW, _MORE))
def test_later_passes_are_watched_like_first_ones(name: str) -> None:
    model, batch = CASES[name].make()
    batches = [batch, batch, batch]
    if batch.keys() <= {"input_ids", "decoder_input_ids"}:
        batches += [{key: ids[:, :-n] for key, ids in batch.items()} for n in (2, 1, 2)]
    parts = []
    with torch.no_grad(), observe(model) as watch:
        for each in batches:
            torch.manual_seed(0)
            model(**each)
    for each in batches:
        torch.manual_seed(0)
        with torch.no_grad(), observe(model) as first:
            model(**each)
        parts.append(first.table())
    table, known = watch.table(), reduce(add, parts)
    np.testing.assert_array_equal(table.covered, known.covered)
    assert_tables_close(table, known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "headwise"])
def test_a_layer_that_is_repeated_in_later_passes_has_a_site_for_each(implementation: str) -> None:
    hw.register_attention()
    model, known = _bert(), _bert()
    known.load_state_dict(model.state_dict())
    for some in (model, known):
        some.set_attn_implementation(implementation)
        del some.encoder.layer[1]
    with _known(model, IDS) as watch:
        for some in (model, known):
            some.encoder.layer.extend([some.encoder.layer[0]] * 2)
        for _ in range(3):
            model(IDS)
        assert [site.layer for site in watch.sites()] == [0, 1, 2]
    with torch.no_grad(), observe(known) as other:
        known(IDS)
    table, of_known = watch.table(), other.table()
    np.testing.assert_array_equal(table.count("lse")[4:], 3 * of_known.count("lse")[4:])
    np.testing.assert_allclose(table.mean("entropy"), of_known.mean("entropy"), rtol=1e-5)
    np.testing.assert_allclose(table.mean("self"), of_known.mean("self"), rtol=1e-5)


def test_a_layer_by_itself_is_watched() -> None:
    model = _bert()
    with _known(model, IDS) as watch:
        hidden = model.embeddings(IDS)
        for _ in range(2):
            model.encoder.layer[1](hidden)
            model(IDS)
        assert not _get_current_function_mode_stack()
    counts = watch.table().count("lse").reshape(2, 4)
    np.testing.assert_array_equal(counts, [[40] * 4, [60] * 4])


class Interleaved(nn.Module):
    """Attention in two parts, with another attention between them."""

    num_heads = 2

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.variables = inner, set[str]()

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 6)).transpose(1, 2)
        first = F.scaled_dot_product_attention(q[:, :, :3], q, q)
        x = self.inner(x)
        heads = torch.cat([first, F.scaled_dot_product_attention(q[:, :, 3:], q, q)], 2)
        for frame, *_ in inspect.stack(0):
            self.variables.update(frame.f_locals if frame.f_code.co_name == "_call_impl" else ())
        return x + heads.transpose(1, 2).flatten(2)


@torch.no_grad()
def test_calls_are_told_apart_without_a_trace_in_the_frames_of_torch() -> None:
    model = Interleaved(Interleaved(nn.Identity()))
    with hw.observe(model) as watch:
        model(X), model(X), model.inner(X)
        assert not [name for name in model.variables if "headwise" in name]
    assert [site.name for site in watch.sites()] == ["", "inner"]
    assert watch.table().count("lse").tolist() == [20, 20, 30, 30]


def test_a_layer_that_drops_tokens_in_later_passes_is_followed() -> None:
    model = _bert()
    with _known(model, IDS) as watch:
        embed = model.embeddings.forward
        model.embeddings.forward = lambda *args, **options: embed(*args, **options)[:, ::2]
        for _ in range(2):
            model(IDS)
        coverage = {site.coverage for site in watch.sites()}
    assert coverage == {"6 queries for 10 tokens"}
    assert (watch.table().count("lse") == 20 + 12).all()


def test_a_transform_is_refused_and_leaves_no_mode() -> None:
    model = _bert()
    model.set_attn_implementation("eager")  # torch warns of maps over its kernel
    with _known(model, IDS) as watch:
        with pytest.raises(UnsupportedError, match="vmap"):
            torch.func.vmap(lambda ids: model(ids[None])[0], randomness="same")(IDS)
        assert not _get_current_function_mode_stack()
        model(IDS)
    assert (watch.table().count("lse") == 30).all()


def test_a_layer_in_another_thread_is_refused() -> None:
    model, refused = _bert(), []

    def disturb(*_: Any) -> None:
        def run() -> None:
            with torch.no_grad(), pytest.raises(UnsupportedError, match="two threads") as error:
                model.encoder.layer[1](torch.zeros(2, 5, 12))
            refused.append(error)

        other = Thread(target=run)
        other.start()
        other.join()

    with _known(model, IDS), hooked(before=[(model.encoder.layer[0], disturb)]):
        model(IDS)
    assert refused


def test_watches_of_one_model_do_not_disturb_each_other() -> None:
    model = Model()
    with torch.no_grad(), observe(model) as outer:
        for _ in range(3):
            model(X)
        with observe(model) as inner:
            for _ in range(3):
                model(X)
        model(X)
    assert (inner.table().count("lse") == 30).all()
    assert (outer.table().count("lse") == 70).all()
    model(X)  # nothing is observed any more
    assert (outer.table().count("lse") == 70).all()


def test_a_monitor_follows_functions_in_its_first_pass_alone(intercepted: list[object]) -> None:
    model = _bert().train()
    with hw.HeadMonitor(model, every=1) as monitor:
        for _ in range(3):
            del intercepted[:]
            model(IDS).last_hidden_state.sum().backward()
            assert monitor.step()
    assert not intercepted


def _operations(model: nn.Module, x: Tensor, request: Request) -> int:
    """How many operations of torch a pass takes that is not the first."""
    with torch.no_grad(), observe(model, request):
        for _ in range(2):
            model(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x)
    return sum(event.count for event in profile.key_averages() if event.key.startswith("aten::"))


def test_sums_take_as_many_operations_for_any_texts_and_statistics() -> None:
    model = Model()
    few = Request(statistics=("lse", "max_logit"))
    more = Request(statistics=("lse", "max_logit", "max_weight", "sink"))
    base = _operations(model, X[:1], few)
    assert _operations(model, X.repeat(8, 1, 1), few) == base
    assert _operations(model, X[:1], more) == base


def test_a_pass_takes_few_steps_once_its_form_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as users have it
    model, steps = _bert(), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal steps
        steps += event == "call" and frame.f_globals.get("__name__", "").startswith("headwise")

    with torch.no_grad(), observe(model):
        for _ in range(3):
            model(IDS)
        sys.setprofile(count)
        try:
            model(IDS)
        finally:
            sys.setprofile(None)
    assert steps <= 340  # for two sites


def test_a_request_may_have_no_statistics() -> None:
    model = Model()
    with torch.no_grad(), observe(model, Request(statistics=(), received=True)) as watch:
        for _ in range(3):
            model(X)
    assert watch.table().statistics == ()
    torch.testing.assert_close(watch.received("L0.H0").sum(-1), torch.full((2,), 5.0))


def test_answered_calls_know_the_norms_of_their_heads() -> None:
    model, request = _bert(), Request(statistics=("output_norm",))
    norms = []
    for exact in (True, False):
        with torch.no_grad(), observe(model, request, exact=exact) as watch:
            for _ in range(3):
                model(IDS)
        norms.append(watch.table().mean("output_norm"))
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)


# Watches in several threads, and watches that overlap without lying within one another.


class GatedInPlace(Switching):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(super().forward(x).mul_(self.gate(x).sigmoid()))


@pytest.mark.parametrize("kind", [ByHand, GatedInPlace])
def test_passes_of_no_texts_or_tokens_add_nothing(kind: type[nn.Module]) -> None:
    model, request = kind(), Request(statistics=("entropy", "gate"))
    with torch.no_grad(), observe(model, request) as watch:
        for x in (X, X[:0], X[:, :0]):
            model(x)
    with torch.no_grad(), observe(model, request) as alone:
        model(X)
    for name in request.statistics:
        np.testing.assert_array_equal(watch.table().mean(name), alone.table().mean(name))
    if isinstance(model, GatedInPlace):
        gate = model.gate(X).sigmoid().unflatten(-1, (4, 3)).mean((0, 1, 3))
        np.testing.assert_allclose(watch.table().mean("gate"), gate.detach(), rtol=1e-5)


THREADED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "bert": (_bert, IDS),
    "fused": (Switching, X),
    "gpt2": (partial(zoo.make, "GPT2"), IDS),
    "torchs": (_torchs, X),
    "written": (ByHand, X),
}


def _table(model: nn.Module, x: Tensor, passes: int, wait: Callable[[], object]) -> HeadTable:
    with torch.no_grad(), observe(model) as watch:
        for _ in range(passes):
            wait()
            model(x)
        wait()
    return watch.table()


def _in_two_threads(run: Callable[[int, Callable[[], object]], Any]) -> list[Any]:
    """What `run` returns for places 0 and 1, at the same time; it gets what waits for the other."""
    barrier, results = Barrier(2, timeout=60), [None, None]

    def target(place: int) -> None:
        results[place] = run(place, barrier.wait)

    threads = [Thread(target=target, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("two", [("bert", "gpt2"), ("fused", "written"), ("torchs", "bert")])
def test_threads_do_not_disturb_each_other(two: tuple[str, str]) -> None:
    models = [(THREADED[kind][0]().eval(), THREADED[kind][1]) for kind in two]
    alone = [_table(*item, 4, lambda: None) for item in models]
    interface = transformers.AttentionInterface.get_interface
    together = _in_two_threads(lambda place, wait: _table(*models[place], 4, wait))
    for expected, actual in zip(alone, together, strict=True):
        assert_tables_close(actual, expected, rtol=0, atol=0)
    assert transformers.AttentionInterface.get_interface is interface
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("is_watched", [False, True])
def test_models_on_our_kernel_compute_the_same_in_two_threads(
    is_watched: bool, at_any_size: None, left_to_torch: list[str]
) -> None:
    models = [THREADED[kind][0]().eval() for kind in ("bert", "gpt2")]
    for model in models:
        model.set_attn_implementation("headwise")

    def outputs(place: int, wait: Callable[[], object]) -> list[Tensor]:
        model, found = models[place], []
        with torch.no_grad(), observe(model) if is_watched else nullcontext():
            for _ in range(20):
                wait()
                found.append(model(IDS)[0])
        return found

    alone = [outputs(place, lambda: None)[0] for place in range(2)]
    for expected, results in zip(alone, _in_two_threads(outputs), strict=True):
        assert len(results) == 20
        assert all(torch.equal(expected, actual) for actual in results)
    assert not left_to_torch


@pytest.mark.parametrize("kind", THREADED)
def test_watches_may_end_in_any_order(kind: str) -> None:
    make, x = THREADED[kind]
    first, second = make().eval(), make().eval()
    interface = transformers.AttentionInterface.get_interface
    first_watch, second_watch = ExitStack(), ExitStack()
    with torch.no_grad():
        watched = first_watch.enter_context(observe(first))
        also = second_watch.enter_context(observe(second))
        first_watch.close()
        second(x)
        second_watch.close()
    assert watched._recorder.passes == 0
    assert (also.table().count("lse") == 10).all()
    assert transformers.AttentionInterface.get_interface is interface
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_may_run_in_another_thread_than_its_watch() -> None:
    model = _bert()
    with observe(model) as watch:
        thread = Thread(target=lambda: model(IDS))
        thread.start()
        thread.join()
    assert (watch.table().count("lse") == 10).all()


@pytest.mark.parametrize("kind", ["bert", "written"])
def test_a_model_is_watched_by_one_thread_at_a_time(kind: str) -> None:
    make, x = THREADED[kind]
    model, refused = make().eval(), []

    def watch_too() -> None:
        with pytest.raises(UnsupportedError, match="another thread is watching this") as error:
            _table(model, x, 1, lambda: None)
        refused.append(error)

    with torch.no_grad(), observe(model) as watch, observe(model) as inner:
        thread = Thread(target=watch_too)
        thread.start()
        thread.join()
        model(x)
    assert refused
    assert (watch.table().count("lse") == 10).all()
    assert (inner.table().count("lse") == 10).all()
    later = _in_another_thread(lambda: _table(model, x, 1, lambda: None))
    assert (later.count("lse") == 10).all()


def _in_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]
