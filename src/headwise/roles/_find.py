"""Find the role of each head: evaluate relations, compare with nulls, test as one family."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from headwise._display import counted
from headwise._progress import Progress, shows_progress
from headwise.corpora import Corpus
from headwise.errors import ArgumentError, InputError
from headwise.models import (
    check_model,
    fingerprint,
    without_compiler,
)
from headwise.models.checkpoints import originals_of
from headwise.models.texts import (
    context_of,
    tokenizer_of,
)
from headwise.roles._evaluated import Evaluated, judged
from headwise.roles.effects import Score, copying_scores
from headwise.roles.relations import (
    PROBED,
    Relations,
    Role,
    Tokenized,
    gold_roles,
    own_roles,
    probe,
    texts_of,
    token_roles,
    tokenize,
)
from headwise.roles.results import BEHAVIOUR_LABELS, Roles
from headwise.roles.testing import (
    FEWEST_TEXTS,
    SEQUENCES,
    Evidence,
    Trial,
    distinct_texts,
    probe_trial,
    text_trial,
)

_MOST_UNKNOWN = 0.5  # of the tokens; above it the text is in no language of the model


@shows_progress("Finding the roles of heads")
def find_roles(
    model: nn.Module,
    tokenizer: Any,
    corpus: Corpus,
    *,
    relations: Relations | None = None,
    evidence: Evidence | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Roles:
    """Find what each head attends to, tested against baselines on held-out texts.

    A role is a relation: a set of (query, key) pairs of a text, such as a verb and its subject.
    A head has a role if it scores higher on held-out texts than every null (a baseline without
    knowledge of the relation) that applies: chance, the best fixed offset, rules about parts of
    speech and their order, rules that choose among candidates (the nearest, the first, the
    longest, the most repeated), the best head of the same model with permuted or with initial
    weights, the same words in another order, and for repetition the same positions without
    repetition. It needs a lift of .25 (the share of the range above the null that the head
    reaches; for trees ten points) and p < .05, adjusted over all heads and roles together that
    clear half of that bar on the selection half, on which heuristics and null heads are
    selected. The head must clear the whole bar there too. A role describes what a head attends
    to, not what the model uses it for.

    A relation with two ends is two roles, one in each direction. A role is tested only if the
    texts could have shown it: a planted head with the true pairs, diluted with even attention,
    has to be found by the same test, and some score has to be labelled with a probability of
    80 %. The outcome of each row is `found`, `not found`, or `not tested: ` and what is missing.

    The model reads every distinct text once, and random sequences with their controls; each
    null of `evidence` costs another pass, and `notes` counts them. Attention weights are
    computed for a few heads at a time. A text longer than the model's context is cut between
    sentences.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        tokenizer: Its tokenizer, a fast one that reports character offsets. None takes the
            tokenizer of a `SentenceTransformer`.
        corpus: Texts, with or without annotations; trees, mentions and links add their roles.
            A string is one text.
        relations: Your own roles, by name: a function from a text to its pairs of tokens
            (query, key), or a `headwise.roles.ChoiceRelation` among candidates that you name.
        evidence: Which nulls to evaluate, and the seed. None is `Evidence()`: every null that
            is available.
        max_tokens: The most tokens in one text. None is the model's context.
        on_progress: Called after each batch with the texts done and those of all passes together.
    Returns:
        A row per head and role, found or not.
    Raises:
        ArgumentError: two roles have one name, or something in the corpus is not a text.
        InputError: no text has a token, or most tokens are unknown to the tokenizer.
        UnsupportedError: the model cannot be observed exactly, the tokenizer does not report
            character offsets, or a null named in `evidence` is not available.
    """
    wrapper, model = without_compiler(model), check_model("find_roles", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "find_roles")
    evidence = evidence or Evidence()
    n_texts, texts = texts_of("find_roles", corpus)
    limit = context_of(model, tokenizer, max_tokens)
    tokenized = tokenize(tokenizer, texts, limit)
    pieces = tokenized.pieces
    check_tokens(len(texts), bool(pieces), tokenized.unknown)
    roles = with_relations([*token_roles(pieces), *gold_roles(pieces)], relations or {})
    text = text_trial(pieces, texts, roles, evidence)
    drawn = probe(pieces, limit, SEQUENCES, evidence.seed)
    probed = probe_trial(*drawn, evidence.seed)
    trials = [text] if probed is None else [text, probed]
    evaluated = Evaluated.of(model, trials, evidence, on_progress)
    copies = probed if evaluated.scores[0].causal else None
    return judged(
        evaluated,
        evidence,
        texts=distinct_texts(texts),
        notes=notes_on(tokenized, n_texts, trials),
        copying={} if copies is None else copying_of(model, copies, evidence.seed),
        original=originals_of(model, evaluated.scores[0].heads) or (),
        model=fingerprint(model),
    )


def check_tokens(n_texts: int, any_token: bool, unknown: float) -> None:
    """Refuse texts without tokens, or in no language of the model.

    Raises:
        InputError: no text has a token, or most tokens are unknown to the tokenizer.
    """
    if not any_token:
        of = counted(n_texts, "text")
        raise InputError(f"find_roles: {of} without a token. Give texts with words.")
    if unknown > _MOST_UNKNOWN:
        raise InputError(
            f"find_roles: {unknown:.0%} of the tokens of these texts are unknown to the "
            f"tokenizer. Give texts in a language that the model was trained on."
        )


def with_relations(roles: list[Role], relations: Relations) -> list[Role]:
    """Roles with the user's own after them.

    Raises:
        ArgumentError: two roles have one name, or a relation is no function.
    """
    roles = [*roles, *own_roles("find_roles", relations)]
    names = [*(role.name for role in (*roles, *PROBED)), *BEHAVIOUR_LABELS]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ArgumentError(f"find_roles: {duplicates[0]!r} is a role already. Rename yours.")
    return roles


def notes_on(tokenized: Tokenized, n_texts: int, trials: Sequence[Trial]) -> tuple[str, ...]:
    """How the texts were read and split, in sentences."""
    selection = trials[0].split.selection
    distinct, held = len(selection), int((~selection).sum())
    notes = [
        f"{counted(distinct, 'distinct text')} of {n_texts:,}; heads, rules and null heads chosen "
        f"on {distinct - held:,}, all numbers from the other {held:,}",
    ]
    if tokenized.unknown:
        notes.append(f"{tokenized.unknown:.1%} of the tokens are unknown to the tokenizer")
    if tokenized.cut_at_sentences or tokenized.cut_within:
        cut = tokenized.cut_at_sentences + tokenized.cut_within
        notes.append(
            f"{counted(cut, 'text was', 'texts were')} longer than what is read at once and "
            f"cut between sentences, {tokenized.cut_within} of them also within one"
        )
    if held < FEWEST_TEXTS:
        notes.append(
            f"roles of text were not tested: {counted(held, 'held-out text')}, not "
            f"{FEWEST_TEXTS}; give {2 * FEWEST_TEXTS} distinct texts or more"
        )
    notes.append(
        f"{SEQUENCES} sequences of random tokens that repeat, and as many controls"
        if len(trials) > 1
        else "too few different tokens, or too short a context, for sequences"
    )
    return tuple(notes)


def copying_of(model: nn.Module, probe: Trial, seed: int) -> dict[str, Score]:
    """The copying score of each head by its name, on the sequences that do not repeat."""
    assert probe.contrast is not None
    sequences = [item.ids for item in probe.contrast.items]
    return {str(head): score for head, score in copying_scores(model, sequences, seed).items()}
