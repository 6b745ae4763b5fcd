"""The methods that score what each kv head loses when it streams."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._progress import Progress
from headwise.caching._gated_model import StreamedModel, first_columns, real_tokens
from headwise.kernels import weights_in_blocks
from headwise.masks.tiles import Tile
from headwise.models import Attention, AttentionCall, StreamingMask

PerHead = Float[Tensor, "M N"]
Method = Callable[[StreamedModel, Progress], PerHead]


def half_gate(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """−∂loss/∂gate of each text with all gates at ½, which accounts for joint effects."""
    return _slopes(streamed, 0.5, on_progress)


def gradient(streamed: StreamedModel, on_progress: Progress) -> PerHead:
    """−∂loss/∂gate of each text with all heads reading everything."""
    return _slopes(streamed, 1.0, on_progress)


def _slopes(streamed: StreamedModel, at: float, on_progress: Progress) -> PerHead:
    """One backward pass per batch scores all texts, since each text has gates of its own."""
    slopes = []
    for batch, inputs in enumerate(streamed.batches):
        texts = len(inputs["input_ids"])
        gates = torch.full((texts, len(streamed.heads)), at, dtype=torch.float64)
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
    """The weights outside of first tokens and window, the mean over the queries that have such
    keys, and the largest of the query heads of a kv head."""
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
