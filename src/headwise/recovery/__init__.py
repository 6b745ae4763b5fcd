"""Recovery: train a pruned model for a few steps, with the full model as its teacher."""

from headwise.recovery._recover import recover as recover
from headwise.recovery._recover import recovering as recovering
