"""Cut heads out of the weights of one attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models import Attention, HeadCounts, OwnershipMap, count_heads, resize, set_count

# What modules call their counts; what they were and shall be decides which is meant.
_OF_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_OF_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_OF_GROUPS = ("num_key_value_groups", "n_rep")
_OF_WIDTH = ("split_size", "all_head_size", "inner_dim", "embed_dim")
# These read the counts of the whole model where they run.
_READ_THE_CONFIG = ("Phi3Attention", "Phi4MultimodalAttention", "MoonshineAttention")


@dataclass(frozen=True)
class Keep:
    """What stays of one attention: query heads, and the kv heads that they read.

    A kv head stands several times where its queries are to have one each.
    """

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @property
    def counts(self) -> HeadCounts:
        return HeadCounts(len(self.heads), len(self.kv_heads))


def choose(
    attention: Attention, shares: Sequence[OwnershipMap], heads: tuple[int, ...], expand: bool
) -> Keep:
    """Which kv heads stay with these query heads.

    Raises:
        UnsupportedError: some groups would be smaller than others, and `expand` is not asked for.
    """
    counts = count_heads(attention, shares)
    group = counts.heads // counts.kv_heads
    read = [head // group for head in heads]
    kept = sorted(set(read))
    sizes = {kv: read.count(kv) for kv in kept}
    if len(set(sizes.values())) == 1:
        return Keep(heads, tuple(kept))
    if not expand:
        told = ", ".join(f"{n} of kv head {kv}" for kv, n in sizes.items())
        raise UnsupportedError(
            f"prune: {attention.site.name} would keep {told}, and groups must be equal. Remove "
            f"as many heads of each group or whole groups, or give each query its own keys and "
            f"values with expand=True."
        )
    return Keep(heads, tuple(read))


@torch.no_grad()
def cut(model: nn.Module, attention: Attention, shares: Sequence[OwnershipMap], keep: Keep) -> None:
    """Cut everything out of a model, in place, that belongs to no head that is kept."""
    old = count_heads(attention, shares)
    width = attention.output.per_head.shape[1]
    for share in shares:
        place, _, name = share.name.rpartition(".")
        module = model.get_submodule(place)
        weight = getattr(module, name)
        index = kept_indices(share, old, keep).to(weight.device)
        _replace(module, name, weight.index_select(share.axis, index))
    for module in model.get_submodule(attention.around).modules():
        _recount(module, old, keep.counts, width)


def fold_into_bias(model: nn.Module, attention: Attention, add: Float[Tensor, " d_model"]) -> None:
    """Add a constant to what the output projection gives; it gets a bias where it has none."""
    module = model.get_submodule(attention.output.name)
    bias = attention.output.bias
    with torch.no_grad():
        new = add if bias is None else bias + add.to(bias)
    weight = attention.output.weight
    module.bias = nn.Parameter(new.to(weight).detach(), requires_grad=weight.requires_grad)


def kept_indices(share: OwnershipMap, old: HeadCounts, keep: Keep) -> Int[Tensor, " m"]:
    """The indices that stay, in the order in which they shall stand."""
    heads, kv_heads = share.heads, share.kv_heads
    stays = (heads < 0) | torch.isin(heads, torch.tensor(keep.heads))
    stays &= (kv_heads < 0) | torch.isin(kv_heads, torch.tensor(keep.kv_heads))
    if len(set(keep.kv_heads)) == len(keep.kv_heads) or not (kv_heads >= 0).any():
        return stays.nonzero().flatten()
    at = torch.arange(len(heads))
    starts = (kv_heads.diff(prepend=kv_heads[:1]) < 0) | ((kv_heads >= 0) & (kv_heads.roll(1) < 0))
    sections = torch.tensor_split(at, starts.nonzero().flatten()[starts[0].long() :].tolist())
    return torch.cat([_section(share, at, old, keep, stays) for at in sections])


def _section(
    share: OwnershipMap, at: Int[Tensor, " n"], old: HeadCounts, keep: Keep, stays: Tensor
) -> Int[Tensor, " m"]:
    """Of a run of indices of kv heads one after the other: as many as kv heads are kept."""
    kv_heads = share.kv_heads[at]
    if (kv_heads < 0).all():
        return at[stays[at]]
    if len(set(kv_heads.tolist())) < old.kv_heads:
        raise UnsupportedError(
            f"prune: queries, keys and values take turns in {share.name}, which leaves no place "
            f"for further keys and values. Remove as many heads of each group."
        )
    return torch.cat([at[kv_heads == kv] for kv in keep.kv_heads])


def _replace(module: nn.Module, name: str, weight: Tensor) -> None:
    old = getattr(module, name)
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(weight.clone(), requires_grad=old.requires_grad))
    else:
        setattr(module, name, weight.clone())
    resize(module)


def _recount(module: nn.Module, old: HeadCounts, new: HeadCounts, width: int) -> None:
    """Tell a module its new counts, where it knows them by a name of ours and had the old ones."""
    groups = old.heads // old.kv_heads, new.heads // new.kv_heads
    known = {
        _OF_HEADS: (old.heads, new.heads),
        _OF_KV_HEADS: (old.kv_heads, new.kv_heads),
        _OF_GROUPS: groups,
        _OF_WIDTH: (old.heads * width, new.heads * width),
    }
    for names, (was, shall) in known.items():
        for name in names:
            if module.__dict__.get(name) == was:
                set_count(module, name, shall)
    if type(module).__name__ in _READ_THE_CONFIG:
        set_count(module, "config.num_attention_heads", new.heads)
        set_count(module, "config.num_key_value_heads", new.kv_heads)
