"""Find the heads that pick the right stretch of a text, with evidence on held-out examples."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from torch import nn

from headwise._progress import Progress, shows_progress
from headwise.corpora import Example, Several
from headwise.errors import ArgumentError
from headwise.models import (
    check_model,
    fingerprint,
    without_compiler,
)
from headwise.models.texts import (
    context_of,
    tokenizer_of,
)
from headwise.roles.evaluation import check_reads_one_text
from headwise.roles.task._answers import answer_effect
from headwise.roles.task._examples import TokenExample, tokenized_examples
from headwise.roles.task._table import TaskHeads, digest_of
from headwise.roles.task._trial import TaskTrial
from headwise.roles.testing import FEWEST_TEXTS, Evidence, judge

_ADDRESS = ("name", "stack", "layer", "head", "in_set")  # columns that a set does not have


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
    if evidence.splits not in (None, 1):
        raise ArgumentError(
            f"find_heads: Evidence(splits={evidence.splits}), but find_heads makes a single "
            f"split. Leave splits= out."
        )
    limit = context_of(model, tokenizer, max_tokens)
    read = tokenized_examples(examples, tokenizer, limit, model)
    if len(read) < 2:
        raise ArgumentError(f"find_heads: {len(read)} examples. Give {2 * FEWEST_TEXTS} or more.")
    trial = TaskTrial.of(model, read, evidence, most, on_progress)
    family = trial.family()
    (verdict,) = judge([family], seed=evidence.seed)
    chosen = [trial.masses.heads[head] for head in trial.chosen]
    held = [e for e, selected in zip(read, trial.selection, strict=True) if not selected]
    frame = trial.frame(family, verdict)
    (set_row,) = frame.iloc[-1:].to_dict("records")
    return TaskHeads(
        rows=frame.iloc[:-1].reset_index(drop=True),
        heads=tuple(chosen),
        set_row={str(name): value for name, value in set_row.items() if name not in _ADDRESS},
        answers=answer_effect(model, held, chosen, trial.masses.heads, evidence.seed),
        notes=trial.notes(),
        texts={"examples": len(read), "held_out": len(held), "sha256": digest_of(read)},
        queries=_queries(read),
        model=fingerprint(model),
        name=str(getattr(getattr(model, "config", None), "_name_or_path", "") or ""),
        versions={package: version(package) for package in ("headwise", "torch")},
    )


def _queries(examples: Sequence[TokenExample]) -> str:
    """Which queries the examples have, in the words of serving tools."""
    last = all(example.query == ((len(example.ids) - 1, len(example.ids)),) for example in examples)
    return "last_token" if last else "all_tokens"
