"""Watches in several threads, and watches that overlap without lying within one another."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.tables import HeadTable
from headwise.watch import observe
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch

IDS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


class PackedHandwrittenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


class PackedFusedAttention(PackedHandwrittenAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=4, vocab_size=13,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertModel(config)


def _gpt2() -> nn.Module:
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=12, n_layer=2, n_head=4))


def _torchs() -> nn.Module:
    block = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False)


KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "bert": (_bert, IDS),
    "fused": (PackedFusedAttention, X),
    "gpt2": (_gpt2, IDS),
    "torchs": (_torchs, X),
    "written": (PackedHandwrittenAttention, X),
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
    models = [(KINDS[kind][0]().eval(), KINDS[kind][1]) for kind in two]
    alone = [_table(*item, 4, lambda: None) for item in models]
    interface = transformers.AttentionInterface.get_interface
    together = _in_two_threads(lambda place, wait: _table(*models[place], 4, wait))
    for expected, actual in zip(alone, together, strict=True):
        assert expected.heads == actual.heads
        for name in expected.statistics:
            np.testing.assert_array_equal(expected.count(name), actual.count(name))
            np.testing.assert_array_equal(expected.mean(name), actual.mean(name))
    assert transformers.AttentionInterface.get_interface is interface
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("is_watched", [False, True], ids=["plain", "observed"])
def test_models_on_our_kernel_compute_the_same_in_two_threads(
    is_watched: bool, at_any_size: None, left_to_torch: list[str]
) -> None:
    models = [KINDS[kind][0]().eval() for kind in ("bert", "gpt2")]
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


@pytest.mark.parametrize("kind", KINDS)
def test_watches_may_end_in_any_order(kind: str) -> None:
    make, x = KINDS[kind]
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
    model = _bert().eval()
    with observe(model) as watch:
        thread = Thread(target=lambda: model(IDS))
        thread.start()
        thread.join()
    assert (watch.table().count("lse") == 10).all()


@pytest.mark.parametrize("kind", ["bert", "written"])
def test_a_model_is_watched_by_one_thread_at_a_time(kind: str) -> None:
    make, x = KINDS[kind]
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
