"""What each head attends to, with evidence against baselines on held-out texts."""

from headwise.roles._alignment import alignment
from headwise.roles._find import find_roles
from headwise.roles._nulls import Evidence
from headwise.roles._shapes import shape_line, shapes_summary
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

__all__ = [
    "Behaviour",
    "BehaviourBatch",
    "Effect",
    "Effects",
    "Evidence",
    "Group",
    "Roles",
    "agreement",
    "alignment",
    "behaviour",
    "check_reads_one_text",
    "find_roles",
    "repetition",
    "shape_line",
    "shapes_summary",
    "translation",
]
