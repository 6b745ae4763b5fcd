"""What each head attends to, with evidence against baselines on held-out texts."""

from typing import Any

from headwise._renamed import warn_renamed as _warn_renamed
from headwise.roles._behaviors import Behavior as Behavior
from headwise.roles._behaviors import BehaviorBatch as BehaviorBatch
from headwise.roles._behaviors import agreement as agreement
from headwise.roles._behaviors import behavior as behavior
from headwise.roles._behaviors import induction as induction
from headwise.roles._behaviors import name_moving as name_moving
from headwise.roles._behaviors import translation as translation
from headwise.roles._effects import WITHOUT as WITHOUT
from headwise.roles._effects import Effect as Effect
from headwise.roles._effects import Effects as Effects
from headwise.roles._effects import Group as Group
from headwise.roles._effects import group_line as group_line
from headwise.roles._find_roles import find_roles as find_roles
from headwise.roles._summaries import by_nearness as by_nearness
from headwise.roles._summaries import main_roles as main_roles
from headwise.roles._summaries import rules_line as rules_line
from headwise.roles._summaries import rules_of as rules_of
from headwise.roles._summaries import shape_line as shape_line
from headwise.roles._summaries import shapes_summary as shapes_summary
from headwise.roles._summaries import shown_outcomes as shown_outcomes
from headwise.roles._summaries import signs_of as signs_of
from headwise.roles._table import Roles as Roles
from headwise.roles.evidence import FEWEST_TEXTS as FEWEST_TEXTS
from headwise.roles.evidence import Evidence as Evidence
from headwise.roles.evidence import step_down as step_down
from headwise.roles.examples import AlignedBatch as AlignedBatch
from headwise.roles.examples import Alignment as Alignment
from headwise.roles.examples import FoundHeads as FoundHeads
from headwise.roles.examples import align as align
from headwise.roles.examples import find_alignment_heads as find_alignment_heads
from headwise.roles.examples import find_heads as find_heads
from headwise.roles.examples import load_heads as load_heads
from headwise.roles.examples import task_examples as task_examples
from headwise.roles.relations import OFFSETS as OFFSETS
from headwise.roles.relations import PREFIX_MATCHING as PREFIX_MATCHING
from headwise.roles.relations import SAME as SAME
from headwise.roles.relations import ChoiceRelation as ChoiceRelation
from headwise.roles.relations import Pairs as Pairs
from headwise.roles.relations import Relation as Relation
from headwise.roles.relations import Relations as Relations
from headwise.roles.relations import Role as Role
from headwise.roles.relations import TokenText as TokenText
from headwise.roles.scores import check_reads_one_text as check_reads_one_text

_EARLIER = {
    "Behaviour": "Behavior",
    "BehaviourBatch": "BehaviorBatch",
    "behaviour": "behavior",
    "repetition": "induction",
}


def __getattr__(name: str) -> Any:
    if name not in _EARLIER:
        raise AttributeError(f"module 'headwise.roles' has no attribute {name!r}")
    _warn_renamed(f"headwise.roles.{name}", _EARLIER[name])
    return globals()[_EARLIER[name]]
