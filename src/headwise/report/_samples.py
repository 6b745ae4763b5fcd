"""The attention of every head on a few texts: exact maps, or the strongest pairs if long."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32, Int32
from torch import nn

from headwise.models.texts import Piece, beginning_of, token_strings
from headwise.report._passes import Pair
from headwise.tables import Head, HeadTable
from headwise.watch import Request, Stretch, observe, run_pieces

# Longer texts have the strongest pairs instead of exact maps: of so many heads, so many per query.
EXACT_TOKENS = 64
_HEADS_WITH_PAIRS = 64
_KEYS = 4


Side = Literal["source", "target"]


@dataclass(frozen=True)
class TopPairs:
    """The keys that each query of a head attends to most, from the largest weight down.

    Attributes:
        keys: Positions of keys; −1 if no further key has any weight.
        weights: Their weights, 0 … 1.
    """

    keys: Int32[np.ndarray, "T k"]
    weights: Float32[np.ndarray, "T k"]


@dataclass(frozen=True)
class Sample:
    """A text and the attention of the heads on it: exact maps, or the strongest pairs.

    In an encoder-decoder the encoder's heads attend within the text, the decoder's heads within
    the target, and cross-attention heads from the target to the text.

    Attributes:
        tokens: The text, as the model reads it.
        weights: The exact weights of each head: a row for each query, which sums to 1;
        targets: What the decoder of an encoder-decoder reads.
        linked: The head that links two chosen words most, and the tokens of the two.
    """

    tokens: tuple[str, ...]
    weights: Mapping[Head, Float32[np.ndarray, "T S"]]
    targets: tuple[str, ...] = ()
    pairs: Mapping[Head, TopPairs] = field(default_factory=dict)
    received: Mapping[tuple[str, int], Float32[np.ndarray, " S"]] = field(default_factory=dict)
    linked: tuple[Head, Stretch, Stretch] | None = None

    def sides(self, head: Head) -> tuple[Side, Side]:
        """Which text the queries of a head belong to, and which its keys."""
        if not self.targets or head.stack == "encoder":
            return "source", "source"
        return "target", "source" if head.stack.endswith("cross") else "target"

    def side(self, side: Side) -> tuple[str, ...]:
        """The tokens of the text, or of its target."""
        return self.tokens if side == "source" else self.targets


def sample_texts(
    model: nn.Module,
    tokenizer: Any,
    pairs: Sequence[Pair],
    max_tokens: int,
    first: Collection[Head] | None = None,
) -> Iterator[Sample]:
    """The attention on the beginning of each text that has a token.

    Args:
        max_tokens: How many tokens of a text are shown.
        first: The heads whose pairs are kept for a long text; None is all.
    """
    for text, target in pairs:
        pair = text.strip(), None if target is None else target.strip()
        piece = beginning_of(tokenizer, pair, model, max_tokens)
        if piece is not None:
            yield sample_piece("study", model, tokenizer, piece, first)


def heads_to_show_first(table: HeadTable) -> list[Head]:
    """The heads whose attention is farthest from uniform attention, in any statistic."""
    farthest = np.zeros(len(table.heads))
    for name in table.statistics:
        distance = np.abs(table.mean(name) - table.uniform(name))
        farthest = np.fmax(farthest, distance if name != "distance" else 0)
    order = np.argsort(-farthest, kind="stable")[:_HEADS_WITH_PAIRS]
    return [table.heads[row] for row in order]


@torch.no_grad()
def sample_piece(
    caller: str,
    model: nn.Module,
    tokenizer: Any,
    piece: Piece,
    first: Collection[Head] | None = None,
) -> Sample:
    """The attention of every head on one piece.

    Args:
        first: The heads whose pairs are kept for a long text; None is all.
    """
    source, target = (token_strings(tokenizer, ids) for ids in (piece.source, piece.decoder))
    is_long = max(len(source), len(target)) > EXACT_TOKENS
    with observe(model, Request(statistics=(), maps=True, received=is_long)) as watch:
        run_pieces(caller, model, [piece])
        heads = [head for site in watch.sites() for head in site.heads()]
        if not is_long:
            weights = {head: watch.weights(head)[0].float().cpu().numpy() for head in heads}
            return Sample(source, weights, target)
        # What each key receives, as a mean over the heads of a layer: it sums to 1 over the keys.
        received: dict[tuple[str, int], np.ndarray] = {}
        for head in heads:
            place, given = (head.stack, head.layer), watch.received(head)[0].double().cpu().numpy()
            received[place] = received.get(place, 0.0) + given
        shares = {
            place: (total / max(total.sum(), 1e-30)).astype(np.float32)
            for place, total in received.items()
        }
        sample = Sample(source, {}, target, {}, shares)
        pairs = {}
        for head in heads if first is None else [head for head in heads if head in first]:
            n_keys = len(sample.side(sample.sides(head)[1]))
            keys, values = watch.top_keys(head, min(_KEYS, n_keys))
            pairs[head] = TopPairs(keys[0].int().cpu().numpy(), values[0].float().cpu().numpy())
        return replace(sample, pairs=pairs)
