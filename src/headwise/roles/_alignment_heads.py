"""Find the cross-attention heads that align outputs with known spans of the source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._display import counted
from headwise._progress import Progress, shows_progress
from headwise.corpora import Several, list_items
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model, fingerprint
from headwise.roles._align import (
    Calls,
    aligned,
    check_outputs,
    cross_attention,
    cross_heads,
    head_weights,
    source_columns,
)
from headwise.roles._hypotheses import FEWEST_TEXTS
from headwise.roles._samples import halves
from headwise.roles.scores import right_share
from headwise.tables import Head, address_columns, at_prompt, ratio_interval

_CANDIDATES = 8  # heads that a set is chosen from


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
    spans: Sequence[Sequence[tuple[int, int] | None]]
    lengths: Sequence[int] | None = None
    first: int = 0


@dataclass(frozen=True, eq=False)
class AlignmentHeads:
    """Cross-attention heads that align outputs with the source; numbers are of held-out examples.

    Errors are mean distances, in source positions, between the first position that an output is
    aligned with and the true one.

    Attributes:
        rows: A row per cross-attention head: its `error` with the interval (95 %, over examples),
            `accuracy`, the share of outputs whose largest weight lies in the true span, `chance`,
            the `n` outputs of `texts` examples, the error on the selection half (`chosen_half`),
            and whether it is in the set.
        heads: The heads of the set, in the order in which they joined.
        outcome: `found` if the set is closer than the best straight line with 95 % confidence,
            `not found`, or `not tested: ` and what is missing.
        error: The error of the set.
        ci_low: The lower end of its interval.
        ci_high: The upper end.
        last_half: The error of the mean of all heads of the last half of the layers.
        gain_over_last_half: The interval of what the set gains over these heads.
        straight_line: The error of the best straight line: outputs spread evenly over the source,
            or a line fitted to the places of outputs in the selection half.
        model: The fingerprint of the model's weights.
    """

    rows: pd.DataFrame
    heads: tuple[Head, ...]
    outcome: str
    error: float
    ci_low: float
    ci_high: float
    last_half: float
    gain_over_last_half: tuple[float, float]
    straight_line: float
    model: str = ""

    def frame(self) -> pd.DataFrame:
        """All rows: name, stack, layer, head, then the errors."""
        return self.rows.copy()

    def write_to(self, model: nn.Module) -> None:
        """Write the set as `model.generation_config.alignment_heads`, which `save` keeps.

        Whisper's `generate(return_token_timestamps=True)` and `align` read it.

        Raises:
            ArgumentError: the heads are of another model, or the set was not found.
            UnsupportedError: the model has no generation configuration.
        """
        model = check_model("AlignmentHeads.write_to", model)
        actual, config = fingerprint(model), getattr(model, "generation_config", None)
        if actual != self.model:
            raise ArgumentError(
                f"AlignmentHeads.write_to: these are heads of the model {self.model}, not of "
                f"{actual}. Give the model that they were found in."
            )
        if self.outcome != "found":
            raise ArgumentError(
                f"AlignmentHeads.write_to: the set was {self.outcome}; its mean error is "
                f"{self.error:.2f} positions, that of a straight line {self.straight_line:.2f}. "
                f"Give more examples, or some whose borders do not follow from the number of an "
                f"output; or set generation_config.alignment_heads yourself if you want it "
                f"nevertheless."
            )
        if config is None:
            raise UnsupportedError(
                f"AlignmentHeads.write_to: {type(model).__name__} has no generation_config. Give "
                f"a model that generates."
            )
        config.alignment_heads = [[head.layer, head.head] for head in self.heads]
        # Transformers drops fields of its own from files that claim to follow from the config.
        config._from_model_config = False

    def __str__(self) -> str:
        names, row = ", ".join(map(str, self.heads)), self.rows.iloc[0]
        low, high = self.gain_over_last_half
        return (
            f"{names}: {self.outcome}; mean error {self.error:.2f} positions "
            f"[{self.ci_low:.2f}, {self.ci_high:.2f}] over {counted(int(row['n']), 'output')} of "
            f"{counted(int(row['texts']), 'held-out example')}, {self.last_half:.2f} for all heads "
            f"of the last half (gain [{low:.2f}, {high:.2f}]), {self.straight_line:.2f} for a "
            f"straight line"
        )

    def __repr__(self) -> str:
        return at_prompt(f"AlignmentHeads: {self}", self.rows.sort_values("error"))

    def _repr_html_(self) -> str:
        rows = self.rows.sort_values("error")
        return rows.to_html(index=False, float_format="{:.3f}".format, escape=True)


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
    listed = list_items("find_alignment_heads", "batches", batches, AlignedBatch)
    _check_batches(listed, most)
    # One pass for the errors of all heads, whose weights are too many to keep, and another for the
    # weights of the candidates.
    heads: tuple[Head, ...] = ()
    examples: list[KnownExample] = []
    errors: list[np.ndarray] = []
    rights: list[np.ndarray] = []
    for done, batch in enumerate(listed, 1):
        calls, read = known_examples(model, batch)
        error, right = _errors_of_heads(calls, read)
        heads, examples = cross_heads(calls), [*examples, *read]
        errors.append(error)
        rights.append(right)
        if on_progress is not None:
            on_progress(done, len(listed))
    error, right = np.concatenate(errors), np.concatenate(rights)
    selection = halves(len(examples), seed)
    ranked = np.argsort(error[selection, :-1].sum(0), kind="stable")[:_CANDIDATES].tolist()
    weights: list[np.ndarray] = []
    for batch in listed:
        calls, read = known_examples(model, batch)
        of_heads = [head_weights(calls, heads[head]).double() for head in ranked]
        weights += [np.stack([example.shown(of) for of in of_heads]) for example in read]
    chosen = _best_set(examples, weights, selection, most)
    of_set = np.array(
        [e.error(of[chosen].mean(0)) for e, of in zip(examples, weights, strict=True)]
    )
    line = _straight_line(examples, selection)
    # The set, what it gains over the last half and the straight line, and every head.
    columns = np.column_stack([of_set, of_set - error[:, -1], of_set - line, error[:, :-1]])
    count = np.array([float(len(example.tokens)) for example in examples])
    chance = np.array([example.chance() for example in examples])
    held = ~selection
    counts = np.broadcast_to(count[held, None], columns[held].shape)
    low, high = ratio_interval(columns[held], counts, seed=seed)
    n, n_selected = (max(count[half].sum(), 1.0) for half in (held, selection))
    texts = int((count[held] > 0).sum())
    outcome = "found" if high[2] < 0 else "not found"
    needed = f"not tested: {texts} held-out examples, {FEWEST_TEXTS} needed"
    members = [heads[ranked[head]] for head in chosen]
    return AlignmentHeads(
        rows=pd.DataFrame(
            {
                **address_columns(heads),
                "in_set": [head in members for head in heads],
                "error": error[held, :-1].sum(0) / n,
                "ci_low": low[3:],
                "ci_high": high[3:],
                "accuracy": right[held].sum(0) / n,
                "chance": chance[held].sum() / n,
                "n": n,
                "texts": texts,
                "chosen_half": error[selection, :-1].sum(0) / n_selected,
            }
        ),
        heads=tuple(members),
        outcome=outcome if texts >= FEWEST_TEXTS else needed,
        error=float(of_set[held].sum() / n),
        ci_low=float(low[0]),
        ci_high=float(high[0]),
        last_half=float(error[held, -1].sum() / n),
        gain_over_last_half=(float(-high[1]), float(-low[1])),
        straight_line=float(line[held].sum() / n),
        model=fingerprint(model),
    )


def _check_batches(batches: Sequence[AlignedBatch], most: int) -> None:
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
        known = (span for spans in batch.spans for span in spans if span is not None)
        if wrong := [span for span in known if not 0 <= span[0] < span[1]]:
            raise ArgumentError(
                f"find_alignment_heads: a span is {wrong[0]}. Give (start, end) with "
                f"0 <= start < end."
            )


@dataclass(frozen=True)
class KnownExample:
    """One example: its columns of the source and the tokens with a span."""

    row: int
    columns: Tensor
    n_outputs: int
    first: int
    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]

    def shown(self, weights: Float[Tensor, "B T S"]) -> Float[np.ndarray, "t s"]:
        """The weights of its outputs over its source positions."""
        return weights[self.row, : self.n_outputs][:, self.columns].cpu().numpy()

    def error(self, weights: Float[np.ndarray, "T S"]) -> float:
        """The distance between the first position aligned with each token and the true one."""
        starts = aligned(weights).spans[list(self.tokens), 0]
        return float(sum(abs(s - t) for s, (t, _) in zip(starts, self.spans, strict=True)))

    def right(self, weights: Float[np.ndarray, "T S"]) -> float:
        """The number of tokens whose largest weight lies in their span; ties share it."""
        place = np.arange(weights.shape[1])
        known = [(start <= place) & (place < end) for start, end in self.spans]
        right = np.array(known, dtype=bool).reshape(-1, len(place))
        return float(right_share(weights[list(self.tokens)], right).sum())

    def places(self) -> Float[np.ndarray, "t 3"]:
        """For each token with a span: its number, its place if spread evenly, its true place."""
        step = len(self.columns) / (self.n_outputs - self.first)
        pairs = zip((token - self.first for token in self.tokens), self.spans, strict=True)
        rows = [(number, number * step, start) for number, (start, _) in pairs]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)

    def chance(self) -> float:
        """The share of positions in the spans."""
        return sum(end - start for start, end in self.spans) / len(self.columns)


def known_examples(model: nn.Module, batch: AlignedBatch) -> tuple[Calls, list[KnownExample]]:
    """What a model attends with on a batch, and its examples."""
    calls = cross_attention("find_alignment_heads", model, batch.inputs, batch.outputs)
    columns = source_columns("find_alignment_heads", calls, batch.lengths)
    examples = []
    for row, spans in enumerate(batch.spans):
        tokens = [token for token, span in enumerate(spans) if span is not None]
        known = [span for span in spans if span is not None]
        if any(span[1] > len(columns[row]) for span in known):
            raise ArgumentError(
                f"find_alignment_heads: the spans {known} in a source of "
                f"{len(columns[row])} positions. Give spans within the source."
            )
        examples.append(KnownExample(row, columns[row], len(spans), batch.first, tokens, known))
    return calls, examples


def _errors_of_heads(
    calls: Calls, examples: Sequence[KnownExample]
) -> tuple[Float[np.ndarray, "M _"], Float[np.ndarray, "M N"]]:
    """The error of each head, last of the mean of the last half, and the right outputs of each."""
    heads = cross_heads(calls)
    layers = max(head.layer for head in heads) + 1
    late = [head for head in heads if head.layer >= layers // 2]
    error, right = [], []
    mean = torch.zeros(())
    for head in heads:
        weights = head_weights(calls, head).double()
        mean = mean + weights / len(late) if head in late else mean
        shown = [example.shown(weights) for example in examples]
        error.append([e.error(of) for e, of in zip(examples, shown, strict=True)])
        right.append([e.right(of) for e, of in zip(examples, shown, strict=True)])
    error.append([example.error(example.shown(mean)) for example in examples])
    return np.array(error).T, np.array(right).T


def _best_set(
    examples: Sequence[KnownExample],
    weights: Sequence[np.ndarray],
    selection: Bool[np.ndarray, " M"],
    most: int,
) -> list[int]:
    """The candidates whose mean has the least error on the selection half, grown one by one."""
    pairs = [
        pair
        for pair, selected in zip(zip(examples, weights, strict=True), selection, strict=True)
        if selected
    ]
    chosen: list[int] = []
    best, n_candidates = np.inf, len(weights[0])
    while len(chosen) < min(most, n_candidates):
        tried = {
            head: sum(example.error(of[[*chosen, head]].mean(0)) for example, of in pairs)
            for head in range(n_candidates)
            if head not in chosen
        }
        head = min(tried, key=tried.__getitem__)
        if tried[head] >= best:
            break
        best = tried[head]
        chosen.append(head)
    return chosen


def _straight_line(
    examples: Sequence[KnownExample], selection: Bool[np.ndarray, " M"]
) -> Float[np.ndarray, " M"]:
    """The error in each example of the best straight line through the selection half.

    The lines are outputs spread evenly over the source, and two fitted ones: over the number
    of an output, and over its place if spread evenly. No attention is involved.
    """
    places = [example.places() for example in examples]
    known = np.concatenate([p for p, chosen in zip(places, selection, strict=True) if chosen])
    lines = [(1, 0.0, 1.0)]
    for column in (0, 1) if len(known) else ():
        design = np.column_stack([np.ones(len(known)), known[:, column]])
        start, slope = np.linalg.lstsq(design, known[:, 2], rcond=None)[0]
        lines.append((column, start + 0.5, slope))
    errors = np.array(
        [
            [np.abs(np.floor(start + slope * p[:, column]) - p[:, 2]).sum() for p in places]
            for column, start, slope in lines
        ]
    )
    return errors[errors[:, selection].sum(1).argmin()]
