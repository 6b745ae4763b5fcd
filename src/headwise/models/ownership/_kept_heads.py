"""Which indices of a weight stay when heads are cut out of an attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.models.ownership._attention import Attention
from headwise.models.ownership._ownership_map import HeadCounts, OwnershipMap, count_heads


@dataclass(frozen=True)
class KeptHeads:
    """The query heads that stay in one attention, and the kv heads that they read.

    A kv head is listed several times if each of its queries gets a copy of its own.
    """

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @property
    def counts(self) -> HeadCounts:
        return HeadCounts(len(self.heads), len(self.kv_heads))


def keep_heads(
    attention: Attention, maps: Sequence[OwnershipMap], heads: tuple[int, ...], expand: bool
) -> KeptHeads:
    """Keep these query heads, and the kv heads that they read."""
    counts = count_heads(attention, maps)
    group = counts.heads // counts.kv_heads
    read = [head // group for head in heads]
    kept = sorted(set(read))
    sizes = {kv: read.count(kv) for kv in kept}
    if len(set(sizes.values())) == 1:
        return KeptHeads(heads, tuple(kept))
    if not expand:
        listed = ", ".join(f"{size} of kv head {kv}" for kv, size in sizes.items())
        raise UnsupportedError(
            f"prune: {attention.site.name} would keep {listed}, and groups must be equal. Remove "
            f"as many heads of each group or whole groups, or give each query its own keys and "
            f"values with expand=True."
        )
    return KeptHeads(heads, tuple(read))


def kept_indices(owners: OwnershipMap, old: HeadCounts, kept: KeptHeads) -> Int[Tensor, " m"]:
    """The indices of a weight that stay, in their new order."""
    heads, kv_heads = owners.heads, owners.kv_heads
    stays = (heads < 0) | torch.isin(heads, torch.tensor(kept.heads))
    stays &= (kv_heads < 0) | torch.isin(kv_heads, torch.tensor(kept.kv_heads))
    if len(set(kept.kv_heads)) == len(kept.kv_heads) or not (kv_heads >= 0).any():
        return stays.nonzero().flatten()
    indices = torch.arange(len(heads))
    starts = (kv_heads.diff(prepend=kv_heads[:1]) < 0) | ((kv_heads >= 0) & (kv_heads.roll(1) < 0))
    cuts = starts.nonzero().flatten()[starts[0].long() :].tolist()
    sections = torch.tensor_split(indices, cuts)
    return torch.cat([_section(owners, section, old, kept, stays) for section in sections])


def spread(weight: Tensor, owners: OwnershipMap, indices: Int[Tensor, " m"]) -> Tensor:
    """A weight at its old size: its entries at the kept indices, zeros at the others."""
    shape = list(weight.shape)
    shape[owners.axis] = len(owners.heads)
    zeros = weight.new_zeros(shape)
    return zeros.index_copy(owners.axis, indices.to(weight.device), weight)


def _section(
    owners: OwnershipMap,
    indices: Int[Tensor, " n"],
    old: HeadCounts,
    kept: KeptHeads,
    stays: Tensor,
) -> Int[Tensor, " m"]:
    """The kept indices of one run of consecutive kv heads, repeated where a kv head is."""
    kv_heads = owners.kv_heads[indices]
    if (kv_heads < 0).all():
        return indices[stays[indices]]
    if len(set(kv_heads.tolist())) < old.kv_heads:
        raise UnsupportedError(
            f"prune: queries, keys and values are interleaved in {owners.name}, which leaves no "
            f"place for further keys and values. Remove as many heads of each group."
        )
    return torch.cat([indices[kv_heads == kv] for kv in kept.kv_heads])
