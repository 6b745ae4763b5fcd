"""The comparison of two models on the texts of a file, or of two saved tables."""

from dataclasses import replace
from pathlib import Path

from headwise._progress import progress_bar
from headwise.cli._options import Shared
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._texts import read_drawn_texts
from headwise.report import Comparison, compare, compare_tables
from headwise.tables import HeadTable


def compare_models(
    before: str, after: str, text: Path, shared: Shared, *, roles: bool
) -> Comparison:
    """Compare two models on the texts of a file.

    Args:
        roles: Whether to find the roles of both models as well.
    """
    texts = read_drawn_texts(text, shared)
    opened = [open_model(name, shared, text_for="compare") for name in (before, after)]
    with progress_bar(f"Comparing {before} and {after}") as on_progress:
        comparison = compare(
            opened[0][0],
            opened[1][0],
            texts,
            tokenizer=(opened[0][1], opened[1][1]),
            roles=roles,
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
        )
    return replace(comparison, titles=(before, after))


def compare_files(before: Path, after: Path) -> Comparison:
    """Compare two tables that `headwise observe --per-text` wrote."""
    tables = HeadTable.load(before), HeadTable.load(after)
    return compare_tables(*tables, titles=(before.name, after.name))
