"""The heads of a task: those that pick the right stretch of a text, with evidence; their files."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool
from torch import nn

from headwise._display import counted, printable
from headwise._progress import Passes, Progress, shows_progress
from headwise.corpora import Example, Several
from headwise.errors import ArgumentError, HeadError
from headwise.files import JsonFile, as_path, number, typed, write_beside
from headwise.models import check_model, fingerprint
from headwise.models.texts import context_of, tokenizer_of
from headwise.roles._hypotheses import FEWEST_TEXTS, Hypotheses, of_examples
from headwise.roles._nulls import NULLS, Evidence
from headwise.roles._rows import rows_with_set
from headwise.roles._samples import halves
from headwise.roles._task_scores import (
    POSITIONS,
    AnswerEffect,
    Masses,
    TokenExample,
    answer_effect,
    best_set,
    hits,
    margins,
    masses_of,
    positional_hits,
    random_sets,
    right_stretches,
    tokenized_examples,
    with_set,
)
from headwise.roles.scores import check_reads_one_text
from headwise.tables import Head, HeadsLike, at_prompt, resolve_heads

FORMAT = "headwise-heads/1"
TASK_NULLS = ("chance", "position", "permuted", "random", "shuffled", "heads")
_SHOWN = ("name", "in_set", "effect", "ci_low", "ci_high", "null", "baseline", "lift", "p_adj")
_NUMBERS = (
    *("baseline", "lift", "ci_low", "ci_high", "p_adj", "contrast", "n", "chosen_half"),
    *(f"null.{name}" for name in TASK_NULLS),
)
# The columns of a head and of the set, in the order of the table.
_EVIDENCE = ("found", "outcome", "why", "effect", "null", *_NUMBERS)
Pairs = Sequence[tuple[int, int]]  # layer and query head


@dataclass(frozen=True, eq=False)
class TaskHeads(JsonFile):
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
        return super().save(_ending_in(".json", "TaskHeads.save", path))

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
    def _built(cls, content: dict[str, Any]) -> "TaskHeads":
        rows = [_head_row(row) for row in content["heads"]]
        heads = [Head.parse(row["name"]) for row in rows]
        if len(set(heads)) < len(heads):
            raise ValueError("a head is listed twice")
        chosen, effect, texts = content["set"], content["answers"], content["texts"]
        answers = None
        if effect is not None:
            numbers = {str(name): _number(value) for name, value in effect.items() if name != "n"}
            answers = AnswerEffect(n=typed(effect["n"], int), **numbers)
        return cls(
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
        target = _ending_in(ending, "TaskHeads.export", path)
        with write_beside(target) as beside:
            beside.write_text(written(pairs, name, self.queries), "utf-8")
        return target

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


def _ending_in(ending: str, caller: str, path: str | os.PathLike[str]) -> Path:
    path = as_path(caller, path)
    if path.suffix != ending:
        raise ArgumentError(f"{caller}: {path} ends in {path.suffix!r}. End it in {ending}.")
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
    read = TaskHeads.load(path)
    actual = read.model if model is None else fingerprint(check_model("load_heads", model))
    if actual != read.model:
        raise ArgumentError(
            f"load_heads: {path} holds heads of the model {read.model}, not of {actual}. Find the "
            f"heads of this model."
        )
    return read


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


_LARGEST_SET = 0.05  # of all heads


@shows_progress("Finding the heads of a task")
def find_heads(
    model: nn.Module,
    examples: Several[Example],
    *,
    tokenizer: Any = None,
    evidence: Evidence | None = None,
    most: int | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> TaskHeads:
    """Find the heads whose attention picks the right stretch of a text, and a set that does.

    A head decides an example correctly if its queries give a right stretch more mass (mean over the
    queries, sum over the stretch) than any other; its contrast is the margin. Half of the examples
    choose the set and the strongest baselines; all numbers come from the other half. The baselines
    are chance, the best rule of position or length, the best head (for the set, the best set) of
    the same model with permuted and with initial weights, the same head on texts whose stretches
    have exchanged their tokens, and random heads of the model. A head is found if its lift (the
    share of the range above the strongest baseline) is .25 on both halves and p < .05, adjusted
    over what is tested: the heads, and the set, whose lift is .125 on the first half.

    The set grows greedily by the head whose addition to the mean mass decides most examples of the
    first half. If examples have answers, the set is ablated and the loss on held-out answers
    compared with that without random heads.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        examples: Sixty or more, such as those of `task_examples`; with fewer, no head is tested.
        tokenizer: A fast tokenizer, needed if texts are strings: stretches then count characters.
        evidence: Which baselines of other weights and shuffled stretches to evaluate, and the seed.
            Leave `shuffled` out where the surroundings make a stretch right and not its own tokens,
            as among the atoms of one element: a true head is right after the exchange as well.
        most: The most heads in the set. None is 5 % of all heads.
        max_tokens: The most tokens in an example and its answer. None is the model's context.
        on_progress: Called after each batch with the texts done and those of all passes together.
    Returns:
        A row per head, the set, and its effect on answers.
    Raises:
        ArgumentError: there are fewer than two examples, one is malformed, `most` is below 1, or
            `evidence` has several splits.
        UnsupportedError: the model reads two texts, cannot be observed exactly or gives no logits
            for answers, or the tokenizer reports no character offsets.
    Source:
        Wu et al. 2025 (arXiv 2506.09944), section 3, for mass from a query to a passage.
    """
    wrapper, model = model, check_model("find_heads", model)
    check_reads_one_text("find_heads", model)
    if most is not None and most < 1:
        raise ArgumentError(f"find_heads: most={most}. Give 1 or more.")
    evidence, tokenizer = evidence or Evidence(), tokenizer_of(wrapper, tokenizer)
    seed = evidence.seed
    if evidence.splits not in (None, 1):
        raise ArgumentError(
            f"find_heads: Evidence(splits={evidence.splits}), but find_heads makes a single "
            f"split. Leave splits= out."
        )
    limit = context_of(model, tokenizer, max_tokens)
    read = tokenized_examples(examples, tokenizer, limit, model)
    if len(read) < 2:
        raise ArgumentError(f"find_heads: {len(read)} examples. Give {2 * FEWEST_TEXTS} or more.")
    # Stretches that are written alike would exchange nothing: the null would be the head itself.
    exchanges = any(example.differ() for example in read)
    shuffles = evidence.wants("shuffled") and exchanges
    passes = Passes(on_progress, len(read) * (1 + shuffles + evidence.n_models))
    known, masses = masses_of(model, read, passes)
    others = []
    if shuffles:
        rng = np.random.default_rng(seed)
        dealt = [example.shuffled(rng) for example in read]
        others.append(("shuffled", masses_of(model, dealt, passes)[1]))
    for null, null_model in evidence.models_like(model):
        others.append((null, masses_of(null_model, read, passes)[1]))
    selection = halves(len(read), seed)
    family, chosen = task_hypotheses(read, masses, others, selection, seed, most)
    contrast = margins(with_set(masses, chosen), right_stretches(read))
    rows = rows_with_set(known, family, seed).assign(
        in_set=[*(head in chosen for head in range(len(known))), True],
        contrast=contrast[~selection].mean(0),
    )
    rows = rows[["name", "stack", "layer", "head", "in_set", *_EVIDENCE]]
    (set_row,) = rows[list(_EVIDENCE)].iloc[-1:].to_dict("records")
    heads = [known[head] for head in chosen]
    held = [example for example, selected in zip(read, selection, strict=True) if not selected]
    notes = [
        f"{counted(len(read), 'example')}: the set and the strongest baselines chosen on "
        f"{len(read) - len(held)}, all numbers from the other {len(held)}",
    ]
    if not exchanges:
        notes.append("the stretches of each example are written alike: none were exchanged")
    if len(held) < FEWEST_TEXTS:
        notes.append(
            f"no head was tested: {counted(len(held), 'held-out example')}, not {FEWEST_TEXTS}; "
            f"give {2 * FEWEST_TEXTS} or more"
        )
    last = all(example.query == ((len(example.ids) - 1, len(example.ids)),) for example in read)
    return TaskHeads(
        rows=rows.iloc[:-1].reset_index(drop=True),
        heads=tuple(heads),
        set_row={str(name): value for name, value in set_row.items()},
        answers=answer_effect(model, held, heads, known, seed),
        notes=tuple(notes),
        texts={
            "examples": len(read),
            "held_out": len(held),
            "sha256": hashlib.sha256(repr(read).encode()).hexdigest(),
        },
        queries="last_token" if last else "all_tokens",  # in the words of serving tools
        model=fingerprint(model),
        name=str(getattr(getattr(model, "config", None), "_name_or_path", "") or ""),
        versions={package: version(package) for package in ("headwise", "torch")},
    )


def task_hypotheses(
    examples: Sequence[TokenExample],
    masses: Masses,
    others: Sequence[tuple[str, Masses]],
    selection: Bool[np.ndarray, " M"],
    seed: int,
    most: int | None,
) -> tuple[Hypotheses, list[int]]:
    """The hypotheses of every head and, last, the set, on held-out examples; and the set.

    The set and the strongest baselines are chosen on the selection half.

    Args:
        others: The masses of the shuffled examples and of null models, by the name of the null.
    """
    (M, _, N), right = masses.shape, right_stretches(examples)
    size = most or ceil(_LARGEST_SET * N)
    chosen = best_set(masses, right, selection, size)
    decided = hits(with_set(masses, chosen), right)
    by_position = positional_hits(examples)
    rule = int(by_position[selection].mean(0).argmax())
    chance = np.array([example.n_right / len(example.stretches) for example in examples])
    of_sets = random_sets(masses, right, len(chosen), seed)
    # How often each baseline decides each example correctly.
    nulls = {
        "chance": chance[:, None],
        "position": by_position[:, [rule]],
        "heads": np.column_stack([np.repeat(decided[:, :N].mean(-1)[:, None], N, 1), of_sets]),
    }
    for null, of_null in others:
        if null == "shuffled":  # the same heads; a null model gives its best one
            hit = hits(with_set(of_null, chosen), right)
        else:
            hit = hits(with_set(of_null, best_set(of_null, right, selection, size)), right)
            hit[:, :N] = hit[:, [hit[selection, :N].mean(0).argmax()]]
        known = nulls.get(null, hit)  # of several models, the one that is best on the selection
        nulls[null] = np.where(hit[selection].mean(0) > known[selection].mean(0), hit, known)
    of_all = {null: nulls.get(null, np.full((M, 1), np.nan)) for null in TASK_NULLS}
    names = {null: NULLS.get(null, "") for null in TASK_NULLS}
    names |= {"position": POSITIONS[rule], "heads": "random heads"}
    names["shuffled"] = "the same stretches with their tokens exchanged"
    return of_examples("task", decided, np.ones(M), of_all, names, selection), chosen
