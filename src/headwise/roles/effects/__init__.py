"""Ablation effects: how much behaviours of a model depend on the heads that have a role."""

from headwise.roles.effects._ablation_trial import ablate_each
from headwise.roles.effects._behaviour import Behaviour, BehaviourBatch, behaviour
from headwise.roles.effects._copying import Score, copying_scores
from headwise.roles.effects._effects import WITHOUT, Effect, Effects, Group, group_line
from headwise.roles.effects._language import agreement, name_moving, repetition, translation

__all__ = [
    "WITHOUT",
    "Behaviour",
    "BehaviourBatch",
    "Effect",
    "Effects",
    "Group",
    "Score",
    "ablate_each",
    "agreement",
    "behaviour",
    "copying_scores",
    "group_line",
    "name_moving",
    "repetition",
    "translation",
]
