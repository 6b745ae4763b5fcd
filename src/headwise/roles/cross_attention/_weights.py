"""The exact weights of chosen cross-attention heads, under the model's own kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.errors import UnsupportedError
from headwise.kernels import weights_of_head
from headwise.masks.tiles import Tile
from headwise.models import (
    AttentionCall,
    Site,
    Sites,
    Understanding,
    capture_calls,
    device_of,
    model_inputs,
)
from headwise.models.texts import (
    decoder_ids,
    pad,
)
from headwise.tables import Head

# The largest relative difference between a head and its weights times the values.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class CrossAttention:
    """The cross-attention calls of one pass; weights are computed head by head, when needed.

    Attributes:
        rows: For each example the number of queries, one for each output.
    """

    calls: Mapping[Site, AttentionCall]
    rows: Sequence[int]

    @property
    def heads(self) -> tuple[Head, ...]:
        """All cross-attention heads, by layer."""
        return tuple(head for site in self.calls for head in site.heads())

    def visible(self) -> Bool[Tensor, "B S"]:
        """Which source positions of each example are not padding."""
        call = next(iter(self.calls.values()))
        (B, _, T, _), S = call.q.shape, call.k.shape[2]
        mask = call.rule.visible_in(Tile.whole(T, S, call.q.device))
        if mask is None:
            return torch.ones(B, S, dtype=torch.bool, device=call.q.device)
        return mask.expand(B, -1, T, S).any(1).any(1)

    def weights(self, head: Head) -> Float[Tensor, "B T S"]:
        """The weights of one head; those of other heads are not computed.

        Raises:
            UnsupportedError: the head's output does not follow from them.
        """
        site = next(site for site in self.calls if head in site.heads())
        call, T = self.calls[site], max(self.rows)
        weights = weights_of_head(call.q, call.k, call.rule, head.head, range(T))
        _verify(call, head, weights)
        return weights


@torch.no_grad()
def cross_attention(
    caller: str, model: nn.Module, inputs: Mapping[str, Any], outputs: Sequence[Sequence[int]]
) -> CrossAttention:
    """Run an encoder-decoder once, with the outputs as its labels, and keep what it attends with.

    Raises:
        UnsupportedError: no cross-attention call was captured.
    """
    device = device_of(model)
    read = pad([decoder_ids(model, output) for output in outputs], device)
    sites, calls = Sites(model), list[tuple[Site, AttentionCall]]()

    def record(call: AttentionCall) -> None:
        site = sites.of(call, active)
        if site.cross:
            calls.append((site, call))

    batch = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in model_inputs(inputs).items()
    }
    understanding = _understanding_of(model)
    with (
        in_evaluation(model),
        capture_calls(model, record, understanding=understanding) as active,
    ):
        model(**batch, decoder_input_ids=read.input_ids)
    if not calls:
        raise UnsupportedError(
            f"{caller}: no cross-attention of {type(model).__name__} was captured. Give an "
            f"encoder-decoder."
        )
    return CrossAttention(dict(calls), [len(output) for output in outputs])


# What earlier passes have shown about a model, as long as it has the same modules.
_UNDERSTOOD: WeakKeyDictionary[nn.Module, tuple[list[ref[nn.Module]], Understanding]] = (
    WeakKeyDictionary()
)


def _understanding_of(model: nn.Module) -> Understanding:
    """What earlier passes have shown about a model: only its first is followed as a whole."""
    modules = list(model.modules())
    known, understanding = _UNDERSTOOD.get(model, ([], Understanding()))
    if [module() for module in known] != modules:
        known, understanding = [ref(module) for module in modules], Understanding()
        _UNDERSTOOD[model] = known, understanding
    return understanding


def _verify(call: AttentionCall, head: Head, weights: Float[Tensor, "B T S"]) -> None:
    """Refuse a head whose output is not its weights times its values."""
    if call.join is not None or not call.exact:
        return
    kv_head = head.head // (call.q.shape[1] // call.k.shape[1])
    ours = weights @ call.v[:, kv_head].to(weights.dtype)
    theirs = call.heads[:, head.head, : weights.shape[1]].to(weights.dtype)
    gap, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if not gap <= _TOLERANCE.get(call.heads.dtype, 1e-4) * max(size, 1e-6):
        raise UnsupportedError(
            f"align: {head} does not compute attention from its captured inputs: its output and "
            f"ours differ by {gap:.2g} at a size of {size:.2g}. Choose another head, and please "
            f"report it."
        )
