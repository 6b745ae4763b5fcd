"""What each head attends to, with evidence against baselines on held-out texts."""

from headwise.roles._alignment import alignment
from headwise.roles._find import find_roles
from headwise.roles._nulls import Evidence
from headwise.roles._table import Roles
from headwise.roles.effects import (
    Behaviour,
    BehaviourBatch,
    Effect,
    Effects,
    Group,
    agreement,
    behaviour,
    repetition,
    translation,
)
from headwise.roles.evaluation import check_reads_one_text
from headwise.roles.task import AnswerEffect, Example, TaskHeads, find_heads, load_heads

__all__ = [
    "AnswerEffect",
    "Behaviour",
    "BehaviourBatch",
    "Effect",
    "Effects",
    "Evidence",
    "Example",
    "Group",
    "Roles",
    "TaskHeads",
    "agreement",
    "alignment",
    "behaviour",
    "check_reads_one_text",
    "find_heads",
    "find_roles",
    "load_heads",
    "repetition",
    "translation",
]
