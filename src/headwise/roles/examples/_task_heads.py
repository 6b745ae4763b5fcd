"""The heads of a task: those that pick the right stretch of a text, with evidence."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import nn

from headwise._display import counted
from headwise._progress import Passes, Progress, shows_progress
from headwise.corpora import Example, Several
from headwise.errors import ArgumentError
from headwise.models import check_model
from headwise.models.texts import context_of, tokenizer_of
from headwise.roles._samples import first_of_each
from headwise.roles.evidence import FEWEST_TEXTS, NULLS, Evidence, Hypotheses, of_examples
from headwise.roles.examples._found_heads import FoundHeads, heads_of_examples
from headwise.roles.examples._task_scores import (
    POSITIONS,
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
from headwise.tables import HeadsLike, halves, named_heads

TASK_NULLS = ("chance", "position", "permuted", "random", "exchanged", "heads")
_LARGEST_SET = 0.05  # of all heads
_EXCHANGED = (
    "the null exchanged refuses heads that go by the surroundings of a stretch, as in a syntactic "
    "relation, and not heads that prefer some tokens wherever they stand"
)
_ALIKE = "the stretches of each example are written alike: none were exchanged"
_OTHER_FORMS = (
    "words were not shuffled: a head that picks the same words in any order may be found here, and "
    "not as pairs or choices of find_roles"
)


@shows_progress("Finding the heads of a task")
def find_heads(
    model: nn.Module,
    examples: Several[Example],
    *,
    tokenizer: Any = None,
    heads: HeadsLike | None = None,
    evidence: Evidence | None = None,
    most: int | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> FoundHeads:
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
    first half, if that is more than noise: beyond two standard errors of the paired difference. If
    examples have answers, the set is ablated and the loss on held-out answers compared with that
    without random heads.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        examples: Sixty or more distinct ones, such as those of `task_examples`; with fewer, no
            head is tested. Copies of one count once.
        tokenizer: A fast tokenizer, needed if texts are strings: stretches then count characters.
        heads: Heads named before these examples were seen: they alone have rows, they are the set,
            all of them are tested, and p is adjusted for them alone. None searches all heads.
        evidence: Which baselines of other weights and exchanged tokens to evaluate, and the seed.
            Leave `exchanged` out where the surroundings make a stretch right and not its tokens,
            as among the atoms of one element: a true head is right after the exchange as well.
        most: The most heads in the set. None is 5 % of all heads.
        max_tokens: The most tokens in an example and its answer. None is the model's context.
        on_progress: Called after each batch with the texts done and those of all passes together.
    Returns:
        A row per head, the set, and its effect on answers.
    Raises:
        ArgumentError: there are fewer than two distinct examples, one is malformed, `most` is
            below 1 or stands beside `heads`, `heads` names none, or `evidence` has several splits
            or a null of texts.
        HeadError: there is no such head.
        UnsupportedError: the model reads two texts, cannot be observed exactly or gives no logits
            for answers, or the tokenizer reports no character offsets.
    Source:
        Wu et al. 2025 (arXiv 2506.09944), section 3, for mass from a query to a passage.
    """
    wrapper, model = model, check_model("find_heads", model)
    check_reads_one_text("find_heads", model)
    if most is not None and (most < 1 or heads is not None):
        beside = "" if heads is None else f" with heads={heads!r}, which are the set"
        raise ArgumentError(f"find_heads: most={most}{beside}. Give 1 or more, without heads=.")
    evidence, tokenizer = evidence or Evidence(), tokenizer_of(wrapper, tokenizer)
    seed = evidence.seed
    if evidence.splits not in (None, 1):
        raise ArgumentError(
            f"find_heads: Evidence(splits={evidence.splits}), but find_heads makes a single "
            f"split. Leave splits= out."
        )
    if evidence.nulls and "shuffled" in evidence.nulls:
        raise ArgumentError(
            "find_heads: the null 'shuffled' is of texts. Examples have 'exchanged' in its place."
        )
    limit = context_of(model, tokenizer, max_tokens)
    given = tokenized_examples(examples, tokenizer, limit, model)
    read = [given[number] for number in first_of_each(example.question() for example in given)]
    if len(read) < 2:
        raise ArgumentError(
            f"find_heads: {counted(len(read), 'distinct example')} of {len(given)}. Give "
            f"{2 * FEWEST_TEXTS} or more."
        )
    # Stretches that are written alike would exchange nothing: the null would be the head itself.
    differs = any(example.differ() for example in read)
    exchanges = differs and evidence.wants("exchanged")
    about_exchange = (evidence.left_out("exchanged") or [_EXCHANGED]) if differs else [_ALIKE]
    passes = Passes(on_progress, len(read) * (1 + exchanges + evidence.n_models))
    known, masses = masses_of(model, read, passes)
    named = named_heads("find_heads", heads, known)
    shown = [known.index(head) for head in named]
    others = []
    if exchanges:
        rng = np.random.default_rng(seed)
        dealt = [example.exchanged(rng) for example in read]
        others.append(("exchanged", masses_of(model, dealt, passes)[1]))
    for null, null_model in evidence.models_like(model):
        others.append((null, masses_of(null_model, read, passes)[1]))
    selection = halves(len(read), seed)
    family, chosen = task_hypotheses(
        read, masses, others, selection, seed, most, None if heads is None else shown
    )
    contrast = margins(with_set(masses, chosen), right_stretches(read))[:, [*shown, -1]]
    held = [example for example, selected in zip(read, selection, strict=True) if not selected]
    last = all(example.query == ((len(example.ids) - 1, len(example.ids)),) for example in read)
    return heads_of_examples(
        model,
        named,
        [shown.index(head) for head in chosen],
        family,
        selection,
        seed,
        examples=read,
        n_given=len(given),
        columns={"contrast": contrast[~selection].mean(0)},
        notes=[*about_exchange, _OTHER_FORMS, *evidence.left_out("permuted", "random")],
        beforehand=heads is not None,
        answers=answer_effect(model, held, [known[head] for head in chosen], known, seed),
        queries="last_token" if last else "all_tokens",  # in the words of serving tools
    )


def task_hypotheses(
    examples: Sequence[TokenExample],
    masses: Masses,
    others: Sequence[tuple[str, Masses]],
    selection: Bool[np.ndarray, " M"],
    seed: int,
    most: int | None,
    named: list[int] | None = None,
) -> tuple[Hypotheses, list[int]]:
    """The hypotheses of every head and, last, the set, on held-out examples; and the set.

    The set and the strongest baselines are chosen on the selection half.

    Args:
        others: The masses of the exchanged examples and of null models, by the name of the null.
        named: Heads named beforehand: the hypotheses are theirs alone, and they are the set.
    """
    (M, _, N), right = masses.shape, right_stretches(examples)
    size = len(named or ()) or most or ceil(_LARGEST_SET * N)
    chosen = named or best_set(masses, right, selection, size)
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
        if null == "exchanged":  # the same heads; a null model gives its best one
            hit = hits(with_set(of_null, chosen), right)
        else:
            hit = hits(with_set(of_null, best_set(of_null, right, selection, size)), right)
            hit[:, :N] = hit[:, [hit[selection, :N].mean(0).argmax()]]
        known = nulls.get(null, hit)  # of several models, the one that is best on the selection
        nulls[null] = np.where(hit[selection].mean(0) > known[selection].mean(0), hit, known)
    of_all = {null: nulls.get(null, np.full((M, 1), np.nan)) for null in TASK_NULLS}
    names = {null: NULLS.get(null, "") for null in TASK_NULLS}
    names |= {"position": POSITIONS[rule], "heads": "random heads"}
    names["exchanged"] = "the same stretches with their tokens exchanged"
    family = of_examples("task", decided, np.ones(M), of_all, names, selection)
    return family if named is None else family.only([0], [*named, N], screened=False), chosen
