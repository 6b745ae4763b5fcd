"""What one watched step says of every head, over all ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float64
from torch import Tensor

from headwise.models import Site
from headwise.tables import Head, Totals

# Of these the largest value of any query is what counts; of all others the mean over queries.
_BY_MAXIMUM = ("max_logit",)


@dataclass(frozen=True)
class StepStatistics:
    """A number for every statistic and head.

    Attributes:
        values: The mean over queries, or their maximum for `max_logit`.
        seen: Whether a head had any query that the statistic speaks of; without one the
            value is NaN.
    """

    heads: tuple[Head, ...]
    values: Mapping[str, Float64[np.ndarray, " N"]]
    seen: Mapping[str, Bool[np.ndarray, " N"]]

    def each(self, statistic: str) -> Iterator[tuple[Head, float]]:
        """The heads that the statistic speaks of, and its values."""
        rows = zip(self.heads, self.values[statistic], self.seen[statistic], strict=True)
        return ((head, float(value)) for head, value, seen in rows if seen)

    def layers(self) -> dict[str, list[int]]:
        """The rows of each layer, by its name: `L5`, `decoder.cross.L0`."""
        rows: dict[str, list[int]] = {}
        for row, head in enumerate(self.heads):
            rows.setdefault(str(head).rpartition(".")[0], []).append(row)
        return rows

    def scalars(self) -> dict[str, float]:
        """All of it flat: heads first, then layers, then the model.

        Smallest, mean and largest are over the heads that the statistic speaks of, NaN where
        there is none.
        """
        groups = {f"{name}/": rows for name, rows in self.layers().items()}
        groups[""] = list(range(len(self.heads)))
        flat = {
            f"attn/{head}/{name}": float(values[row])
            for row, head in enumerate(self.heads)
            for name, values in self.values.items()
        }
        for place, rows in groups.items():
            for name, values in self.values.items():
                some = values[rows][self.seen[name][rows]]
                for what, of in (("min", np.min), ("mean", np.mean), ("max", np.max)):
                    flat[f"attn/{place}{name}/{what}"] = float(of(some)) if some.size else np.nan
        return flat


def read(
    taken: Mapping[Site, Mapping[str, Totals]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> StepStatistics:
    """The reading of what was taken here and on the other ranks of the group."""
    names = tuple(next(iter(taken.values())))
    tops = tuple(name for name in names if name in _BY_MAXIMUM)

    def column(name: str, part: str) -> Float64[np.ndarray, " N"]:
        return np.concatenate([getattr(totals[name], part) for totals in taken.values()])

    sums = np.array([[column(name, part) for name in names] for part in ("total", "count")])
    maxima = np.array([column(name, "maximum") for name in tops])
    if dist.is_available() and dist.is_initialized():
        sums, maxima = _over_ranks(sums, maxima, device, group)
    total, count = sums
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    values = dict(zip(names, mean, strict=True))
    # A maximum of numbers some of which are none hides them; the mean does not.
    values |= {
        n: np.where(np.isnan(values[n]), np.nan, m) for n, m in zip(tops, maxima, strict=True)
    }
    return StepStatistics(
        heads=tuple(head for site in taken for head in site.heads()),
        values=values,
        seen=dict(zip(names, count > 0, strict=True)),
    )


def _over_ranks(
    sums: np.ndarray, maxima: np.ndarray, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sums and maxima over all ranks, in one all_reduce.

    A sum is the one reduction that they share: each rank writes its maxima into a place of
    its own, where all others have zeros.
    """
    ranks = dist.get_world_size(group)
    slots = np.zeros((ranks, *maxima.shape))
    slots[dist.get_rank(group)] = np.where(np.isnan(maxima), -np.inf, maxima)
    packed: Tensor = torch.from_numpy(np.concatenate([sums.ravel(), slots.ravel()])).to(device)
    dist.all_reduce(packed, group=group)
    flat = packed.cpu().numpy()
    highest = flat[sums.size :].reshape(slots.shape).max(0)
    return flat[: sums.size].reshape(sums.shape), np.where(highest == -np.inf, np.nan, highest)
