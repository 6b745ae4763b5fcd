"""Heads of a task: those that pick the right stretch of a text, and files that hold them."""

from headwise.roles.task._answers import AnswerEffect
from headwise.roles.task._find import find_heads
from headwise.roles.task._head_file import load_heads
from headwise.roles.task._table import TaskHeads

__all__ = ["AnswerEffect", "TaskHeads", "find_heads", "load_heads"]
