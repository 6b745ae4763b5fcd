"""Recovery: train a pruned model for a few steps, with the full model as its teacher."""

from headwise.recovery._recover import recover, recovering

__all__ = ["recover", "recovering"]
