"""The commands, a file each. What a command needs to do its work is imported when it runs."""

from headwise.cli.commands._cache import cache
from headwise.cli.commands._compare import compare
from headwise.cli.commands._corpus import corpus, merge
from headwise.cli.commands._count import count
from headwise.cli.commands._explain import explain
from headwise.cli.commands._group import group
from headwise.cli.commands._heads import heads
from headwise.cli.commands._importance import importance
from headwise.cli.commands._observe import observe
from headwise.cli.commands._prune import prune
from headwise.cli.commands._report import report
from headwise.cli.commands._roles import roles
from headwise.cli.commands._single_text import look
from headwise.cli.commands._train import train

__all__ = [
    "cache",
    "compare",
    "corpus",
    "count",
    "explain",
    "group",
    "heads",
    "importance",
    "look",
    "merge",
    "observe",
    "prune",
    "report",
    "roles",
    "train",
]
