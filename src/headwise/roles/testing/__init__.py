"""Tests of hypotheses: trials, null models, planted controls, families, adjusted p, splits."""

from headwise.roles.testing._control import Control, plant
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
)
from headwise.roles.testing._families import NULLS
from headwise.roles.testing._nulls import Evidence
from headwise.roles.testing._significance import step_down
from headwise.roles.testing._splits import Evaluated
from headwise.roles.testing._trials import (
    SEQUENCES,
    Trial,
    distinct_texts,
    probe_trial,
    text_trial,
)

__all__ = [
    "FEWEST_TEXTS",
    "LEVEL",
    "NULLS",
    "SEQUENCES",
    "Control",
    "Evaluated",
    "Evidence",
    "Family",
    "Trial",
    "Verdict",
    "best_of",
    "distinct_texts",
    "halves",
    "has_role",
    "is_promising",
    "judge",
    "lift",
    "plant",
    "probe_trial",
    "step_down",
    "text_trial",
]
