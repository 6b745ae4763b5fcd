"""Does it matter? What behaviours of a model lose without the heads that have a role."""

from headwise.roles.matter._behaviour import Behaviour, Question, behaviour
from headwise.roles.matter._effects import WITHOUT, Effect, Effects, Group, group_line
from headwise.roles.matter._language import agreement, repetition, translation
from headwise.roles.matter._trial import Trial, groups_of, try_without

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
