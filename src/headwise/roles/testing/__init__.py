"""Tests of hypotheses: trials, null models, planted controls, families, adjusted p, splits."""

from headwise.roles.testing._control import POWER, plant
from headwise.roles.testing._evidence import (
    FEWEST_TEXTS,
    LEVEL,
    Family,
    Verdict,
    best_of,
    halves,
    has_role,
    is_promising,
    judge,
    lift,
    why_not,
)
from headwise.roles.testing._families import (
    NULLS,
    RULE,
    Baseline,
    make_family,
    null_head_baseline,
)
from headwise.roles.testing._significance import step_down
from headwise.roles.testing._trials import (
    SEQUENCES,
    Evidence,
    Split,
    Trial,
    digest_of_text,
    distinct_texts,
    halves_of_texts,
    probe_trial,
    text_trial,
)

__all__ = [
    "FEWEST_TEXTS",
    "LEVEL",
    "NULLS",
    "POWER",
    "RULE",
    "SEQUENCES",
    "Baseline",
    "Evidence",
    "Family",
    "Split",
    "Trial",
    "Verdict",
    "best_of",
    "digest_of_text",
    "distinct_texts",
    "halves",
    "halves_of_texts",
    "has_role",
    "is_promising",
    "judge",
    "lift",
    "make_family",
    "null_head_baseline",
    "plant",
    "probe_trial",
    "step_down",
    "text_trial",
    "why_not",
]
