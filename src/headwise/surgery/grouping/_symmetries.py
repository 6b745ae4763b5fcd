"""The symmetries of keys and values: maps of features that leave the attention output unchanged."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.surgery.grouping._rows import HeadRows, Layout, Trace

# The number of positions at which rotations are compared.
_POSITIONS = 8
# Relative tolerances of equality. Many models rotate in single precision whatever their dtype; a
# norm differs by far more than these.
_TOLERANCE = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
_DEFAULT_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Symmetries:
    """Which features of a head may be mixed with which.

    Where positions rotate pairs of features (RoPE), each pair may still be rotated and scaled,
    which multiplies it as a complex number. Features that are not rotated may be mixed in any
    way. All others, as under a norm, stay unmixed.

    Attributes:
        free: The features that may be mixed with each other in any way.
        pairs: The pairs of features that may be rotated and scaled.
    """

    free: Int[Tensor, " n_free"]
    pairs: Int[Tensor, "n_pairs 2"]

    def __str__(self) -> str:
        kinds = {"mixed": len(self.free), "rotated in pairs": 2 * len(self.pairs)}
        return ", ".join(f"{n} features {kind}" for kind, n in kinds.items() if n) or "averaged"


def none_free() -> Symmetries:
    empty = torch.zeros(0, dtype=torch.long)
    return Symmetries(empty, empty.view(0, 2))


def all_free(width: int) -> Symmetries:
    return Symmetries(torch.arange(width), none_free().pairs)


def symmetries_of_values(trace: Trace, layout: Layout) -> Symmetries:
    """Values may be mixed in any way where heads sum the outputs of the linear layer unchanged."""
    maps = _position_maps(trace, "v", layout.v)
    width = layout.v.index.shape[1]
    unchanged = maps is not None and maps.equal(torch.eye(width).to(maps).expand_as(maps))
    return all_free(width) if unchanged else none_free()


def symmetries_of_keys(trace: Trace, layout: Layout) -> Symmetries:
    """Derive the symmetries of keys from how positions map queries and keys.

    With `q = Q x` and `k = K y` at two positions, the products stay the same under every `R`
    that commutes with all `Qᵀ K`.
    """
    q, k = _position_maps(trace, "q", layout.q), _position_maps(trace, "k", layout.k)
    if q is None or k is None:
        return none_free()
    k = k.repeat_interleave(len(q) // len(k), 0)
    products = torch.einsum("htia,hsib->htsab", q, k).flatten(0, 2)
    return _commuting(products, _TOLERANCE.get(q.dtype, _DEFAULT_TOLERANCE))


def _commuting(products: Float[Tensor, "n D D"], tolerance: float) -> Symmetries:
    """The symmetries that commute with all products."""
    margin = tolerance * products.abs().max()
    linked = (products != 0).any(0)
    linked = (linked | linked.T).fill_diagonal_(False)
    scales = products.diagonal(dim1=1, dim2=2)  # n D
    unlinked = (~linked.any(1)).nonzero().flatten()
    equal = all((scales[:, i] - scales[:, unlinked[0]]).abs().max() <= margin for i in unlinked)
    pairs = []
    for i, j in linked.triu().nonzero().tolist():
        rotation_error = products[:, i, j] + products[:, j, i]
        scale_error = scales[:, i] - scales[:, j]
        isolated = linked[i].sum() == linked[j].sum() == 1
        if isolated and max(rotation_error.abs().max(), scale_error.abs().max()) <= margin:
            pairs.append((i, j))
    free = unlinked.cpu() if equal else none_free().free
    return Symmetries(free, torch.tensor(pairs, dtype=torch.long).view(-1, 2))


def _position_maps(trace: Trace, part: str, rows: HeadRows) -> Float[Tensor, "n T D D"] | None:
    """The matrix that maps each head's features at each position of the first text.

    None where the features are no linear function of the linear layer's output, as under a norm.
    """
    output = trace.outputs[rows.name]
    heads = trace.parts[part]
    heads = heads[:: len(heads) // len(rows.index), 0, :_POSITIONS]  # n T D
    if output.ndim != 3:
        return None
    grads = [
        torch.autograd.grad(feature.sum(), output, retain_graph=True)[0][0, :_POSITIONS]
        for feature in heads.unbind(-1)
    ]
    maps = torch.stack(grads)[:, :, rows.index].permute(2, 1, 0, 3)  # n T D D
    mapped = torch.einsum("ntij,tnj->nti", maps, output.detach()[0, :_POSITIONS, rows.index])
    error = (mapped - heads.detach()).abs().max()
    tolerance = _TOLERANCE.get(mapped.dtype, _DEFAULT_TOLERANCE)
    return maps if error <= tolerance * mapped.abs().max() else None
