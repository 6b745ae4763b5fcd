"""Which queries of a request count, and its named spans: no vLLM and no torch."""

import re
from collections.abc import Collection

import numpy as np
from jaxtyping import Int64

from headwise.errors import ArgumentError

# A request has sums for each phase: its prompt, and the tokens that were generated and then read.
PHASES = ("prefill", "decode")
# How clients name the stretches of a request. HTTP clients may pass flat values only, so it is
# one string: "passage=4:90 question=90:101".
SPAN = re.compile(r"([^\s=]+)=(\d{1,9}):(\d{1,9})", re.ASCII)


def counted_positions(
    start: int, end: int, prompt: int, every: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " m"]]:
    """The positions of a step that count, those of the prompt and those after it.

    A query counts by its position in its request, a multiple of `every`, so that chunks, batches
    and preemption change nothing. The last of the prompt counts too: it chooses the first token.

    Args:
        start: The first position of the step that was not read before.
        end: One past the last.
        prompt: The length of the prompt.
        every: 1 counts all of them.
    """
    positions = np.arange(start + -start % every, end, every, dtype=np.int64)
    if start < prompt <= end and (prompt - 1) % every:
        positions = np.sort(np.append(positions, prompt - 1))
    first_generated = int(np.searchsorted(positions, prompt))
    return positions[:first_generated], positions[first_generated:]


def spans(**stretches: tuple[int, int]) -> dict[str, str]:
    """Name stretches of one request, as `extra_args` of its `SamplingParams`.

    Args:
        stretches: `(start, end)` by name, in tokens of the request, without the position `end`.
    Raises:
        ArgumentError: a name has a space or `=`, or a stretch is empty.

    Example:
        >>> spans(passage=(4, 90), question=(90, 101))
        {'headwise': 'passage=4:90 question=90:101'}
    """
    text = " ".join(f"{name}={start}:{end}" for name, (start, end) in stretches.items())
    read_spans(text, stretches)
    return {"headwise": text}


def read_spans(text: object, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """The stretches that a request names.

    Args:
        text: What the client sent, which may be anything.
        names: The spans that are watched.
    Raises:
        ArgumentError: it is malformed, or names a span that is not watched.
    """
    parts = text.split() if isinstance(text, str) else [repr(text)]
    matches = [SPAN.fullmatch(part) for part in parts]
    stretches = {match[1]: (int(match[2]), int(match[3])) for match in matches if match}
    wrong = [part for part, match in zip(parts, matches, strict=True) if match is None]
    wrong += [
        f"{name}={a}:{b}" for name, (a, b) in stretches.items() if a >= b or name not in names
    ]
    if wrong or len(stretches) < len(parts):
        raise ArgumentError(
            f"spans: {' '.join(wrong) or text!r} names no stretch of {', '.join(names) or 'any'}. "
            f"Write each once, such as passage=4:90, with a name that the request of the watch has."
        )
    return stretches
