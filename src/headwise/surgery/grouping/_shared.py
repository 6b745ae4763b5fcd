"""The keys, or values, that a group of heads can best share."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from headwise.surgery.grouping._freedom import Freedom

# The least weight of a direction beside the mean one: so what is absorbed stays bounded.
_FLOOR = 1e-6


@dataclass(frozen=True, eq=False)
class Made:
    """How the keys, or values, of heads are made, and what counts of them.

    Attributes:
        rows: What they are made by, the bias as a last column.
        seen: The same times a root of the second moments of what comes in, so that products of
            these are those of the features themselves.
        counts: The second moments of what features meet, in queries or in output weights: an
            error counts by what it does there.
    """

    rows: Float[Tensor, "n D m"]
    seen: Float[Tensor, "n D m"]
    counts: Float[Tensor, "n D D"]

    def of(self, heads: list[int]) -> "Made":
        return Made(self.rows[heads], self.seen[heads], self.counts[heads])


@dataclass(frozen=True, eq=False)
class Shared:
    """What a group shares: head `g` of it keeps about `mixed[g] @ rows`.

    Attributes:
        lost: What sharing loses of what counts.
        whole: How much counts there was.
    """

    rows: Float[Tensor, "D m"]
    mixed: Float[Tensor, "n D D"]
    lost: float
    whole: float


def share(made: Made, freedom: Freedom) -> Shared:
    """What loses least of all that heads can share when each may be mixed as it is free to be.

    For features that may be mixed in any way these are the leading directions of all heads
    together, for pairs the leading complex direction. Other features are averaged.
    """
    n, D, _ = made.rows.shape
    mixed = torch.eye(D).to(made.rows).repeat(n, 1, 1)  # from what is shared to what each has
    taken = mixed / n  # from what each has to what is shared
    free, pairs = freedom.free, freedom.pairs
    if len(free):
        block = (slice(None), free[:, None], free)
        root = _root(made.counts[block])
        leading = _leading((root @ made.seen[:, free]).flatten(0, 1), len(free))
        leading = leading.view(n, len(free), len(free))
        taken[block] = leading.mT @ root / n**0.5
        mixed[block] = torch.linalg.solve(root, leading) * n**0.5
    if len(pairs):
        weight = _of_pairs(made.counts, freedom)
        seen = torch.complex(made.seen[:, pairs[:, 0]], made.seen[:, pairs[:, 1]])
        leading = _leading((weight[..., None] * seen).transpose(0, 1), 1)[..., 0].T  # n P
        _put(taken, freedom, leading.conj() * weight / n**0.5)
        _put(mixed, freedom, leading / weight * n**0.5)
    rows, seen = (torch.einsum("nij,njm->im", taken, x) for x in (made.rows, made.seen))
    return Shared(rows, mixed, _size(made, made.seen - mixed @ seen), _size(made, made.seen))


def _size(made: Made, seen: Float[Tensor, "n D m"]) -> float:
    return torch.einsum("nij,nim,njm->", made.counts, seen, seen).item()


def _root(counts: Float[Tensor, "n F F"]) -> Float[Tensor, "n F F"]:
    values, vectors = torch.linalg.eigh(counts)
    values = (values / values.mean().clamp(min=1e-300)).clamp(min=_FLOOR)
    return vectors * values.sqrt()[:, None] @ vectors.mT


def _of_pairs(counts: Float[Tensor, "n D D"], freedom: Freedom) -> Float[Tensor, "n P"]:
    own = counts.diagonal(dim1=1, dim2=2)[:, freedom.pairs].sum(-1)
    return (own / own.mean(0).clamp(min=1e-300)).clamp(min=_FLOOR).sqrt()


def _leading(x: Tensor, rank: int) -> Tensor:
    """Of `[..., n, m]` the `[..., n, rank]` by whose combinations of rows most of it is kept."""
    return torch.linalg.eigh(x @ x.mH).eigenvectors[..., -rank:]


def _put(mixed: Float[Tensor, "n D D"], freedom: Freedom, factor: Complex[Tensor, "n P"]) -> None:
    """Let pairs be multiplied by these, as complex numbers."""
    one, two = freedom.pairs.T
    mixed[:, one, one] = mixed[:, two, two] = factor.real
    mixed[:, two, one], mixed[:, one, two] = factor.imag, -factor.imag
