"""What a group of heads shares: nothing shared loses less, and nothing is turned that is bound."""

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise import MultiHeadAttention, RoPE
from headwise.models import find_attentions
from headwise.surgery.grouping._cluster import cluster, neighbors
from headwise.surgery.grouping._freedom import (
    Freedom,
    all_free,
    freedom_of_keys,
    freedom_of_values,
    none_free,
)
from headwise.surgery.grouping._rows import layout_of, traced
from headwise.surgery.grouping._shared import Made, share

n_groups, sizes, seeds = st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000)


def _made(n: int, D: int, m: int, freedom: Freedom) -> Made:
    rows = torch.randn(n, D, m, dtype=torch.float64)
    counts = torch.randn(n, D, D + 1, dtype=torch.float64)
    counts = counts @ counts.mT
    if len(freedom.free) < D:  # features that positions turn count apart
        counts = torch.diag_embed(counts.diagonal(dim1=1, dim2=2))
        for one, two in freedom.pairs.tolist():
            counts[:, one, one] = counts[:, two, two]
    return Made(rows, rows @ torch.randn(m, m, dtype=torch.float64), counts)


def _freedom(kind: str, D: int) -> Freedom:
    some = torch.arange(D)
    return {
        "all": all_free(D),
        "none": none_free(),
        "pairs": Freedom(some[:0], some.view(2, -1).T),
        "some": Freedom(some[D // 2 :], some[: D // 2].view(-1, 2)),
    }[kind]


KINDS = ("all", "none", "pairs", "some")


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 4), seed=seeds)
def test_what_is_lost_is_what_counts_of_the_error(kind: str, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    freedom = _freedom(kind, 8)
    made = _made(n, 8, 11, freedom)
    shared = share(made, freedom)
    error = made.rows - shared.mixed @ shared.rows
    error = error @ torch.linalg.lstsq(made.rows.flatten(0, 1), made.seen.flatten(0, 1)).solution
    lost = sum(
        torch.trace(one.T @ two @ one).item() for one, two in zip(error, made.counts, strict=True)
    )
    whole = sum(
        torch.trace(one.T @ two @ one).item()
        for one, two in zip(made.seen, made.counts, strict=True)
    )
    assert shared.lost == pytest.approx(lost, rel=1e-6, abs=1e-9 * whole)
    assert shared.whole == pytest.approx(whole)
    if n == 1:
        assert shared.lost <= 1e-12 * whole


@pytest.mark.parametrize("kind", ["all", "pairs", "some"])
@given(seed=seeds)
def test_no_other_share_loses_less(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    freedom = _freedom(kind, 8)
    made = _made(3, 8, 11, freedom)
    shared = share(made, freedom)
    assert 0 < shared.lost < share(made, none_free()).lost
    for _ in range(5):
        rows = shared.rows + 0.1 * torch.randn_like(shared.rows)
        mixed = shared.mixed + 0.1 * _drawn(freedom, 3, 8)
        assert _lost(made, rows, mixed) > shared.lost


def _drawn(freedom: Freedom, n: int, D: int) -> Tensor:
    """Matrices that mix what is free to be mixed."""
    mixed = torch.zeros(n, D, D, dtype=torch.float64)
    free, (one, two) = freedom.free, freedom.pairs.T
    mixed[:, free[:, None], free] = torch.randn(n, len(free), len(free), dtype=torch.float64)
    real, imaginary = torch.randn(2, n, len(one), dtype=torch.float64)
    mixed[:, one, one] = mixed[:, two, two] = real
    mixed[:, two, one], mixed[:, one, two] = imaginary, -imaginary
    return mixed


def _lost(made: Made, rows: Tensor, mixed: Tensor) -> float:
    taken = torch.linalg.lstsq(made.rows.flatten(0, 1).mT, rows.mT).solution.mT
    seen = taken @ made.seen.flatten(0, 1)
    error = made.seen - mixed @ seen
    return torch.einsum("nij,nim,njm->", made.counts, error, error).item()


@given(n_groups, sizes, seeds)
def test_clusters_are_all_heads_in_equal_groups(n_groups: int, size: int, seed: int) -> None:
    n = n_groups * size
    apart = np.random.default_rng(seed).random((n, n))
    apart = apart + apart.T
    np.fill_diagonal(apart, 0)
    groups = cluster(apart, n_groups)
    assert sorted(head for group in groups for head in group) == [*range(n)]
    assert {len(group) for group in groups} == {size}
    # No two heads would do better in each other's place.
    inside = _inside(apart, groups)
    for one, two in ((i, j) for i in range(n) for j in range(i)):
        swap = {one: two, two: one}
        other = [[swap.get(head, head) for head in group] for group in groups]
        assert inside <= _inside(apart, other) + 1e-9


def _inside(apart: np.ndarray, groups: list[list[int]]) -> float:
    return float(sum(apart[np.ix_(group, group)].sum() for group in groups))


@given(n_groups, sizes, seeds)
def test_heads_that_are_alike_come_together(n_groups: int, size: int, seed: int) -> None:
    kinds = np.random.default_rng(seed).permutation(np.repeat(np.arange(n_groups), size))
    groups = cluster((kinds[:, None] != kinds).astype(float), n_groups)
    assert sorted(groups) == sorted(
        np.flatnonzero(kinds == kind).tolist() for kind in range(n_groups)
    )


def test_neighbors_stay_in_order() -> None:
    assert neighbors(6, 2) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("width", [0, 4, 8])
def test_positions_bind_pairs(pairing: Literal["half", "interleaved"], width: int) -> None:
    rope = RoPE(width, pairing=pairing) if width else None
    keys, values = _free(MultiHeadAttention(16, 2, head_dim=8, bias=True, rope=rope).double())
    half = width // 2
    wanted = [(i, i + half) if pairing == "half" else (2 * i, 2 * i + 1) for i in range(half)]
    assert [*map(tuple, keys.pairs.tolist())] == wanted
    assert keys.free.tolist() == [*range(width, 8)]
    assert values.free.tolist() == [*range(8)]


def test_norms_bind_keys_and_not_values() -> None:
    keys, values = _free(MultiHeadAttention(16, 2, qk_norm=True).double())
    assert (len(keys.free), len(keys.pairs), len(values.free)) == (0, 0, 8)
    assert (str(keys), str(values)) == ("averaged", "8 features mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_binds_no_more(dtype: torch.dtype) -> None:
    keys, _ = _free(MultiHeadAttention(64, 2, rope=RoPE(16)).to(dtype))
    assert str(keys) == "16 features mixed, 16 features turned in pairs"


def _free(layer: MultiHeadAttention) -> tuple[Freedom, Freedom]:
    x = torch.randn(2, 5, layer.d_model, dtype=layer.q_proj.weight.dtype)
    attentions = find_attentions(layer, x)
    with traced(layer, attentions, x) as traces:
        trace = traces[attentions[0]]
        layout = layout_of(attentions[0], trace)
        return freedom_of_keys(trace, layout), freedom_of_values(trace, layout)
