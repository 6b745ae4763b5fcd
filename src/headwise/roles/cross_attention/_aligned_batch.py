"""Examples of an encoder-decoder whose true alignment is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from headwise.errors import ArgumentError
from headwise.roles.cross_attention._align import aligned, check_outputs, source_columns
from headwise.roles.cross_attention._weights import CrossAttention, cross_attention
from headwise.roles.scores import TIE

KnownSpan = tuple[int, int] | None


@dataclass(frozen=True)
class AlignedBatch:
    """Examples of an encoder-decoder whose true alignment is known.

    Attributes:
        inputs: The inputs of the model by name.
        outputs: The token ids of each output.
        spans: For each output its tokens' spans `(start, end)` of source positions, without the
            position `end`; None for a token without one.
        lengths: The number of source positions of each example; None for all that are not padding.
        first: The first output with a span; those before it are a prompt, as in `align`.
    """

    inputs: Mapping[str, Any]
    outputs: Sequence[Sequence[int]]
    spans: Sequence[Sequence[KnownSpan]]
    lengths: Sequence[int] | None = None
    first: int = 0


def check_batches(batches: Sequence[AlignedBatch], most: int) -> None:
    if most < 1 or not batches:
        raise ArgumentError(
            f"find_alignment_heads: most={most} of {len(batches)} batches. Give 1 or more of both."
        )
    for batch in batches:
        outputs = check_outputs("find_alignment_heads", batch.outputs, batch.first)
        lengths = [len(output) for output in outputs]
        if lengths != [len(spans) for spans in batch.spans]:
            raise ArgumentError(
                f"find_alignment_heads: spans of {[len(spans) for spans in batch.spans]} tokens "
                f"for outputs of {lengths}. Give a span, or None, for each token."
            )
        if any(span is not None for spans in batch.spans for span in spans[: batch.first]):
            raise ArgumentError(
                f"find_alignment_heads: a span of an output before first={batch.first}. Give None "
                f"for each token of the prompt."
            )
        wrong = [
            s for spans in batch.spans for s in spans if s is not None and not 0 <= s[0] < s[1]
        ]
        if wrong:
            raise ArgumentError(
                f"find_alignment_heads: a span is {wrong[0]}. Give (start, end) with "
                f"0 <= start < end."
            )


@dataclass(frozen=True)
class KnownExample:
    """One example: its columns of the source and the tokens with a span."""

    row: int
    columns: torch.Tensor
    n_outputs: int
    first: int
    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]

    def shown(self, weights: Float[torch.Tensor, "B T S"]) -> Float[np.ndarray, "t s"]:
        """The weights of its outputs over its source positions."""
        return weights[self.row, : self.n_outputs][:, self.columns].cpu().numpy()

    def error(self, weights: Float[np.ndarray, "T S"]) -> float:
        starts = aligned(weights).spans[:, 0]
        return float(
            sum(abs(starts[t] - s) for t, (s, _) in zip(self.tokens, self.spans, strict=True))
        )

    def right(self, weights: Float[np.ndarray, "T S"]) -> float:
        top = weights >= weights.max(-1, keepdims=True) * (1 - TIE)
        pairs = zip(self.tokens, self.spans, strict=True)
        return float(sum(top[t, start:end].sum() / top[t].sum() for t, (start, end) in pairs))

    def places(self) -> Float[np.ndarray, "t 3"]:
        """For each token with a span: its number, its place if spread evenly, its true place."""
        step = len(self.columns) / (self.n_outputs - self.first)
        pairs = zip((token - self.first for token in self.tokens), self.spans, strict=True)
        rows = [(number, number * step, start) for number, (start, _) in pairs]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)

    def chance(self) -> float:
        return sum(end - start for start, end in self.spans) / len(self.columns)


def known_examples(
    model: nn.Module, batch: AlignedBatch
) -> tuple[CrossAttention, list[KnownExample]]:
    attention = cross_attention("find_alignment_heads", model, batch.inputs, batch.outputs)
    columns = source_columns("find_alignment_heads", attention, batch.lengths)
    examples = []
    for row, spans in enumerate(batch.spans):
        known = [(token, span) for token, span in enumerate(spans) if span is not None]
        if any(span[1] > len(columns[row]) for _, span in known):
            raise ArgumentError(
                f"find_alignment_heads: the spans {[span for _, span in known]} in a source of "
                f"{len(columns[row])} positions. Give spans within the source."
            )
        tokens, inside = [token for token, _ in known], [span for _, span in known]
        examples.append(KnownExample(row, columns[row], len(spans), batch.first, tokens, inside))
    return attention, examples
