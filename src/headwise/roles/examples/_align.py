"""Align the outputs of an encoder-decoder with its inputs, by chosen cross-attention heads.

Only the weights of these heads are computed, from queries and keys of the model's own kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from headwise._display import type_of
from headwise._evaluation import in_evaluation
from headwise.capture import AttentionCall, Site, capture_calls
from headwise.errors import ArgumentError, UnsupportedError
from headwise.kernels import weights_of_head
from headwise.masks.tiles import Tile
from headwise.models import check_model, device_of, model_inputs
from headwise.models.texts import decoder_ids, pad
from headwise.tables import Head, HeadsLike, resolve_heads

# The largest relative difference between a head and its weights times the values.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
Outputs = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Alignment:
    """The source positions that each output of one example is aligned with.

    Attributes:
        spans: For each aligned output the first position and the one after the last; spans are
            in order, and neighbors share a position at most.
        mass: The share of each output's attention that lies in its span, 0 … 1.
    """

    spans: Int64[np.ndarray, "T 2"]
    mass: Float[np.ndarray, " T"]

    def times(
        self, seconds: float, offset: tuple[float, float] = (0.0, 0.0)
    ) -> Float[np.ndarray, "T 2"]:
        """The spans in seconds, for source positions of `seconds` each (0.02 for Whisper).

        Args:
            offset: What starts and ends are too late by, in positions: `start_offset` and
                `end_offset` of `FoundHeads.set_row`.
        """
        times: Float[np.ndarray, "T 2"] = (self.spans - np.array(offset)) * seconds
        return times


def align(
    model: nn.Module,
    inputs: Mapping[str, Any],
    outputs: Outputs,
    *,
    heads: HeadsLike | None = None,
    lengths: Sequence[int] | None = None,
) -> list[Alignment]:
    """Align each output token with a span of source positions, monotonically.

    The model runs once under its own attention kernel; only the weights of the chosen heads are
    computed, from its queries and keys. Their mean is aligned by dynamic programming. The query of
    an output is the decoder position from which it is predicted.

    Args:
        model: An encoder-decoder, such as Whisper or T5.
        inputs: Its inputs by name, such as `input_features` or `input_ids` and `attention_mask`.
        outputs: The token ids of each output, as the model writes them; a prompt is aligned too,
            so that what comes before the first word, such as silence, is its own.
        heads: Cross-attention heads, as `(layer, head)` or by name. None are those in the model's
            `generation_config.alignment_heads`.
        lengths: The number of source positions of each example. None takes all that are not
            padding; Whisper pads sound to 30 seconds, so give the frames of the sound itself.
    Returns:
        For each example, the spans of its outputs, in source positions.
    Raises:
        ArgumentError: there are no heads or outputs, an output is empty, `lengths` does not fit
            the source, or encoder outputs are not what the encoder returns.
        HeadError: a head is no cross-attention head of the model.
        UnsupportedError: the model has no cross-attention that can be captured exactly.
    """
    model = check_model("align", model)
    outputs = check_outputs("align", outputs)
    chosen = _alignment_heads(model) if heads is None else heads
    calls = cross_attention("align", model, inputs, outputs)
    known = resolve_heads(chosen, cross_heads(calls))
    if not known:
        raise ArgumentError(f"align: heads={heads!r}. Give at least one cross-attention head.")
    weights = torch.stack([head_weights(calls, head).double() for head in known]).mean(0)
    columns = source_columns("align", calls, lengths)
    return [
        aligned(weights[row, : len(output)][:, columns[row]].cpu().numpy())
        for row, output in enumerate(outputs)
    ]


# The cross-attention calls of one pass, by their sites.
Calls = Mapping[Site, AttentionCall]


def cross_heads(calls: Calls) -> tuple[Head, ...]:
    """All cross-attention heads, by layer."""
    return tuple(head for site in calls for head in site.heads())


def head_weights(calls: Calls, head: Head) -> Float[Tensor, "B T S"]:
    """The weights of one head; those of other heads are not computed.

    Raises:
        UnsupportedError: the head's output does not follow from them.
    """
    call = next(call for site, call in calls.items() if head in site.heads())
    weights = weights_of_head(call.q, call.k, call.rule, head.head, range(call.q.shape[2]))
    _verify(call, head, weights)
    return weights


@torch.no_grad()
def cross_attention(
    caller: str, model: nn.Module, inputs: Mapping[str, Any], outputs: Sequence[Sequence[int]]
) -> Calls:
    """Run an encoder-decoder with the outputs as its labels, and keep what it attends with."""
    encoded = inputs.get("encoder_outputs", ())
    if isinstance(encoded, Tensor) or type(encoded) is dict:  # and no output of transformers
        raise ArgumentError(
            f"{caller}: encoder_outputs is {type_of(encoded)}. Give what the encoder "
            f"returns, or a tuple of its tensors."
        )
    device = device_of(model)
    read = pad([decoder_ids(model, output) for output in outputs], device)
    calls = list[tuple[Site, AttentionCall]]()

    def record(call: AttentionCall) -> None:
        site = active.sites.of(call)
        if site.cross:
            calls.append((site, call))

    batch = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in model_inputs(inputs).items()
    }
    with in_evaluation(model), capture_calls(model, record) as active:
        model(**batch, decoder_input_ids=read["input_ids"])
    if not calls:
        raise UnsupportedError(
            f"{caller}: no cross-attention of {type(model).__name__} was captured. Give an "
            f"encoder-decoder."
        )
    return dict(calls)


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


def aligned(weights: Float[np.ndarray, "T S"]) -> Alignment:
    """The alignment of one example, from its weights over positions that are not padding."""
    weights = weights / weights.sum(-1, keepdims=True).clip(1e-30)
    spans = monotone_spans(weights)
    mass = [row[start:end].sum() for row, (start, end) in zip(weights, spans, strict=True)]
    return Alignment(spans, np.array(mass))


def source_columns(caller: str, calls: Calls, lengths: Sequence[int] | None) -> list[Tensor]:
    """The columns of each example's source positions, in order."""
    call = next(iter(calls.values()))
    (B, _, T, _), S = call.q.shape, call.k.shape[2]
    visible = torch.ones(B, S, dtype=torch.bool, device=call.q.device)
    if (mask := call.rule.visible_in(Tile.whole(T, S, call.q.device))) is not None:
        visible = mask.expand(B, -1, T, S).any(1).any(1)
    columns = [row.nonzero().squeeze(-1) for row in visible]
    if lengths is None:
        return columns
    known = [len(row) for row in columns]
    if len(lengths) != len(known) or not all(
        1 <= length <= most for length, most in zip(lengths, known, strict=True)
    ):
        raise ArgumentError(
            f"{caller}: lengths={list(lengths)} for sources of {known} positions. Give a number "
            f"from 1 on for each."
        )
    return [row[:length] for row, length in zip(columns, lengths, strict=True)]


def check_outputs(caller: str, outputs: Any) -> list[list[int]]:
    """The outputs as lists."""
    listed = outputs.tolist() if isinstance(outputs, Tensor) else list(outputs)
    if not listed or any(isinstance(output, Integral | str) for output in listed):
        raise ArgumentError(
            f"{caller}: outputs={outputs!r:.60}. Give a list of token ids for each example."
        )
    if [] in listed:
        raise ArgumentError(f"{caller}: output {listed.index([])} has no token. Leave it out.")
    return [[int(token) for token in output] for output in listed]


def _alignment_heads(model: nn.Module) -> list[tuple[int, int]]:
    """The heads that the model's generation configuration names."""
    config: Any = getattr(model, "generation_config", None)
    heads = getattr(config, "alignment_heads", None)
    if not heads:
        raise ArgumentError(
            f"align: heads=None, and {type(model).__name__} has no "
            f"generation_config.alignment_heads. Give heads=, such as those of "
            f"headwise.find_alignment_heads."
        )
    return [(int(layer), int(head)) for layer, head in heads]


def monotone_spans(weights: Float[np.ndarray, "T S"]) -> Int64[np.ndarray, "T 2"]:
    """The source positions of each output under the best monotone alignment.

    An alignment is a path from the first output and position to the last ones, in steps to the
    next position, the next output, or both; each output is aligned with the positions that the
    path visits in its row, a half-open span. The path has the largest sum of weights above uniform
    attention, `w − 1/S`, so that a position is shared by two outputs only if both attend to it.
    Of equal paths, an output ends as early as possible.

    Args:
        weights: Attention from outputs to source positions, each row with a sum of 1.
    Source:
        Sakoe & Chiba 1978, the symmetric form, for sums to be maximized.
    """
    T, S = weights.shape
    gains = weights.astype(np.float64) - 1.0 / S
    entry = np.zeros((T, S), dtype=np.int64)  # where the best path to a cell entered its row
    above = np.zeros((T, S), dtype=bool)  # whether it entered from the cell above, not diagonally
    best = np.full(S, -np.inf)  # of the row before
    for row in range(T):
        diagonal = np.concatenate([[-np.inf], best[:-1]])
        above[row] = best > diagonal
        arrival = np.maximum(best, diagonal)
        if row == 0:
            arrival[0] = 0.0
        total = gains[row].cumsum()
        # The best path to column s enters at the column j ≤ s with the largest difference.
        difference = arrival - (total - gains[row])
        largest = np.maximum.accumulate(difference)
        is_new = difference > np.concatenate([[-np.inf], largest[:-1]])
        entry[row] = np.maximum.accumulate(np.where(is_new, np.arange(S), 0))
        best = total + largest
    spans = np.zeros((T, 2), dtype=np.int64)
    column = S - 1
    for row in range(T - 1, -1, -1):
        start = entry[row, column]
        spans[row] = start, column + 1
        column = start if above[row, start] else start - 1
    return spans
