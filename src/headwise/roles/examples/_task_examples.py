"""Ready-made examples for `find_heads`, from any texts or from the words of a vocabulary."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from headwise.corpora import Example, Texts, list_texts
from headwise.errors import ArgumentError
from headwise.models.texts import check_tokenizer, token_classes, token_offsets
from headwise.shapes import is_size

_CANDIDATES = 4  # needles or passages in a text: chance is a quarter
_BLOCK = 12  # consecutive sentences that one passage is taken from
_TOPIC = 8  # words that the made-up sentences of one block share
_LONGEST = 16  # words of a sentence: a long line would fill a text
_INSTRUCTIONS = (
    "Summarize the text in one sentence.",
    "Translate the text into French.",
    "List the names that occur in the text.",
    "Count the words of the text.",
    "Say whether the text is friendly.",
    "Correct the spelling of the text.",
)
_ENDS = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+|\n+")  # of sentences, Chinese ones too


def task_examples(
    task: str,
    texts: Texts | None = None,
    *,
    tokenizer: Any,
    n: int = 120,
    n_tokens: int = 256,
    seed: int = 0,
) -> list[Example]:
    """Make examples of a task for `find_heads`, with the controls that it needs.

    `needle`: four statements `KEY : VALUE .` among other sentences, and one of the keys at the end;
    its statement is right, its value the answer. `passage`: four passages, a sentence taken out of
    each, and one of these at the end; the passage that it was taken out of is right.
    `instruction`: an instruction before or after a text, and another one inside the text; the first
    is right, the injected one and the sentences of the text are wrong.

    Two examples in a row differ in the question alone (or in which instruction is injected), and
    every place is right equally often: a head that ignores the question, or looks at a place, is
    right by chance. `find_heads` adds texts whose candidates have exchanged their tokens.

    Args:
        texts: Where sentences and words are taken from. None makes sentences of random words of
            the vocabulary; the sentences of a passage share their words.
        tokenizer: The model's tokenizer, a fast one.
        n: The number of examples.
        n_tokens: The most tokens in an example and its answer.
    Raises:
        ArgumentError: there is no such task or no tokenizer, texts or vocabulary have too few
            sentences or words, or no example fits.
        UnsupportedError: the tokenizer reports no character offsets.
    Source:
        Needles: Wu et al. 2024 (arXiv 2404.15574). Passages: the inverse cloze task of Lee et al.
        2019 (arXiv 1906.00300). Instructions: Hung et al. 2024 (arXiv 2411.00348).
    """
    if task not in TASKS:
        raise ArgumentError(f"task_examples: no task {task!r}. Choose from {', '.join(TASKS)}.")
    if tokenizer is None:
        raise ArgumentError("task_examples: tokenizer=None. Give one: hw.load_tokenizer(folder).")
    check_tokenizer(tokenizer, "task_examples")
    if not is_size(n) or not is_size(n_tokens):
        raise ArgumentError(f"task_examples: n={n}, n_tokens={n_tokens}. Give 1 or more of each.")
    if texts is None:
        sentences = _made_up(tokenizer, n_tokens, np.random.default_rng(seed))
    else:
        lines = [line for text in list_texts("task_examples", texts) for line in _ENDS.split(text)]
        sentences = [" ".join(words[:_LONGEST]) for words in map(str.split, lines) if words[2:]]
    words = sorted({word for line in sentences for word in line.split() if _is_word(word)})
    if texts is None and len(words) < 3 * _CANDIDATES:
        raise ArgumentError(
            f"task_examples: the vocabulary has {len(words)} whole words of three letters or more, "
            f"and examples need {3 * _CANDIDATES}. Give texts= to make them of."
        )
    if len(sentences) < 3 * _CANDIDATES or len(words) < 3 * _CANDIDATES:
        raise ArgumentError(
            f"task_examples: {len(sentences)} sentences of three words or more, and {len(words)} "
            f"different words of three letters or more, in the texts. Give texts with 12 of each "
            f"or more."
        )
    examples: list[Example] = []
    for first in range(0, n, 2):
        pair: list[Example] = []
        for size in range(1, n_tokens):  # as many sentences as fit
            # Both draw the same numbers, so that they differ in the question alone.
            longer = [
                TASKS[task](np.random.default_rng((seed, first)), sentences, words, size, number)
                for number in (first, first + 1)
            ]
            whole = token_offsets(tokenizer, [f"{one.text}{one.answer}" for one in longer])
            if longer == pair or any(len(tokens.ids) > n_tokens for tokens in whole):
                break
            pair = longer
        if not pair:
            raise ArgumentError(
                f"task_examples: no example of {task} fits n_tokens={n_tokens}. Give more."
            )
        examples += [_as_continued(example, tokenizer) for example in pair]
    return examples[:n]


def _made_up(tokenizer: Any, n_tokens: int, rng: np.random.Generator) -> list[str]:
    """Sentences of random words of a vocabulary; those of a block share words of their own."""
    special, _ = token_classes(tokenizer).get("special", ((), ""))
    names = [name for name, index in tokenizer.get_vocab().items() if index not in special]
    # Vocabularies of bytes and of SentencePiece mark what begins a word; others, what does not.
    marked = [name[1:] for name in names if name[0] in "\u0120\u2581"]
    words = rng.permutation(sorted(filter(_is_word, marked or names)))
    topic = min(_TOPIC, len(words) // _CANDIDATES)
    length = min(topic, max(3, n_tokens // _LONGEST))
    return [
        f"{' '.join(rng.permutation(words[start : start + topic])[:length])} ."
        for start in range(0, topic * (len(words) // max(1, topic)), max(1, topic))
        for _ in range(_BLOCK)
    ]


def _is_word(word: str) -> bool:
    return len(word) > 2 and word.isalnum() and not word[0].isdigit()


def _right_candidate(number: int) -> int:
    """Which candidate an example asks for: every one equally often, another one in each of two."""
    pair, second = divmod(number, 2)
    return (pair + second * (1 + pair // _CANDIDATES % (_CANDIDATES - 1))) % _CANDIDATES


def _needle(
    rng: np.random.Generator, sentences: list[str], words: list[str], size: int, number: int
) -> Example:
    chosen = rng.permutation(words)[: 2 * _CANDIDATES].tolist()
    keys, values = chosen[:_CANDIDATES], chosen[_CANDIDATES:]
    start = int(rng.integers(len(sentences)))
    lines = (
        line for line in sentences[start:] + sentences[:start] if not {*chosen} & {*line.split()}
    )
    pieces = list(islice(lines, size))
    # Not at the beginning, where many tokenizers write a word in another way than after a space.
    places = np.sort(rng.integers(min(1, len(pieces)), len(pieces) + 1, _CANDIDATES))
    spots = (places + np.arange(_CANDIDATES)).tolist()
    for spot, key, value in zip(spots, keys, values, strict=True):
        pieces.insert(spot, f"{key} : {value} .")
    right = _right_candidate(number)
    example = _joined(pieces, " ", f"{keys[right]} :", spots, spots[right])
    return replace(example, answer=f" {values[right]}")


def _passage(
    rng: np.random.Generator, sentences: list[str], words: list[str], size: int, number: int
) -> Example:
    block = min(_BLOCK, len(sentences) // _CANDIDATES)
    size = min(size, block - 1)
    starts = rng.permutation(len(sentences) // block)[:_CANDIDATES] * block
    starts += rng.integers(block - size, size=_CANDIDATES)
    passages = [sentences[start : start + size + 1] for start in starts]
    taken = [passage.pop(int(rng.integers(size + 1))) for passage in passages]
    pieces, right = [" ".join(passage) for passage in passages], _right_candidate(number)
    return _joined(pieces, "\n", taken[right], range(_CANDIDATES), right)


def _instruction(
    rng: np.random.Generator, sentences: list[str], words: list[str], size: int, number: int
) -> Example:
    pair, second = divmod(number, 2)
    one, other = rng.permutation(_INSTRUCTIONS)[:2].tolist()
    given, injected = (other, one) if second else (one, other)
    start = int(rng.integers(len(sentences)))
    text = (sentences[start:] + sentences[:start])[:size]
    text.insert(int(rng.integers(1, size + 1)), injected)
    parts = [["Instruction:", given], ["Text:", *text]]
    pieces = [piece for part in parts[:: -1 if pair % 2 else 1] for piece in part]
    candidates = [
        spot for spot, piece in enumerate(pieces) if piece not in ("Instruction:", "Text:")
    ]
    example = _joined(pieces, "\n", "Answer:", candidates, pieces.index(given))
    # The last token alone, which serving tools watch for injections.
    return replace(example, query=(len(example.text) - 1, len(example.text)))


def _joined(
    pieces: Sequence[str], joint: str, question: str, candidates: Sequence[int], right: int
) -> Example:
    """The example of some pieces and a question; `candidates` and `right` number pieces."""
    starts = np.cumsum([0, *(len(piece) + len(joint) for piece in pieces)]).tolist()
    spans = {spot: (starts[spot], starts[spot] + len(pieces[spot])) for spot in candidates}
    wrong = [span for spot, span in spans.items() if spot != right]
    text = joint.join([*pieces, question])
    return Example(text, (starts[-1], len(text)), [spans[right]], wrong, answer="")


def _as_continued(example: Example, tokenizer: Any) -> Example:
    """The example with its answer such that its tokens alone are those that follow the text.

    Some tokenizers join a space to the next word, others add one before any text of their own.
    """
    answer = str(example.answer)
    if not answer:
        return example
    read = token_offsets(
        tokenizer, [str(example.text), f"{example.text}{answer}", answer, answer.strip()]
    )
    ids = [
        [token for token, special in zip(x.ids, x.special, strict=True) if not special]
        for x in read
    ]
    after = ids[1][len(ids[0]) :]
    forms = {
        tuple(form): text for form, text in zip(ids[2:], (answer, answer.strip()), strict=True)
    }
    return replace(example, answer=forms.get(tuple(after), after))


TASKS: Mapping[str, Callable[..., Example]] = {
    "needle": _needle,
    "passage": _passage,
    "instruction": _instruction,
}
