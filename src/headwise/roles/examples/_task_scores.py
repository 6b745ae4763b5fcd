"""What heads decide on the examples of a task, and what ablating them does to the answers.

A head decides for the stretch that gets the most of its attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._display import counted
from headwise._evaluation import in_evaluation
from headwise._extras import is_tokenizer_of_rust, untruncated
from headwise._progress import Progress
from headwise.corpora import Example, Several, list_items, one_text
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import device_of
from headwise.models.texts import (
    TokenOffsets,
    check_ids,
    pad,
    text_alone,
    token_offsets,
    without_logits,
)
from headwise.ownership import by_attention, find_attentions, mean_heads, replace_heads
from headwise.roles._samples import digest_of_tensor, grown_set
from headwise.roles.scores import right_share, rows_of_batches
from headwise.tables import Head, bootstrap_means
from headwise.watch import Request, Stretch, observe, read_stretches, stretch_tokens

_TOKENS = 4096  # in one batch
_CANDIDATES = 64  # heads that a set is chosen from
_NOISE = 2.0  # standard errors that a head's gain for the set has to exceed
_RANDOM_SETS = 200
_ABLATED_SETS = 5  # random ones; each costs a pass
_ENDS = (2.5, 97.5)  # percent: the ends of an interval of 95 %
POSITIONS = ("the first", "the last", "the nearest to the query", "the longest")

PerHead = Float[np.ndarray, "M N"]


@dataclass(frozen=True)
class TokenExample:
    """An example in tokens; its stretches are the right ones, then the wrong ones.

    Attributes:
        n_right: The number of right stretches.
        inputs: What else the model reads.
    """

    ids: tuple[int, ...]
    query: tuple[Stretch, ...]
    stretches: tuple[Stretch, ...]
    n_right: int
    answer: tuple[int, ...]
    inputs: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def question(self) -> tuple[Any, ...]:
        """What heads are asked: equal for copies of one example, whatever their answers are."""
        right, wrong = self.stretches[: self.n_right], self.stretches[self.n_right :]
        spans = (frozenset(part) for part in (self.query, right, wrong))
        return self.ids, *spans, *(digest_of_tensor(self.inputs[name]) for name in self.inputs)

    def differ(self) -> bool:
        """Whether the stretches have different tokens, so that exchanging them can matter."""
        return len({self.ids[place] for span in self.stretches for place in range(*span)}) > 1

    def exchanged(self, rng: np.random.Generator) -> "TokenExample":
        """The same text with the tokens of all stretches dealt to them at random."""
        places = [place for start, end in self.stretches for place in range(start, end)]
        ids = np.array(self.ids)
        ids[places] = ids[rng.permutation(places)]
        return replace(self, ids=tuple(ids.tolist()))


def tokenized_examples(
    examples: Several[Example], tokenizer: Any, limit: int, model: nn.Module
) -> list[TokenExample]:
    """The examples in tokens.

    Raises:
        ArgumentError: something is not an example, or one is malformed, longer than `limit`, or
            has a token id that the model does not have.
        UnsupportedError: texts are strings and the tokenizer does not report character offsets.
    """
    listed = list_items("find_heads", "examples", examples, Example)
    texts = [
        one_text(f"find_heads: {_place(number, example)}", example.text)
        for number, example in enumerate(listed)
        if isinstance(example.text, str)
    ]
    if texts and tokenizer is None:
        raise ArgumentError(
            f"find_heads: {counted(len(texts), 'example')} of strings without a tokenizer. Give "
            f"tokenizer=, or token ids."
        )
    encoded = iter(token_offsets(tokenizer, texts) if texts else ())
    read = []
    for number, example in enumerate(listed):
        tokens = next(encoded) if isinstance(example.text, str) else None
        where = f"find_heads: {_place(number, example)}"
        _check_inputs(where, example.inputs, listed[0].inputs)
        one = _in_tokens(where, example, tokens, tokenizer)
        if len(one.ids) + len(one.answer) > limit:
            raise ArgumentError(
                f"{where} has {len(one.ids)} tokens and an answer of "
                f"{len(one.answer)}, and the model reads {limit}. Shorten it."
            )
        check_ids(where, (*one.ids, *one.answer), model)
        read.append(one)
    return read


def _place(number: int, example: Example) -> str:
    return example.source or f"example {number}"


def _check_inputs(caller: str, inputs: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Refuse inputs that do not fit into a batch with those of the first example."""
    axes, expected = (
        {name: tuple(x.shape[1:]) if isinstance(x, Tensor) else type(x).__name__
         for name, x in given.items()}
        for given in (inputs, first)
    )  # fmt: skip
    are_tensors = all(isinstance(x, Tensor) for x in inputs.values())
    if axes != expected or not are_tensors or {"input_ids", "attention_mask"} & axes.keys():
        raise ArgumentError(
            f"{caller} has the inputs {axes}, and the first example {expected}. Give each example "
            f"tensors of the same names and axes, such as pixel_values; its text is input_ids."
        )


def _in_tokens(
    caller: str, example: Example, tokens: TokenOffsets | None, tokenizer: Any
) -> TokenExample:
    ids = example.text if tokens is None else tokens.ids
    is_list = isinstance(ids, Sequence | np.ndarray) and len(ids) > 0
    if isinstance(ids, bytes) or not is_list or not all(isinstance(x, Integral) for x in ids):
        raise ArgumentError(f"{caller} has the text {ids!r:.40}. Give a string or token ids.")
    named = {
        name: read_stretches(f"{caller}: {name}", getattr(example, name))
        for name in ("query", "right", "wrong")
    }
    if empty := [name for name, stretches in named.items() if not stretches]:
        raise ArgumentError(f"{caller} has {empty[0]}=[]. Give at least one (start, end).")
    if tokens is not None and isinstance(example.text, str):
        named = {
            name: [stretch_tokens(f"{caller}: {name}", example.text, tokens, s) for s in stretches]
            for name, stretches in named.items()
        }
    for name, stretches in named.items():
        for start, end in stretches:
            if end > len(ids):
                raise ArgumentError(
                    f"{caller}: {name} has ({start}, {end}) in a text of {len(ids)} tokens. Give "
                    f"positions from 0 to {len(ids)}."
                )
    candidates = (*named["right"], *named["wrong"])
    for (start, end), (next_start, next_end) in pairwise(sorted(candidates)):
        if next_start < end:
            raise ArgumentError(
                f"{caller}: ({start}, {end}) and ({next_start}, {next_end}) of right and wrong "
                f"share a token. Give candidates that do not overlap."
            )
    answer = _answer(caller, example.answer, tokenizer)
    text = tuple(int(token) for token in ids)
    return TokenExample(
        text, tuple(named["query"]), candidates, len(named["right"]), answer, example.inputs
    )


def _answer(caller: str, answer: str | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """The token ids of an answer, without special tokens."""
    if not isinstance(answer, str):
        return tuple(int(token) for token in answer)
    answer = one_text(caller, answer, "answer")
    if tokenizer is None:
        raise ArgumentError(
            f"{caller} has the answer {answer!r}, and no tokenizer. Give tokenizer=."
        )
    if is_tokenizer_of_rust(tokenizer):
        return tuple(untruncated(tokenizer).encode(answer, add_special_tokens=False).ids)
    return tuple(tokenizer(answer, add_special_tokens=False)["input_ids"])


# The attention that each of `N` heads gives to each of up to `K` stretches of `M` examples: the
# mean over the queries of an example of their mass on a stretch; −inf where it has fewer.
Masses = Float[np.ndarray, "M K N"]
IsRight = Bool[np.ndarray, "M K"]  # whether a stretch is a right one


def hits(masses: Masses, right: IsRight) -> PerHead:
    """1 where the stretch with the largest mass is a right one; stretches that tie share it."""
    return right_share(masses, right[..., None], axis=1)


def margins(masses: Masses, right: IsRight) -> PerHead:
    """The largest mass on a right stretch less the largest on a wrong one: the contrast."""
    is_right = right[..., None]
    on_right: PerHead = np.where(is_right, masses, -np.inf).max(1)
    return on_right - np.where(is_right, -np.inf, masses).max(1)


def with_set(masses: Masses, heads: Sequence[int]) -> Float[np.ndarray, "M K _"]:
    """The masses of all heads and, as one more, the mean mass of some."""
    return np.concatenate([masses, masses[..., list(heads)].mean(-1, keepdims=True)], -1)


def best_set(
    masses: Masses, right: IsRight, selection: Bool[np.ndarray, " M"], most: int
) -> list[int]:
    """A set whose mean mass decides best on some examples, grown one head at a time.

    The head joins with which the set decides most examples correctly; among equal heads, the one
    that leaves the largest mean margin. The set ends before a head whose gain, paired by example,
    is not beyond two standard errors: it was the best of many, and one example is noise.
    """
    masses, right = masses[selection], right[selection]
    order = np.argsort(-margins(masses, right).mean(0), kind="stable")[:_CANDIDATES]
    candidates = masses[..., order]

    def errors(chosen: list[int]) -> Float[np.ndarray, "n 2"]:
        sums = candidates[..., chosen].sum(-1, keepdims=True) + candidates
        return -np.stack([hits(sums, right).mean(0), margins(sums, right).mean(0)], 1)

    grown = grown_set(errors, most, n_falling=1)
    sizes = range(1, len(grown) + 1)
    means = np.stack([candidates[..., grown[:size]].mean(-1) for size in sizes], -1)
    gains = np.diff(hits(means, right), axis=1)
    noise = _NOISE * gains.std(0) / np.sqrt(len(gains))
    joined = 1 + int(np.cumprod(gains.mean(0) > noise).sum())
    return [int(order[head]) for head in grown[:joined]]


def random_sets(masses: Masses, right: IsRight, size: int, seed: int) -> Float[np.ndarray, " M"]:
    """How often random sets of this size decide correctly, in each example."""
    rng = np.random.default_rng(seed)
    sets = [rng.permutation(masses.shape[-1])[:size] for _ in range(_RANDOM_SETS)]
    decided = [hits(masses[..., heads].mean(-1, keepdims=True), right)[:, 0] for heads in sets]
    mean: Float[np.ndarray, " M"] = np.mean(decided, axis=0)
    return mean


def right_stretches(examples: Sequence[TokenExample]) -> IsRight:
    """Which stretches are right, in the order of masses."""
    most = max(len(example.stretches) for example in examples)
    return np.arange(most) < np.array([[example.n_right] for example in examples])


@torch.no_grad()
def masses_of(
    model: nn.Module, examples: Sequence[TokenExample], on_progress: Progress | None = None
) -> tuple[tuple[Head, ...], Masses]:
    """The heads of a model, and the mass that each gives to each stretch under its own kernel."""
    K = max(len(example.stretches) for example in examples)
    names = tuple(f"stretch {number}" for number in range(K))
    request = Request(statistics=(), spans=names, queries="all", per_text=True)
    order: list[int] = []
    with in_evaluation(model), observe(model, request) as watch:
        for rows in rows_of_batches([len(example.ids) for example in examples], _TOKENS):
            batch = [examples[row] for row in rows]
            watch.spans(
                **{
                    name: [list(example.stretches[number : number + 1]) for example in batch]
                    for number, name in enumerate(names)
                },
                queries=[list(example.query) for example in batch],
            )
            with text_alone("find_heads", model):
                model(**_inputs_of(batch, model), **without_logits(model))
            order += rows
            if on_progress is not None:
                on_progress(len(order), len(examples))
    table = watch.table()
    sums = [table.per_text(name) for name in names]
    total = np.stack([part.total for part in sums], 1)
    count = np.stack([part.count for part in sums], 1)
    reads = np.flatnonzero(count.any((0, 1)))  # the heads of a vision tower read no query
    total, count = total[..., reads], count[..., reads]
    if len(total) != len(examples) or not total.size or not (count > 0).all():
        raise UnsupportedError(
            f"find_heads: {type(model).__name__} attends to {len(total)} texts, but "
            f"{len(examples)} were given, or some queries attend to nothing. Give a model whose "
            f"heads attend within one text."
        )
    exists = np.arange(K) < np.array([[len(example.stretches)] for example in examples])
    return tuple(table.heads[head] for head in reads), np.where(
        exists[..., None], (total / count)[np.argsort(order)], -np.inf
    )


def _inputs_of(
    batch: Sequence[TokenExample], model: nn.Module, answers: bool = False
) -> dict[str, Tensor]:
    """The examples of a batch, with their answers if asked for, as inputs of a model."""
    ids = [(*example.ids, *example.answer) if answers else example.ids for example in batch]
    device = device_of(model)
    others = {
        name: torch.cat([example.inputs[name] for example in batch]).to(device)
        for name in batch[0].inputs
    }
    return pad(ids, device) | others


def positional_hits(examples: Sequence[TokenExample]) -> Float[np.ndarray, "M 4"]:
    """Whether each rule of position or length picks a right stretch; ties share it."""
    hits = np.zeros((len(examples), len(POSITIONS)))
    for row, example in enumerate(examples):
        starts, ends = np.array(example.stretches).T
        query = min(start for start, _ in example.query)
        distance = np.where(ends <= query, query - ends, np.abs(starts - query))
        for rule, score in enumerate((-starts, starts, -distance, ends - starts)):
            top = score == score.max()
            hits[row, rule] = top[: example.n_right].sum() / top.sum()
    return hits


@dataclass(frozen=True)
class AnswerEffect:
    """How well a model answers held-out examples with and without a set of heads.

    An ablated head outputs its mean over the texts of the examples.

    Attributes:
        n: The number of examples with an answer.
        loss: The mean loss of an answer's tokens, in nats.
        accuracy: The share of answers whose every token is the most likely one.
        loss_without: The loss without the set.
        accuracy_without: The accuracy without the set.
        loss_random: The loss without as many random heads, over several draws.
        accuracy_random: The accuracy without as many random heads.
        ci_low: The lower end of the interval of the loss's growth (95 %, over examples).
        ci_high: The upper end.
    """

    n: int
    loss: float
    accuracy: float
    loss_without: float
    accuracy_without: float
    loss_random: float
    accuracy_random: float
    ci_low: float
    ci_high: float

    def __str__(self) -> str:
        right = (
            f"{self.accuracy_without:.0%} are right instead of {self.accuracy:.0%} "
            f"({self.accuracy_random:.0%})"
        )
        if not max(self.accuracy, self.accuracy_without, self.accuracy_random):
            right = "the model answers none correctly, with or without them"
        return (
            f"without these heads the loss of {self.n} answers grows by "
            f"{self.loss_without - self.loss:.3f} nats [{self.ci_low:.3f}, {self.ci_high:.3f}] "
            f"({self.loss_random - self.loss:.3f} without as many random heads), and {right}"
        )


def answer_effect(
    model: nn.Module,
    examples: Sequence[TokenExample],
    heads: Sequence[Head],
    known: Sequence[Head],
    seed: int,
) -> AnswerEffect | None:
    """The effect of ablating some heads on answers; None if no example has one.

    Args:
        known: All heads, which random ones are drawn from.
    Raises:
        UnsupportedError: the model gives no logits of tokens.
    """
    answered = [example for example in examples if example.answer]
    if not answered:
        return None
    lengths = [len(example.ids) for example in answered]
    batches = [[answered[row] for row in rows] for rows in rows_of_batches(lengths, _TOKENS)]
    reference = [_inputs_of(batch, model, answers=True) for batch in batches]

    def without(removed: Sequence[Head]) -> Float[np.ndarray, "2 n"]:
        chosen = by_attention(list(removed), attentions)
        with replace_heads(model, attentions, chosen, lambda attention, _: mean_of[attention]):
            return _answers(model, batches)

    rng = np.random.default_rng(seed)
    with in_evaluation(model):
        attentions = find_attentions(model, reference[0])
        mean_of = mean_heads(model, attentions, reference)
        whole, ablated = _answers(model, batches), without(heads)
        draws = [rng.permutation(len(known))[: len(heads)] for _ in range(_ABLATED_SETS)]
        random = np.mean([without([known[head] for head in draw]) for draw in draws], axis=0)
    growth = bootstrap_means((ablated[0] - whole[0])[:, None], seed=seed)
    low, high = np.percentile(growth, _ENDS)
    means = {
        f"{name}{ending}": float(mean)
        for ending, result in (("", whole), ("_without", ablated), ("_random", random))
        for name, mean in zip(("loss", "accuracy"), result.mean(-1), strict=True)
    }
    return AnswerEffect(n=len(answered), ci_low=float(low), ci_high=float(high), **means)


@torch.no_grad()
def _answers(
    model: nn.Module, batches: Sequence[Sequence[TokenExample]]
) -> Float[np.ndarray, "2 n"]:
    """The loss of each answer, and whether it is right."""
    answers = []
    for batch in batches:
        output = model(**_inputs_of(batch, model, answers=True))
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise UnsupportedError(
                f"find_heads: {type(model).__name__} gives no logits of tokens, so the effect on "
                f"answers is unknown. Give examples without answer=, or the model with its head."
            )
        for row, example in zip(logits, batch, strict=True):
            start, n = len(example.ids), len(example.answer)
            answer = torch.tensor(example.answer, device=row.device)
            predicted = row[start - 1 : start - 1 + n]
            loss = nn.functional.cross_entropy(predicted.double(), answer)
            answers.append((loss.item(), float((predicted.argmax(-1) == answer).all())))
    return np.array(answers).T
