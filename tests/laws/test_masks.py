"""Masks are rules: combining them before or after they become tensors is the same."""

from functools import reduce
from operator import and_, or_

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import headwise as hw
from headwise import masks
from headwise.errors import MaskError, ShapeError
from headwise.masks import Mask
from headwise.masks.parts import Dense, split_additive
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


@pytest.mark.parametrize("window", [(None, None), (S - 1, None), (None, T - 1), (S, T)])
def test_a_window_that_hides_nothing_simplifies_to_none(window: tuple) -> None:
    assert masks.window(window).simplify(T, S) is None
    assert (masks.window(window) & masks.causal()).simplify(T, S) == masks.causal()


@given(first=_some(), second=_some(), seed=st.integers(0, 2**31))
def test_reaches_finds_the_queries_that_see_a_marked_key(
    first: Mask, second: Mask, seed: int
) -> None:
    marked = torch.rand(2, 3, S, generator=torch.Generator().manual_seed(seed)) < 0.3
    for mask in (first, second, first & second, ~first):
        expected = (_full(mask) & marked[:, :, None]).any(-1)
        assert torch.equal(mask.reaches(marked, T).expand_as(expected), expected)


@given(first=_some(), second=_some())
def test_a_mask_has_no_truth_value(first: Mask, second: Mask) -> None:
    # `first and second` would be the second alone.
    for mask in (first, first & second, first | second, ~first):
        for use in (lambda m: m and first, lambda m: m or first, lambda m: not m, bool):
            with pytest.raises(MaskError, match=r"no truth value.*first & second, .* \| .* or ~"):
                use(mask)
    assert issubclass(MaskError, TypeError)


@given(rules=st.permutations(["causal", "padding", "~padding", "left", "documents"]))
def test_a_rule_for_other_sizes_is_refused_wherever_it_stands(rules: list[str]) -> None:
    """However rules are combined, what one of them refuses is refused."""
    B, T = 2, 5
    q = torch.zeros(B, 3, T, 4)
    fits = {
        "causal": masks.causal(),
        "padding": masks.padding([T, 3]),
        "~padding": ~masks.padding([0, T]),
        "left": masks.padding([1, T], "left"),
        "documents": masks.documents([[0, 0, 1, 1, 1], [0] * T]),
    }
    one, too_long = "for 2 texts. Give one for each", rf"\[\d, {T + 1}\] of {T} keys"
    for name, other, message in (
        ("padding", masks.padding([3]), f"1 length {one}"),
        ("~padding", ~masks.padding([3, 3, 3]), f"3 lengths {one}"),
        ("documents", masks.documents([[0] * T]), f"1 row {one}"),
        ("padding", masks.padding([5, T + 1]), too_long),
        ("left", masks.padding([5, T + 1], "left"), too_long),
    ):
        for use in (and_, or_):
            hw.attend(q, q, q, mask=reduce(use, [fits[rule] for rule in rules]))
            bad = reduce(use, [(fits | {name: other})[rule] for rule in rules])
            for backend in ("auto", "rows"):
                with pytest.raises(ShapeError, match=message):
                    hw.attend(q, q, q, mask=bad, backend=backend)
            if message == too_long:
                with pytest.raises(ShapeError, match=message):
                    bad.dense(T, T)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hides", [False, True])
def test_an_additive_mask_is_a_mask_and_what_it_adds(dtype: torch.dtype, hides: bool) -> None:
    added = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    if hides:
        added[:, 1, 2:, 4:] = torch.finfo(dtype).min
        added[0, 0, 0, :3] = -torch.inf
    before = added.clone()
    mask, bias = split_additive(added, "attend")
    hidden = torch.zeros(2, 3, 5, 7, dtype=torch.bool)
    if hides:
        hidden[:, 1, 2:, 4:] = True
        hidden[0, 0, 0, :3] = True
        assert isinstance(mask, Dense)
        assert torch.equal(mask.visible, ~hidden)
    else:
        assert mask is None
        assert bias is added  # a copy would take longer than attention does
    assert torch.equal(bias, before.masked_fill(hidden, 0.0))
    assert torch.equal(added, before)


@pytest.mark.parametrize("lowest", [-5e29, -3e38])
def test_biases_that_kernels_would_take_as_hidden_are_raised(lowest: float) -> None:
    added = torch.tensor([[0.5, lowest], [lowest, -2.0]])
    mask, bias = split_additive(added, "attend")
    assert mask is None
    assert torch.equal(bias[0, 0], added.clamp(min=-1e29))


def test_additive_masks_of_zeros_do_nothing_unless_they_are_learned() -> None:
    zeros = torch.zeros(1, 2, 3, 4)
    assert split_additive(zeros, "attend", allow_binary=True) == (None, None)
    _, learned = split_additive(zeros.clone().requires_grad_(), "attend", allow_binary=True)
    assert learned is not None
    assert learned.requires_grad
