"""Laws of the cache: decoding in pieces equals one pass, whatever the cache keeps."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise import masks
from headwise.errors import ShapeError
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE

B, T, D_MODEL, H, Hkv = 3, 13, 8, 4, 2

SCHEMES: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "rope": lambda: {"rope": RoPE(4)},
    "interleaved": lambda: {"rope": RoPE(2, pairing="interleaved"), "qk_norm": True},
    "alibi": lambda: {"position_bias": ALiBi(H), "softcap": 3.0, "sinks": 0.5},
    "window": lambda: {"rope": RoPE(4), "window": (3, 0), "gate": True, "v_head_dim": 3},
}
schemes = st.sampled_from(sorted(SCHEMES))
pieces = st.lists(st.integers(1, 5), min_size=1, max_size=6)
KINDS: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache,
    "allocated": lambda: KVCache(max_length=32),
}
kinds = st.sampled_from(sorted(KINDS))


def _layer(scheme: str) -> MultiHeadAttention:
    layer = MultiHeadAttention(D_MODEL, H, Hkv, head_dim=5, **SCHEMES[scheme]())
    return layer.double().requires_grad_(False)


def _texts(n_tokens: int) -> Tensor:
    return torch.randn(B, n_tokens, D_MODEL, dtype=torch.float64)


def _read(
    layer: MultiHeadAttention, x: Tensor, cache: KVCache, sizes: Sequence[int], **options: Any
) -> Tensor:
    return torch.cat([layer(x, cache=cache, causal=True, **options) for x in x.split(sizes, 1)], 1)


@given(scheme=schemes, kind=kinds, sizes=pieces)
def test_decoding_in_pieces_equals_one_pass(scheme: str, kind: str, sizes: list[int]) -> None:
    layer, x = _layer(scheme), _texts(sum(sizes))
    cache = KINDS[kind]()
    output = _read(layer, x, cache, sizes)
    torch.testing.assert_close(output, layer(x, causal=True))
    assert (len(cache), cache.lengths.tolist()) == (sum(sizes), [sum(sizes)])


@given(
    scheme=schemes,
    kind=kinds,
    sizes=pieces,
    padding=st.lists(st.integers(0, 6), min_size=B, max_size=B),
)
def test_each_text_of_a_batch_equals_the_text_alone(
    scheme: str, kind: str, sizes: list[int], padding: list[int]
) -> None:
    layer, x = _layer(scheme), _texts(sum(sizes))
    cache = KINDS[kind]()
    cache = KVCache(cache.max_length, left_padding=padding)
    output = _read(layer, x, cache, sizes)
    for row, n_padding in enumerate(padding):
        alone = layer(x[row : row + 1, n_padding:], causal=True)
        torch.testing.assert_close(output[row : row + 1, n_padding:], alone)
        assert not output[row, :n_padding].any()
    assert cache.lengths.tolist() == [max(0, sum(sizes) - n) for n in padding]


@given(
    scheme=schemes,
    sizes=pieces,
    window=st.integers(1, 6),
    n_sinks=st.integers(0, 3),
    padding=st.none() | st.lists(st.integers(0, 6), min_size=B, max_size=B),
)
def test_a_rolling_cache_equals_one_pass_with_a_window_and_sinks(
    scheme: str, sizes: list[int], window: int, n_sinks: int, padding: list[int] | None
) -> None:
    layer, x = _layer(scheme), _texts(sum(sizes))
    if (
        layer.attention.window
    ):  # (3, 0): no sinks before the window, and nothing forgotten within it
        n_sinks, window = 0, window + 3
    cache = KVCache(window=window, n_sinks=n_sinks, left_padding=padding)
    output = _read(layer, x, cache, sizes)
    for row, n_padding in enumerate(padding or [0] * B):
        alone = x[row : row + 1, n_padding:]
        positions = torch.arange(alone.shape[1])
        kept = (positions > positions[:, None] - window) | (positions < n_sinks)
        expected = layer(alone, causal=True, mask=kept)
        torch.testing.assert_close(output[row : row + 1, n_padding:], expected)
    assert len(cache) <= window + n_sinks


@given(scheme=schemes, kind=kinds, keep=st.lists(st.integers(0, T), min_size=B, max_size=B))
def test_cropped_tokens_have_no_effect(scheme: str, kind: str, keep: list[int]) -> None:
    layer, x, more = _layer(scheme), _texts(T), _texts(4)
    cache = KINDS[kind]()
    layer(x, cache=cache, causal=True)
    cache.crop(torch.tensor(keep))
    assert cache.lengths.expand(B).tolist() == keep
    assert len(cache) == max(keep)
    output = _read(layer, more, cache, [1, 3])
    for row, length in enumerate(keep):
        alone = torch.cat((x[row : row + 1, :length], more[row : row + 1]), dim=1)
        torch.testing.assert_close(output[row : row + 1], layer(alone, causal=True)[:, length:])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_speculative_rounds_use_no_more_slots_than_tokens(kind: str) -> None:
    layer, x = _layer("rope"), _texts(45)
    cache = KINDS[kind]()
    layer(x[:, :5], cache=cache, causal=True)
    lengths = torch.tensor([5, 5, 5])
    for accepted in torch.tensor([[4, 0, 2], [0, 4, 2], [1, 1, 0]] * 4):
        positions = lengths[:, None] + torch.arange(4)
        drafts = x.gather(1, positions[..., None].expand(-1, -1, D_MODEL))
        drafts[torch.arange(4) >= accepted[:, None]] = 7.0
        output = layer(drafts, cache=cache, causal=True)
        for row, (start, n) in enumerate(zip(lengths.tolist(), accepted.tolist(), strict=True)):
            alone = layer(x[row : row + 1, : start + n], causal=True)
            torch.testing.assert_close(output[row : row + 1, :n], alone[:, start:])
        lengths += accepted
        cache.crop(lengths)
        assert (len(cache), cache.lengths.tolist()) == (int(lengths.max()), lengths.tolist())


@given(
    kind=kinds,
    padding=st.lists(st.integers(0, 9), min_size=B, max_size=B),
    keep=st.lists(st.integers(0, 9), min_size=B, max_size=B),
)
def test_cropping_frees_the_slots_of_padding(
    kind: str, padding: list[int], keep: list[int]
) -> None:
    layer, x, more = _layer("rope"), _texts(6), _texts(4)
    cache = KVCache(KINDS[kind]().max_length, left_padding=padding)
    layer(x, cache=cache, causal=True)
    cache.crop(torch.tensor(keep))
    assert len(cache) == max(cache.lengths)
    output = _read(layer, more, cache, [1, 3])
    for row, (before, length) in enumerate(zip(padding, keep, strict=True)):
        first, later = x[row : row + 1, before:][:, :length], max(0, before - 6)
        alone = layer(torch.cat((first, more[row : row + 1, later:]), dim=1), causal=True)
        torch.testing.assert_close(output[row : row + 1, later:], alone[:, first.shape[1] :])


def _fails(failure: str, layer: MultiHeadAttention) -> dict[str, Any]:
    """Arguments of a call that fails late; or make the layer fail late."""
    if failure == "hook":

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        layer.out_proj.register_forward_hook(interrupt)
    return {"mask": torch.ones(2, 3, dtype=torch.bool)} if failure == "mask" else {}


@pytest.mark.parametrize("failure", ["mask", "hook"])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("kind", [*sorted(KINDS), "window"])
def test_a_failed_call_leaves_the_cache_unchanged(kind: str, begun: bool, failure: str) -> None:
    layer, x = _layer("rope"), _texts(9)
    broken = copy.deepcopy(layer)
    arguments = _fails(failure, broken)
    cache = (KINDS | {"window": lambda: KVCache(window=4)})[kind]()
    twin, start = copy.deepcopy(cache), 4 if begun else 0
    for each in (cache, twin) if begun else ():
        layer(x[:, :4], cache=each, causal=True)
    with pytest.raises((ShapeError, KeyboardInterrupt)):
        broken(x[:2, 5:7] if not begun else x[:, 5:7], cache=cache, causal=True, **arguments)
    assert (len(cache), cache.lengths.tolist()) == (len(twin), twin.lengths.tolist())
    output, expected = (layer(x[:, start:], cache=each, causal=True) for each in (cache, twin))
    assert output.equal(expected)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cropping_by_one_number_copies_nothing(kind: str) -> None:
    cache = KINDS[kind]()
    held = cache.append(torch.ones(B, Hkv, T, 5), torch.ones(B, Hkv, T, 5))
    cache.crop(4)
    assert (len(cache), cache.lengths.tolist()) == (4, [4])
    again = cache.append(torch.zeros(B, Hkv, 1, 5), torch.zeros(B, Hkv, 1, 5))
    assert (again.k.data_ptr() == held.k.data_ptr()) == (kind == "allocated")
    cache.crop(20)
    assert len(cache) == 5


@given(scheme=schemes, kind=kinds, order=st.lists(st.integers(0, B - 1), min_size=1, max_size=5))
def test_reordered_texts_continue_from_their_own_past(
    scheme: str, kind: str, order: list[int]
) -> None:
    layer, x = _layer(scheme), _texts(5)
    more = torch.randn(len(order), 2, D_MODEL, dtype=torch.float64)
    cache = KVCache(KINDS[kind]().max_length, left_padding=[0, 2, 1])
    layer(x, cache=cache, causal=True)
    cache.reorder(torch.tensor(order))
    output = _read(layer, more, cache, [1, 1])
    for row, old in enumerate(order):
        alone = torch.cat((x[old : old + 1, [0, 2, 1][old] :], more[row : row + 1]), dim=1)
        torch.testing.assert_close(output[row : row + 1], layer(alone, causal=True)[:, -2:])


def test_a_rolling_cache_can_be_reordered() -> None:
    layer, x = _layer("rope"), _texts(T)
    first, second = (KVCache(window=3, n_sinks=1, left_padding=[0, 4, 11]) for _ in range(2))
    layer(x, cache=first, causal=True)
    layer(x, cache=second, causal=True)
    second.reorder(torch.tensor([2, 0]))
    more = _texts(2)
    expected = _read(layer, more, first, [1, 1])
    output = _read(layer, more[[2, 0]], second, [1, 1])
    torch.testing.assert_close(output, expected[[2, 0]])


@pytest.mark.parametrize("padding", [None, [0, 2, 1]])
def test_a_mask_of_any_kind_combines_with_the_cache(padding: list[int] | None) -> None:
    layer, x = _layer("alibi"), _texts(6)
    visible = torch.rand(6, 6) < 0.7
    bias = torch.randn(6, 6, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    for part in (
        lambda rows, keys: visible[rows, keys],
        lambda rows, keys: bias[rows, keys],
        lambda rows, keys: masks.window((2, 0)),
    ):
        cache, early = KVCache(left_padding=padding), slice(4)
        begun = layer(x[:, :4], cache=cache, causal=True, mask=part(early, early))
        ended = layer(x[:, 4:], cache=cache, causal=True, mask=part(slice(4, None), slice(None)))
        output = torch.cat((begun, ended), dim=1)
        for row, n_padding in enumerate(padding or [0] * B):
            real = slice(n_padding, None)
            alone = layer(x[row : row + 1, real], causal=True, mask=part(real, real))
            torch.testing.assert_close(output[row : row + 1, real], alone)


@given(scheme=schemes, kind=kinds)
def test_weights_equal_the_last_rows_of_one_pass(scheme: str, kind: str) -> None:
    layer, x = _layer(scheme), _texts(T)
    cache = KINDS[kind]()
    layer(x[:, :-2], cache=cache, causal=True)
    output = layer(x[:, -2:], cache=cache, causal=True, need_weights=True)
    expected = layer(x, causal=True, need_weights=True)
    torch.testing.assert_close(output.weights, expected.weights[:, :, -2:])


@pytest.mark.parametrize(
    "modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)]
)
@pytest.mark.parametrize("kind", [*sorted(KINDS), "window"])
def test_no_grad_and_inference_mode_can_alternate(
    kind: str, modes: tuple[Callable[[], Any], ...]
) -> None:
    layer, x = _layer("rope"), _texts(T)
    cache = (KINDS | {"window": lambda: KVCache(window=T)})[kind]()
    outputs = []
    for mode, part in zip((*modes, *modes), x.split([4, 3, 2, 4], 1), strict=True):
        with mode():
            outputs.append(layer(part, cache=cache, causal=True))
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x, causal=True))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_copied_cache_is_independent(kind: str) -> None:
    layer, x = _layer("rope"), _texts(T)
    cache = KINDS[kind]()
    layer(x[:, :4], cache=cache, causal=True)
    twin = copy.deepcopy(cache)
    layer(x[:, 4:9].flip(1), cache=twin, causal=True)
    output = layer(x[:, 4:], cache=cache, causal=True)
    torch.testing.assert_close(output, layer(x, causal=True)[:, 4:])


def test_gradients_flow_through_a_growing_cache() -> None:
    layer = _layer("rope").requires_grad_()
    x = _texts(T).requires_grad_()
    inputs = [x, *layer.parameters()]
    pieces = _read(layer, x, KVCache(), [5, 1, 7])
    actual = torch.autograd.grad(pieces.square().sum(), inputs)
    expected = torch.autograd.grad(layer(x, causal=True).square().sum(), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
