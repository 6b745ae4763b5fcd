"""The roles of a model's heads on texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from headwise._progress import progress_bar
from headwise.cli._options import Shared
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._relations import load_relations
from headwise.cli.tasks._texts import draw_texts
from headwise.roles import Evidence, Relations, Roles, find_roles

if TYPE_CHECKING:
    from headwise.corpora import AnnotatedText


def find_model_roles(
    name: str,
    texts: list["str | AnnotatedText"],
    shared: Shared,
    nulls: tuple[str, ...] | None,
    relations: Sequence[str] = (),
) -> Roles:
    """Open a model and find the roles of its heads.

    Args:
        nulls: The nulls to test against; None is every null that the model allows.
        relations: The user's own functions and choices, as FILE.py:NAME.
    """
    evidence = Evidence(nulls, seed=shared.seed or 0)
    own = load_relations(relations, name)
    drawn = draw_texts(texts, shared)
    model, tokenizer = open_model(name, shared)
    return find_roles_of(name, model, tokenizer, drawn, evidence, shared.max_tokens, own)


def find_roles_of(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence["str | AnnotatedText"],
    evidence: Evidence,
    max_tokens: int | None,
    relations: Relations | None = None,
) -> Roles:
    """Find the roles of the heads of an open model, behind a progress bar."""
    with progress_bar(f"Finding the roles of the heads of {name}") as on_progress:
        return find_roles(
            model,
            tokenizer,
            texts,
            relations=relations,
            evidence=evidence,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
