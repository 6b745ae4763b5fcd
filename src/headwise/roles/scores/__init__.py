"""Scores of heads on roles: items and roles are indexed once, then any model is scored on them."""

from headwise.roles.scores._eligible import right_share as right_share
from headwise.roles.scores._heuristics import OFFSETS as OFFSETS
from headwise.roles.scores._heuristics import RULES as RULES
from headwise.roles.scores._heuristics import heuristic_names as heuristic_names
from headwise.roles.scores._scores import Evaluator as Evaluator
from headwise.roles.scores._scores import RoleScores as RoleScores
from headwise.roles.scores._scores import check_reads_one_text as check_reads_one_text
from headwise.roles.scores._scores import rows_of_batches as rows_of_batches
from headwise.roles.scores._tag_rules import TagRows as TagRows
from headwise.roles.scores._tag_rules import fit_tag_rules as fit_tag_rules
