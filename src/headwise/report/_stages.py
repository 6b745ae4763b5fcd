"""The stages of a study: statistics of every head on all texts, then maps of a few short ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress, shows_progress
from headwise.corpora import EOS, RELATIONS, Texts, annotate, choices, relations
from headwise.errors import ArgumentError
from headwise.lab import Trained
from headwise.models import check_model, class_of
from headwise.models.texts import check_reads_text, context_of, token_classes, tokenizer_of
from headwise.report._passes import observe_texts, pairs_for, sizes_of
from headwise.report._samples import heads_to_show_first, sample_texts
from headwise.report._study import Study
from headwise.roles import Roles, agreement, find_roles, induction, translation
from headwise.tables import HeadTable
from headwise.watch import BATCH_SIZE, Relation, Request

# The beginnings of this many texts are shown, each of this many tokens.
_SAMPLES, _SAMPLE_TOKENS = 3, 24
# Texts chosen by a reader are shown whole, and so many are enough for one page.
_MOST_SHOWN = 48


@dataclass(frozen=True)
class About:
    """Where a study comes from, as the page says it.

    Attributes:
        title: The model's name.
        source: Where the texts are from.
        meanings: Descriptions of the requested classes and relations, by name.
        training: Facts about the training run, for a Mini-GPT.
    """

    title: str = ""
    source: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, str | int | float] | None = None


@shows_progress("Studying heads")
def study(
    model: nn.Module,
    texts: Texts,
    *,
    tokenizer: Any = None,
    targets: Texts | None = None,
    request: Request | None = None,
    about: About | None = None,
    max_tokens: int | None = None,
    show: Texts | None = None,
    full: bool = False,
    batch_size: int = BATCH_SIZE,
    on_progress: Progress | None = None,
) -> Study:
    """Measure every head of a model on some texts, and record attention maps of a few short ones.

    A text that is longer than the model's context, or than `max_tokens`, is split into several:
    nothing is cut off. A pair of a text and a separate target is not split but refused. The model
    is in evaluation mode while it is watched.

    Args:
        model: A Mini-GPT, a Hugging Face model, or any model that takes `input_ids` and
            `attention_mask`.
        texts: The texts to study the model on; a string is one text.
        tokenizer: Its tokenizer. None uses that of a `SentenceTransformer`.
        targets: For an encoder-decoder, the output for each text: the decoder reads it, shifted
            to the right. None takes each text as its own target.
        request: The statistics to compute. None is every statistic, and the mass on special
            tokens and on punctuation if the tokenizer has them. Studies of
            `Request(per_text=True)` can be compared; they keep the sums of each whole text.
        about: Where the study comes from, as the page says it.
        max_tokens: The most tokens in one text.
        show: Up to 48 texts whose attention the page shows. None shows the beginnings of three of
            the studied texts. A long text has no exact maps, only its strongest pairs, for
            the 64 heads that differ most from uniform attention.
        full: Whether to keep the strongest pairs of all heads for long texts.
        batch_size: How many texts the model reads at a time, fewer where memory is short.
        on_progress: Called after each batch with the number of finished texts and of all texts.
    Returns:
        The study: a table, samples and facts, without the model.
    Raises:
        ArgumentError: an item is not a text, texts and targets differ in number, there are
            targets for a model that reads one text, or a batch has no text.
        InputError: the texts hold no token, or a pair is longer than the model's context.
        UnsupportedError: the model cannot be watched exactly, or reads more than text.
    """
    wrapper, model = model, check_model("study", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "study")
    check_reads_text("study", model)
    about = about or About()
    meanings = dict(about.meanings)
    if request is None:
        classes = token_classes(tokenizer)
        request = Request(classes={name: ids for name, (ids, _) in classes.items()})
        meanings |= {name: meaning for name, (_, meaning) in classes.items()}
    pairs = pairs_for("study", model, texts, targets)
    table, pieces = observe_texts(
        "study", model, tokenizer, pairs, request, max_tokens, on_progress, batch_size
    )
    with in_evaluation(model):
        if show is None:  # texts spread evenly over the corpus
            shown, n_tokens = pairs[:: max(1, len(pairs) // _SAMPLES)][:_SAMPLES], _SAMPLE_TOKENS
        else:
            shown = pairs_for("study", model, show)
            n_tokens = max_tokens or context_of(model, tokenizer)
        if len(shown) > _MOST_SHOWN:
            raise ArgumentError(
                f"study: {len(shown)} texts to show. Give at most {_MOST_SHOWN}; all other texts "
                f"can be studied without being shown."
            )
        first = None if full else heads_to_show_first(table)
        samples = tuple(sample_texts(model, tokenizer, shown, n_tokens, first))
    return Study(
        title=about.title or type(model).__name__,
        model=_facts(model, table),
        text={"source": about.source or "texts given in code"}
        | sizes_of(pairs, pieces, own_targets=targets is None),
        table=table,
        meanings=meanings,
        samples=samples,
        training=about.training,
    )


@shows_progress("Studying heads")
def study_lab(
    trained: Trained,
    *,
    lines: int = 256,
    per_text: bool = False,
    on_progress: Progress | None = None,
) -> Study:
    """Study a Mini-GPT on fresh lines of its grammar, with the mass on every gold relation.

    Half of the lines are sentences in which a verb stands beside a pronoun that it was never
    paired with in training; the other half repeat a random sequence. Roles and the effects of
    ablation are measured on ordinary sentences.

    Args:
        lines: How many lines of each kind to study, and how many sentences for roles.
        per_text: Whether to keep the sums of each line, so that the study can be compared.
    """
    grammar = trained.settings.grammar()
    words = {token_id: word for word, token_id in trained.tokenizer.get_vocab().items()}
    meanings = {name: meaning for name, meaning in RELATIONS.items() if name != "previous token"}

    def gold(name: str) -> Relation:
        return lambda ids: relations([words[token_id] for token_id in ids])[name]

    request = Request(relations={name: gold(name) for name in meanings}, per_text=per_text)
    # Training draws with (seed, 0, step), evaluation with (seed, 1).
    rng = np.random.default_rng([trained.settings.seed, 2])
    drawn = [grammar.sentence(rng, held_out=True) for _ in range(lines)]
    drawn += [grammar.repeat(rng) for _ in range(lines)]
    about = About(
        title="Mini-GPT",
        source="its grammar: fresh lines, with verbs beside pronouns never paired in training",
        meanings=meanings,
        training=trained.facts(),
    )
    lab_study = study(
        trained.model,
        [f"{line} {EOS}" for line in drawn],
        tokenizer=trained.tokenizer,
        request=request,
        about=about,
        on_progress=on_progress,
    )
    return lab_study.with_roles(roles_of_lab(trained, lines=lines, on_progress=on_progress))


def roles_of_lab(
    trained: Trained, *, lines: int = 256, on_progress: Progress | None = None
) -> Roles:
    """What the heads of a Mini-GPT do on fresh sentences, and the effect of ablating each.

    Effects are measured on other sentences: verb forms with and without an adverb after their
    subject, translations, and repeated sequences.

    Args:
        lines: How many sentences to find roles on, and how many to measure each behavior on.
    """
    grammar, model, tokenizer = trained.settings.grammar(), trained.model, trained.tokenizer
    # Training draws with (seed, 0, step), evaluation with (seed, 1), the study with (seed, 2).
    rng = np.random.default_rng([trained.settings.seed, 3])
    role_lines, effect_lines = ([grammar.sentence(rng) for _ in range(lines)] for _ in range(2))
    roles = find_roles(
        model, [annotate(line) for line in role_lines], tokenizer=tokenizer, on_progress=on_progress
    )
    behaviors = [
        agreement(
            model, choices(effect_lines, apart=False), tokenizer=tokenizer, name="agreement, beside"
        ),
        agreement(
            model, choices(effect_lines, apart=True), tokenizer=tokenizer, name="agreement, apart"
        ),
        translation(model, [annotate(line) for line in effect_lines], tokenizer=tokenizer),
        induction(model, [str(line) for line in effect_lines], tokenizer=tokenizer),
    ]
    heads = list(dict.fromkeys(roles.frame()["name"]))
    return roles.effects(model, behaviors, heads=heads, on_progress=on_progress)


def _facts(model: nn.Module, table: HeadTable) -> dict[str, str | int]:
    layers = {(head.stack, head.layer) for head in table.heads}
    kv_heads = {
        (head.stack, head.layer, int(kv))
        for head, kv in zip(table.heads, table.kv_heads, strict=True)
    }
    return {
        "class": class_of(model),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": len(layers),
        "heads": len(table.heads),
        "key/value heads": len(kv_heads),
        "fingerprint": table.model,
    }
