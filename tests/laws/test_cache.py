"""Laws of the cache: decoding in pieces equals one pass."""

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

SCHEMES: dict[str, dict[str, Any]] = {
    "none": {},
    "rope": {"rope": RoPE(4)},
    "normed": {"rope": RoPE(2), "qk_norm": True, "gate": True, "v_head_dim": 3},
    "alibi": {"position_bias": ALiBi(H)},
}
schemes = st.sampled_from(sorted(SCHEMES))
pieces = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def _layer(scheme: str) -> MultiHeadAttention:
    layer = MultiHeadAttention(D_MODEL, H, Hkv, head_dim=5, **SCHEMES[scheme])
    return layer.double().requires_grad_(False)


def _texts(n_tokens: int) -> Tensor:
    return torch.randn(B, n_tokens, D_MODEL, dtype=torch.float64)


def _read(
    layer: MultiHeadAttention, x: Tensor, cache: KVCache, sizes: Sequence[int], **options: Any
) -> Tensor:
    return torch.cat([layer(x, cache=cache, causal=True, **options) for x in x.split(sizes, 1)], 1)


@given(scheme=schemes, sizes=pieces)
def test_decoding_in_pieces_equals_one_pass(scheme: str, sizes: list[int]) -> None:
    layer, x, cache = _layer(scheme), _texts(sum(sizes)), KVCache()
    output = _read(layer, x, cache, sizes)
    torch.testing.assert_close(output, layer(x, causal=True))
    assert len(cache) == sum(sizes)


def _fails(failure: str, layer: MultiHeadAttention) -> dict[str, Any]:
    """Arguments of a call that fails late; or make the layer fail late."""
    if failure == "hook":

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        layer.out_proj.register_forward_hook(interrupt)
    return {"mask": torch.ones(2, 3, dtype=torch.bool)} if failure == "mask" else {}


@pytest.mark.parametrize("failure", ["mask", "hook"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_failed_call_leaves_the_cache_unchanged(begun: bool, failure: str) -> None:
    layer, x, cache = _layer("rope"), _texts(9), KVCache()
    broken = copy.deepcopy(layer)
    arguments = _fails(failure, broken)
    start = 4 if begun else 0
    if begun:
        layer(x[:, :4], cache=cache, causal=True)
    with pytest.raises((ShapeError, KeyboardInterrupt)):
        broken(x[:2, 5:7] if not begun else x[:, 5:7], cache=cache, causal=True, **arguments)
    assert len(cache) == start
    output = layer(x[:, start:], cache=cache, causal=True)
    torch.testing.assert_close(output, layer(x, causal=True)[:, start:])


def test_a_mask_of_any_kind_combines_with_the_cache() -> None:
    layer, x = _layer("alibi"), _texts(6)
    visible = torch.rand(6, 6) < 0.7
    bias = torch.randn(6, 6, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    for part in (
        lambda rows, keys: visible[rows, keys],
        lambda rows, keys: bias[rows, keys],
        lambda rows, keys: masks.window((2, 0)),
    ):
        cache, whole = KVCache(), slice(None)
        begun = layer(x[:, :4], cache=cache, causal=True, mask=part(slice(4), slice(4)))
        ended = layer(x[:, 4:], cache=cache, causal=True, mask=part(slice(4, None), whole))
        expected = layer(x, causal=True, mask=part(whole, whole))
        torch.testing.assert_close(torch.cat((begun, ended), dim=1), expected)


@given(scheme=schemes)
def test_weights_equal_the_last_rows_of_one_pass(scheme: str) -> None:
    layer, x, cache = _layer(scheme), _texts(T), KVCache()
    layer(x[:, :-2], cache=cache, causal=True)
    output = layer(x[:, -2:], cache=cache, causal=True, need_weights=True)
    expected = layer(x, causal=True, need_weights=True)
    torch.testing.assert_close(output.weights, expected.weights[:, :, -2:])


@pytest.mark.parametrize(
    "modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)]
)
def test_no_grad_and_inference_mode_can_alternate(modes: tuple[Callable[[], Any], ...]) -> None:
    layer, x, cache = _layer("rope"), _texts(T), KVCache()
    outputs = []
    for mode, part in zip((*modes, *modes), x.split([4, 3, 2, 4], 1), strict=True):
        with mode():
            outputs.append(layer(part, cache=cache, causal=True))
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x, causal=True))


def test_a_copied_cache_is_independent() -> None:
    layer, x, cache = _layer("rope"), _texts(T), KVCache()
    layer(x[:, :4], cache=cache, causal=True)
    twin = copy.deepcopy(cache)
    layer(x[:, 4:9].flip(1), cache=twin, causal=True)
    output = layer(x[:, 4:], cache=cache, causal=True)
    torch.testing.assert_close(output, layer(x, causal=True)[:, 4:])


def test_gradients_flow_through_a_cache() -> None:
    layer = _layer("rope").requires_grad_()
    x = _texts(T).requires_grad_()
    inputs = [x, *layer.parameters()]
    pieces = _read(layer, x, KVCache(), [5, 1, 7])
    actual = torch.autograd.grad(pieces.square().sum(), inputs)
    expected = torch.autograd.grad(layer(x, causal=True).square().sum(), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
