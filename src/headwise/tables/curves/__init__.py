"""Pruning curves: the loss as heads are removed in an order, its elbow, and their picture."""

from headwise.tables.curves._curves import Curves, Elbow

__all__ = ["Curves", "Elbow"]
