"""The scores of a model's heads on the texts of a file."""

from pathlib import Path
from typing import Any

from headwise.cli._options import Shared
from headwise.cli._print import print_note, progress_bar
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._texts import draw_texts, note_split_texts, read_text_file, sentences_of
from headwise.corpora import read_pairs
from headwise.scoring import RESUMABLE, importance
from headwise.tables import Scores


def score_model(
    name: str, path: Path, shared: Shared, *, pairs: bool, out: Path | None, **settings: Any
) -> Scores:
    """Score the heads of a model on the texts of a file, or on the sentences of its pairs.

    Args:
        out: Where the scores will be written; the partial results of an ablation are kept beside
            it.
        settings: Further arguments of `importance`.
    """
    read = sentences_of(read_pairs(path)) if pairs else read_text_file(path, shared)
    texts = draw_texts(read, shared)
    model, tokenizer = open_model(name, shared)
    note_split_texts(texts, model, tokenizer, shared)
    partial = None
    if out is not None and settings["method"] in RESUMABLE:
        partial = out.with_name(f"{out.name}.part")
        if partial.exists():
            print_note(f"Resuming from {partial}")
    settings |= {"tokenizer": tokenizer, "max_tokens": shared.max_tokens, "resume": partial}
    try:
        with progress_bar(f"Scoring the heads of {name}") as on_progress:
            return importance(model, texts, on_progress=on_progress, **settings)
    except KeyboardInterrupt:
        if partial is not None and partial.exists():
            print_note(f"Run the same command again to resume from {partial}.")
        raise
