"""Find the cross-attention heads that align outputs with known spans of the source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._display import type_of
from headwise._progress import Progress, shows_progress
from headwise.corpora import Several, Span, list_items, one_text
from headwise.errors import ArgumentError
from headwise.models import check_model
from headwise.models.texts import TokenOffsets, token_offsets
from headwise.roles._samples import digest_of_tensor, first_of_each, grown_set, sums_by_text
from headwise.roles.evidence import of_examples
from headwise.roles.examples._align import (
    Calls,
    aligned,
    check_outputs,
    cross_attention,
    cross_heads,
    head_weights,
    source_columns,
)
from headwise.roles.examples._found_heads import FoundHeads, heads_of_examples
from headwise.tables import Head, halves, ratio_interval

_CANDIDATES = 8  # heads that a set is chosen from
_NULLS = {"chance": "chance", "line": "a straight line"}


@dataclass(frozen=True)
class AlignedBatch:
    """Examples of an encoder-decoder whose true alignment is known.

    Attributes:
        inputs: The inputs of the model by name.
        outputs: The token ids of each output.
        spans: For each output its tokens' spans `(start, end)` of source positions, without the
            position `end`; None for a token without one. Tokens before the first span are a
            prompt. Neighbors with the same span are the tokens of one word.
        lengths: The number of source positions of each example; None for all that are not padding.
    """

    inputs: Mapping[str, Any]
    outputs: Sequence[Sequence[int]]
    spans: Sequence[Sequence[tuple[int, int] | None]]
    lengths: Sequence[int] | None = None

    @classmethod
    def of_words(
        cls,
        processor: Any,
        sounds: Sequence[Float[np.ndarray, " _"]],
        texts: Sequence[str],
        words: Sequence[Sequence[tuple[float, float, str]]],
    ) -> "AlignedBatch":
        """Utterances for a Whisper, with the times of their words.

        The prompt is the tokenizer's own, `processor.tokenizer.set_prefix_tokens` changes it. A
        token of several words makes one word of them, and one of no word has no span.

        Args:
            processor: The processor of the model: a feature extractor and a tokenizer.
            sounds: Waveforms of one channel, at the sampling rate of the feature extractor.
            texts: What is said, as the model writes it: with a space before the first word, but in
                languages that are written without spaces.
            words: For each sound its words in order, as `(start_s, end_s, "word")`: stretches of
                characters of its text.
        Raises:
            ArgumentError: the processor has no feature extractor or tokenizer, there are not as
                many texts and lists of words as sounds, or a word is not in its text after those
                before it.
        """
        extractor, tokenizer = (
            getattr(processor, part, None) for part in ("feature_extractor", "tokenizer")
        )
        if extractor is None or tokenizer is None:
            raise ArgumentError(
                f"AlignedBatch.of_words: {type_of(processor)} has no feature extractor or "
                f"no tokenizer. Give the WhisperProcessor of the model."
            )
        if not len(sounds) == len(texts) == len(words):
            raise ArgumentError(
                f"AlignedBatch.of_words: {len(sounds)} sounds, {len(texts)} texts and "
                f"{len(words)} lists of words. Give a text and a list of words for each sound."
            )
        texts = [one_text("AlignedBatch.of_words", text) for text in texts]
        # The second convolution of the encoder makes one source position of two frames.
        samples = 2 * extractor.hop_length
        rate = extractor.sampling_rate
        outputs: list[Sequence[int]] = []
        spans: list[Sequence[tuple[int, int] | None]] = []
        for text, of_sound, tokens in zip(
            texts, words, token_offsets(tokenizer, texts), strict=True
        ):
            borders = [
                (round(start * rate / samples), round(stop * rate / samples))
                for start, stop, _ in of_sound
            ]
            stretches = _stretches(text, [word for *_, word in of_sound])
            of_tokens = _spans_of_tokens(text, tokens, stretches, borders)
            # The decoder puts the first of the tokens around a text before it by itself.
            outputs.append(tokens.ids[1:])
            spans.append(of_tokens[1:])
        inputs = extractor(list(sounds), sampling_rate=rate, return_tensors="pt")
        lengths = [ceil(len(sound) / samples) for sound in sounds]
        return cls(dict(inputs), outputs, spans, lengths)


def _stretches(text: str, words: Sequence[str]) -> list[Span]:
    """The characters of each word, one after another."""
    stretches: list[Span] = []
    end = 0
    for word in map(str.strip, words):
        start = text.find(word, end) if word else -1
        if start < 0:
            raise ArgumentError(
                f"AlignedBatch.of_words: the word {word!r} is not in {text[end:]!r:.60}, which is "
                f"left of its text. Give words as they stand in the text, in order."
            )
        end = start + len(word)
        stretches.append((start, end))
    return stretches


def _spans_of_tokens(
    text: str, tokens: TokenOffsets, stretches: Sequence[Span], borders: Sequence[Span]
) -> list[Span | None]:
    """For each token the span of its word; None for a token of no word."""
    spans: list[Span | None] = [None] * len(tokens.ids)
    for stretch, (start, end) in zip(stretches, borders, strict=True):
        inside = tokens.tokens_in(text, stretch)
        # Where a token belongs to the word before as well, both are one.
        before = spans[inside[0]] if inside else None
        if before is not None:
            inside = [n for n, span in enumerate(spans) if span == before] + inside
            start = before[0]
        for token in inside:
            spans[token] = start, end
    return spans


@shows_progress("Finding alignment heads")
def find_alignment_heads(
    model: nn.Module,
    batches: Several[AlignedBatch],
    *,
    most: int = 4,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> FoundHeads:
    """Find the cross-attention heads that align outputs with the source, and a set that does best.

    Each head is aligned monotonically by itself, as `align` does; its error is the mean distance
    of the borders of a word from the true ones, after the median distance on half of the examples,
    a constant offset, is removed. The set grows by the head whose weights, averaged with those of
    the set, have the least error on a quarter of the examples; the head joins if the error falls
    on another quarter as well. All numbers come from the other half. The set is compared with all
    heads of the last half of the layers, which Transformers takes where no heads are known, and
    with the best straight line: outputs spread evenly over the source, or a line fitted on the
    first half.

    A head is found if it aligns words with the middle of their span often enough: the lift of that
    share over chance and that straight line is .25 on both halves and p < .05, adjusted over the
    heads and the set. The queries of cross-attention are all of the decoder, so that heads are
    asked in one direction alone: which part of the source an output looks at.

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
    # One pass for the borders of all heads, whose weights are too many to keep, and another for
    # the weights of the candidates.
    heads: tuple[Head, ...] = ()
    examples: list[KnownExample] = []
    borders: list[np.ndarray] = []
    for done, batch in enumerate(listed, 1):
        calls, read = known_examples(model, batch)
        heads, examples = cross_heads(calls), [*examples, *read]
        borders += _borders_of_heads(calls, read)
        if on_progress is not None:
            on_progress(done, len(listed))
    n_given, distinct = len(examples), first_of_each(example.content for example in examples)
    examples = [examples[number] for number in distinct]
    borders = [borders[number] for number in distinct]
    N, M = len(heads), len(examples)
    selection = halves(M, seed)
    spans = np.concatenate([example.spans for example in examples])
    example_of = np.repeat(np.arange(M), [len(example.words) for example in examples])
    is_selected = selection[example_of]
    error, _, _ = errors_of_words(np.concatenate(borders)[:, :N], spans, is_selected)
    ranked = np.argsort(error[is_selected].sum(0), kind="stable")[:_CANDIDATES].tolist()
    weights: list[np.ndarray] = []
    for batch in listed:
        calls, read = known_examples(model, batch)
        of_heads = [head_weights(calls, heads[head]).double() for head in ranked]
        weights += [np.stack([example.shown(of) for of in of_heads]) for example in read]
    weights = [weights[number] for number in distinct]
    chosen = _best_set(examples, weights, selection, most, seed)
    pairs = zip(examples, weights, strict=True)
    of_set = np.concatenate([example.borders(of[chosen].mean(0)) for example, of in pairs])
    # Every head, the set, all heads of the last half, and the straight lines.
    places = np.concatenate([example.places() for example in examples])
    lines = straight_lines(places, spans, is_selected)
    known = np.concatenate(borders)
    aligners = np.column_stack([known[:, :N], of_set[:, None], known[:, N:], lines])
    error, right, offset = errors_of_words(aligners, spans, is_selected)
    late, line = N + 1, N + 2 + int(error[is_selected, N + 2 :].sum(0).argmin())
    error, right, count = (
        sums_by_text(of_words, example_of, M)
        for of_words in (error, right.astype(np.float64), np.ones(len(spans)))
    )
    chance = np.array([example.chance() for example in examples])
    # Null models are no baselines here: a straight line is right more often than their best head.
    nulls = {"chance": chance[:, None], "line": right[:, [line]]}
    family = of_examples("alignment", right[:, :late], count, nulls, _NULLS, selection)
    # The errors of every head and the set, and the set's less those of the last half and the line.
    less = error[:, [N]] - error[:, [late, line]]
    errors, held = np.column_stack([error[:, :late], less]), ~selection
    counts = np.broadcast_to(count[held, None], errors[held].shape)
    low, high = ratio_interval(errors[held], counts, seed=seed)
    mean = error[held].sum(0) / max(count[held].sum(), 1.0)
    (first, last), (gain_low, gain_high) = offset[N], (-high[late], -low[late])
    note = (
        f"the borders of words are wrong by {mean[N]:.2f} positions [{low[N]:.2f}, "
        f"{high[N]:.2f}], without a constant offset of {first:+.1f} for starts and {last:+.1f} for "
        f"ends; by {mean[late]:.2f} under all heads of the last half (gain [{gain_low:.2f}, "
        f"{gain_high:.2f}]), by {mean[line]:.2f} under a straight line"
    )
    return heads_of_examples(
        model,
        heads,
        [ranked[head] for head in chosen],
        family,
        selection,
        seed,
        examples=[example.content for example in examples],
        n_given=n_given,
        columns={
            "error": mean[:late],
            "error_low": low[:late],
            "error_high": high[:late],
            "start_offset": offset[:late, 0],
            "end_offset": offset[:late, 1],
        },
        of_set={
            "last_half": float(mean[late]),
            "gain_low": float(gain_low),
            "gain_high": float(gain_high),
            "straight_line": float(mean[line]),
        },
        objection="" if high[-1] < 0 else "its error is not below that of a straight line",
        notes=[note],
    )


def _check_batches(batches: Sequence[AlignedBatch], most: int) -> None:
    """Refuse batches without outputs, or with spans that do not fit them."""
    if most < 1 or not batches:
        raise ArgumentError(
            f"find_alignment_heads: most={most} of {len(batches)} batches. Give 1 or more of both."
        )
    for batch in batches:
        outputs = check_outputs("find_alignment_heads", batch.outputs)
        lengths = [len(output) for output in outputs]
        if lengths != [len(spans) for spans in batch.spans]:
            raise ArgumentError(
                f"find_alignment_heads: spans of {[len(spans) for spans in batch.spans]} tokens "
                f"for outputs of {lengths}. Give a span, or None, for each token."
            )
        known = (span for spans in batch.spans for span in spans if span is not None)
        if wrong := [span for span in known if not 0 <= span[0] < span[1]]:
            raise ArgumentError(
                f"find_alignment_heads: a span is {wrong[0]}. Give (start, end) with "
                f"0 <= start < end."
            )


@dataclass(frozen=True)
class KnownExample:
    """One example of a batch: its columns of the source, the tokens and true spans of its words.

    Attributes:
        content: What makes it an example of its own: its outputs, its spans and its source.
    """

    row: int
    columns: Tensor
    n_outputs: int
    words: Sequence[Sequence[int]]
    spans: Float[np.ndarray, "w 2"]
    content: tuple[Any, ...]

    def shown(self, weights: Float[Tensor, "B T S"]) -> Float[np.ndarray, "t s"]:
        """The weights of its outputs over its source positions."""
        return weights[self.row, : self.n_outputs][:, self.columns].cpu().numpy()

    def borders(self, weights: Float[np.ndarray, "T S"]) -> Float[np.ndarray, "w 2"]:
        """The first position that each word is aligned with, and the one after the last."""
        spans = aligned(weights).spans
        borders = [(spans[tokens[0], 0], spans[tokens[-1], 1]) for tokens in self.words]
        return np.array(borders, dtype=np.float64).reshape(-1, 2)

    def places(self) -> Float[np.ndarray, "w 2 2"]:
        """For both borders of each word: their number, and their place if spread evenly."""
        prompt = self.words[0][0] if self.words else 0  # tokens before the first word
        numbers = [(of[0] - prompt, of[-1] + 1 - prompt) for of in self.words]
        number = np.array(numbers, dtype=np.float64).reshape(-1, 2)
        step = len(self.columns) / (self.n_outputs - prompt)
        return np.stack([number, number * step], -1)

    def chance(self) -> float:
        """The share of positions in the spans."""
        return float((self.spans[:, 1] - self.spans[:, 0]).sum()) / len(self.columns)


# The words of all examples stand one after another.


def errors_of_words(
    borders: Float[np.ndarray, "W C 2"],
    spans: Float[np.ndarray, "W 2"],
    fitted: Bool[np.ndarray, " W"],
) -> tuple[Float[np.ndarray, "W C"], Bool[np.ndarray, "W C"], Float[np.ndarray, "C 2"]]:
    """The error of each word for each aligner, whether its middle is right, and the offsets.

    The offsets are removed: heads that look ahead or back by a constant follow the words too.
    The median minimizes the mean distance on the words that it is fitted to.
    """
    distance = borders - spans[:, None]
    offset = np.median(distance[fitted], 0) if fitted.any() else np.zeros(distance.shape[1:])
    middle, (start, end) = (borders - offset).mean(-1), spans.T[:, :, None]
    return np.abs(distance - offset).mean(-1), (start <= middle) & (middle < end), offset


def straight_lines(
    places: Float[np.ndarray, "W 2 2"],
    spans: Float[np.ndarray, "W 2"],
    fitted: Bool[np.ndarray, " W"],
) -> Float[np.ndarray, "W _ 2"]:
    """The borders of each word on straight lines, which involve no attention.

    The lines are outputs spread evenly over the source, and two fitted ones: over the number of an
    output, and over its place if spread evenly.
    """
    lines = [places[..., 1]]
    for of in np.moveaxis(places, -1, 0) if fitted.any() else ():
        fits = [np.polyfit(of[fitted, end], spans[fitted, end], 1) for end in (0, 1)]
        lines.append(np.stack([np.polyval(fit, of[:, end]) for end, fit in enumerate(fits)], -1))
    return np.floor(np.stack(lines, 1) + 0.5)


def known_examples(model: nn.Module, batch: AlignedBatch) -> tuple[Calls, list[KnownExample]]:
    """What a model attends with on a batch, and its examples."""
    calls = cross_attention("find_alignment_heads", model, batch.inputs, batch.outputs)
    columns = source_columns("find_alignment_heads", calls, batch.lengths)
    outputs = check_outputs("find_alignment_heads", batch.outputs)
    examples = []
    for row, spans in enumerate(batch.spans):
        groups = groupby(enumerate(spans), key=lambda pair: pair[1])
        words = [(span, [token for token, _ in pairs]) for span, pairs in groups if span]
        known = [span for span, _ in words]
        if any(span[1] > len(columns[row]) for span in known):
            raise ArgumentError(
                f"find_alignment_heads: the spans {known} in a source of "
                f"{len(columns[row])} positions. Give spans within the source."
            )
        true = np.array(known, dtype=np.float64).reshape(-1, 2)
        tokens = [of for _, of in words]
        content = (*outputs[row],), (*spans,), *_source(batch.inputs, row, columns[row])
        examples.append(KnownExample(row, columns[row], len(spans), tokens, true, content))
    return calls, examples


def _source(inputs: Mapping[str, Any], row: int, columns: Tensor) -> list[bytes]:
    """The digests of what the model reads of one example, without the padding of texts."""
    encoded = inputs.get("encoder_outputs", ())[:1]  # of tuples and of outputs of Transformers
    rows = [of[row].cpu() for of in (*inputs.values(), *encoded) if isinstance(of, Tensor)]
    n = len(inputs["attention_mask"][row]) if "attention_mask" in inputs else 0
    shown = (of[columns.cpu()] if len(of) == n else of for of in rows)
    return [digest_of_tensor(of) for of in shown]


def _borders_of_heads(
    calls: Calls, examples: Sequence[KnownExample]
) -> list[Float[np.ndarray, "w C 2"]]:
    """The borders of each example by each head, and last by the mean of the last half."""
    heads = cross_heads(calls)
    layers = max(head.layer for head in heads) + 1
    late = [head for head in heads if head.layer >= layers // 2]
    borders = []
    mean = torch.zeros(())
    for head in heads:
        weights = head_weights(calls, head).double()
        mean = mean + weights / len(late) if head in late else mean
        borders.append([example.borders(example.shown(weights)) for example in examples])
    borders.append([example.borders(example.shown(mean)) for example in examples])
    return [np.stack(of, 1) for of in zip(*borders, strict=True)]


def _best_set(
    examples: Sequence[KnownExample],
    weights: Sequence[np.ndarray],
    selection: Bool[np.ndarray, " M"],
    most: int,
    seed: int,
) -> list[int]:
    """The candidates whose mean has the least error, grown one by one.

    A head is chosen on one quarter of the examples, and joins if the error falls on both quarters
    of the selection half: a gain on the words that it was chosen by may be chance.
    """
    numbers = np.flatnonzero(selection).tolist()
    spans = np.concatenate([examples[number].spans for number in numbers])
    lengths = [len(examples[number].words) for number in numbers]
    first = np.repeat(halves(len(numbers), seed), lengths)

    def errors(chosen: list[int]) -> Float[np.ndarray, "n 2"]:
        tried = []
        for head in range(len(weights[0])):
            heads = [*chosen, head]
            borders = [examples[n].borders(weights[n][heads].mean(0)) for n in numbers]
            error, _, _ = errors_of_words(np.concatenate(borders)[:, None], spans, first)
            tried.append((error[first].sum(), error[~first].sum()))
        return np.array(tried)

    return grown_set(errors, most, n_falling=2)
