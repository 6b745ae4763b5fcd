"""Planted heads: one for each role, whose attention is on the pairs of the role alone."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.roles.evaluation._eligible import EligiblePairs, HeadWeights

_MOST = 2**24  # weights in one block


def planted_sums(
    eligible: EligiblePairs, visible: Bool[Tensor, "B 1 T S"]
) -> Float[Tensor, "cells 1"]:
    """What the planted head of each role scores on that role, through the scores of all heads.

    A query of the role attends equally to the tokens of its keys, all others to every visible
    token. A role without a relation, such as evenness, has an even head.
    """
    index = eligible.index
    n_roles = len(index.roles)
    total = torch.zeros(index.n_cells, 1)
    present = torch.unique(index.role)
    block_size = max(1, _MOST // visible.numel())
    for start in range(0, len(present), block_size):
        roles = present[start : start + block_size]
        weights = _weights(eligible, visible.cpu(), roles)
        even = dict.fromkeys(("entropy", "content entropy"), torch.ones(weights.shape[:3]))
        block = HeadWeights(slice(0, len(roles)), weights, even)
        sums = eligible.value(block).view(-1, n_roles, len(roles))
        own = sums[:, roles, torch.arange(len(roles))]
        total.view(-1, n_roles)[:, roles] = own
    return total


def _weights(
    eligible: EligiblePairs, visible: Bool[Tensor, "B 1 T S"], roles: Tensor
) -> Float[Tensor, "B h T S"]:
    index, pairs = eligible.index, eligible.index.token_pairs
    even = visible.float() / visible.sum(-1, keepdim=True).clamp(min=1)
    weights = torch.zeros(len(visible), len(roles), *visible.shape[2:])
    role = index.role[pairs.query]
    relational = torch.tensor([role.kind != "breadth" for role in index.roles])
    inside = torch.isin(role, roles) & relational[role]
    weights[
        index.text[pairs.query][inside],
        torch.searchsorted(roles, role[inside]),
        pairs.query_token[inside],
        pairs.key_token[inside],
    ] = 1.0
    weights *= visible
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1), even)
