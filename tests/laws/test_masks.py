"""Masks are rules: combining them before or after they become tensors is the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from headwise import masks
from headwise.masks import Mask
from headwise.masks.tiles import Tile

T, S = 5, 7


def _some() -> st.SearchStrategy[Mask]:
    side = st.none() | st.integers(0, 4)
    dense = st.integers(0, 2**31).map(
        lambda seed: masks.as_mask(
            torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(seed)) < 0.5
        )
    )
    return st.one_of(
        st.just(masks.causal()),
        st.tuples(side, side).map(masks.window),
        st.lists(st.integers(0, S), min_size=2, max_size=2).map(masks.padding),
        st.lists(st.integers(0, S), min_size=2, max_size=2).map(
            lambda lengths: masks.padding(lengths, "left")
        ),
        st.just(masks.documents(torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 7]))),
        st.builds(_of_flex, st.integers(0, 4), st.integers(0, 1)),
        dense,
    )


def _of_flex(side: int, text: int) -> Mask:
    block_mask = create_block_mask(
        lambda b, h, q, k: (q + S - T - k <= side) & ((b == text) | (k > 0)),
        B=2, H=None, Q_LEN=T, KV_LEN=S, device="cpu",
    )  # fmt: skip
    return masks.from_flex(block_mask)


def _full(mask: Mask) -> torch.Tensor:
    return mask.dense(T, S).expand(2, 1, T, S)


@given(first=_some(), second=_some())
def test_combining_masks_equals_combining_tensors(first: Mask, second: Mask) -> None:
    assert torch.equal(_full(first & second), _full(first) & _full(second))
    assert torch.equal(_full(first | second), _full(first) | _full(second))
    assert torch.equal(_full(~first), ~_full(first))
    assert torch.equal(_full(~(first & second)), _full(~first | ~second))


@given(first=_some(), second=_some(), rows=st.tuples(st.integers(0, T), st.integers(0, T)))
def test_a_mask_hides_everything_outside_its_extent(first: Mask, second: Mask, rows: tuple) -> None:
    block = range(*sorted(rows))
    for mask in (first, second, first & second, first | second, ~first, first & ~second):
        extent = mask.extent(block, T, S)
        visible = _full(mask)[:, :, block.start : block.stop]
        outside = torch.ones(S, dtype=torch.bool)
        outside[extent.start : extent.stop] = False
        assert not visible[..., outside].any()
        shared = mask.shared(block, T, S)
        assert visible[..., shared.start : shared.stop].all()


@given(mask=_some(), rows=st.tuples(st.integers(0, T), st.integers(0, T)))
def test_a_tile_is_a_slice_of_the_dense_mask(mask: Mask, rows: tuple) -> None:
    block = range(*sorted(rows))
    tile = Tile(T, S, block, range(2, 6), torch.device("cpu"))
    whole = _full(mask)[:, :, block.start : block.stop, 2:6]
    assert torch.equal(mask.tile(tile).expand(2, 1, len(block), 4), whole)


@given(first=_some(), second=_some())
def test_simplifying_a_mask_drops_only_rules_that_hide_nothing(first: Mask, second: Mask) -> None:
    for mask in (first, first & second, first | second):
        simple = mask.simplify(T, S)
        assert torch.equal(
            _full(masks.window((None, None)) if simple is None else simple), _full(mask)
        )


@given(first=_some(), second=_some(), seed=st.integers(0, 2**31))
def test_reaches_finds_the_queries_that_see_a_marked_key(
    first: Mask, second: Mask, seed: int
) -> None:
    marked = torch.rand(2, 3, S, generator=torch.Generator().manual_seed(seed)) < 0.3
    for mask in (first, second, first & second, ~first):
        expected = (_full(mask) & marked[:, :, None]).any(-1)
        assert torch.equal(mask.reaches(marked, T).expand_as(expected), expected)


def test_causal_is_aligned_bottom_right() -> None:
    expected = torch.ones(3, 5, dtype=torch.bool).tril(2)
    assert torch.equal(masks.causal().dense(3, 5)[0, 0], expected)
    assert torch.equal(masks.causal().dense(5, 3)[0, 0], torch.ones(5, 3).tril(-2).bool())


def test_a_window_counts_the_keys_beside_the_query() -> None:
    expected = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    assert torch.equal(masks.window((2, 1)).dense(4, 4)[0, 0], expected)
    assert torch.equal(masks.window(1).dense(4, 4), masks.window((1, 1)).dense(4, 4))


def test_both_polarities_and_additive_masks_mean_the_same() -> None:
    visible = torch.rand(4, 6) < 0.5
    additive = torch.zeros(4, 6).masked_fill(~visible, -torch.inf)
    lowest = torch.zeros(4, 6).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (
        masks.from_blocked(~visible),
        masks.from_additive(additive),
        masks.from_additive(lowest),
    ):
        assert torch.equal(mask.dense(4, 6)[0, 0], visible)


def test_a_flex_mask_counts_queries_from_the_first() -> None:
    block_mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, T, S, device="cpu")
    visible = torch.ones(T, S, dtype=torch.bool).tril()
    assert torch.equal(masks.from_flex(block_mask).dense(T, S)[0, 0], visible)


@given(visible=st.lists(st.booleans(), min_size=T * S, max_size=T * S))
def test_a_mask_of_zeros_and_ones_means_the_same_in_every_dtype(visible: list[bool]) -> None:
    booleans = torch.tensor(visible).view(T, S)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64):
        mask = masks.from_binary(booleans.to(dtype))
        assert torch.equal(mask.dense(T, S)[0, 0], booleans)
    four = masks.from_binary(booleans.float().expand(2, 1, T, S))
    assert torch.equal(four.dense(T, S)[:, 0], booleans.expand(2, T, S))
