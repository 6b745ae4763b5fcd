"""Grouping shares features with the least loss, and mixes only those that positions allow."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise import MultiHeadAttention, RoPE
from headwise.ownership import find_attentions
from headwise.surgery.grouping._fit import Features, Fit, cluster, fit
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
    """The rows that produce some features, the rows weighted by the inputs, and the metric."""

    rows: Tensor
    weighted: Tensor
    metric: Tensor

    def fit(self, symmetries: Symmetries) -> Fit:
        return fit(Features.of(self.weighted, self.metric), symmetries)

    def loss(self, rows: Tensor, decoders: Tensor) -> float:
        """The weighted error when each head reconstructs its features from these rows."""
        error = self.rows - decoders @ rows
        return self._size(
            error @ torch.linalg.lstsq(self._flat(self.rows), self._flat(self.weighted)).solution
        )

    def total(self) -> float:
        return self._size(self.weighted)

    def _size(self, x: Tensor) -> float:
        return sum(
            torch.trace(head.T @ metric @ head).item()
            for head, metric in zip(x, self.metric, strict=True)
        )

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


def _heads(n: int, D: int, symmetries: Symmetries) -> Heads:
    # Fewer inputs than features, so that the inputs can be recovered from the features.
    rows = torch.randn(n, D, D - 1, dtype=torch.float64)
    metric = torch.randn(n, D, D + 1, dtype=torch.float64)
    metric = metric @ metric.mT
    if len(symmetries.free) < D:  # features that positions rotate have independent weights
        metric = torch.diag_embed(metric.diagonal(dim1=1, dim2=2))
        for i, j in symmetries.pairs.tolist():
            metric[:, i, i] = metric[:, j, j]
    return Heads(rows, rows @ torch.randn(D - 1, D - 1, dtype=torch.float64), metric)


def _symmetries(kind: str, D: int) -> Symmetries:
    features = torch.arange(D)
    return {
        "all": all_free(D),
        "none": none_free(),
        "pairs": Symmetries(features[:0], features.view(2, -1).T),
        "some": Symmetries(features[D // 2 :], features[: D // 2].view(-1, 2)),
    }[kind]


KINDS = ("all", "none", "pairs", "some")


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 4), seed=seeds)
def test_the_loss_is_the_weighted_error(kind: str, n: int, seed: int) -> None:
    torch.manual_seed(seed)
    symmetries = _symmetries(kind, 8)
    heads = _heads(n, 8, symmetries)
    result, total = heads.fit(symmetries), heads.total()
    assert result.total == pytest.approx(total)
    loss = heads.loss(result.shared(heads.rows), result.decoders)
    assert result.loss == pytest.approx(loss, rel=1e-6, abs=1e-9 * total)
    if n == 1:
        assert result.loss <= 1e-9 * total


@pytest.mark.parametrize("kind", ["all", "pairs", "some"])
@given(seed=seeds)
def test_shared_features_lose_least(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    symmetries = _symmetries(kind, 8)
    heads = _heads(3, 8, symmetries)
    best = heads.fit(symmetries)
    assert best.loss < heads.fit(none_free()).loss
    for _ in range(5):
        rows = best.shared(heads.rows)
        rows = rows + 0.1 * torch.randn_like(rows)
        decoders = best.decoders + 0.1 * _random_mixing(symmetries, 3, 8)
        assert heads.loss(rows, decoders) > best.loss - 1e-9


def _random_mixing(symmetries: Symmetries, n: int, D: int) -> Tensor:
    """Random matrices that mix features as the symmetries allow."""
    matrices = torch.zeros(n, D, D, dtype=torch.float64)
    free, (i, j) = symmetries.free, symmetries.pairs.T
    matrices[:, free[:, None], free] = torch.randn(n, len(free), len(free), dtype=torch.float64)
    real, imaginary = torch.randn(2, n, len(i), dtype=torch.float64)
    matrices[:, i, i] = matrices[:, j, j] = real
    matrices[:, j, i], matrices[:, i, j] = imaginary, -imaginary
    return matrices


@given(n_groups, sizes, seeds)
def test_clusters_are_all_heads_in_equal_groups(n_groups: int, size: int, seed: int) -> None:
    n = n_groups * size
    apart = np.random.default_rng(seed).random((n, n))
    apart = apart + apart.T
    np.fill_diagonal(apart, 0)
    groups = cluster(apart, n_groups)
    assert sorted(head for group in groups for head in group) == [*range(n)]
    assert {len(group) for group in groups} == {size}
    # No swap of two heads would be better.
    inside = _inside(apart, groups)
    for first, second in ((i, j) for i in range(n) for j in range(i)):
        swap = {first: second, second: first}
        swapped = [[swap.get(head, head) for head in group] for group in groups]
        assert inside <= _inside(apart, swapped) + 1e-9


def _inside(apart: np.ndarray, groups: list[list[int]]) -> float:
    return float(sum(apart[np.ix_(group, group)].sum() for group in groups))


@given(n_groups, sizes, seeds)
def test_similar_heads_form_a_group(n_groups: int, size: int, seed: int) -> None:
    kinds = np.random.default_rng(seed).permutation(np.repeat(np.arange(n_groups), size))
    groups = cluster((kinds[:, None] != kinds).astype(float), n_groups)
    assert sorted(groups) == sorted(
        np.flatnonzero(kinds == kind).tolist() for kind in range(n_groups)
    )


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("width", [0, 4, 8])
def test_rope_ties_pairs_of_features(pairing: Literal["half", "interleaved"], width: int) -> None:
    rope = RoPE(width, pairing=pairing) if width else None
    keys, values = _free(MultiHeadAttention(16, 2, head_dim=8, bias=True, rope=rope).double())
    half = width // 2
    expected = [(i, i + half) if pairing == "half" else (2 * i, 2 * i + 1) for i in range(half)]
    assert [*map(tuple, keys.pairs.tolist())] == expected
    assert keys.free.tolist() == [*range(width, 8)]
    assert values.free.tolist() == [*range(8)]


def test_norms_restrict_keys_and_not_values() -> None:
    keys, values = _free(MultiHeadAttention(16, 2, qk_norm=True).double())
    assert (len(keys.free), len(keys.pairs), len(values.free)) == (0, 0, 8)
    assert (str(keys), str(values)) == ("averaged", "8 features mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_restricts_no_more(dtype: torch.dtype) -> None:
    keys, _ = _free(MultiHeadAttention(64, 2, rope=RoPE(16)).to(dtype))
    assert str(keys) == "16 features mixed, 16 features rotated in pairs"


def _free(layer: MultiHeadAttention) -> tuple[Symmetries, Symmetries]:
    x = torch.randn(2, 5, layer.d_model, dtype=layer.q_proj.weight.dtype)
    attentions = find_attentions(layer, x)
    with traced(layer, attentions, x) as traces:
        trace = traces[attentions[0]]
        layout = layout_of(attentions[0], trace)
        return symmetries_of_keys(trace, layout), symmetries_of_values(trace, layout)
