"""Methods that score kv heads, on a model that mixes reading and streaming by a gate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._progress import Progress
from headwise._torch_private import without_function_modes
from headwise.kernels import weights_in_blocks
from headwise.masks.tiles import Tile
from headwise.models import (
    Attention,
    AttentionCall,
    StreamingMask,
    capture_calls,
    edit_heads,
    streaming_heads,
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

    @torch.no_grad()
    def calls(self, batch: int) -> Iterator[tuple[Attention, AttentionCall]]:
        """The attention calls of a batch, with nothing streaming."""
        by_module = {attention.module: attention for attention in self.attentions}
        calls: list[AttentionCall] = []
        with capture_calls(self.model, calls.append):
            self.model(**self.batches[batch])
        return ((by_module[call.module], call) for call in calls)

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


PerHead = Float[Tensor, "M N"]
Method = Callable[[StreamedModel, Progress], PerHead]


def half_gate(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """−∂loss/∂gate of each text with all gates at ½, which accounts for joint effects."""
    return _slopes(streamed, 0.5, on_progress)


def gradient(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """−∂loss/∂gate of each text with all heads reading everything."""
    return _slopes(streamed, 1.0, on_progress)


def _slopes(streamed: StreamedModel, gate: float, on_progress: Progress) -> PerHead:
    """One backward pass per batch scores all texts, since each text has gates of its own."""
    slopes = []
    for batch, inputs in enumerate(streamed.batches):
        texts = len(inputs["input_ids"])
        gates = torch.full((texts, len(streamed.heads)), gate, dtype=torch.float64)
        gates = gates.to(inputs["input_ids"].device).requires_grad_()
        total = streamed.losses(batch, gates).sum()
        slopes.append(-torch.autograd.grad(total, gates)[0])
        on_progress(batch + 1, len(streamed.batches))
    return torch.cat(slopes)


@torch.no_grad()
def leave_one_out(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """The increase of each text's loss when one kv head streams and all others read everything."""
    increases, n_heads = [], len(streamed.heads)
    total = n_heads * len(streamed.batches)
    for batch, inputs in enumerate(streamed.batches):
        gates = torch.ones(n_heads, dtype=torch.float64, device=inputs["input_ids"].device)
        before, columns = streamed.losses(batch, gates), []
        for head in range(n_heads):
            gates[head] = 0
            columns.append(streamed.losses(batch, gates) - before)
            gates[head] = 1
            on_progress(batch * n_heads + head + 1, total)
        increases.append(torch.stack(columns, 1))
    return torch.cat(increases)


def mass(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """The attention weight on keys outside the first tokens and the window.

    Its mean over the queries that have such keys, and of that the maximum over the query heads
    that read a kv head.
    """
    return _observed(streamed, _mass_outside, on_progress)


def output(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """The norm by which the output of a kv head's query heads changes, the mean over tokens."""
    return _observed(streamed, _output_change, on_progress)


def _observed(
    streamed: StreamedModel,
    score: Callable[[StreamedModel, int, Attention, AttentionCall], Float[Tensor, "B Hkv"]],
    on_progress: Progress,
) -> PerHead:
    rows = []
    for batch in range(len(streamed.batches)):
        calls = streamed.calls(batch)
        rows.append(torch.cat([score(streamed, batch, *call) for call in calls], 1))
        on_progress(batch + 1, len(streamed.batches))
    return torch.cat(rows)


def _mass_outside(
    streamed: StreamedModel, batch: int, attention: Attention, call: AttentionCall
) -> Float[Tensor, "B Hkv"]:
    inputs, (B, H, T, _) = streamed.batches[batch], call.q.shape
    real = real_tokens(inputs)
    windows = torch.full((1,), streamed.window)
    inside = StreamingMask(streamed.sinks, windows, first_columns(inputs))
    visible = inside.tile(Tile.whole(T, T, call.q.device))
    positions = real.cumsum(1) - 1
    eligible = (real & (positions >= streamed.sinks + streamed.window))[:, None]
    masses = call.q.new_zeros(B, H)
    for block in weights_in_blocks(call.q, call.k, call.rule):
        outside = block.weights.masked_fill(visible, 0.0).sum(-1) * eligible
        masses[:, block.heads] = outside.sum(-1) / eligible.sum(-1).clamp(min=1)
    return masses.view(B, attention.site.n_kv_heads, -1).amax(-1)


def _output_change(
    streamed: StreamedModel, batch: int, attention: Attention, call: AttentionCall
) -> Float[Tensor, "B Hkv"]:
    inputs, n_kv_heads = streamed.batches[batch], attention.site.n_kv_heads
    real = real_tokens(inputs)[:, None]
    change = call.heads - streamed.streamed_heads(call, inputs)  # B H T Dv
    weight = attention.output.per_head.to(change)
    written = change.new_zeros(len(change), n_kv_heads, change.shape[2], weight.shape[2])
    for head in range(change.shape[1]):
        written[:, head * n_kv_heads // change.shape[1]] += change[:, head] @ weight[head]
    return (written.norm(dim=-1) * real).sum(-1) / real.sum(-1)


METHODS: Mapping[str, Method] = {
    "half-gate": half_gate,
    "gradient": gradient,
    "leave-one-out": leave_one_out,
    "mass": mass,
    "output": output,
}
