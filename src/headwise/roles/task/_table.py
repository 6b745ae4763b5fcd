"""The heads of a task: a row per head, the chosen set, and files that hold and export them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from headwise._display import counted, printable
from headwise.errors import ArgumentError, HeadError
from headwise.files import as_path, write_beside
from headwise.roles.task._answers import AnswerEffect
from headwise.roles.task._examples import TokenExample
from headwise.roles.task._exports import EXPORTS
from headwise.tables import Head, HeadsLike, at_prompt, resolve_heads

FORMAT = "headwise-heads/1"
NULLS = ("chance", "position", "permuted", "random", "shuffled", "heads")
_SHOWN = ("name", "in_set", "effect", "ci_low", "ci_high", "null", "baseline", "lift", "p_adj")


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
            "set": {"heads": [str(head) for head in self.heads], **_plain(self.set_row)},
            "heads": [_plain(row) for row in self.rows.to_dict("records")],
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
        if format not in EXPORTS:
            raise ArgumentError(
                f"TaskHeads.export: no format {format!r}. Choose from {', '.join(EXPORTS)}."
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
        ending, written = EXPORTS[format]
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


def digest_of(examples: Sequence[TokenExample]) -> str:
    """The SHA-256 of examples, from their tokens and stretches."""
    return hashlib.sha256(repr(list(examples)).encode()).hexdigest()


def _outcome(row: Mapping[str, Any]) -> str:
    why = printable(row["why"])
    return f"{row['outcome']} ({why})" if why else str(row["outcome"])


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Values that JSON has; NaN becomes null."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    return {name: None if value != value else value for name, value in plain.items()}


def _write(caller: str, path: str | Path, ending: str, content: str) -> Path:
    path = as_path(caller, path)
    if path.suffix != ending:
        raise ArgumentError(f"{caller}: {path} ends in {path.suffix!r}. End it in {ending}.")
    with write_beside(path) as beside:
        beside.write_text(content, "utf-8")
    return path
