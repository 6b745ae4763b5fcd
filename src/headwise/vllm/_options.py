"""What is watched, as plain values that reach another process, and what is refused by name."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.roles import load_heads
from headwise.tables import Head, HeadsLike, list_heads
from headwise.vllm._pages import SPANS, STATISTICS
from headwise.vllm._positions import SPAN
from headwise.watch import Request

# A causal model without sinks has no row for these: they are NaN in a table, as after `observe`.
WITHOUT_ROWS = ("next", "sink")
# Fields of a request that need the tokens, the values, or more than sums over queries.
_REFUSED = ("classes", "relations", "pairs", "top", "value", "received", "per_query", "maps")
_OF_A_SERVER = ("every", "layers", "heads", "exact", "statistics", "spans", "path")

Options = dict[str, Any]


def make_options(
    request: Request | None,
    every: int,
    layers: Collection[int] | None,
    heads: HeadsLike | str | os.PathLike[str] | None,
    exact: bool,
) -> Options:
    """Check what `watch` is values, and write it in values that every process can read.

    Raises:
        ArgumentError: `request` or `every` is invalid, or a span has a name that no client can
            write.
        UnsupportedError: the request has something that is not served.
    """
    request = Request() if request is None else request
    if not isinstance(request, Request):
        raise ArgumentError(f"vllm.watch: request={request!r}. Give a Request(...).")
    refused = [name for name in _REFUSED if getattr(request, name)]
    known = (*STATISTICS, *WITHOUT_ROWS)
    refused += [name for name in request.statistics if name not in known]
    if refused or request.queries != "eligible":
        names = ", ".join(refused) or f"queries={request.queries!r}"
        raise UnsupportedError(
            f"vllm.watch: {names} cannot be computed for served requests. There are "
            f"{', '.join(known)}, and spans."
        )
    if len(request.spans) > SPANS:
        raise UnsupportedError(
            f"vllm.watch: spans={request.spans}. Name at most {SPANS}: the kernel adds up no more."
        )
    for name in request.spans:
        if not SPAN.fullmatch(f"{name}=0:1"):
            raise ArgumentError(
                f"vllm.watch: the span {name!r} cannot be written by a client. Leave out spaces, =."
            )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ArgumentError(f"vllm.watch: every={every!r}. Give a number of positions, from 1 on.")
    return {
        "statistics": [name for name in request.names if name not in WITHOUT_ROWS],
        "spans": list(request.spans),
        "every": every,
        "layers": None if layers is None else sorted({int(layer) for layer in layers}),
        "heads": None if heads is None else _names_of(heads),
        "exact": bool(exact),
    }


def server_options(text: str) -> Options:
    """The options of a server, from the JSON object in its environment.

    Raises:
        InputError: it is not such an object.
        ArgumentError: an option is unknown, or `path` is missing.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"HEADWISE_VLLM: {text!r} is not JSON ({error}).") from error
    unknown = sorted(set(values) - set(_OF_A_SERVER)) if isinstance(values, dict) else [text]
    if unknown or not isinstance(values.get("path"), str):
        raise ArgumentError(
            f"HEADWISE_VLLM: {', '.join(unknown) or 'no path'}. Write a JSON object such as "
            f'{{"path": "heads.jsonl"}}, with any of {", ".join(_OF_A_SERVER)}.'
        )
    names: dict[str, Any] = {
        key: tuple(values[key]) for key in ("statistics", "spans") if key in values
    }
    others = (
        values.get("every", 16),
        values.get("layers"),
        values.get("heads"),
        values.get("exact", True),
    )
    return make_options(Request(**names), *others) | {"path": values["path"]}


def _names_of(heads: Any) -> list[str]:
    """The names of heads in any form, or those of a head file."""
    if isinstance(heads, Path) or (isinstance(heads, str) and heads.endswith(".json")):
        return [str(head) for head in load_heads(heads).heads]
    names = list_heads(heads)
    return [str(head if isinstance(head, str | Head) else Head("", *head)) for head in names]
