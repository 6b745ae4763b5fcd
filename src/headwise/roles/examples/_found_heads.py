"""Heads that are found on examples, with the evidence: one result for tasks and alignments."""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from torch import nn

from headwise._display import BEFOREHAND, counted, measured_on, printable
from headwise._extras import versions
from headwise.errors import ArgumentError
from headwise.files import JsonFile, as_path, number, typed
from headwise.models import check_model, fingerprint
from headwise.roles._rows import NOT_FOUND, TEXT, evidence_rows
from headwise.roles.evidence import FEWEST_TEXTS, Hypotheses, run_tests, why_not
from headwise.roles.examples._head_files import ending_in, export_heads
from headwise.roles.examples._task_scores import AnswerEffect
from headwise.tables import Head, HeadsLike, at_prompt, resolve_heads

FORMAT = "headwise-heads/1"
_ADDRESS = ("name", "stack", "layer", "head")
_TEXTS = ("found", "outcome", "why", "effect", "null")  # the columns before the numbers
_NUMBERS = ("baseline", "lift", "ci_low", "ci_high", "p_adj")
_SHOWN = ("name", "in_set", "effect", "error", "null", "baseline", "lift", "p_adj")


@dataclass(frozen=True, eq=False)
class FoundHeads(JsonFile):
    """Heads that do what examples ask for, with the evidence; often there are none.

    All numbers come from held-out examples.

    Attributes:
        rows: A row per head. `outcome` is `found` (then `found` is true), `not found`, or
            `not tested: ` and what is missing; `why` is the reason of `not found`. `effect` is the
            share of cases in which the head is right, with its interval (95 %, over examples) from
            `ci_low` to `ci_high`; `null` is the strongest baseline, `baseline` its share, `lift`
            the share of the range above it, `p_adj` the p adjusted over all heads that are tested,
            and the set, and 1 where the lift on the selection half is too small for a test; `n`
            the cases, an example or a word each, in `texts` examples; `chosen_half` the effect on
            the selection half; `null.…` is the share of each baseline; `in_set` whether the head
            is in the set. `find_heads` adds `contrast`, the mean margin of mass;
            `find_alignment_heads` adds `error`, with its interval from `error_low` to
            `error_high`, and what was removed before, `start_offset` and `end_offset`.
        heads: The heads of the set, in the order in which they joined.
        set_row: The same numbers for the set. Of alignments also `straight_line`, the error of
            the best straight line, `last_half`, the error of the mean of all heads of the last
            half of the layers, and the interval of what the set gains over it, `gain_low` to
            `gain_high`.
        answers: The effect of ablating the set on answers; None without answers.
        notes: How the numbers were obtained.
        texts: The number of distinct examples, of those held out, and the SHA-256 of their tokens.
        queries: `last_token` if the last token of each text is its only query; or `all_tokens`.
        model: The fingerprint of the model's weights.
        name: The name of the model, if its configuration has one: on the hub, or of its folder.
        versions: The versions of the packages that computed the table.
    """

    _format = FORMAT
    _problem = "holds no heads"
    _indent = 1
    _function = "load_heads"

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

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the heads as JSON, in the schema of the page on head files.

        Raises:
            ArgumentError: the path does not end in .json.
            OutputError: the file cannot be written; no partial file remains.
        """
        caller = "FoundHeads.save"
        return super().save(ending_in(".json", caller, as_path(caller, path)))

    def _content(self) -> dict[str, Any]:
        return {
            "model": {"name": self.name, "fingerprint": self.model},
            "set": {"heads": [str(head) for head in self.heads], **self.set_row},
            "heads": self.rows.to_dict("records"),
            "answers": None if self.answers is None else asdict(self.answers),
            "queries": self.queries,
            "texts": dict(self.texts),
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    @classmethod
    def _built(cls, content: dict[str, Any]) -> "FoundHeads":
        rows = [_head_row(row) for row in content["heads"]]
        heads = [Head.parse(row["name"]) for row in rows]
        if len(set(heads)) < len(heads):
            raise ValueError("a head is listed twice")
        if any(row.keys() != rows[0].keys() for row in rows):
            raise ValueError("the heads differ in their columns")
        chosen, effect, texts = content["set"], content["answers"], content["texts"]
        answers = None
        if effect is not None:
            numbers = {str(name): _number(value) for name, value in effect.items() if name != "n"}
            answers = AnswerEffect(n=typed(effect["n"], int), **numbers)
        return cls(
            rows=pd.DataFrame(rows),
            heads=tuple(resolve_heads(_texts(chosen.pop("heads")), heads)),
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

    def export(
        self,
        path: str | os.PathLike[str],
        format: str,
        *,
        model_name: str | None = None,
        heads: HeadsLike | None = None,
    ) -> Path:
        """Write the heads where another tool reads them, with a note of the evidence for them.

        Args:
            path: A file that ends in .json for `vllm-hook`, in .yaml for `qrhead`; the folder of a
                Whisper for `transformers` and `ctranslate2`. Whether that folder holds the same
                weights is not checked.
            format: `vllm-hook` (a model configuration of IBM's vLLM-Hook, with `important_heads`),
                `qrhead` (a configuration of QRRetriever, with `attn_head_set`), or the
                `alignment_heads` by which words are timed: `transformers` (in
                `generation_config.json`) or `ctranslate2` (in `config.json`, for faster-whisper).
            model_name: The model's name on the Hugging Face hub. None is its own name.
            heads: The heads to write, the best first; the note says that they are your choice.
                None is the set, which must be found.
        Returns:
            The file.
        Raises:
            ArgumentError: another format or ending, no name, no heads, or the set was not found.
            HeadError: there is no such head, or one is of a stack that the tool does not list.
            InputError: the folder has no configuration to write to.
            OutputError: the file cannot be written.
        """
        if heads is None and not self.set_row["found"]:
            raise ArgumentError(
                f"FoundHeads.export: the set was {_outcome(self.set_row)}. Give heads=, or find a "
                f"set that beats its baselines."
            )
        known = [Head.parse(row) for row in self.rows["name"]]
        chosen = self.heads if heads is None else resolve_heads(heads, known, measured=True)
        if not chosen:
            raise ArgumentError(
                f"FoundHeads.export: heads={heads!r} names none of {len(known)}. Name some."
            )
        name = self.name if model_name is None else model_name
        to = as_path("FoundHeads.export", path)
        return export_heads(to, format, chosen, name, self.queries, self._evidence(chosen))

    def _evidence(self, heads: Sequence[Head]) -> str:
        """What is known of these heads, as the set or as another choice, and how."""
        source = f"headwise {self.versions.get('headwise', '')}, model {self.model}"
        if tuple(heads) == self.heads:
            lines = self._set_lines()
        else:
            chosen = "the user's own choice, which was not tested together"
            lines = [f"{chosen}; {self._alone(heads)}"]
        return f"{source}: {'; '.join([*lines, *map(printable, self.notes)])}"

    def _alone(self, heads: Sequence[Head]) -> str:
        rows = self.rows.set_index("name").loc[[*map(str, heads)]].to_dict("index")
        alone = [f"{name} {row['effect']:.1%} {_outcome(row)}" for name, row in rows.items()]
        return f"right alone in: {', '.join(alone)}"

    def _set_lines(self) -> list[str]:
        """The evidence for the set, and for each of several heads in it."""
        return [self._set_line(), *([self._alone(self.heads)] if self.heads[1:] else [])]

    def _set_line(self) -> str:
        row = self.set_row
        return (
            f"the set {', '.join(map(str, self.heads))} is right in {row['effect']:.1%} of "
            f"{row['n']:.0f} held-out cases [{row['ci_low']:.1%}, {row['ci_high']:.1%}], against "
            f"{row['baseline']:.1%} of {printable(row['null']) or 'no baseline'}: {_outcome(row)}"
        )

    def __str__(self) -> str:
        lines = [f"{counted(int(self.rows['found'].sum()), 'head')} of {len(self.rows)} found"]
        lines += self._set_lines()
        lines += [] if self.answers is None else [str(self.answers)]
        return "\n".join([*lines, *map(printable, self.notes)])

    def __repr__(self) -> str:
        return at_prompt(f"FoundHeads: {self}", self._shown())

    def _repr_html_(self) -> str:
        return self._shown().to_html(index=False, float_format="{:.3f}".format, escape=True)

    def _shown(self) -> pd.DataFrame:
        return self.found()[[name for name in _SHOWN if name in self.rows]]


def _outcome(row: Mapping[Any, Any]) -> str:
    why = f"p = {row['p_adj']:.2g}" if row["found"] else printable(row["why"])
    return f"{row['outcome']} ({why})" if why else str(row["outcome"])


def load_heads(path: str | Path, model: nn.Module | None = None) -> FoundHeads:
    """Read a file that `FoundHeads.save` wrote.

    Args:
        model: The model that the heads are to be used in; its weights are compared.
    Raises:
        ArgumentError: the heads were found in other weights than those of `model`.
        InputError: the file is missing, or holds no heads of this schema.
    """
    read = FoundHeads.load(path)
    actual = read.model if model is None else fingerprint(check_model("load_heads", model))
    if actual != read.model:
        raise ArgumentError(
            f"load_heads: {path} holds heads of the model {read.model}, not of {actual}. Find the "
            f"heads of this model."
        )
    return read


def _head_row(row: dict[str, Any]) -> dict[str, Any]:
    head = Head.parse(typed(row.pop("name"), str))
    address = {"stack": head.stack, "layer": head.layer, "head": head.head}
    if {name: row.pop(name) for name in address} != address:
        raise ValueError(f"the stack, layer or head of {head} differs from its name")
    in_set = typed(row.pop("in_set"), bool)
    return {"name": str(head), **address, "in_set": in_set, **_evidence(row)}


def _evidence(row: dict[str, Any]) -> dict[str, Any]:
    """The evidence of a head or of the set: what every row has, and further numbers."""
    read: dict[str, Any] = {
        "found": typed(row.pop("found"), bool),
        "outcome": typed(row.pop("outcome"), str),
        "why": typed(row.pop("why"), str),
        "effect": _number(row.pop("effect")),
        "null": typed(row.pop("null"), str),
    }
    required = (*_NUMBERS, "n", "chosen_half")
    return read | {name: _number(row[name]) for name in dict.fromkeys([*_NUMBERS, *row, *required])}


def _texts(values: Any) -> list[str]:
    return [typed(value, str) for value in typed(values, list)]


def _number(value: Any) -> float:
    """A finite number; NaN for null."""
    return math.nan if value is None else number(value)


def heads_of_examples(
    model: nn.Module,
    heads: Sequence[Head],
    chosen: Sequence[int],
    family: Hypotheses,
    selection: Bool[np.ndarray, " M"],
    seed: int,
    *,
    examples: Sequence[Any],
    n_given: int,
    columns: Mapping[str, Float[np.ndarray, " C"]],
    of_set: Mapping[str, float] | None = None,
    objection: str = "",
    notes: Sequence[str] = (),
    answers: AnswerEffect | None = None,
    queries: str = "all_tokens",
    beforehand: bool = False,
) -> FoundHeads:
    """Test the hypotheses that heads, and last a set of them, are right on held-out examples.

    Args:
        heads: All heads of the model that are asked.
        chosen: The numbers of those in the set.
        family: The hypotheses of every head and, last, the set.
        selection: The examples that the set and the baselines were chosen on.
        examples: The distinct examples in tokens, for their digest; of `n_given` with copies.
        columns: Further numbers of every head and, last, the set.
        of_set: Further numbers of the set alone.
        objection: Why the set is not found though it passes the test; "" if nothing is against it.
        notes: Further notes.
        beforehand: Whether the heads, which are the set, were named and not chosen.
    """
    (tested,) = run_tests([family], seed=seed)
    rows = evidence_rows([*heads, Head("", 0, 0)], family, tested, TEXT)
    rows = rows.assign(
        why=why_not(family, tested),
        in_set=[*(head in chosen for head in range(len(heads))), True],
        **columns,
    )
    nulls = [f"null.{null}" for null in family.nulls]
    evidence = [*_TEXTS, *_NUMBERS, *columns, "n", "texts", "chosen_half", *nulls]
    rows = rows[[*_ADDRESS, "in_set", *evidence]]
    (last,) = rows[evidence].iloc[-1:].to_dict("records")
    set_row = {str(name): value for name, value in last.items()} | dict(of_set or {})
    if set_row["found"] and objection:
        set_row |= {"found": False, "outcome": NOT_FOUND, "why": objection}
    n, held = len(selection), int((~selection).sum())
    noted = [
        f"{counted(n, 'distinct example')} of {n_given:,}; {'' if beforehand else 'the set and '}"
        f"the strongest baselines chosen on {n - held}, all numbers from the other {held}, as "
        f"independent examples",
        *notes,
        f"p adjusted over {counted(len(heads), 'head')}{BEFOREHAND * beforehand} and the set",
    ]
    if held < FEWEST_TEXTS:
        noted.append(
            f"no head was tested: {counted(held, 'held-out example')}, not {FEWEST_TEXTS}; give "
            f"{2 * FEWEST_TEXTS} distinct ones or more"
        )
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if name and (os.path.isabs(name) or os.path.exists(name)):
        name = Path(name).resolve().name  # of the folder, not where it lies on this machine
    weights, digest = fingerprint(model), hashlib.sha256(repr(examples).encode()).hexdigest()
    made_with = versions()
    noted.append(measured_on(weights, "examples", digest, seed, made_with["headwise"]))
    return FoundHeads(
        rows=rows.iloc[:-1].reset_index(drop=True),
        heads=tuple(heads[head] for head in chosen),
        set_row=set_row,
        answers=answers,
        notes=tuple(noted),
        texts={"examples": n, "held_out": held, "sha256": digest},
        queries=queries,
        model=weights,
        name=name,
        versions=made_with,
    )
