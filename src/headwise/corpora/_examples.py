"""Examples of a task for heads: a text, a query, and what it should and should not attend to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwise.corpora._text import Span

Stretches = Span | Sequence[Span]


@dataclass(frozen=True)
class Example:
    """A text with a query, the stretches that answer it, and stretches that do not.

    A question with its passage among distractors; an instruction and an injected one; an answer
    and its source. Stretches are `(start, end)`, without the position `end`: of tokens if the text
    is given as token ids, of characters if it is a string (as in `Watch.spans`).

    Attributes:
        text: The text, or its token ids.
        query: The stretch, or stretches, whose tokens are the queries.
        right: The stretches that a head should attend to.
        wrong: The other candidates.
        answer: What follows the text, to measure what ablating heads does to it; a string, or
            token ids. Empty if unknown.
        source: The file and line that it was read from, for errors.
    """

    text: str | Sequence[int]
    query: Stretches
    right: Stretches
    wrong: Stretches
    answer: str | Sequence[int] = ()
    source: str = field(default="", repr=False, compare=False)
