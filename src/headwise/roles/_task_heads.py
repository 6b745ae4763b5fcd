"""The heads of a task: a row per head, the chosen set, and files that hold and export them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from headwise._display import counted, printable
from headwise.errors import ArgumentError, HeadError
from headwise.files import as_path, build_from, number, read_object, typed, write_beside
from headwise.models import check_model, fingerprint
from headwise.roles._task_scores import AnswerEffect
from headwise.tables import Head, HeadsLike, at_prompt, resolve_heads

FORMAT = "headwise-heads/1"
TASK_NULLS = ("chance", "position", "permuted", "random", "shuffled", "heads")
_SHOWN = ("name", "in_set", "effect", "ci_low", "ci_high", "null", "baseline", "lift", "p_adj")
_NUMBERS = (
    *("effect", "baseline", "lift", "ci_low", "ci_high", "p_adj", "contrast", "n", "chosen_half"),
    *(f"null.{name}" for name in TASK_NULLS),
)
Pairs = Sequence[tuple[int, int]]  # layer and query head


@dataclass(frozen=True, eq=False)
class TaskHeads:
    """Heads that pick the right stretch of a text, with the evidence; often there are none.

    All numbers come from held-out examples.

    Attributes:
        rows: A row per head. `outcome` is `found` (then `found` is true), `not found`, or
            `not tested: ` and what is missing; `why` is the reason of `not found`. `effect` is the
            share of examples that the head decides correctly, with its interval (95 %, over
            examples) from `ci_low` to `ci_high`; `null` is the strongest baseline, `baseline` its
            share, `lift` the share of the range above it, `p_adj` the p adjusted over all heads
            that are tested, and the set, and 1 where the lift on the selection half is too small
            for a test; `contrast` the mean margin of mass; `n` the held-out examples,
            `chosen_half` the effect on the selection half; `null.…` is the share of each baseline;
            `in_set` whether the head is in the set.
        heads: The heads of the set, in the order in which they joined.
        set_row: The same numbers for the set.
        answers: The effect of ablating the set on answers; None without answers.
        notes: How the numbers were obtained.
        texts: The number of examples, of those held out, and the SHA-256 of their tokens.
        queries: `last_token` if the last token of each text is its only query; or `all_tokens`.
        model: The fingerprint of the model's weights.
        name: The name of the model, if its configuration has one.
        versions: The versions of the packages that computed the table.
    """

    rows: pd.DataFrame
    heads: tuple[Head, ...]
    set_row: Mapping[str, Any]
    answers: AnswerEffect | None = None
    notes: tuple[str, ...] = ()
    texts: Mapping[str, int | str] = field(default_factory=dict)
    queries: str = "all_tokens"
    model: str = ""
    name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def frame(self) -> pd.DataFrame:
        """All rows: name, stack, layer, head, then the evidence."""
        return self.rows.copy()

    def found(self) -> pd.DataFrame:
        """The rows of the heads that were found, from the largest effect down."""
        rows = self.rows[self.rows["found"]]
        return rows.sort_values("effect", ascending=False, kind="stable", ignore_index=True)

    def save(self, path: str | Path) -> Path:
        """Save the heads as JSON, in the schema of the page on head files.

        Raises:
            ArgumentError: the path does not end in .json.
            OutputError: the file cannot be written; no partial file remains.
        """
        content = {
            "format": FORMAT,
            "model": {"name": self.name, "fingerprint": self.model},
            "set": {"heads": [str(head) for head in self.heads], **_to_json(self.set_row)},
            "heads": [_to_json(row) for row in self.rows.to_dict("records")],
            "answers": None if self.answers is None else asdict(self.answers),
            "queries": self.queries,
            "texts": dict(self.texts),
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }
        return _write("TaskHeads.save", path, ".json", json.dumps(content, indent=1) + "\n")

    def export(
        self,
        path: str | Path,
        format: str,
        *,
        model_name: str | None = None,
        heads: HeadsLike | None = None,
    ) -> Path:
        """Write the heads in the form that another tool reads.

        Args:
            path: A file that ends in .json for `vllm-hook`, in .yaml for `qrhead`.
            format: `vllm-hook` (a model configuration of IBM's vLLM-Hook, with `important_heads`)
                or `qrhead` (a configuration of QRRetriever, with `attn_head_set`).
            model_name: The model's name on the Hugging Face hub. None is its own name.
            heads: The heads to write, the best first. None is the set, which must be found.
        Raises:
            ArgumentError: another format or ending, no name, or the set was not found.
            HeadError: there is no such head, or one belongs to a stack, which these tools lack.
            OutputError: the file cannot be written.
        """
        if format not in _EXPORTS:
            raise ArgumentError(
                f"TaskHeads.export: no format {format!r}. Choose from {', '.join(_EXPORTS)}."
            )
        name = self.name if model_name is None else model_name
        if not name:
            raise ArgumentError(
                f"TaskHeads.export: model_name={model_name!r}, and the model's configuration has "
                f"none. Give model_name='owner/name'."
            )
        if heads is None and not self.set_row["found"]:
            raise ArgumentError(
                f"TaskHeads.export: the set was {_outcome(self.set_row)}. Give heads=, or find a "
                f"set that beats its baselines."
            )
        known = [Head.parse(row) for row in self.rows["name"]]
        chosen = self.heads if heads is None else resolve_heads(heads, known)
        if stacked := [head for head in chosen if head.stack]:
            raise HeadError(
                f"TaskHeads.export: {stacked[0]} belongs to a stack, and {format} numbers layers "
                f"of one stack. Export heads of a model with one stack."
            )
        ending, written = _EXPORTS[format]
        pairs = [(head.layer, head.head) for head in chosen]
        return _write("TaskHeads.export", path, ending, written(pairs, name, self.queries))

    def __str__(self) -> str:
        found = int(self.rows["found"].sum())
        names = ", ".join(map(str, self.heads))
        row = self.set_row
        lines = [
            f"{counted(found, 'head')} of {len(self.rows)} found",
            f"the set {names} decides {row['effect']:.1%} of {counted(int(row['n']), 'example')} "
            f"correctly [{row['ci_low']:.1%}, {row['ci_high']:.1%}], against {row['baseline']:.1%} "
            f"of {printable(row['null']) or 'no baseline'}: {_outcome(row)}",
        ]
        lines += [] if self.answers is None else [str(self.answers)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return at_prompt(f"TaskHeads: {self}", self.found()[list(_SHOWN)])

    def _repr_html_(self) -> str:
        found = self.found()[list(_SHOWN)]
        return found.to_html(index=False, float_format="{:.3f}".format, escape=True)


def _outcome(row: Mapping[str, Any]) -> str:
    why = printable(row["why"])
    return f"{row['outcome']} ({why})" if why else str(row["outcome"])


def _to_json(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Values that JSON has; NaN becomes null."""
    values = {
        name: value.item() if hasattr(value, "item") else value for name, value in row.items()
    }
    return {name: None if value != value else value for name, value in values.items()}


def _write(caller: str, path: str | Path, ending: str, content: str) -> Path:
    path = as_path(caller, path)
    if path.suffix != ending:
        raise ArgumentError(f"{caller}: {path} ends in {path.suffix!r}. End it in {ending}.")
    with write_beside(path) as beside:
        beside.write_text(content, "utf-8")
    return path


# The forms in which other tools read lists of heads; each was read from the tool's own parser.


def _vllm_hook(heads: Pairs, model: str, queries: str) -> str:
    """A model configuration of vLLM-Hook: `HookLLM.load_config` reads `params` and `hookq`."""
    content = {
        "model_info": {
            "provider": "attn-hf",
            "name": model.rpartition("/")[2],
            "model_id": model,
            "note": "Heads found by headwise.find_heads, with evidence on held-out examples.",
        },
        "params": {"important_heads": [list(head) for head in heads]},
        "hookq": {"hookq_mode": queries},
    }
    return json.dumps(content, indent=4) + "\n"


def _qrhead(heads: Pairs, model: str, queries: str) -> str:
    """A configuration of QRRetriever: `attn_head_set` is split at commas, then at hyphens.

    A quoted JSON string is a YAML string. QRRetriever always takes all tokens of its query.
    """
    fields = {
        "attn_head_set": ",".join(f"{layer}-{head}" for layer, head in heads),
        "model_base_class": model.rpartition("/")[2],
        "model_name_or_path": model,
    }
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())


# The ending of the file, and what writes its content.
_EXPORTS: Mapping[str, tuple[str, Callable[[Pairs, str, str], str]]] = {
    "vllm-hook": (".json", _vllm_hook),
    "qrhead": (".yaml", _qrhead),
}


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
    """The heads that a file holds.

    Raises:
        TypeError: a value is of another type.
        ValueError: the format is another, or a head is listed twice.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
    rows = [_head_row(row) for row in content["heads"]]
    heads = [Head.parse(row["name"]) for row in rows]
    if len(set(heads)) < len(heads):
        raise ValueError("a head is listed twice")
    chosen, effect, texts = content["set"], content["answers"], content["texts"]
    answers = None
    if effect is not None:
        numbers = {str(name): _number(value) for name, value in effect.items() if name != "n"}
        answers = AnswerEffect(n=typed(effect["n"], int), **numbers)
    return TaskHeads(
        rows=pd.DataFrame(rows),
        heads=tuple(resolve_heads(_texts(chosen["heads"]), heads)),
        set_row=_evidence(chosen),
        answers=answers,
        notes=tuple(_texts(content["notes"])),
        texts={name: typed(texts[name], int) for name in ("examples", "held_out")}
        | {"sha256": typed(texts["sha256"], str)},
        queries=typed(content["queries"], str),
        model=typed(content["model"]["fingerprint"], str),
        name=typed(content["model"]["name"], str),
        versions={name: typed(version, str) for name, version in content["versions"].items()},
    )


def _head_row(row: Mapping[str, Any]) -> dict[str, Any]:
    head = Head.parse(typed(row["name"], str))
    if (row["stack"], row["layer"], row["head"]) != (head.stack, head.layer, head.head):
        raise ValueError(f"the stack, layer or head of {head} differs from its name")
    address = {"name": str(head), "stack": head.stack, "layer": head.layer, "head": head.head}
    return {**address, "in_set": typed(row["in_set"], bool), **_evidence(row)}


def _evidence(row: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of a head or of the set, in the order of the table."""
    evidence: dict[str, Any] = {
        "found": typed(row["found"], bool),
        "outcome": typed(row["outcome"], str),
        "why": typed(row.get("why", ""), str),  # files of version 0.1 have none
        "effect": _number(row["effect"]),
        "null": typed(row["null"], str),
    }
    return evidence | {name: _number(row[name]) for name in _NUMBERS}


def _texts(values: Any) -> list[str]:
    return [typed(value, str) for value in typed(values, list)]


def _number(value: Any) -> float:
    """A finite number; NaN for null."""
    return math.nan if value is None else number(value)
