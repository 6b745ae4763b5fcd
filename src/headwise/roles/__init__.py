"""What each head attends to, with evidence against baselines on held-out texts."""

from headwise.roles._align import Alignment, align
from headwise.roles._alignment_heads import AlignedBatch, AlignmentHeads, find_alignment_heads
from headwise.roles._behaviours import (
    Behaviour,
    BehaviourBatch,
    agreement,
    behaviour,
    name_moving,
    repetition,
    translation,
)
from headwise.roles._effects import WITHOUT, Effect, Effects, Group, group_line
from headwise.roles._find_roles import find_roles
from headwise.roles._hypotheses import FEWEST_TEXTS
from headwise.roles._nulls import Evidence
from headwise.roles._significance import step_down
from headwise.roles._summaries import (
    by_nearness,
    main_roles,
    rules_line,
    rules_of,
    shape_line,
    shapes_summary,
    shown_outcomes,
    signs_of,
)
from headwise.roles._table import Roles
from headwise.roles._task_examples import task_examples
from headwise.roles._task_heads import TaskHeads, find_heads, load_heads
from headwise.roles._task_scores import AnswerEffect
from headwise.roles.relations import (
    ChoiceRelation,
    Pairs,
    Relation,
    Relations,
    TokenText,
)
from headwise.roles.scores import check_reads_one_text

__all__ = [
    "FEWEST_TEXTS",
    "WITHOUT",
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
    "behaviour",
    "by_nearness",
    "check_reads_one_text",
    "find_alignment_heads",
    "find_heads",
    "find_roles",
    "group_line",
    "load_heads",
    "main_roles",
    "name_moving",
    "repetition",
    "rules_line",
    "rules_of",
    "shape_line",
    "shapes_summary",
    "shown_outcomes",
    "signs_of",
    "step_down",
    "task_examples",
    "translation",
]
