"""What each head attends to, with evidence against baselines on held-out texts."""

from headwise.roles._find import find_roles
from headwise.roles.cross_attention import (
    AlignedBatch,
    Alignment,
    AlignmentHeads,
    align,
    alignment,
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
    name_moving,
    repetition,
    translation,
)
from headwise.roles.evaluation import check_reads_one_text
from headwise.roles.relations import (
    ChoiceRelation,
    Pairs,
    Relation,
    Relations,
    TokenText,
    own_roles,
)
from headwise.roles.results import (
    Roles,
    by_nearness,
    main_roles,
    rules_line,
    rules_of,
    shape_line,
    shapes_summary,
    shown_outcomes,
    signs_of,
)
from headwise.roles.task import AnswerEffect, TaskHeads, find_heads, load_heads
from headwise.roles.testing import FEWEST_TEXTS, Evidence, step_down

__all__ = [
    "FEWEST_TEXTS",
    "AlignedBatch",
    "Alignment",
    "AlignmentHeads",
    "AnswerEffect",
    "Behaviour",
    "BehaviourBatch",
    "ChoiceRelation",
    "Effect",
    "Effects",
    "Evidence",
    "Group",
    "Pairs",
    "Relation",
    "Relations",
    "Roles",
    "TaskHeads",
    "TokenText",
    "agreement",
    "align",
    "alignment",
    "behaviour",
    "by_nearness",
    "check_reads_one_text",
    "find_alignment_heads",
    "find_heads",
    "find_roles",
    "load_heads",
    "main_roles",
    "name_moving",
    "own_roles",
    "repetition",
    "rules_line",
    "rules_of",
    "shape_line",
    "shapes_summary",
    "shown_outcomes",
    "signs_of",
    "step_down",
    "translation",
]
