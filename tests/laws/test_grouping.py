"""What a group of heads shares: nothing shared loses less, and nothing is turned that is bound."""

from dataclasses import dataclass
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
from headwise.surgery.grouping._fit import Features, Fit, fit
from headwise.surgery.grouping._rows import layout_of, traced
from headwise.surgery.grouping._symmetries import (
    Symmetries,
    all_free,
    none_free,
    symmetries_of_keys,
    symmetries_of_values,
)

n_groups, sizes, seeds = st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000)


@dataclass(frozen=True)
class Heads:
    """What makes some features, the same as they are seen, and what of them counts."""

    rows: Tensor
    seen: Tensor
    counts: Tensor

    def fit(self, freedom: Symmetries) -> Fit:
        return fit(Features.of(self.seen, self.counts), freedom)

    def lost(self, rows: Tensor, mixed: Tensor) -> float:
        """What counts of the error when each head keeps `mixed` of these rows."""
        error = self.rows - mixed @ rows
        return self._counted(
            error @ torch.linalg.lstsq(self._flat(self.rows), self._flat(self.seen)).solution
        )

    def whole(self) -> float:
        return self._counted(self.seen)

    def _counted(self, x: Tensor) -> float:
        return sum(
            torch.trace(one.T @ two @ one).item() for one, two in zip(x, self.counts, strict=True)
        )

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


def _heads(n: int, D: int, freedom: Symmetries) -> Heads:
    # Fewer come in than there are features, so that all that comes in can be told from them.
    rows = torch.randn(n, D, D - 1, dtype=torch.float64)
    counts = torch.randn(n, D, D + 1, dtype=torch.float64)
    counts = counts @ counts.mT
    if len(freedom.free) < D:  # features that positions turn count apart
        counts = torch.diag_embed(counts.diagonal(dim1=1, dim2=2))
        for one, two in freedom.pairs.tolist():
            counts[:, one, one] = counts[:, two, two]
    return Heads(rows, rows @ torch.randn(D - 1, D - 1, dtype=torch.float64), counts)


def _freedom(kind: str, D: int) -> Symmetries:
    some = torch.arange(D)
    return {
        "all": all_free(D),
        "none": none_free(),
        "pairs": Symmetries(some[:0], some.view(2, -1).T),
        "some": Symmetries(some[D // 2 :], some[: D // 2].view(-1, 2)),
    }[kind]


KINDS = ("all", "none", "pairs", "some")


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 4), seed=seeds)
def test_what_is_lost_is_what_counts_of_the_error(kind: str, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    freedom = _freedom(kind, 8)
    heads = _heads(n, 8, freedom)
    found, whole = heads.fit(freedom), heads.whole()
    assert found.whole == pytest.approx(whole)
    lost = heads.lost(found.shared(heads.rows), found.mixed)
    assert found.lost == pytest.approx(lost, rel=1e-6, abs=1e-9 * whole)
    if n == 1:
        assert found.lost <= 1e-9 * whole


@pytest.mark.parametrize("kind", ["all", "pairs", "some"])
@given(seed=seeds)
def test_nothing_else_that_is_shared_loses_less(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    freedom = _freedom(kind, 8)
    heads = _heads(3, 8, freedom)
    found = heads.fit(freedom)
    assert found.lost < heads.fit(none_free()).lost
    for _ in range(5):
        rows = found.shared(heads.rows)
        rows = rows + 0.1 * torch.randn_like(rows)
        assert heads.lost(rows, found.mixed + 0.1 * _drawn(freedom, 3, 8)) > found.lost - 1e-9


def _drawn(freedom: Symmetries, n: int, D: int) -> Tensor:
    """Matrices that mix what is free to be mixed."""
    mixed = torch.zeros(n, D, D, dtype=torch.float64)
    free, (one, two) = freedom.free, freedom.pairs.T
    mixed[:, free[:, None], free] = torch.randn(n, len(free), len(free), dtype=torch.float64)
    real, imaginary = torch.randn(2, n, len(one), dtype=torch.float64)
    mixed[:, one, one] = mixed[:, two, two] = real
    mixed[:, two, one], mixed[:, one, two] = imaginary, -imaginary
    return mixed


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


def _free(layer: MultiHeadAttention) -> tuple[Symmetries, Symmetries]:
    x = torch.randn(2, 5, layer.d_model, dtype=layer.q_proj.weight.dtype)
    attentions = find_attentions(layer, x)
    with traced(layer, attentions, x) as traces:
        trace = traces[attentions[0]]
        layout = layout_of(attentions[0], trace)
        return symmetries_of_keys(trace, layout), symmetries_of_values(trace, layout)
