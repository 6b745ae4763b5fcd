"""Softmax attention that a module implements by hand, followed from its logits to its heads."""

from headwise.models.capture.softmax._tracker import SoftmaxCall, SoftmaxTracker

__all__ = ["SoftmaxCall", "SoftmaxTracker"]
