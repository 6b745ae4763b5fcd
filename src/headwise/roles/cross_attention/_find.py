"""Find the cross-attention heads that align outputs with known spans of the source."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import nn

from headwise._progress import Progress, shows_progress
from headwise.corpora import Several, list_items
from headwise.models import check_model, fingerprint
from headwise.roles._hypotheses import FEWEST_TEXTS
from headwise.roles._samples import halves
from headwise.roles.cross_attention._aligned_batch import (
    AlignedBatch,
    KnownExample,
    check_batches,
    known_examples,
)
from headwise.roles.cross_attention._table import AlignmentHeads
from headwise.tables import Head, ratio_interval

_CANDIDATES = 8  # heads that a set is chosen from


@shows_progress("Finding alignment heads")
def find_alignment_heads(
    model: nn.Module,
    batches: Several[AlignedBatch],
    *,
    most: int = 4,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> AlignmentHeads:
    """Find the cross-attention heads that align outputs with the source, and a set that does best.

    Each head is aligned monotonically by itself, as `align` does; its error is the mean distance
    between the first position of an output and its true one. The set grows greedily by the head
    whose weights, averaged with those of the set, have the least error on half of the examples;
    all numbers come from the other half. It is compared with all heads of the last half of the
    layers, which Transformers takes where no heads are known, and with the best straight line:
    outputs spread evenly over the source, or a line fitted on the first half. The queries of
    cross-attention are all of the decoder, so that heads are asked in one direction alone: which
    part of the source an output looks at.

    Args:
        batches: Sixty examples or more, with known spans.
        most: The most heads in the set.
        seed: The seed of the halves and of the bootstrap.
        on_progress: Called after each batch of a pass with the number of batches done and of all.
    Returns:
        A row per cross-attention head, and the set with its errors.
    Raises:
        ArgumentError: there are no examples, spans do not fit them, or `most` is below 1.
        UnsupportedError: the model has no cross-attention that can be captured exactly.
    """
    model = check_model("find_alignment_heads", model)
    listed: list[AlignedBatch] = list_items(
        "find_alignment_heads", "batches", batches, AlignedBatch
    )
    check_batches(listed, most)
    parts = []
    for done, batch in enumerate(listed, 1):
        parts.append(_Errors.of(model, batch))
        if on_progress is not None:
            on_progress(done, len(listed))
    errors = _Errors.joined(parts)
    selection = halves(len(errors.count), seed)
    ranked = errors.heads_by_error(selection)[:_CANDIDATES]
    weights = [_candidate_weights(model, batch, ranked) for batch in listed]
    chosen, of_set = _best_set(weights, ranked, selection, most)
    return _table(model, errors, selection, chosen, of_set, seed)


@dataclass(frozen=True)
class _Errors:
    """Sums over the tokens with a span of each of `M` examples, for each of `N` heads.

    Attributes:
        error: The distance between the aligned first position and the true one.
        right: 1 where the largest weight lies in the span; ties share it.
        last_half: The error of the mean of all heads of the last half of the layers.
        places: For each example, the numbers of its tokens with a span, their places if spread
            evenly over the source, and their true places.
        chance: The share of positions in the span.
        count: The number of tokens with a span.
    """

    heads: tuple[Head, ...]
    error: Float[np.ndarray, "M N"]
    right: Float[np.ndarray, "M N"]
    last_half: Float[np.ndarray, " M"]
    places: tuple[Float[np.ndarray, "_ 3"], ...]
    chance: Float[np.ndarray, " M"]
    count: Float[np.ndarray, " M"]

    @classmethod
    def of(cls, model: nn.Module, batch: AlignedBatch) -> "_Errors":
        """One pass over a batch; the weights of one head at a time."""
        attention, examples = known_examples(model, batch)
        layers = max(head.layer for head in attention.heads) + 1
        late = [head for head in attention.heads if head.layer >= layers // 2]
        error, right = [], []
        mean = torch.zeros(())
        for head in attention.heads:
            weights = attention.weights(head).double()
            mean = mean + weights / len(late) if head in late else mean
            shown = [example.shown(weights) for example in examples]
            error.append([e.error(w) for e, w in zip(examples, shown, strict=True)])
            right.append([e.right(w) for e, w in zip(examples, shown, strict=True)])
        return cls(
            heads=attention.heads,
            error=np.array(error).T,
            right=np.array(right).T,
            last_half=np.array([e.error(e.shown(mean)) for e in examples]),
            places=tuple(e.places() for e in examples),
            chance=np.array([e.chance() for e in examples]),
            count=np.array([float(len(e.tokens)) for e in examples]),
        )

    @classmethod
    def joined(cls, parts: Sequence["_Errors"]) -> "_Errors":
        names = ("error", "right", "last_half", "chance", "count")
        sums = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        places = tuple(places for part in parts for places in part.places)
        return cls(parts[0].heads, places=places, **sums)

    def straight_line(self, selection: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
        """The error in each example of the best straight line through the selection half.

        The lines are outputs spread evenly over the source, and two fitted ones: over the number
        of an output, and over its place if spread evenly. No attention is involved.
        """
        known = np.concatenate(
            [p for p, chosen in zip(self.places, selection, strict=True) if chosen]
        )
        lines = [(1, 0.0, 1.0)]
        for column in (0, 1) if len(known) else ():
            design = np.column_stack([np.ones(len(known)), known[:, column]])
            start, slope = np.linalg.lstsq(design, known[:, 2], rcond=None)[0]
            lines.append((column, start + 0.5, slope))
        errors = np.array(
            [
                [
                    np.abs(np.floor(start + slope * p[:, column]) - p[:, 2]).sum()
                    for p in self.places
                ]
                for column, start, slope in lines
            ]
        )
        return errors[errors[:, selection].sum(1).argmin()]

    def heads_by_error(self, selection: Bool[np.ndarray, " M"]) -> list[Head]:
        order = np.argsort(self.error[selection].sum(0), kind="stable")
        return [self.heads[head] for head in order]


Candidates = tuple[list[KnownExample], list[Float[np.ndarray, "C _ _"]]]


def _candidate_weights(model: nn.Module, batch: AlignedBatch, heads: Sequence[Head]) -> Candidates:
    """The weights of the candidates, for each example of a batch."""
    attention, examples = known_examples(model, batch)
    weights = [attention.weights(head).double() for head in heads]
    return examples, [np.stack([example.shown(w) for w in weights]) for example in examples]


def _best_set(
    candidates: Sequence[Candidates],
    heads: Sequence[Head],
    selection: Bool[np.ndarray, " M"],
    most: int,
) -> tuple[list[Head], Float[np.ndarray, " M"]]:
    """The set with the least error on the selection half, and its error in each example."""
    pairs = [
        pair for examples, weights in candidates for pair in zip(examples, weights, strict=True)
    ]

    def errors(chosen: Sequence[int], only: Bool[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
        return np.array(
            [
                example.error(weights[list(chosen)].mean(0)) if is_scored else np.nan
                for (example, weights), is_scored in zip(pairs, only, strict=True)
            ]
        )

    chosen: list[int] = []
    best = np.inf
    while len(chosen) < min(most, len(heads)):
        tried = {
            head: float(np.nansum(errors([*chosen, head], selection)))
            for head in range(len(heads))
            if head not in chosen
        }
        head = min(tried, key=tried.__getitem__)
        if tried[head] >= best:
            break
        best = tried[head]
        chosen.append(head)
    return [heads[head] for head in chosen], errors(chosen, np.ones_like(selection))


def _table(
    model: nn.Module,
    errors: _Errors,
    selection: Bool[np.ndarray, " M"],
    chosen: Sequence[Head],
    of_set: Float[np.ndarray, " M"],
    seed: int,
) -> AlignmentHeads:
    held = ~selection
    straight_line = errors.straight_line(selection)
    columns = np.column_stack([of_set, of_set - errors.last_half, of_set - straight_line])[held]
    low, high = _intervals(columns, errors.count[held], seed)
    n, texts = max(errors.count[held].sum(), 1.0), int((errors.count[held] > 0).sum())
    outcome = "found" if high[2] < 0 else "not found"
    needed = f"not tested: {texts} held-out examples, {FEWEST_TEXTS} needed"
    return AlignmentHeads(
        rows=_rows(errors, selection, chosen, seed),
        heads=tuple(chosen),
        outcome=outcome if texts >= FEWEST_TEXTS else needed,
        error=float(of_set[held].sum() / n),
        ci_low=float(low[0]),
        ci_high=float(high[0]),
        last_half=float(errors.last_half[held].sum() / n),
        gain_over_last_half=(float(-high[1]), float(-low[1])),
        straight_line=float(straight_line[held].sum() / n),
        model=fingerprint(model),
    )


def _rows(
    errors: _Errors, selection: Bool[np.ndarray, " M"], chosen: Sequence[Head], seed: int
) -> pd.DataFrame:
    """A row per head."""
    held, heads = ~selection, errors.heads
    n = max(errors.count[held].sum(), 1.0)
    low, high = _intervals(errors.error[held], errors.count[held], seed)
    return pd.DataFrame(
        {
            "name": [str(head) for head in heads],
            "stack": [head.stack for head in heads],
            "layer": [head.layer for head in heads],
            "head": [head.head for head in heads],
            "in_set": [head in chosen for head in heads],
            "error": errors.error[held].sum(0) / n,
            "ci_low": low,
            "ci_high": high,
            "accuracy": errors.right[held].sum(0) / n,
            "chance": errors.chance[held].sum() / n,
            "n": n,
            "texts": int((errors.count[held] > 0).sum()),
            "chosen_half": errors.error[selection].sum(0) / max(errors.count[selection].sum(), 1.0),
        }
    )


def _intervals(
    sums: Float[np.ndarray, "M N"], count: Float[np.ndarray, " M"], seed: int
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """The interval of each column's sum per token, over examples."""
    return ratio_interval(sums, np.broadcast_to(count[:, None], sums.shape), seed=seed)
