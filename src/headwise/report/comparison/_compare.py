"""Two models, studies or tables, compared head by head."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from headwise._progress import Progress, shows_progress
from headwise.corpora import Texts, refuse_path
from headwise.errors import ArgumentError
from headwise.report._study import Study, load_study
from headwise.report.comparison._compare_tables import compare_tables
from headwise.report.comparison._comparison import Comparison
from headwise.report.comparison._measure import measure_both
from headwise.roles import Roles, find_roles
from headwise.tables import HeadTable
from headwise.watch import Request

Side = nn.Module | Study | HeadTable | str | os.PathLike[str]
BothRoles = bool | tuple[Roles, Roles]


@shows_progress("Comparing heads")
def compare(
    before: Side,
    after: Side,
    texts: Texts | None = None,
    *,
    tokenizer: Any = None,
    request: Request | None = None,
    roles: BothRoles = False,
    max_tokens: int | None = None,
    tolerance: float = 1e-5,
    on_progress: Progress | None = None,
) -> Comparison:
    """Compare two models head by head: checkpoints, or before and after training or pruning.

    Each statistic of each head is compared on the same texts, and all of them are tested as one
    family: at most one comparison in twenty names any difference where there is none. Heads of
    pruned and grouped models are matched by their original addresses. Texts beyond the context
    of a model are split, and their pieces count as one text.

    Two tables are taken to be of the same texts if they count the same rows in each. Otherwise
    their texts are independent samples.

    Args:
        before: A model; or a study of `Request(per_text=True)`, the folder of a saved one, or a
            table of one.
        after: The same kind of thing.
        texts: The texts that both models read; only for models.
        tokenizer: Their tokenizer, or a pair of tokenizers. None uses that of a
            `SentenceTransformer`.
        request: The statistics to compare, for models. None is every cheap statistic, the norm of
            each head's output, and the mass on special tokens and on punctuation.
        roles: Whether to find the roles of both models on the texts; or two tables of roles.
            Roles of two studies are compared in any case.
        max_tokens: The most tokens that are read at once.
        tolerance: A difference within a text that is rounding, for values up to 1; beyond, a
            share of the value. Give more for models in half precision, such as 0.01.
        on_progress: Called with what is done and all there is to do: texts of both models, and
            then, with `roles=True`, what `find_roles` reports of each.
    Returns:
        The comparison, without the models.
    Raises:
        ArgumentError: the two are not of one kind, their tokens or statistics differ, sums per
            text are missing, or an argument does not apply.
        HeadError: the heads of the two cannot be matched.
        InputError: the texts hold no token, or a folder holds no study.
        UnsupportedError: a model cannot be watched exactly, or reads more than text.
    """
    if not 0 <= tolerance < 1:
        raise ArgumentError(f"compare: tolerance={tolerance}. Give a share from 0 to below 1.")
    before, after = _loaded(before), _loaded(after)
    if isinstance(before, nn.Module) and isinstance(after, nn.Module):
        tokenizers = tokenizer if isinstance(tokenizer, tuple) else (tokenizer, tokenizer)
        if texts is None:
            raise ArgumentError("compare: texts=None. Give the texts that both models read.")
        refuse_path("compare", "texts", texts)
        texts = texts if isinstance(texts, str) else list(texts)
        stages = _stages(on_progress, 3 if roles is True else 1)
        tables = measure_both((before, after), tokenizers, texts, request, max_tokens, stages[0])
        if roles is True:
            sides = zip((before, after), tokenizers, stages[1:], strict=True)
            roles = _pair(
                [find_roles(model, each, texts, on_progress=stage) for model, each, stage in sides]
            )
    else:
        names = ("texts", "tokenizer", "request", "max_tokens")
        values = (texts, tokenizer, request, max_tokens)
        tables = _tables(before, after, dict(zip(names, values, strict=True)))
        roles = _known_roles(before, after, roles)
    titles = [side.title if isinstance(side, Study) else "" for side in (before, after)]
    return compare_tables(
        *tables, None if isinstance(roles, bool) else roles, tolerance, (titles[0], titles[1])
    )


def _loaded(side: Side) -> nn.Module | Study | HeadTable:
    return load_study(side) if isinstance(side, str | os.PathLike) else side


def _stages(on_progress: Progress | None, n: int) -> list[Progress | None]:
    """A callback for each of several stages, which together are one progress."""
    if on_progress is None:
        return [None] * n

    def stage(number: int) -> Progress:
        return lambda done, total: on_progress(number * total + done, n * total)

    return [stage(number) for number in range(n)]


def _pair(roles: list[Roles]) -> tuple[Roles, Roles]:
    return roles[0], roles[1]


def _tables(
    before: object, after: object, for_models: Mapping[str, object]
) -> tuple[HeadTable, HeadTable]:
    """The tables of two studies, or two tables.

    Raises:
        ArgumentError: they are something else, or an argument for models is given.
    """
    tables = []
    for side in (before, after):
        table = side.table if isinstance(side, Study) else side
        if not isinstance(table, HeadTable):
            kinds = f"{type(before).__name__} and {type(after).__name__}"
            raise ArgumentError(
                f"compare: {kinds} cannot be compared. Give two models, or two studies or tables."
            )
        tables.append(table)
    unused = [name for name, value in for_models.items() if value is not None]
    if unused:
        raise ArgumentError(
            f"compare: {unused[0]}= is for models, and these are tables of texts that were read "
            f"already. Leave it out."
        )
    return tables[0], tables[1]


def _known_roles(before: object, after: object, roles: BothRoles) -> BothRoles:
    """Two tables of roles, those of two studies, or False."""
    if roles is True:
        raise ArgumentError(
            "compare: roles=True is for models, and these are tables. Give (Roles, Roles)."
        )
    of_studies = [side.roles for side in (before, after) if isinstance(side, Study)]
    known = [each for each in of_studies if each is not None]
    return _pair(known) if roles is False and len(known) == 2 else roles
