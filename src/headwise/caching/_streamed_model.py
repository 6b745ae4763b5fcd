"""A model that mixes reading and streaming by a gate for each kv head, and what gates cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._progress import Progress
from headwise._torch_private import without_function_modes
from headwise.models import (
    AttentionCall,
    capture_calls,
)
from headwise.models.cache import streaming_heads
from headwise.models.ownership import (
    Attention,
    edit_heads,
)
from headwise.scoring import Inputs, Loss

Gates = Float[Tensor, "*B N"]
"""A gate for each kv head, optionally per text: 1 reads all tokens, 0 streams."""


@dataclass(frozen=True)
class StreamedModel:
    """A model in which each kv head reads all tokens, or the first and the latest, or a mix.

    Attributes:
        attentions: Every attention of the model.
        loss: What the model should keep doing.
        batches: The texts on which kv heads are scored.
        sinks: How many of the first tokens of each text a streaming head reads.
        window: How many of the latest tokens it reads, a query's own included.
    """

    model: nn.Module
    attentions: list[Attention]
    loss: Loss
    batches: Sequence[Inputs]
    sinks: int
    window: int

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The layer and the kv head of each gate."""
        sites = [attention.site for attention in self.attentions]
        return [(i, head) for i, site in enumerate(sites) for head in range(site.n_kv_heads)]

    def losses(self, batch: int, gates: Gates) -> Float[Tensor, " B"]:
        """The loss of each text of a batch under the gates."""
        inputs = self.batches[batch]
        calls: dict[nn.Module, AttentionCall] = {}

        def record(call: AttentionCall) -> None:
            calls[call.module] = call

        def mix(attention: Attention, heads: Float[Tensor, "B T H Dv"]) -> Tensor:
            gate = gates[..., self._slices[attention]]
            call = calls.pop(attention.module)
            if not gate.requires_grad and bool((gate == 1).all()):
                return heads
            gate = gate.repeat_interleave(heads.shape[2] // gate.shape[-1], -1)
            gate = gate.reshape(-1, 1, gate.shape[-1], 1).to(heads.dtype)
            streamed = self.streamed_heads(call, inputs).transpose(1, 2).to(heads.dtype)
            return heads * gate + streamed * (1 - gate)

        with (
            capture_calls(self.model, record, keep_graph=True),
            edit_heads(self.model, self.attentions, mix),
        ):
            output = self.model(**inputs)
        return self.loss.per_text(output, inputs)

    def scores(self, on_progress: Progress) -> Float[Tensor, "M N"]:
        """−∂loss/∂gate of each text with all gates at ½, which accounts for joint effects.

        One backward pass per batch scores all texts, since each text has gates of its own. It
        orders heads as well as leaving each of them out, which takes a pass for each head.
        """
        slopes = []
        for batch, inputs in enumerate(self.batches):
            texts = len(inputs["input_ids"])
            gates = torch.full((texts, len(self.heads)), 0.5, dtype=torch.float64)
            gates = gates.to(inputs["input_ids"].device).requires_grad_()
            total = self.losses(batch, gates).sum()
            slopes.append(-torch.autograd.grad(total, gates)[0])
            on_progress(batch + 1, len(self.batches))
        return torch.cat(slopes)

    def streamed_heads(self, call: AttentionCall, inputs: Inputs) -> Float[Tensor, "B H T Dv"]:
        """What the query heads of a call would read if all of them were streaming."""
        with without_function_modes():
            first = first_columns(inputs)
            return streaming_heads(
                call.q, call.k, call.v, call.rule, (self.sinks, self.window), first
            )

    @cached_property
    def _slices(self) -> dict[Attention, slice]:
        """The gates of each attention."""
        slices, start = {}, 0
        for attention in self.attentions:
            slices[attention] = slice(start, start + attention.site.n_kv_heads)
            start += attention.site.n_kv_heads
        return slices


def real_tokens(inputs: Inputs) -> Bool[Tensor, "B T"]:
    """Which tokens of a batch are not padding."""
    mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def first_columns(inputs: Inputs) -> Int[Tensor, " B"] | None:
    """The column of the first token of each text; None if all are the first."""
    first = (real_tokens(inputs).cumsum(1) == 0).sum(1)
    return first if bool(first.any()) else None
