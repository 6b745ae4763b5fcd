"""What each head does, with evidence that would stand up."""

from headwise.roles._alignment import alignment
from headwise.roles._find import find_roles
from headwise.roles._nulls import Evidence
from headwise.roles._table import Roles
from headwise.roles.effects import (
    Behaviour,
    Effect,
    Effects,
    Group,
    Question,
    agreement,
    behaviour,
    repetition,
    translation,
)
from headwise.roles.evaluation import check_reads_one_text

__all__ = [
    "Behaviour",
    "Effect",
    "Effects",
    "Evidence",
    "Group",
    "Question",
    "Roles",
    "agreement",
    "alignment",
    "behaviour",
    "check_reads_one_text",
    "find_roles",
    "repetition",
    "translation",
]
