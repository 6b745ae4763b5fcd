"""The attention of every head on a few texts: exact maps, or the strongest pairs if long."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float32, Int32
from torch import nn

from headwise.errors import ArgumentError
from headwise.models.texts import Piece, beginning_of, context_of, token_strings
from headwise.report._passes import Pair, run
from headwise.tables import Head, HeadTable
from headwise.watch import Request, Watch, observe

# The beginnings of this many texts are shown, each of this many tokens.
_SAMPLES, _SAMPLE_TOKENS = 3, 24
# Texts chosen by a reader are shown whole, and so many are enough for one page.
MAX_SHOWN = 48
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
    """

    tokens: tuple[str, ...]
    weights: Mapping[Head, Float32[np.ndarray, "T S"]]
    targets: tuple[str, ...] = ()
    pairs: Mapping[Head, TopPairs] = field(default_factory=dict)
    received: Mapping[tuple[str, int], Float32[np.ndarray, " S"]] = field(default_factory=dict)

    def sides(self, head: Head) -> tuple[Side, Side]:
        """Which text the queries of a head belong to, and which its keys."""
        if not self.targets or head.stack == "encoder":
            return "source", "source"
        return "target", "source" if head.stack.endswith("cross") else "target"

    def side(self, side: Side) -> tuple[str, ...]:
        """The tokens of the text, or of its target."""
        return self.tokens if side == "source" else self.targets


def sample_beginnings(
    model: nn.Module, tokenizer: Any, pairs: Sequence[Pair]
) -> tuple[Sample, ...]:
    """Exact maps of the beginnings of a few texts, spread evenly over the corpus."""
    stride = max(1, len(pairs) // _SAMPLES)
    chosen = pairs[::stride][:_SAMPLES]
    return tuple(_samples(model, tokenizer, chosen, _SAMPLE_TOKENS, None))


def sample_whole(
    model: nn.Module,
    tokenizer: Any,
    pairs: Sequence[Pair],
    first: Collection[Head] | None,
    max_tokens: int | None = None,
) -> tuple[Sample, ...]:
    """The attention on whole texts, as far as the model's context reaches.

    Args:
        first: The heads whose pairs are kept for a long text; None is all.
    Raises:
        ArgumentError: there are more texts than a page shows.
    """
    if len(pairs) > MAX_SHOWN:
        raise ArgumentError(
            f"study: {len(pairs)} texts to show. Give at most {MAX_SHOWN}; all other texts can be "
            f"studied without being shown."
        )
    tokens = max_tokens or context_of(model, tokenizer)
    return tuple(_samples(model, tokenizer, pairs, tokens, first))


def heads_to_show_first(table: HeadTable) -> list[Head]:
    """The heads whose attention is farthest from uniform attention, in any statistic."""
    farthest = np.zeros(len(table.heads))
    for name in table.statistics:
        distance = np.abs(table.mean(name) - table.even(name))
        farthest = np.fmax(farthest, distance if name != "distance" else 0)
    order = np.argsort(-farthest, kind="stable")[:_HEADS_WITH_PAIRS]
    return [table.heads[row] for row in order]


def _samples(
    model: nn.Module,
    tokenizer: Any,
    pairs: Sequence[Pair],
    tokens: int,
    first: Collection[Head] | None,
) -> Iterator[Sample]:
    for text, target in pairs:
        pair = text.strip(), None if target is None else target.strip()
        piece = beginning_of(tokenizer, pair, model, tokens)
        if piece is not None:
            yield sample_piece("study", model, tokenizer, piece, first)


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
        run(caller, model, [piece])
        heads = [head for site in watch.sites() for head in site.heads()]
        if not is_long:
            weights = {head: watch.weights(head)[0].float().cpu().numpy() for head in heads}
            return Sample(source, weights, target)
        shown = [head for head in heads if first is None or head in first]
        sample = Sample(source, {}, target, {}, _received_by_layer(watch, heads))
        sizes = {head: len(sample.side(sample.sides(head)[1])) for head in shown}
        pairs = {head: _top_pairs(watch, head, min(_KEYS, sizes[head])) for head in shown}
        return replace(sample, pairs=pairs)


def _top_pairs(watch: Watch, head: Head, k: int) -> TopPairs:
    keys, weights = watch.top_keys(head, k)
    return TopPairs(keys[0].int().cpu().numpy(), weights[0].float().cpu().numpy())


def _received_by_layer(watch: Watch, heads: Sequence[Head]) -> dict[tuple[str, int], np.ndarray]:
    """What each key receives, as a mean over the heads of a layer: the sums to 1 over the keys."""
    sums: dict[tuple[str, int], np.ndarray] = {}
    for head in heads:
        received = watch.received(head)[0].double().cpu().numpy()
        place = head.stack, head.layer
        sums[place] = sums[place] + received if place in sums else received
    return {
        place: (total / max(total.sum(), 1e-30)).astype(np.float32) for place, total in sums.items()
    }
