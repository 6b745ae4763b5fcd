"""What is watched, as plain values that reach another process, and what is refused by name."""

import json
import os
import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int64

from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.kernels.pages import SPANS, STATISTICS
from headwise.roles import load_heads
from headwise.tables import Head, HeadsLike, list_heads
from headwise.watch import Request, check_arguments

# A causal model without sinks has no row for these: they are NaN in a table, as after `observe`.
WITHOUT_ROWS = ("next", "sink")
# A request has sums for each phase: its prompt, and the tokens that were generated and then read.
PHASES = ("prefill", "decode")
# How clients name the stretches of a request. HTTP clients may pass flat values only, so it is
# one string: "passage=4:90 question=90:101".
SPAN = re.compile(r"([^\s=]+)=(\d{1,9}):(\d{1,9})", re.ASCII)
_OF_A_SERVER: dict[str, Any] = {
    "path": str, "every": int, "layers": list, "heads": (str, list), "exact": bool,
    "statistics": list, "spans": list,
}  # fmt: skip
Options = dict[str, Any]


def make_options(
    request: Request | None = None,
    every: SupportsIndex = 16,
    layers: Collection[SupportsIndex] | None = None,
    heads: HeadsLike | str | os.PathLike[str] | None = None,
    exact: bool = True,
) -> Options:
    """Check what `watch` is given, and write it in values that every process can read."""
    request = Request() if request is None else request
    if not isinstance(request, Request):
        raise ArgumentError(f"vllm.watch: request={request!r}. Give a Request(...).")
    known = [name for name in request.statistics if name in (*STATISTICS, *WITHOUT_ROWS)]
    served = Request(tuple(known), spans=request.spans[:SPANS], per_text=request.per_text)
    # The rest needs the tokens, the values, or more than sums over queries.
    for name in (field.name for field in fields(Request)):
        if getattr(request, name) != getattr(served, name):
            raise UnsupportedError(
                f"vllm.watch: {name}={getattr(request, name)!r} is more than served requests "
                f"have: {', '.join((*STATISTICS, *WITHOUT_ROWS))}, and at most {SPANS} spans."
            )
    for name in request.spans:
        if not SPAN.fullmatch(f"{name}=0:1"):
            raise ArgumentError(
                f"vllm.watch: the span {name!r} cannot be written by a client. Leave out spaces, =."
            )
    numbers, step = check_arguments("vllm.watch", layers, every)
    if isinstance(heads, os.PathLike) or (isinstance(heads, str) and heads.endswith(".json")):
        heads = load_heads(Path(heads)).heads
    names = None if heads is None else list_heads(heads)
    return {
        "statistics": [name for name in request.names if name not in WITHOUT_ROWS],
        "spans": list(request.spans),
        "every": step,
        "layers": numbers,
        "heads": names and [str(head) if isinstance(head, Head) else head for head in names],
        "exact": bool(exact),
    }


def server_options(text: str) -> Options:
    """The options of a server, from the JSON object in its environment."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"HEADWISE_VLLM: {text!r} is not JSON ({error}).") from error
    is_object = isinstance(values, dict)
    given = values if is_object else {text: None}
    wrong = [
        f"{name}={value!r}"
        for name, value in given.items()
        if not isinstance(value, _OF_A_SERVER.get(name, ()))
    ]
    if wrong or "path" not in given:
        raise ArgumentError(
            f"HEADWISE_VLLM: {', '.join(wrong) or 'no path'}. Write a JSON object such as "
            f'{{"path": "heads.jsonl"}}, with any of {", ".join(_OF_A_SERVER)}.'
        )
    path = values.pop("path")
    statistics, stretches = values.pop("statistics", Request.statistics), values.pop("spans", ())
    request = Request(tuple(statistics), spans=tuple(stretches))
    return make_options(request, **values) | {"path": path}


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
    """
    parts = text.split() if isinstance(text, str) else [repr(text)]
    stretches: dict[str, tuple[int, int]] = {}
    for part in parts:
        match = SPAN.fullmatch(part)
        start, end = map(int, match.groups()[1:]) if match else (0, 0)
        if match is None or start >= end or match[1] in stretches or match[1] not in names:
            raise ArgumentError(
                f"spans: {part} in {text!r} names no stretch of {', '.join(names) or 'any'}. Write "
                f"each once, such as passage=4:90, with a name that the request of the watch has."
            )
        stretches[match[1]] = start, end
    return stretches
