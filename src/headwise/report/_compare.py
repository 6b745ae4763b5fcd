"""Two models, studies or tables, compared head by head."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headwise._evaluation import in_evaluation
from headwise._progress import Progress, shows_progress
from headwise.corpora import Texts, refuse_path
from headwise.errors import ArgumentError
from headwise.models import check_model
from headwise.models.texts import (
    Piece,
    as_pieces,
    check_reads_text,
    context_of,
    reads_two_texts,
    token_classes,
    tokenizer_of,
)
from headwise.report._compare_tables import compare_tables
from headwise.report._comparison import Comparison
from headwise.report._passes import Pair, by_whole_text, pairs_for
from headwise.report._study import Study, load_study
from headwise.roles import Roles, find_roles
from headwise.tables import HeadTable
from headwise.watch import DEFAULT, Request, watch_pieces

Side = nn.Module | Study | HeadTable | str | os.PathLike[str]


@shows_progress("Comparing heads")
def compare(
    before: Side,
    after: Side,
    texts: Texts | None = None,
    *,
    tokenizer: Any = None,
    request: Request | None = None,
    roles: bool | tuple[Roles, Roles] = False,
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
    before, after = (
        load_study(side) if isinstance(side, str | os.PathLike) else side
        for side in (before, after)
    )
    if isinstance(before, nn.Module) and isinstance(after, nn.Module):
        if texts is None:
            raise ArgumentError("compare: texts=None. Give the texts that both models read.")
        refuse_path("compare", "texts", texts)
        texts = texts if isinstance(texts, str) else list(texts)
        tokenizers = tokenizer if isinstance(tokenizer, tuple) else (tokenizer, tokenizer)
        stages = _stages(on_progress, 3 if roles is True else 1)
        tables = _measure_both([before, after], tokenizers, texts, request, max_tokens, stages[0])
        known = [
            find_roles(model, texts, tokenizer=each, on_progress=stage)
            for model, each, stage in zip((before, after), tokenizers, stages[1:], strict=False)
        ]
    else:
        tables = [_table_of(side, before, after) for side in (before, after)]
        values = (texts, tokenizer, request, max_tokens)
        names = ("texts", "tokenizer", "request", "max_tokens")
        unused = [name for name, x in zip(names, values, strict=True) if x is not None]
        if unused:
            raise ArgumentError(
                f"compare: {unused[0]}= is for models, and these are tables of texts that were "
                f"read already. Leave it out."
            )
        if roles is True:
            raise ArgumentError(
                "compare: roles=True is for models, and these are tables. Give (Roles, Roles)."
            )
        of_studies = [side.roles for side in (before, after) if isinstance(side, Study)]
        known = [each for each in of_studies if each is not None]
    both = None if isinstance(roles, bool) else roles
    if both is None and len(known) == 2:
        both = known[0], known[1]
    titles = [side.title if isinstance(side, Study) else "" for side in (before, after)]
    return compare_tables(tables[0], tables[1], both, tolerance, (titles[0], titles[1]))


def _stages(on_progress: Progress | None, n: int) -> list[Progress | None]:
    """A callback for each of several stages, which together are one progress."""
    if on_progress is None:
        return [None] * n

    def stage(number: int) -> Progress:
        return lambda done, total: on_progress(number * total + done, n * total)

    return [stage(number) for number in range(n)]


def _table_of(side: object, before: object, after: object) -> HeadTable:
    """The table of a study, or the table itself.

    Raises:
        ArgumentError: it is something else.
    """
    table = side.table if isinstance(side, Study) else side
    if not isinstance(table, HeadTable):
        kinds = f"{type(before).__name__} and {type(after).__name__}"
        raise ArgumentError(
            f"compare: {kinds} cannot be compared. Give two models, or two studies or tables."
        )
    return table


def _measure_both(
    models: Sequence[Any],
    tokenizers: Sequence[Any],
    texts: Any,
    request: Request | None,
    max_tokens: int | None,
    on_progress: Progress | None,
) -> list[HeadTable]:
    """The tables of two models on the same texts.

    Raises:
        ArgumentError: the models read text in different ways, or into different tokens.
    """
    inner = [check_model("compare", model) for model in models]
    for model in inner:
        check_reads_text("compare", model)
    two = [reads_two_texts(model) for model in inner]
    if two[0] != two[1]:
        names = [type(model).__name__ for model in inner]
        raise ArgumentError(
            f"compare: only one of {names[0]} and {names[1]} reads two texts. Compare models of "
            f"one kind."
        )
    readers = [
        tokenizer_of(model, tokenizer, "compare")
        for model, tokenizer in zip(models, tokenizers, strict=True)
    ]
    owners, pieces = _pieces_of_both(
        inner, readers, pairs_for("compare", inner[0], texts), max_tokens
    )
    if request is None:  # every statistic that a change can show in
        classes = {name: ids for name, (ids, _) in token_classes(readers[0]).items()}
        request = Request((*DEFAULT, "output_norm"), classes=classes)
    request = replace(request, per_text=True)
    tables = []
    progress = _stages(on_progress, 2)  # the models take equally long
    for model, own, stage in zip(inner, pieces, progress, strict=True):
        with in_evaluation(model):
            table = watch_pieces("compare", model, own, request, stage)
        tables.append(by_whole_text(table, owners))
    return tables


def _pieces_of_both(
    models: Sequence[nn.Module],
    tokenizers: Sequence[Any],
    pairs: Sequence[Pair],
    max_tokens: int | None,
) -> tuple[list[int], list[list[Piece]]]:
    """For each piece its text, and the pieces of both models; their tokens are the same."""
    both = list(zip(tokenizers, models, strict=True))
    limits = [context_of(model, tokenizer) for tokenizer, model in both]
    limit = min(limits if max_tokens is None else [max_tokens, *limits])
    owners: list[int] = []
    pieces: list[list[Piece]] = [[], []]
    for number, pair in enumerate(pairs):
        sides = [as_pieces(tokenizer, [pair], model, limit) for tokenizer, model in both]
        tokens = [[list(piece.source) for piece in side] for side in sides]
        if tokens[0] != tokens[1]:
            lengths = [sum(map(len, side)) for side in tokens]
            found = f"{lengths[0]} tokens before and {lengths[1]} after"
            raise ArgumentError(
                f"compare: the tokenizers differ: text {number} ({pair[0][:40]!r}) has "
                f"{found if lengths[0] != lengths[1] else 'other tokens after than before'}. "
                f"Compare models that read the same tokens."
            )
        owners += [number] * len(sides[0])
        for side, new in zip(pieces, sides, strict=True):
            side += new
    return owners, pieces
