"""The keys, or values, that a group of heads can best share."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from headwise.surgery.grouping._symmetries import Symmetries

# The least weight of a direction beside the mean one: so what is absorbed stays bounded.
_FLOOR = 1e-6


@dataclass(frozen=True, eq=False)
class Features:
    """The keys, or values, of some heads over all that may come in, by their second moments.

    Attributes:
        products: The mean products of the features of each two heads.
        counts: The second moments of what features meet, in queries or in output weights: an
            error counts by what it does there.
    """

    products: Float[Tensor, "n n D D"]
    counts: Float[Tensor, "n D D"]

    @classmethod
    def of(cls, seen: Float[Tensor, "n D m"], counts: Float[Tensor, "n D D"]) -> "Features":
        """Those of features whose products are the products of these rows."""
        n, D, _ = seen.shape
        flat = seen.flatten(0, 1)
        return cls((flat @ flat.T).view(n, D, n, D).transpose(1, 2), counts)

    def some(self, heads: list[int]) -> "Features":
        return Features(self.products[heads][:, heads], self.counts[heads])


@dataclass(frozen=True, eq=False)
class Fit:
    """What a group shares: of what each has the sum of `taken`; and each keeps `mixed` of that.

    Attributes:
        lost: What sharing loses of what counts.
        whole: How much counts there was.
    """

    taken: Float[Tensor, "n D D"]
    mixed: Float[Tensor, "n D D"]
    lost: float
    whole: float

    def shared(self, rows: Float[Tensor, "n D m"]) -> Float[Tensor, "D m"]:
        """What is shared of what makes the features of each head."""
        return (self.taken @ rows).sum(0)


def fit(features: Features, freedom: Symmetries) -> Fit:
    """What loses least of all that heads can share when each may be mixed as it is free to be.

    For features that may be mixed in any way these are the leading directions of all heads
    together, for pairs the leading complex direction. Other features are averaged.
    """
    n, D, _ = features.counts.shape
    mixed = torch.eye(D).to(features.counts).repeat(n, 1, 1)
    taken = mixed / n
    free, pairs = freedom.free, freedom.pairs
    if len(free):
        block = (..., free[:, None], free)
        root = _root(features.counts[block])
        found = root[:, None] @ features.products[block] @ root  # n n F F
        leading = _leading(found.transpose(1, 2).reshape(n * len(free), -1), len(free))
        leading = leading.view(n, len(free), len(free))
        taken[block] = leading.mT @ root / n**0.5
        mixed[block] = torch.linalg.solve(root, leading) * n**0.5
    if len(pairs):
        own = features.products[:, :, pairs[:, :, None], pairs[:, None]]  # n n P 2 2
        weight = _of_pairs(features.counts, freedom)
        found = torch.complex(own[..., 0, 0] + own[..., 1, 1], own[..., 1, 0] - own[..., 0, 1])
        leading = _leading((weight[:, None] * found * weight).movedim(-1, 0), 1)[..., 0].T  # n P
        _put(taken, freedom, leading.conj() * weight / n**0.5)
        _put(mixed, freedom, leading / weight * n**0.5)
    return Fit(taken, mixed, *_lost(features, taken, mixed))


def _lost(
    features: Features, taken: Float[Tensor, "n D D"], mixed: Float[Tensor, "n D D"]
) -> tuple[float, float]:
    """What counts of the error, and of all there was."""
    own = features.products.diagonal().permute(2, 0, 1)  # n D D
    cross = torch.einsum("ghij,hkj->gik", features.products, taken)  # each with what is shared
    shared = (taken @ cross).sum(0)
    error = own - cross @ mixed.mT - mixed @ cross.mT + mixed @ shared @ mixed.mT
    lost, whole = ((features.counts * x).sum().item() for x in (error, own))
    return max(lost, 0.0), whole  # what is nothing may be rounded below it


def _root(counts: Float[Tensor, "n F F"]) -> Float[Tensor, "n F F"]:
    values, vectors = torch.linalg.eigh(counts)
    values = (values / values.mean().clamp(min=1e-300)).clamp(min=_FLOOR)
    return vectors * values.sqrt()[:, None] @ vectors.mT


def _of_pairs(counts: Float[Tensor, "n D D"], freedom: Symmetries) -> Float[Tensor, "n P"]:
    own = counts.diagonal(dim1=1, dim2=2)[:, freedom.pairs].sum(-1)
    return (own / own.mean(0).clamp(min=1e-300)).clamp(min=_FLOOR).sqrt()


def _leading(products: Tensor, rank: int) -> Tensor:
    """Of `[..., n, n]` the `[..., n, rank]` by whose combinations most of it is kept."""
    return torch.linalg.eigh(products).eigenvectors[..., -rank:]


def _put(
    mixed: Float[Tensor, "n D D"], freedom: Symmetries, factor: Complex[Tensor, "n P"]
) -> None:
    """Let pairs be multiplied by these, as complex numbers."""
    one, two = freedom.pairs.T
    mixed[:, one, one] = mixed[:, two, two] = factor.real
    mixed[:, two, one], mixed[:, one, two] = factor.imag, -factor.imag
