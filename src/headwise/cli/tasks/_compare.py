"""The comparison of two models on the texts of a file, or of two saved tables or studies."""

from dataclasses import replace
from pathlib import Path

from headwise.cli._options import Shared
from headwise.cli._print import progress_bar
from headwise.cli.tasks._models import open_model, title_of
from headwise.cli.tasks._texts import read_drawn_texts
from headwise.report import Comparison, Study, compare, load_study
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
    return replace(comparison, titles=(title_of(before), title_of(after)))


def compare_files(before: Path, after: Path) -> Comparison:
    """Compare two studies that `headwise report --save` wrote, or tables of observe --per-text."""
    comparison = compare(_results_in(before), _results_in(after))
    return replace(comparison, titles=(before.name, after.name))


def _results_in(path: Path) -> Study | HeadTable:
    return load_study(path) if path.is_dir() else HeadTable.load(path)
