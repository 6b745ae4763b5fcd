"""The heads of a model that pick the right stretch of examples."""

from pathlib import Path

from headwise.cli._options import Shared
from headwise.cli._print import progress_bar
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._texts import draw_texts
from headwise.corpora import read_examples
from headwise.roles import Evidence, TaskHeads, find_heads


def find_model_heads(
    name: str,
    examples: Path,
    shared: Shared,
    nulls: tuple[str, ...] | None,
    most: int | None,
) -> TaskHeads:
    """Open a model and find its heads, behind a progress bar.

    Args:
        nulls: The nulls to test against; None is every null that the model allows.
    """
    evidence = Evidence(nulls, seed=shared.seed or 0)
    drawn = draw_texts(read_examples(examples), shared)
    model, tokenizer = open_model(name, shared)
    with progress_bar(f"Finding the heads of {name}") as on_progress:
        return find_heads(
            model,
            drawn,
            tokenizer=tokenizer,
            evidence=evidence,
            most=most,
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
        )
