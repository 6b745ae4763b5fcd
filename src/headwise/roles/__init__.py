"""What each head attends to, with evidence against baselines on held-out texts."""

from headwise.roles._alignment import alignment
from headwise.roles._find import find_roles
from headwise.roles._nulls import Evidence
from headwise.roles._shapes import shape_line, shapes_summary
from headwise.roles._table import Roles
from headwise.roles.cross_attention import (
    AlignedBatch,
    Alignment,
    AlignmentHeads,
    align,
    find_alignment_heads,
)
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
from headwise.roles.relations import Pairs, TokenText
from headwise.roles.task import AnswerEffect, TaskHeads, find_heads, load_heads

__all__ = [
    "AlignedBatch",
    "Alignment",
    "AlignmentHeads",
    "AnswerEffect",
    "Behaviour",
    "BehaviourBatch",
    "Effect",
    "Effects",
    "Evidence",
    "Group",
    "Pairs",
    "Roles",
    "TaskHeads",
    "TokenText",
    "agreement",
    "align",
    "alignment",
    "behaviour",
    "check_reads_one_text",
    "find_alignment_heads",
    "find_heads",
    "find_roles",
    "load_heads",
    "repetition",
    "shape_line",
    "shapes_summary",
    "translation",
]
