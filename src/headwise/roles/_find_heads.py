"""Find the heads that pick the right stretch of a text, with evidence on held-out examples."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from torch import nn

from headwise._display import counted
from headwise._progress import Passes, Progress, shows_progress
from headwise.corpora import Example, Several
from headwise.errors import ArgumentError
from headwise.models import check_model, fingerprint, without_compiler
from headwise.models.texts import context_of, tokenizer_of
from headwise.roles._hypotheses import FEWEST_TEXTS, Hypotheses, has_role, run_tests, why_not
from headwise.roles._nulls import NULLS, Evidence
from headwise.roles._rows import outcome_of
from headwise.roles._samples import halves
from headwise.roles._task_heads import TASK_NULLS, TaskHeads
from headwise.roles._task_scores import (
    POSITIONS,
    Masses,
    TokenExample,
    answer_effect,
    masses_of,
    positional_hits,
    tokenized_examples,
)
from headwise.roles.relations import Role
from headwise.roles.scores import check_reads_one_text

_TASK = Role("task", "", lambda text: ())  # for its bars, which are those of roles
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
        examples: Sixty or more; with fewer, no head is tested.
        tokenizer: A fast tokenizer, needed if texts are strings: stretches then count characters.
        evidence: Which baselines of other weights and shuffled stretches to evaluate, and the seed.
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
    wrapper, model = without_compiler(model), check_model("find_heads", model)
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
    shuffles = evidence.wants("shuffled")
    passes = Passes(on_progress, len(read) * (1 + shuffles + evidence.n_models))
    masses = masses_of(model, read, passes)
    others = []
    if shuffles:
        rng = np.random.default_rng(seed)
        dealt = [example.shuffled(rng) for example in read]
        others.append(("shuffled", masses_of(model, dealt, passes)))
    for null, null_model in evidence.models_like(model):
        others.append((null, masses_of(null_model, read, passes)))
    selection = halves(len(read), seed)
    family, chosen = task_hypotheses(read, masses, others, selection, seed, most)
    (tested,) = run_tests([family], seed=seed)
    rows = _rows(family, tested, masses, chosen, ~selection)
    (set_row,) = rows.iloc[-1:].to_dict("records")
    address = ("name", "stack", "layer", "head", "in_set")  # columns that a set does not have
    heads = [masses.heads[head] for head in chosen]
    held = [example for example, selected in zip(read, selection, strict=True) if not selected]
    last = all(example.query == ((len(example.ids) - 1, len(example.ids)),) for example in read)
    return TaskHeads(
        rows=rows.iloc[:-1].reset_index(drop=True),
        heads=tuple(heads),
        set_row={str(name): value for name, value in set_row.items() if name not in address},
        answers=answer_effect(model, held, heads, masses.heads, seed),
        notes=_notes(len(read), len(held)),
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
    N, M = len(masses.heads), len(examples)
    size = most or ceil(_LARGEST_SET * N)
    chosen = masses.best_set(selection, size)
    hits = _with_set(masses, chosen)
    by_position = positional_hits(examples)
    rule = int(by_position[selection].mean(0).argmax())
    chance = np.array([example.n_right / len(example.stretches) for example in examples])
    random_sets = masses.random_sets(len(chosen), seed)
    # How often each baseline decides each example correctly.
    nulls = {
        "chance": np.repeat(chance[:, None], N + 1, 1),
        "position": np.repeat(by_position[:, [rule]], N + 1, 1),
        "heads": np.column_stack([np.repeat(hits[:, :N].mean(-1)[:, None], N, 1), random_sets]),
    }
    for null, of_null in others:
        if null == "shuffled":  # the same heads; a null model gives its best one
            decided = _with_set(of_null, chosen)
        else:
            own = of_null.hits()
            best_set = of_null.best_set(selection, size)
            decided = np.repeat(own[:, [own[selection].mean(0).argmax()]], N + 1, 1)
            decided[:, -1:] = of_null.hits(of_null.of_set(best_set))
        known = nulls.get(null, decided)  # of several models, the one that is best on the selection
        nulls[null] = np.where(
            decided[selection].mean(0) > known[selection].mean(0), decided, known
        )
    on_selection = [null[selection].mean(0) for null in nulls.values()]
    measures = {
        "chosen_half": hits[selection].mean(0),
        "chosen_baseline": np.max(on_selection, axis=0),
    }
    held, unknown = ~selection, np.full((M, N + 1), np.nan)
    names = {null: [NULLS.get(null, "")] for null in TASK_NULLS}
    names |= {"position": [POSITIONS[rule]], "heads": ["random heads"]}
    names["shuffled"] = ["the same stretches with their tokens exchanged"]
    family = Hypotheses(
        value=hits[held],
        count=np.ones_like(hits[held]),
        nulls={null: nulls.get(null, unknown)[held] for null in TASK_NULLS},
        roles=(_TASK,),
        null_names=names,
        measures=measures,
    )
    return family, chosen


def _with_set(masses: Masses, chosen: Sequence[int]) -> Float[np.ndarray, "M C"]:
    """The hits of every head, and last those of the set."""
    return np.column_stack([masses.hits(), masses.hits(masses.of_set(chosen))])


def _rows(
    family: Hypotheses,
    tested: pd.DataFrame,
    masses: Masses,
    chosen: Sequence[int],
    held: Bool[np.ndarray, " M"],
) -> pd.DataFrame:
    """A row per head, and a last one for the set."""
    heads = masses.heads
    margins = np.column_stack([masses.margins(), masses.margins(masses.of_set(chosen))])
    rows = tested.assign(
        name=[*map(str, heads), ""],
        stack=[*(head.stack for head in heads), ""],
        layer=[*(head.layer for head in heads), -1],
        head=[*(head.head for head in heads), -1],
        in_set=[*(head in chosen for head in range(len(heads))), True],
        found=has_role(family, tested),
        why=why_not(family, tested),
        null=[family.null_names[null][0] if null else "" for null in tested["null"]],
        contrast=margins[held].mean(0),
        chosen_half=family.measures["chosen_half"],
    )
    rows["outcome"] = [outcome_of(row) for row in rows.to_dict("records")]
    return rows[
        [
            *("name", "stack", "layer", "head", "in_set", "found", "outcome", "why", "effect"),
            *("null", "baseline", "lift", "ci_low", "ci_high", "p_adj", "contrast", "n"),
            *("chosen_half", *(f"null.{null}" for null in TASK_NULLS)),
        ]
    ]


def _notes(n: int, held: int) -> tuple[str, ...]:
    """How the examples were split, in sentences."""
    notes = [
        f"{counted(n, 'example')}: the set and the strongest baselines chosen on "
        f"{n - held}, all numbers from the other {held}",
    ]
    if held < FEWEST_TEXTS:
        notes.append(
            f"no head was tested: {counted(held, 'held-out example')}, not {FEWEST_TEXTS}; "
            f"give {2 * FEWEST_TEXTS} or more"
        )
    return tuple(notes)
