"""Watches in several threads, and watches that overlap without lying within one another."""

from collections.abc import Callable
from contextlib import ExitStack
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from headwise.tables import HeadTable
from headwise.watch import observe
from on_our_kernel import at_any_size as at_any_size

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


@pytest.mark.parametrize("two", [("bert", "gpt2"), ("fused", "written"), ("torchs", "bert")])
def test_threads_do_not_disturb_each_other(two: tuple[str, str]) -> None:
    models = [(KINDS[kind][0]().eval(), KINDS[kind][1]) for kind in two]
    alone = [_table(*item, 4, lambda: None) for item in models]
    interface = transformers.AttentionInterface.get_interface
    barrier, together = Barrier(2, timeout=60), [alone[1], alone[0]]

    def run(place: int) -> None:
        together[place] = _table(*models[place], 4, barrier.wait)

    threads = [Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, actual in zip(alone, together, strict=True):
        assert expected.heads == actual.heads
        for name in expected.statistics:
            np.testing.assert_array_equal(expected.count(name), actual.count(name))
            np.testing.assert_array_equal(expected.mean(name), actual.mean(name))
    assert transformers.AttentionInterface.get_interface is interface
    assert torch.backends.mha.get_fastpath_enabled()


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


def test_models_on_our_kernel_run_in_two_threads(at_any_size: None) -> None:
    models = [_bert().eval(), _gpt2().eval()]
    for model in models:
        model.set_attn_implementation("headwise")
    with torch.no_grad():
        alone = [model(IDS)[0] for model in models]
    barrier, same = Barrier(2, timeout=60), [False, False]

    def run(place: int) -> None:
        with torch.no_grad():
            outs = []
            for _ in range(8):
                barrier.wait()
                outs.append(models[place](IDS)[0])
        same[place] = all(torch.equal(out, alone[place]) for out in outs)

    threads = [Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True, True]
