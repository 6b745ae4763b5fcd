"""What may be done to queries and keys alike so that their products stay the same."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.surgery.grouping._rows import Layout, Rows, Trace

# At how many positions it is looked at how features turn.
_POSITIONS = 8
# How near is the same, since many models turn in single precision whatever their dtype; a norm
# is off by as much as there is.
_NEAR = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
_NEAR_ELSE = 1e-3


@dataclass(frozen=True, eq=False)
class Symmetries:
    """Which features of a head may be mixed with which.

    Positions that turn pairs of features (RoPE) leave each pair free to be turned and scaled,
    which is to multiply it as a complex number; features that nothing turns may be mixed in any
    way. What is neither, as under a norm, stays as it is.

    Attributes:
        free: The features that may be mixed among each other.
        pairs: The features that may be mixed in twos.
    """

    free: Int[Tensor, " n_free"]
    pairs: Int[Tensor, "n_pairs 2"]

    def __str__(self) -> str:
        kinds = {"mixed": len(self.free), "turned in pairs": 2 * len(self.pairs)}
        return ", ".join(f"{n} features {how}" for how, n in kinds.items() if n) or "averaged"


def none_free() -> Symmetries:
    nobody = torch.zeros(0, dtype=torch.long)
    return Symmetries(nobody, nobody.view(0, 2))


def all_free(width: int) -> Symmetries:
    return Symmetries(torch.arange(width), none_free().pairs)


def symmetries_of_values(trace: Trace, layout: Layout) -> Symmetries:
    """Values may be mixed in any way where heads add up what the linear layer gave."""
    turns = _turns(trace, "v", layout.v)
    width = layout.v.index.shape[1]
    plain = turns is not None and turns.equal(torch.eye(width).to(turns).expand_as(turns))
    return all_free(width) if plain else none_free()


def symmetries_of_keys(trace: Trace, layout: Layout) -> Symmetries:
    """What may be done to keys, found from how they and queries follow from their layers.

    With `q = Q x` and `k = K y` at two positions, the products stay the same under every `R`
    that commutes with all `Qᵀ K`.
    """
    q, k = _turns(trace, "q", layout.q), _turns(trace, "k", layout.k)
    if q is None or k is None:
        return none_free()
    k = k.repeat_interleave(len(q) // len(k), 0)
    products = torch.einsum("htia,hsib->htsab", q, k).flatten(0, 2)
    return _commuting(products, _NEAR.get(q.dtype, _NEAR_ELSE))


def _commuting(products: Float[Tensor, "n D D"], tolerance: float) -> Symmetries:
    """The features that may be mixed since all products treat them alike."""
    near = tolerance * products.abs().max()
    linked = (products != 0).any(0)
    linked = (linked | linked.T).fill_diagonal_(False)
    own = products.diagonal(dim1=1, dim2=2)  # n D
    alone = (~linked.any(1)).nonzero().flatten()
    alike = all((own[:, one] - own[:, alone[0]]).abs().max() <= near for one in alone)
    pairs = []
    for one, two in linked.triu().nonzero().tolist():
        turned = products[:, one, two] + products[:, two, one]
        scaled = own[:, one] - own[:, two]
        only = linked[one].sum() == linked[two].sum() == 1
        if only and max(turned.abs().max(), scaled.abs().max()) <= near:
            pairs.append((one, two))
    none = none_free()
    return Symmetries(
        alone.cpu() if alike else none.free, torch.tensor(pairs, dtype=torch.long).view(-1, 2)
    )


def _turns(trace: Trace, part: str, rows: Rows) -> Float[Tensor, "n T D D"] | None:
    """The matrix that each head's features are multiplied by at each position of the first text.

    None where they follow from what the linear layer gave in another way, as under a norm.
    """
    given = trace.outputs[rows.name]
    heads = trace.parts[part]
    heads = heads[:: len(heads) // len(rows.index), 0, :_POSITIONS]  # n T D
    if given.ndim != 3:
        return None
    grads = [
        torch.autograd.grad(feature.sum(), given, retain_graph=True)[0][0, :_POSITIONS]
        for feature in heads.unbind(-1)
    ]
    turns = torch.stack(grads)[:, :, rows.index].permute(2, 1, 0, 3)  # n T D D
    made = torch.einsum("ntij,tnj->nti", turns, given.detach()[0, :_POSITIONS, rows.index])
    apart = (made - heads.detach()).abs().max()
    same = apart <= _NEAR.get(made.dtype, _NEAR_ELSE) * made.abs().max()
    return turns if same else None
