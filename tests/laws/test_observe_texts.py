"""Texts stay texts: packed into one row, decoded step by step, in any split and order."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise import masks
from headwise.errors import ArgumentError
from headwise.layer import KVCache, MultiHeadAttention
from headwise.tables import COLUMNS, HeadTable
from headwise.watch import Request, Watch, observe
from oracles import modules_of

lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
Pairs = list[tuple[int, int]]

REQUEST = Request(
    statistics=(*Request().statistics, "participation", "output_norm"),
    pairs=("back",), top=("first", "back"), value=("previous", "back"),
    per_text=True, received=True,
)  # fmt: skip


def _layer(**how: object) -> MultiHeadAttention:
    torch.manual_seed(3)
    return MultiHeadAttention(12, 4, 2, **how).double().eval()


LAYER = _layer()


def _texts(sizes: Sequence[int]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, 12, generator=rng, dtype=torch.float64) for size in sizes]


def _back(size: int) -> Pairs:
    """Several keys for a query, or none."""
    return [(q, k) for q in range(size) for k in range(q + 1) if (q + k) % 3 == 1]


def _one_by_one(sizes: Sequence[int], order: Sequence[int] | None = None) -> HeadTable:
    with torch.no_grad(), observe(LAYER, REQUEST) as watch:
        texts = _texts(sizes)
        for at in range(len(sizes)) if order is None else order:
            watch.pairs(back=[_back(sizes[at])])
            LAYER(texts[at][None], causal=True)
    return watch.table()


def assert_same(one: HeadTable, two: HeadTable) -> None:
    """Equal but for the order of texts."""
    assert one.statistics == two.statistics
    for name in one.statistics:
        mine, theirs = one.totals[name], two.totals[name]
        for part in COLUMNS:
            known = getattr(theirs, part)
            np.testing.assert_allclose(
                getattr(mine, part), known, rtol=1e-9, atol=1e-9, err_msg=f"{name}.{part}"
            )
        for ours, known in zip(one.per_text(name).parts, two.per_text(name).parts, strict=True):
            np.testing.assert_allclose(_ordered(ours), _ordered(known), atol=1e-9, err_msg=name)


def _ordered(texts: np.ndarray) -> np.ndarray:
    rounded = np.round(texts, 7)
    return texts[np.lexsort(rounded.T)]


@settings(max_examples=15)
@given(sizes=lengths, seed=st.integers(0, 99))
def test_any_order_gives_the_same_sums_of_texts(sizes: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    table = _one_by_one(sizes)
    assert_same(_one_by_one(sizes, order), table)
    assert table.per_text("lse").count[:, 0].tolist() == sizes


@settings(max_examples=15)
@given(rows=st.lists(lengths, min_size=1, max_size=2), seed=st.integers(0, 9))
def test_packed_texts_are_texts(rows: list[list[int]], seed: int) -> None:
    width = max(map(sum, rows))
    x = torch.zeros(len(rows), width, 12, dtype=torch.float64)
    # Numbers in no order, and a row may end in padding.
    ids = torch.full((len(rows), width), -5)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    names = np.random.default_rng(seed).permutation(20)
    flat = [size for row in rows for size in row]
    texts = iter(_texts(flat))
    pairs = []
    for row, sizes in enumerate(rows):
        start, numbered = 0, names[: len(sizes)]
        for number, size in zip(numbered.tolist(), sizes, strict=True):
            at = slice(start, start + size)
            x[row, at], ids[row, at], real[row, at] = next(texts), number, True
            start += size
        pairs += map(_back, sizes)
    rule = masks.documents(ids) & masks.causal() & masks.as_mask(real[:, None, None])
    with torch.no_grad(), observe(LAYER, REQUEST) as watch:
        watch.pairs(back=pairs)
        LAYER(x, mask=rule)
    assert_same(watch.table(), _one_by_one(flat))


@settings(max_examples=15)
@given(sizes=lengths, side=st.sampled_from(["left", "right"]))
def test_padding_never_counts(sizes: list[int], side: str) -> None:
    x, rule = _padded(sizes, side)
    with torch.no_grad(), observe(LAYER, REQUEST) as watch:
        watch.pairs(back=[_back(size) for size in sizes])
        LAYER(x, mask=rule & masks.causal())
        received = [watch.received((0, head)) for head in range(4)]
    assert_same(watch.table(), _one_by_one(sizes))
    real = rule.dense(x.shape[1], x.shape[1])[:, 0, 0]
    for mass in received:
        assert (mass[~real] == 0).all()
        np.testing.assert_allclose(mass.sum(-1), sizes)


def _padded(sizes: Sequence[int], side: str) -> tuple[Tensor, masks.Mask]:
    width = max(sizes) + 1
    x = torch.full((len(sizes), width, 12), 99.0, dtype=torch.float64)
    for row, (size, text) in enumerate(zip(sizes, _texts(sizes), strict=True)):
        at = slice(0, size) if side == "right" else slice(width - size, width)
        x[row, at] = text
    return x, masks.padding(sizes, side)


@settings(max_examples=15)
@given(steps=st.lists(st.integers(1, 3), min_size=1, max_size=4), texts=st.integers(1, 3))
def test_decoding_goes_on_with_its_texts(steps: list[int], texts: int) -> None:
    size = sum(steps)
    x = torch.stack(_texts([size] * texts))
    with torch.no_grad(), observe(LAYER, REQUEST) as watch:
        for _ in range(2):  # the second texts are others, though as long as the first
            cache = KVCache()
            for part, read in zip(x.split(steps, dim=1), np.cumsum(steps), strict=True):
                watch.pairs(back=[_back(int(read))] * texts)
                LAYER(part, causal=True, cache=cache)
            x = x.flip(0)
        received = watch.received((0, 3))
    with torch.no_grad(), observe(LAYER, REQUEST) as whole:
        for _ in range(2):
            whole.pairs(back=[_back(size)] * texts)
            LAYER(x, causal=True)
    assert_same(watch.table(), whole.table())
    torch.testing.assert_close(received.flip(0), whole.received((0, 3)))


def test_every_nth_micro_batch_is_counted_once_whole() -> None:
    texts = _texts([5, 3, 4, 6, 2])
    with observe(LAYER, every=2) as watch:
        for text in texts:  # gradients accumulate over five passes
            LAYER(text[None], causal=True).sum().backward()
    LAYER.zero_grad()
    assert watch.table().count("lse").tolist() == [5 + 4 + 2] * 4


def test_only_watched_passes_have_pairs() -> None:
    request = Request(statistics=(), pairs=("back",))
    with torch.no_grad(), observe(LAYER, request, every=2) as watch:
        for text in _texts([5, 3, 4]):
            watch.pairs(back=[[(1, 0)]])
            LAYER(text[None], causal=True)
    assert watch.table().count("back").tolist() == [2] * 4


def test_pairs_of_one_text_are_nan_across_texts() -> None:
    with torch.no_grad(), observe(LAYER, REQUEST) as watch:
        watch.pairs(back=[[(1, 0)]])
        LAYER(*(text[None] for text in _texts([5, 3])))
    table = watch.table()
    for name in ("back", "top(back)", "value(back)", "value(previous)"):
        assert np.isnan(table.mean(name)).all()
        assert (table.per_text(name).count == 0).all()
    assert np.isfinite(table.mean("top(first)")).all()


def _maps(watch: Watch) -> Tensor:
    return torch.stack([watch.weights((0, head)) for head in range(4)], 1)


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_asked_of_masses_is_that_of_the_weights(causal: bool) -> None:
    request = Request(
        statistics=("participation", "output_norm"), pairs=("back",),
        top=("first", "back"), value=("previous", "back"), received=True, maps=True,
    )  # fmt: skip
    x = torch.stack(_texts([7, 7]))
    with torch.no_grad(), observe(LAYER, request) as watch:
        watch.pairs(back=[_back(7), _back(7)])
        LAYER(x, causal=causal)
        weights = _maps(watch)
        values = LAYER.v_proj(x).unflatten(-1, (2, 3)).transpose(1, 2).repeat_interleave(2, 1)
        outputs = LAYER.out_proj.weight.detach().T.unflatten(0, (4, 3))
    table = watch.table()
    alone = 1 if causal else 0  # rows at the beginning that see a single key

    def mean(values: Tensor, eligible: Tensor | None = None) -> np.ndarray:
        kept = torch.ones(7, dtype=torch.bool) if eligible is None else eligible.clone()
        kept[:alone] = False
        return values[:, :, kept].mean((0, 2)).numpy()

    pairs = torch.zeros(7, 7, dtype=torch.bool)
    pairs[tuple(torch.tensor(_back(7)).T)] = True
    previous = torch.eye(7, dtype=torch.bool).roll(-1, 1).tril()
    first = torch.zeros_like(pairs).index_fill_(1, torch.tensor(0), True)
    top = (weights == weights.amax(-1, keepdim=True)).double()
    moved = weights * (values @ outputs).norm(dim=-1)[:, :, None]
    moved = moved / moved.sum(-1, keepdim=True)
    expected = {
        "participation": mean(1 / weights.square().sum(-1)),
        "output_norm": (weights @ values @ outputs).norm(dim=-1).mean((0, 2)).numpy(),
        "back": mean((weights * pairs).sum(-1), pairs.any(-1)),
        "top(first)": mean((top * first).sum(-1)),
        "top(back)": mean((top * pairs).sum(-1), pairs.any(-1)),
        "value(previous)": mean((moved * previous).sum(-1), previous.any(-1)),
        "value(back)": mean((moved * pairs).sum(-1), pairs.any(-1)),
    }
    assert table.statistics == tuple(expected)
    for name, known in expected.items():
        np.testing.assert_allclose(table.mean(name), known, rtol=1e-9, err_msg=name)
    for head in range(4):
        torch.testing.assert_close(watch.received((0, head)), weights[:, head].sum(1))


@pytest.mark.parametrize("block", [1, 1 << 22], ids=["a row at a time", "at once"])
def test_a_close_look_is_at_the_same_weights(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.watch._maps._BLOCK", block)
    x, rule = _padded([7, 5], "left")
    with torch.no_grad(), observe(LAYER, Request(statistics=(), maps=True)) as watch:
        LAYER(x, mask=rule & masks.causal())
        known = LAYER(x, mask=rule & masks.causal(), need_weights=True).weights
    for head in range(4):
        whole = known[:, head]
        torch.testing.assert_close(watch.weights((0, head)), whole)
        torch.testing.assert_close(watch.weights((0, head), slice(-3, None)), whole[:, -3:])
        top = watch.top_keys((0, head), k=3, rows=slice(2, 6))
        torch.testing.assert_close(top.weights, whole[:, 2:6].topk(3).values)
        assert ((top.keys == -1) == (top.weights == 0)).all()
        found = whole[:, 2:6].gather(-1, top.keys.clamp(min=0))
        torch.testing.assert_close(found.where(top.keys >= 0, 0.0), top.weights)


def test_asking_for_everything_changes_no_bit_and_leaves_nothing() -> None:
    layer = _layer()
    before = modules_of(layer)
    x = torch.stack(_texts([5, 5])).requires_grad_()
    plain = layer(x, causal=True)
    [gradient] = torch.autograd.grad(plain.sum(), x)
    with observe(layer, REQUEST) as outer, observe(layer, REQUEST) as inner:
        for watch in (outer, inner):
            watch.pairs(back=[_back(5)] * 2)
        watched = layer(x, causal=True)
        assert torch.equal(watched, plain)
        assert torch.equal(torch.autograd.grad(watched.sum(), x)[0], gradient)
        assert_same(outer.table(), inner.table())
        with pytest.raises(ArgumentError, match="no pairs were given"):
            layer(x, causal=True)
    assert modules_of(layer) == before


def test_even_attention_has_the_values_that_even_says() -> None:
    layer = _layer()
    torch.nn.init.zeros_(layer.q_proj.weight)
    request = Request(
        statistics=("participation",), pairs=("back",), top=("back", "previous", "first")
    )
    with torch.no_grad(), observe(layer, request) as watch:
        watch.pairs(back=[_back(7)])
        layer(_texts([7])[0][None], causal=True)
    table = watch.table()
    for name in table.statistics:
        np.testing.assert_allclose(table.mean(name), table.even(name), err_msg=name)


@given(seed=st.integers(0, 999), size=st.integers(1, 6), scale=st.sampled_from([1.0, 40.0]))
def test_every_statistic_stays_in_its_range(seed: int, size: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, size, 12, generator=rng, dtype=torch.float64) * scale
    # A key that nobody may look at, not even itself, is padding.
    mask = (torch.rand(2, 1, size, size, generator=rng) < 0.6) | torch.eye(size).bool()
    with torch.no_grad(), observe(LAYER, REQUEST) as watch:
        watch.pairs(back=[_back(size)] * 2)
        LAYER(x, mask=mask)
    table = watch.table()
    shares = ("max_weight", "first", "self", "previous", "next", "back")
    shares += ("top(first)", "top(back)", "value(previous)", "value(back)")
    bounds = dict.fromkeys(shares, (0, 1)) | {
        "entropy": (0, np.log(size)),
        "participation": (1, size),
        "distance": (0, size - 1),
        "output_norm": (0, np.inf),
    }
    for name, (low, high) in bounds.items():
        for column in (table.mean(name), table.maximum(name)):
            found = column[~np.isnan(column)]
            assert ((found >= low - 1e-9) & (found <= high + 1e-9)).all(), name
        np.testing.assert_array_equal(np.isnan(table.mean(name)), table.count(name) == 0)


@settings(max_examples=15)
@given(size=st.integers(3, 9), seed=st.integers(0, 9))
def test_a_key_that_no_query_sees_is_a_token(size: int, seed: int) -> None:
    """A sparse mask says nothing about padding; `masks.padding` and a mask of keys alone do."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, size, 12, generator=rng, dtype=torch.float64)
    sparse = torch.rand(2, 1, size, size, generator=rng) > 0.3
    sparse[:, :, :, 1], sparse[:, :, :, 0] = False, True
    sparse[:, :, 0, 2], sparse[:, :, 1, 2] = False, True  # else it would be a mask of keys alone
    real = torch.ones(2, size, dtype=torch.bool)
    real[1, -1] = False
    for mask, expected in (
        (masks.as_mask(sparse), 2 * size),
        (masks.as_mask(sparse) & masks.padding([size, size - 1]), 2 * size - 1),
        (masks.as_mask(sparse) & masks.as_mask(real[:, None, None]), 2 * size - 1),
    ):
        with torch.no_grad(), observe(LAYER, Request(queries="all")) as watch:
            LAYER(x, mask=mask)
        assert (watch.table().count("first") == expected).all()
        assert (watch.table().count("lse") == expected).all()
