"""Reads the JSON files of task heads."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from headwise.errors import ArgumentError
from headwise.files import build_from, read_object
from headwise.models import check_model, fingerprint
from headwise.roles.task._answers import AnswerEffect
from headwise.roles.task._table import FORMAT, NULLS, TaskHeads
from headwise.tables import Head, resolve_heads

_NUMBERS = (
    "effect", "baseline", "lift", "ci_low", "ci_high", "p_adj", "contrast", "n", "chosen_half",
    *(f"null.{name}" for name in NULLS),
)  # fmt: skip


def load_heads(path: str | Path, model: nn.Module | None = None) -> TaskHeads:
    """Read a file that `TaskHeads.save` wrote.

    Args:
        model: The model that the heads are to be used in; its weights are compared.
    Raises:
        ArgumentError: the heads were found in other weights than those of `model`.
        InputError: the file is missing, or holds no heads of this schema.
    """
    caller, problem, advice = "load_heads", "holds no heads", "Give a file of TaskHeads.save."
    content = read_object(path, caller, advice, problem)
    read = build_from(lambda: _from_json(content), f"{caller}: {path} {problem}", advice)
    actual = read.model if model is None else fingerprint(check_model(caller, model))
    if actual != read.model:
        raise ArgumentError(
            f"load_heads: {path} holds heads of the model {read.model}, not of {actual}. Find the "
            f"heads of this model."
        )
    return read


def _from_json(content: Mapping[str, Any]) -> TaskHeads:
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
    rows = [_head_row(row) for row in content["heads"]]
    heads = [Head.parse(row["name"]) for row in rows]
    if len(set(heads)) < len(heads):
        raise ValueError("a head is listed twice")
    chosen, answers, texts = content["set"], content["answers"], content["texts"]
    return TaskHeads(
        rows=pd.DataFrame(rows),
        heads=tuple(resolve_heads(_names(chosen["heads"]), heads)),
        set_row=_evidence(chosen),
        answers=None if answers is None else _answers(answers),
        notes=tuple(_names(content["notes"])),
        texts={name: _whole(texts[name]) for name in ("examples", "held_out")}
        | {"sha256": _text(texts["sha256"])},
        queries=_text(content["queries"]),
        model=_text(content["model"]["fingerprint"]),
        name=_text(content["model"]["name"]),
        versions={_text(name): _text(number) for name, number in content["versions"].items()},
    )


def _head_row(row: Mapping[str, Any]) -> dict[str, Any]:
    head = Head.parse(_text(row["name"]))
    if (row["stack"], row["layer"], row["head"]) != (head.stack, head.layer, head.head):
        raise ValueError(f"the stack, layer or head of {head} differs from its name")
    address = {"name": str(head), "stack": head.stack, "layer": head.layer, "head": head.head}
    return {**address, "in_set": _flag(row["in_set"]), **_evidence(row)}


def _evidence(row: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of a head or of the set, in the order of the table."""
    evidence: dict[str, Any] = {
        "found": _flag(row["found"]),
        "outcome": _text(row["outcome"]),
        "why": _text(row.get("why", "")),  # files of version 0.1 have none
        "effect": _number(row["effect"]),
        "null": _text(row["null"]),
    }
    return evidence | {name: _number(row[name]) for name in _NUMBERS}


def _answers(effect: Mapping[str, Any]) -> AnswerEffect:
    numbers = {str(name): _number(value) for name, value in effect.items() if name != "n"}
    return AnswerEffect(n=_whole(effect["n"]), **numbers)


def _names(values: Any) -> Sequence[str]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r:.40} is not a list")
    return [_text(value) for value in values]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is neither true nor false")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is not a whole number")
    return value


def _number(value: Any) -> float:
    """A finite number; NaN for null."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} is not a finite number")
    return float(value)
