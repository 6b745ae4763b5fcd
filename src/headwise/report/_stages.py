"""The stages of a study: watch the heads on every text, then look closely at a few short ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from headwise._evaluation import in_evaluation
from headwise.corpora import (
    EOS,
    RELATIONS,
    Grammar,
    Texts,
    annotate,
    choices,
    relations,
)
from headwise.lab import Trained
from headwise.models import (
    as_pieces,
    check_model,
    check_reads_text,
    token_classes,
    tokenizer_of,
)
from headwise.report._passes import Progress, pairs_for, sample_maps, sizes_of, watch_pieces
from headwise.report._study import Study
from headwise.roles import Roles, agreement, find_roles, repetition, translation
from headwise.tables import HeadTable
from headwise.watch import Relation, Request


@dataclass(frozen=True)
class About:
    """What the page says of a study's origin.

    Attributes:
        title: The model's name.
        source: Where the texts are from.
        meanings: What the requested classes and relations say, by name.
        training: Facts about the training run, for a model that we trained.
    """

    title: str = ""
    source: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, str | int | float] | None = None


def study(
    model: nn.Module,
    tokenizer: Any,
    texts: Texts,
    *,
    targets: Texts | None = None,
    request: Request | None = None,
    about: About | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Study:
    """Watch every head of a model on some texts, and take a few short maps for the eye.

    A text longer than the model reads, or than `max_tokens`, becomes several: nothing is cut
    off; a pair of a text and another target is refused. The model is put in evaluation mode
    while it is watched.

    Args:
        model: A Mini-GPT, a Hugging Face model, or any model that takes `input_ids` and
            `attention_mask`.
        tokenizer: Its tokenizer. None is that of a `SentenceTransformer`.
        texts: What it reads; a string is one text.
        targets: For an encoder-decoder, what it should write for each text: its decoder reads
            them, shifted to the right. None takes each text as its own target.
        request: What to find out. None is every statistic, and the mass on special tokens and
            on punctuation, where the tokenizer has them.
        about: What the page says of the study's origin.
        max_tokens: The most tokens in one text.
        on_batch: Told after each batch how many texts are done, of how many.
    Returns:
        The study: a table, samples and facts, without the model.
    Raises:
        ArgumentError: something is not a text, there are more texts than targets or fewer, or
            targets for a model that reads one text.
        InputError: the texts hold no token, or a pair is longer than the model reads.
        UnsupportedError: the model cannot be watched exactly, or does not read text alone.
    """
    outer, model = model, check_model("study", model)
    tokenizer = tokenizer_of(outer, tokenizer, "study")
    check_reads_text("study", model)
    about = about or About()
    meanings = dict(about.meanings)
    if request is None:
        classes = token_classes(tokenizer)
        request = Request(classes={name: ids for name, (ids, _) in classes.items()})
        meanings |= {name: says for name, (_, says) in classes.items()}
    pairs = pairs_for(model, texts, targets)
    pieces = as_pieces(tokenizer, pairs, model, max_tokens)
    with in_evaluation(model):
        table = watch_pieces(model, pieces, request, on_progress)
        samples = sample_maps(model, tokenizer, pairs)
    return Study(
        title=about.title or type(model).__name__,
        model=_facts(model, table),
        text={"source": about.source or "texts given in code"}
        | sizes_of(pairs, pieces, own=targets is None),
        table=table,
        meanings=meanings,
        samples=samples,
        training=about.training,
    )


def study_lab(trained: Trained, *, lines: int = 256, on_progress: Progress | None = None) -> Study:
    """Study a Mini-GPT on fresh lines of its grammar, with the mass on every gold relation.

    The sentences have a verb beside a pronoun that it never met in training; as many lines
    repeat a random sequence. Roles are looked for, and heads taken out, on ordinary sentences.
    """
    grammar = trained.settings.grammar()
    words = {at: word for word, at in trained.tokenizer.get_vocab().items()}
    gold = {name: says for name, says in RELATIONS.items() if name != "previous token"}
    request = Request(relations={name: _gold(name, words) for name in gold})
    about = About(
        title="Mini-GPT",
        source="its grammar: fresh lines with verbs beside pronouns they never met in training",
        meanings=gold,
        training=trained.facts(),
    )
    seen = study(
        trained.model,
        trained.tokenizer,
        _fresh_lines(grammar, lines, trained.settings.seed),
        request=request,
        about=about,
        on_progress=on_progress,
    )
    return seen.with_roles(roles_of_lab(trained, lines=lines, on_progress=on_progress))


def roles_of_lab(
    trained: Trained, *, lines: int = 256, on_progress: Progress | None = None
) -> Roles:
    """What the heads of a Mini-GPT do on fresh sentences, and what it loses without each.

    It is tried on other sentences: verb forms with an adverb after their subject and without,
    translations, and repeated sequences.

    Args:
        lines: How many sentences to look for roles on, and how many to try each behaviour on.
    """
    grammar, model, tokenizer = trained.settings.grammar(), trained.model, trained.tokenizer
    # Training draws with (seed, 0, step), evaluation with (seed, 1), the study with (seed, 2).
    rng = np.random.default_rng([trained.settings.seed, 3])
    looked, tried = ([grammar.sentence(rng) for _ in range(lines)] for _ in range(2))
    roles = find_roles(
        model, tokenizer, [annotate(line) for line in looked], on_progress=on_progress
    )
    behaviours = [
        agreement(model, tokenizer, choices(tried, apart=False), name="agreement, beside"),
        agreement(model, tokenizer, choices(tried, apart=True), name="agreement, apart"),
        translation(model, tokenizer, [annotate(line) for line in tried]),
        repetition(model, tokenizer, [str(line) for line in tried]),
    ]
    heads = list(dict.fromkeys(roles.frame()["name"]))
    return roles.effects(model, behaviours, heads=heads, on_progress=on_progress)


def _gold(name: str, words: Mapping[int, str]) -> Relation:
    def pairs(ids: Sequence[int]) -> list[tuple[int, int]]:
        return relations([words[one] for one in ids])[name]

    return pairs


def _fresh_lines(grammar: Grammar, lines: int, seed: int) -> list[str]:
    # Training draws with (seed, 0, step), evaluation with (seed, 1).
    rng = np.random.default_rng([seed, 2])
    drawn = [grammar.sentence(rng, held_out=True) for _ in range(lines)]
    drawn += [grammar.repeat(rng) for _ in range(lines)]
    return [f"{line} {EOS}" for line in drawn]


def _facts(model: nn.Module, table: HeadTable) -> dict[str, str | int]:
    layers = {(head.stack, head.layer) for head in table.heads}
    kv_heads = {
        (head.stack, head.layer, int(kv))
        for head, kv in zip(table.heads, table.kv_heads, strict=True)
    }
    return {
        "class": type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": len(layers),
        "heads": len(table.heads),
        "key/value heads": len(kv_heads),
        "fingerprint": table.model,
    }
