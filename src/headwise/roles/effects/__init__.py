"""Does it matter? What behaviours of a model lose without the heads that have a role."""

from headwise.roles.effects._ablation_trial import Trial, groups_of, try_without
from headwise.roles.effects._behaviour import Behaviour, Question, behaviour
from headwise.roles.effects._effects import WITHOUT, Effect, Effects, Group, group_line
from headwise.roles.effects._language import agreement, repetition, translation

__all__ = [
    "WITHOUT",
    "Behaviour",
    "Effect",
    "Effects",
    "Group",
    "Question",
    "Trial",
    "agreement",
    "behaviour",
    "group_line",
    "groups_of",
    "repetition",
    "translation",
    "try_without",
]
