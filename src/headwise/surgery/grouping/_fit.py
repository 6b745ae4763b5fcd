"""The groups of heads that lose least by sharing keys, or values, and what each group shares."""

from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Complex, Float, Float64
from torch import Tensor

from headwise.surgery.grouping._symmetries import Symmetries

# The least weight of a direction, relative to the mean: it bounds the matrices that queries and
# output weights absorb.
_FLOOR = 1e-6


class Features(NamedTuple):
    """The keys, or values, of some heads over the distribution of inputs, by second moments.

    Attributes:
        gram: The mean products of the features of every two heads.
        metric: The second moments of the queries or output weights that multiply the features:
            they weight an error by its effect.
    """

    gram: Float[Tensor, "n n D D"]
    metric: Float[Tensor, "n D D"]

    @classmethod
    def of(cls, rows: Float[Tensor, "n D m"], metric: Float[Tensor, "n D D"]) -> "Features":
        """Features whose mean products are the products of these rows."""
        n, D, _ = rows.shape
        flat = rows.flatten(0, 1)
        return cls((flat @ flat.T).view(n, D, n, D).transpose(1, 2), metric)

    def subset(self, heads: list[int]) -> "Features":
        return Features(self.gram[heads][:, heads], self.metric[heads])


class Fit(NamedTuple):
    """How a group shares features: the sum over heads of `encoders` times each head's features.

    Attributes:
        encoders: The matrix of each head's contribution to the shared features.
        decoders: The matrix by which each head reconstructs its features from the shared ones.
        loss: The weighted squared error of the reconstruction.
        total: The weighted squared size of the features.
    """

    encoders: Float[Tensor, "n D D"]
    decoders: Float[Tensor, "n D D"]
    loss: float
    total: float

    def shared(self, rows: Float[Tensor, "n D m"]) -> Float[Tensor, "D m"]:
        """The rows that produce the shared features, from the rows of each head."""
        return (self.encoders @ rows).sum(0)


def fit(features: Features, symmetries: Symmetries) -> Fit:
    """Find the features that heads can share with the least loss under their symmetries.

    Features with any mixing share the leading directions of all heads together; pairs of
    features that rotate share the leading complex direction. Other features are averaged.
    """
    n, D, _ = features.metric.shape
    decoders = torch.eye(D).to(features.metric).repeat(n, 1, 1)
    encoders = decoders / n
    free, pairs = symmetries.free, symmetries.pairs
    if len(free):
        block = (..., free[:, None], free)
        root = _root(features.metric[block])
        weighted = root[:, None] @ features.gram[block] @ root  # n n F F
        leading = _leading(weighted.transpose(1, 2).reshape(n * len(free), -1), len(free))
        leading = leading.view(n, len(free), len(free))
        encoders[block] = leading.mT @ root / n**0.5
        decoders[block] = torch.linalg.solve(root, leading) * n**0.5
    if len(pairs):
        gram = features.gram[:, :, pairs[:, :, None], pairs[:, None]]  # n n P 2 2
        weight = _pair_weights(features.metric, symmetries)
        products = torch.complex(
            gram[..., 0, 0] + gram[..., 1, 1], gram[..., 1, 0] - gram[..., 0, 1]
        )
        weighted = weight[:, None] * products * weight
        leading = _leading(weighted.movedim(-1, 0), 1)[..., 0].T  # n P
        _write_pairs(encoders, symmetries, leading.conj() * weight / n**0.5)
        _write_pairs(decoders, symmetries, leading / weight * n**0.5)
    return Fit(encoders, decoders, *_loss_and_total(features, encoders, decoders))


def _loss_and_total(
    features: Features, encoders: Float[Tensor, "n D D"], decoders: Float[Tensor, "n D D"]
) -> tuple[float, float]:
    """The weighted squared error of the reconstruction, and size of the features."""
    own = features.gram.diagonal().permute(2, 0, 1)  # n D D
    cross = torch.einsum("ghij,hkj->gik", features.gram, encoders)  # of each head with the shared
    shared = (encoders @ cross).sum(0)
    error = own - cross @ decoders.mT - decoders @ cross.mT + decoders @ shared @ decoders.mT
    loss, total = ((features.metric * x).sum().item() for x in (error, own))
    return max(loss, 0.0), total  # rounding may bring a loss of zero below it


def _root(metric: Float[Tensor, "n F F"]) -> Float[Tensor, "n F F"]:
    values, vectors = torch.linalg.eigh(metric)
    values = (values / values.mean().clamp(min=1e-300)).clamp(min=_FLOOR)
    return vectors * values.sqrt()[:, None] @ vectors.mT


def _pair_weights(metric: Float[Tensor, "n D D"], symmetries: Symmetries) -> Float[Tensor, "n P"]:
    weights = metric.diagonal(dim1=1, dim2=2)[:, symmetries.pairs].sum(-1)
    return (weights / weights.mean(0).clamp(min=1e-300)).clamp(min=_FLOOR).sqrt()


def _leading(products: Tensor, rank: int) -> Tensor:
    """The leading eigenvectors of `[..., n, n]`, as `[..., n, rank]`."""
    return torch.linalg.eigh(products).eigenvectors[..., -rank:]


def _write_pairs(
    matrices: Float[Tensor, "n D D"], symmetries: Symmetries, factors: Complex[Tensor, "n P"]
) -> None:
    """Make the matrices multiply pairs of features by complex numbers."""
    i, j = symmetries.pairs.T
    matrices[:, i, i] = matrices[:, j, j] = factors.real
    matrices[:, j, i], matrices[:, i, j] = factors.imag, -factors.imag


def cluster(distances: Float64[np.ndarray, "n n"], n_groups: int) -> list[list[int]]:
    """Find groups of equal size with small distances within them.

    Groups are built greedily; then pairs of heads swap groups for as long as that helps.

    Args:
        distances: The distance between every two heads: symmetric, with a zero diagonal.
    """
    groups = _greedy(distances, len(distances) // n_groups)
    while _exchange(distances, groups):
        pass
    return sorted(sorted(group) for group in groups)


def _greedy(distances: Float64[np.ndarray, "n n"], size: int) -> list[list[int]]:
    remaining, groups = set(range(len(distances))), []
    while remaining:
        pairs = combinations(sorted(remaining), 2)
        closest = min(pairs, key=distances.__getitem__, default=None)
        group = [*closest] if closest and size > 1 else [min(remaining)]
        while len(group) < size:
            candidates = sorted(remaining - set(group))
            group.append(min(candidates, key=lambda head: distances[head, group].sum()))
        remaining -= set(group)
        groups.append(group)
    return groups


def _exchange(distances: Float64[np.ndarray, "n n"], groups: list[list[int]]) -> bool:
    """Swap every two heads whose swap reduces the distances; return whether any did."""
    changed = False
    for first, second in combinations(groups, 2):
        for i, j in product(range(len(first)), range(len(second))):
            a, b = first[i], second[j]
            before = distances[a, first].sum() + distances[b, second].sum()
            after = distances[b, first].sum() + distances[a, second].sum() - 2 * distances[a, b]
            if after < before - 1e-12 * abs(before):
                first[i], second[j] = b, a
                changed = True
    return changed
