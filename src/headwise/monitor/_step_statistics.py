"""The statistics of every head on one watched step, over all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float64
from torch import Tensor

from headwise.capture import Site
from headwise.tables import Head, Totals

# These statistics report their maximum over queries; all others report the mean.
_BY_MAXIMUM = ("max_logit",)


@dataclass(frozen=True)
class StepStatistics:
    """The value of every statistic and head.

    Attributes:
        sites: Where the heads attend; `heads` lists theirs one site after the other.
        values: The mean over queries, or their maximum for `max_logit`.
        defined: Whether a head had any eligible query; without one the value is NaN.
    """

    sites: tuple[Site, ...]
    heads: tuple[Head, ...]
    values: Mapping[str, Float64[np.ndarray, " N"]]
    defined: Mapping[str, Bool[np.ndarray, " N"]]

    def each(self, statistic: str) -> Iterator[tuple[Head, float]]:
        """The heads for which a statistic is defined, and its values."""
        rows = zip(self.heads, self.values[statistic], self.defined[statistic], strict=True)
        return ((head, float(value)) for head, value, is_defined in rows if is_defined)

    def layers(self) -> dict[str, list[int]]:
        """The rows of each layer, by its name: `L5`, `decoder.cross.L0`."""
        rows: dict[str, list[int]] = {}
        for row, head in enumerate(self.heads):
            rows.setdefault(str(head).rpartition(".")[0], []).append(row)
        return rows

    def scalars(self) -> dict[str, float]:
        """All values as scalars by key: heads first, then layers, then the model.

        Minimum, mean and maximum are over the heads for which the statistic is defined; NaN if
        there is none.
        """
        groups = {f"{name}/": rows for name, rows in self.layers().items()}
        groups[""] = list(range(len(self.heads)))
        flat = {
            f"attn/{head}/{name}": float(values[row])
            for row, head in enumerate(self.heads)
            for name, values in self.values.items()
        }
        for prefix, rows in groups.items():
            for name, values in self.values.items():
                defined = values[rows][self.defined[name][rows]]
                for label, reduce in (("min", np.min), ("mean", np.mean), ("max", np.max)):
                    flat[f"attn/{prefix}{name}/{label}"] = (
                        float(reduce(defined)) if defined.size else np.nan
                    )
        return flat


def step_statistics(
    sites: Sequence[Site],
    totals: Mapping[str, Totals],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> StepStatistics:
    """The statistics of a step, from the totals of this rank and all others of the group."""
    tops = tuple(name for name in totals if name in _BY_MAXIMUM)
    sums = np.array([[of.total for of in totals.values()], [of.count for of in totals.values()]])
    maxima = np.array([totals[name].maximum for name in tops])
    if dist.is_available() and dist.is_initialized():
        sums, maxima = _over_ranks(sums, maxima, device, group)
    total, count = sums
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    values = dict(zip(totals, mean, strict=True))
    # A maximum hides NaN, but the mean does not.
    values |= {
        n: np.where(np.isnan(values[n]), np.nan, m) for n, m in zip(tops, maxima, strict=True)
    }
    return StepStatistics(
        sites=tuple(sites),
        heads=tuple(head for site in sites for head in site.heads()),
        values=values,
        defined=dict(zip(totals, count > 0, strict=True)),
    )


def _over_ranks(
    sums: np.ndarray, maxima: np.ndarray, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sums and maxima over all ranks, in one all_reduce.

    The reduction is a sum for both: each rank writes its maxima into a slot of its own, where
    all other ranks have zeros.
    """
    ranks = dist.get_world_size(group)
    slots = np.zeros((ranks, *maxima.shape))
    slots[dist.get_rank(group)] = np.where(np.isnan(maxima), -np.inf, maxima)
    packed: Tensor = torch.from_numpy(np.concatenate([sums.ravel(), slots.ravel()])).to(device)
    dist.all_reduce(packed, group=group)
    flat = packed.cpu().numpy()
    highest = flat[sums.size :].reshape(slots.shape).max(0)
    return flat[: sums.size].reshape(sums.shape), np.where(highest == -np.inf, np.nan, highest)
