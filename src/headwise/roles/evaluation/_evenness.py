"""Evenness: the entropy of attention as a share of that of even attention."""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels import HeadBlock
from headwise.roles.relations import Item

# Of the attention of a query: what less is left for the other keys is too little to spread.
_LEAST_LEFT = 1e-3


class Sinks:
    """The keys of each text where attention may rest: the first token, and special tokens."""

    def __init__(self, items: Sequence[Item], S: int) -> None:
        sinks = torch.ones(len(items), S, dtype=torch.bool)
        for row, item in enumerate(items):
            inside = [tokens[0] for tokens in item.units["token"] if tokens[0]]
            sinks[row, inside] = False
            sinks[row, len(item.ids) :] = False
        self._sinks = sinks

    @cached_property
    def _columns(self) -> tuple[Int[Tensor, "B n"], Bool[Tensor, "B n"]]:
        """The positions of the sinks of each text, padded to the text with the most."""
        most = int(self._sinks.sum(1).max())
        present, positions = self._sinks.to(torch.uint8).topk(most, dim=1)
        return positions, present.bool()

    def evenness(
        self, block: HeadBlock, visible: Bool[Tensor, "B #H T S"]
    ) -> dict[str, Float[Tensor, "B h T"]]:
        """The evenness of each row over all keys, and over those that are no sinks; 0 to 1.

        A row that leaves almost no attention to the keys that are no sinks counts as 0.
        """
        visible = visible if visible.shape[1] == 1 else visible[:, block.heads]
        sinks = self._sinks.to(visible.device)[:, None, None]
        n_keys, n_content = visible.sum(-1), (visible & ~sinks).sum(-1)
        positions, present = (part.to(visible.device) for part in self._columns)
        shape = (*block.weights.shape[:3], positions.shape[1])
        on_sinks = block.weights.gather(3, positions[:, None, None].expand(shape))
        on_sinks = on_sinks * present[:, None, None]
        left = 1 - on_sinks.sum(-1)
        # H = Σ over sinks + left · (H of the rest) − left ln left
        content = (block.entropy + torch.special.xlogy(on_sinks, on_sinks).sum(-1)) / left
        content = (content + left.clamp(min=_LEAST_LEFT).log()) * _per_nat(n_content)
        content = torch.where(left > _LEAST_LEFT, content.clamp(0.0, 1.0), 0.0)
        return {"entropy": block.entropy * _per_nat(n_keys), "content entropy": content}


def _per_nat(n_keys: Int[Tensor, "B #h T"]) -> Float[Tensor, "B #h T"]:
    """One over the entropy of even attention."""
    return 1.0 / n_keys.clamp(min=2).float().log()
