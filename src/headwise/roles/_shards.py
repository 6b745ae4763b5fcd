"""Roles from shards: sums of each text, measured anywhere, from which all roles are judged."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from headwise.corpora import AnnotatedText
from headwise.corpora.streams import windows
from headwise.models import check_model, originals_of
from headwise.roles._evaluated import EXCERPT, Evaluated, judged
from headwise.roles._find import copying_of, notes_on
from headwise.roles._sums import (
    PROBE,
    SCHEMA,
    TEXTS,
    Arrays,
    RoleSums,
    TrialSums,
    evaluate_trial,
)
from headwise.roles._survey import Survey, kept
from headwise.roles.evaluation import Evaluator
from headwise.roles.relations import Relations, Role, tokenize
from headwise.roles.results import Roles
from headwise.roles.testing import (
    Evidence,
    Split,
    Trial,
    digest_of_text,
    distinct_texts,
    halves_of_texts,
    text_trial,
)
from headwise.tables import Head


def sums_of_shard(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[AnnotatedText],
    shard: int,
    survey: Survey,
    relations: Relations,
    evidence: Evidence,
) -> RoleSums | None:
    """Evaluate the model and its null models on a shard; the first one has the probes too.

    Raises:
        UnsupportedError: the model cannot be observed exactly, the tokenizer does not report
            character offsets, or a null named in `evidence` is not available.
    """
    model = check_model("find_roles", model)
    roles = survey.roles(relations)
    parts: list[TrialSums] = []
    read: list[str] = []
    for window in windows(kept(texts, survey.left_out(shard))):
        pieces = tokenize(tokenizer, window, survey.limit).pieces
        if pieces:
            trial = text_trial(pieces, window, roles, evidence, survey.tags)
            parts.append(evaluate_trial(model, trial, evidence, len(read)))
        read += distinct_texts(window)
    about: dict[str, Any] = {
        "headwise_role_sums": SCHEMA,
        "digests": [digest_of_text(text).hex() for text in read],
        "excerpts": [text[:EXCERPT] for text in read],
    }
    trials = {TEXTS: TrialSums.joined(parts)} if parts else {}
    probe = survey.probe_trial(evidence.seed) if shard == 0 else None
    if probe is not None:
        trials[PROBE] = evaluate_trial(model, probe, evidence, 0)
        causal = trials[PROBE].about["causal"]
        about["copying"] = copying_of(model, probe, evidence.seed) if causal else {}
    arrays: Arrays = {}
    for name, sums in trials.items():
        about[name] = sums.about
        arrays |= {f"{name}.{part}": array for part, array in sums.arrays.items()}
        heads = [Head(*head) for head in sums.about["heads"]]
        about["original"] = [str(was or "") for was in originals_of(model, heads) or ()]
    return RoleSums(about, arrays) if read or trials else None


def merge_roles(
    shards: Iterable[RoleSums],
    survey: Survey,
    relations: Relations,
    evidence: Evidence,
    model: str,
) -> Roles:
    """The roles that `find_roles` finds on the texts of all shards.

    Args:
        relations: Only the names count.
        model: The fingerprint of the model.
    """
    parts = list(shards)
    excerpts: dict[bytes, str] = {}
    for part in parts:
        for digest, excerpt in zip(part.about["digests"], part.about["excerpts"], strict=True):
            excerpts.setdefault(bytes.fromhex(digest), excerpt)
    merged = [TrialSums.of_shards(parts, TEXTS)]
    trials = [_text_trial(merged[0], parts, survey.roles(relations), survey.tags, evidence.seed)]
    probe = survey.probe_trial(evidence.seed)
    if probe is not None:
        trials.append(probe)
        merged.append(TrialSums.of_shards(parts, PROBE))
    facts: dict[str, Any] = {}
    for part in reversed(parts):
        facts |= {name: part.about[name] for name in ("copying", "original") if name in part.about}
    nulls = enumerate(merged[0].nulls)
    evaluated = Evaluated.of_scores(
        trials,
        evidence,
        [each.scores() for each in merged],
        [each.contrast() for each in merged],
        ((null, [each.null(index) for each in merged]) for index, null in nulls),
    )
    return judged(
        evaluated,
        evidence,
        texts=list(excerpts.values()),
        notes=notes_on(survey.tokenized(), survey.texts, trials),
        copying={head: tuple(score) for head, score in facts.get("copying", {}).items()},
        original=facts["original"],
        model=model,
    )


def _text_trial(
    merged: TrialSums,
    parts: Sequence[RoleSums],
    roles: Sequence[Role],
    tags: Sequence[str],
    seed: int,
) -> Trial:
    """A trial over all texts that holds their lengths and halves, but not the texts."""
    digests = [bytes.fromhex(digest) for part in parts for digest in part.about["digests"]]
    number = {digest: index for index, digest in enumerate(dict.fromkeys(digests))}
    rows = np.array([number[digests[row]] for row in merged.arrays["row"].tolist()])
    split = Split(rows, halves_of_texts(list(number), seed), list(number))
    ordered = [role for role in roles if role.depends_on_order]
    contrast = Evaluator((), ordered) if merged.contrast() is not None else None
    return Trial(Evaluator((), roles, tags), split, "shuffled", contrast, merged.arrays["sizes"])
