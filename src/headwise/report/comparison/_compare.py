"""Two models, studies or tables, compared head by head."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress, shows_progress
from headwise.corpora import Texts, list_pairs, list_texts, refuse_path
from headwise.errors import ArgumentError
from headwise.models import check_model, without_compiler
from headwise.models.texts import (
    Piece,
    as_pieces,
    check_reads_text,
    context_of,
    reads_two_texts,
    token_classes,
    tokenizer_of,
)
from headwise.report._passes import by_whole_text, watch_pieces
from headwise.report._study import Study, load_study
from headwise.report.comparison._compare_tables import compare_tables
from headwise.report.comparison._comparison import Comparison
from headwise.roles import Roles, find_roles
from headwise.tables import HeadTable
from headwise.watch import DEFAULT, Request

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
        tables = _measure_both((before, after), tokenizers, texts, request, max_tokens, stages[0])
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


def _measure_both(
    models: tuple[Any, Any],
    tokenizers: tuple[Any, Any],
    texts: Any,
    request: Request | None,
    max_tokens: int | None,
    on_progress: Progress | None,
) -> tuple[HeadTable, HeadTable]:
    """The tables of two models on the same texts.

    Raises:
        ArgumentError: the models read text in different ways, or into different tokens.
    """
    inner = [check_model("compare", model) for model in models]
    for model in inner:
        check_reads_text("compare", model)
    owners, pieces = _pieces_of_both(models, inner, tokenizers, texts, max_tokens)
    request = _request_for(_tokenizers(models, tokenizers)[0], request)
    tables = []
    progress = _stages(on_progress, 2)  # the models take equally long
    for number, model in enumerate(inner):
        with in_evaluation(model):
            table = watch_pieces(model, pieces[number], request, progress[number])
        tables.append(by_whole_text(table, owners))
    return tables[0], tables[1]


def _pieces_of_both(
    models: tuple[Any, Any],
    inner: Sequence[nn.Module],
    tokenizers: tuple[Any, Any],
    texts: Any,
    max_tokens: int | None,
) -> tuple[list[int], list[list[Piece]]]:
    """For each piece its text, and the pieces of both models; their tokens are the same."""
    pairs = _pairs_for(inner, texts)
    resolved = _tokenizers(models, tokenizers)
    limits = [context_of(*side) for side in zip(inner, resolved, strict=True)]
    limit = min(limits if max_tokens is None else [max_tokens, *limits])
    owners: list[int] = []
    pieces: list[list[Piece]] = [[], []]
    for number, pair in enumerate(pairs):
        sides = [
            as_pieces(tokenizer, [pair], model, limit)
            for model, tokenizer in zip(inner, resolved, strict=True)
        ]
        tokens = [[list(piece.source) for piece in side] for side in sides]
        if tokens[0] != tokens[1]:
            raise ArgumentError(
                f"compare: the tokenizers differ: text {number} ({pair[0][:40]!r}) has "
                f"{sum(map(len, tokens[0]))} tokens before and {sum(map(len, tokens[1]))} after, "
                f"or different ones. Compare models that read the same tokens."
            )
        owners += [number] * len(sides[0])
        for side, new in zip(pieces, sides, strict=True):
            side += new
    return owners, pieces


def _pairs_for(models: Sequence[nn.Module], texts: Any) -> list[tuple[str, str | None]]:
    two = [reads_two_texts(model) for model in models]
    if two[0] != two[1]:
        names = [type(model).__name__ for model in models]
        raise ArgumentError(
            f"compare: only one of {names[0]} and {names[1]} reads two texts. Compare models of "
            f"one kind."
        )
    if two[0]:
        return [*list_pairs("compare", texts)]
    return [(text, None) for text in list_texts("compare", texts)]


def _tokenizers(models: tuple[Any, Any], tokenizers: tuple[Any, Any]) -> list[Any]:
    sides = zip(models, tokenizers, strict=True)
    return [
        tokenizer_of(without_compiler(model), tokenizer, "compare") for model, tokenizer in sides
    ]


def _request_for(tokenizer: Any, request: Request | None) -> Request:
    """The request with the sums of each text; None is every statistic that a change can show in."""
    if request is not None:
        return replace(request, per_text=True)
    classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
    return Request((*DEFAULT, "output_norm"), classes=classes, per_text=True)
