"""Classes whose objects turn a batch of texts into a row, as engines for large corpora call them.

Ray, Spark and datasets spread batches over workers, hold devices and restart what dies. What is
ours is small: a batch of texts gives a table of sums, and tables add up.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise._methods import METHODS
from headwise.checkpoints import load, load_tokenizer
from headwise.corpora import list_texts
from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.models import check_model
from headwise.models.texts import check_reads_text, iter_pieces, reads_two_texts, tokenizer_of
from headwise.scoring import Inputs, Loss, importance
from headwise.tables import HeadTable, Scores
from headwise.watch import Request, watch_pieces

# Parts of a request that are given or read pass by pass.
_OF_A_PASS = ("pairs", "spans", "received", "per_query", "maps")


class _Batches:
    """Opens a model once, and turns each batch of texts into a row."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        column: str = "text",
        max_tokens: int | None = None,
        on_error: str = "raise",
        **opening: Any,
    ) -> None:
        self._name = type(self).__name__
        if on_error not in ("raise", "skip"):
            raise ArgumentError(f"{self._name}: on_error={on_error!r}. Give 'raise' or 'skip'.")
        if isinstance(model, str | Path):
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            model = load(model, **opening)
        elif opening:
            raise ArgumentError(
                f"{self._name}: {', '.join(opening)} is for a model that is opened here. Leave it "
                f"out with a {type(model).__name__}."
            )
        self._tokenizer = tokenizer_of(model, tokenizer, self._name)
        self._model = check_model(self._name, model)
        check_reads_text(self._name, self._model)
        self._column, self._max_tokens, self._skips = column, max_tokens, on_error == "skip"

    def __call__(self, batch: Any) -> dict[str, list[Any]]:
        """Measure a batch of texts.

        Args:
            batch: Columns by name, or a frame. The columns `path` and `row`, if there are any,
                name a text in errors. Missing texts and those of white space are left out.
        Returns:
            One row: `table`, the bytes of a table, which are empty if no text has a token, and
            `skipped`, the number of texts that were refused.
        Raises:
            ArgumentError: the batch has no such column.
            InputError: a text is refused, and `on_error` is "raise".
        """
        columns = [*batch]
        if self._column not in columns:
            raise ArgumentError(
                f"{self._name}: there is no column {self._column!r}, only "
                f"{', '.join(map(str, columns))}. Give column=."
            )
        # A missing text of a frame is NaN, which differs from itself.
        rows = {i: cell for i, cell in enumerate(batch[self._column]) if _is_text(cell)}
        try:
            tables, skipped = [self._measure([*rows.values()])] if rows else [], 0
        except UnsupportedError:  # the model's fault, not a text's
            raise
        except Exception as error:
            tables, skipped = self._measure_each(batch, rows)
            if not skipped:  # they fail together alone, as where memory is short
                raise error
        measured = [table for table in tables if table is not None]
        table = reduce(add, measured).to_bytes() if measured else b""
        return {"table": [table], "skipped": [skipped]}

    def _measure_each(self, batch: Any, rows: dict[int, Any]) -> tuple[list[Any], int]:
        """The tables of single texts, and how many texts are refused."""
        tables = []
        for index, text in rows.items():
            try:
                tables.append(self._measure([text]))
            except Exception as error:
                if self._skips:
                    continue
                path = batch["path"][index] if "path" in [*batch] else "the batch"
                row = batch["row"][index] if "row" in [*batch] else index
                raise InputError(
                    f"{self._name}: row {row} of {path}, {str(text)[:40]!r}, cannot be measured "
                    f"({first_line(error)}). Correct it, or give on_error='skip'."
                ) from error
        return tables, len(rows) - len(tables)

    def _measure(self, texts: Sequence[Any]) -> Any:
        """The result on some texts; None if none of them has a token."""
        raise NotImplementedError


class BatchObserver(_Batches):
    """Computes the statistics of every head on batches of texts, one row of bytes for each batch.

    Engines for large corpora make one object for each worker and call it on batches: Ray Data by
    `map_batches`, datasets by `map(batched=True)`, Spark in `mapInPandas`. `HeadTable.sum` adds the
    rows up, in any order.

    Args:
        model: What `load` opens, or a model in memory.
        request: The statistics; None is `Request()`.
        tokenizer: The model's tokenizer. None is the one beside it.
        column: The column that holds the texts.
        max_tokens: The most tokens in one text; a longer one becomes several. None is the model's
            context.
        on_error: "raise", or "skip" for counting a text that the model refuses, in
            `HeadTable.skipped`.
        opening: Options of `load`, such as `device=` and `dtype=`.
    Raises:
        ArgumentError: there is no tokenizer, or the request has parts of single passes.
        InputError: the model cannot be opened.
        UnsupportedError: the model reads no text.
    """

    def __init__(
        self, model: str | Path | nn.Module, request: Request | None = None, **options: Any
    ) -> None:
        self._request = Request() if request is None else request
        for part in _OF_A_PASS:
            if value := getattr(self._request, part):
                raise ArgumentError(
                    f"BatchObserver: the request has {part}={value!r:.60}, which is given or read "
                    f"pass by pass. Use relations, or watch the model with headwise.observe."
                )
        super().__init__(model, **options)

    def _measure(self, texts: Sequence[Any]) -> HeadTable | None:
        model, two = self._model, reads_two_texts(self._model)
        pairs = [(text, text if two else None) for text in list_texts(self._name, texts)]
        pieces = [*iter_pieces(self._tokenizer, pairs, model, self._max_tokens)]
        if not pieces:
            return None
        with in_evaluation(model):
            return watch_pieces(self._name, model, pieces, self._request, None)


class BatchImportance(_Batches):
    """Scores the importance of every head on batches of texts, one row of bytes for each batch.

    Used as `BatchObserver` is; `Scores.sum` adds the rows up.

    Args:
        model: What `load` opens, or a model in memory.
        method: A method of `importance` that scores each text by itself: half-gate, gradient,
            curvature or zero-ablation.
        loss: The loss, as `importance` takes it.
        options: `tokenizer`, `column`, `max_tokens`, `on_error` and options of `load`, as in
            `BatchObserver`.
    Raises:
        ArgumentError: the method needs all texts, or there is no tokenizer.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        method: str = "half-gate",
        *,
        loss: Loss | str | Callable[[Any, Inputs], Tensor] | None = None,
        **options: Any,
    ) -> None:
        by_text = [name for name, about in METHODS.items() if about.by_text]
        if method not in by_text:
            raise ArgumentError(
                f"BatchImportance: method={method!r} needs all texts, and a batch has only its "
                f"own. Choose from {', '.join(by_text)}."
            )
        super().__init__(model, **options)
        self._method, self._loss = method, loss

    def _measure(self, texts: Sequence[Any]) -> Scores | None:
        pairs = [(text, None) for text in list_texts(self._name, texts)]
        if not any(iter_pieces(self._tokenizer, pairs, self._model, self._max_tokens)):
            return None
        return importance(
            self._model,
            texts,
            self._method,
            loss=self._loss,
            tokenizer=self._tokenizer,
            max_tokens=self._max_tokens,
        )


def _is_text(cell: Any) -> bool:
    """Whether a cell holds something other than white space; a missing one of a frame is NaN."""
    return cell is not None and cell == cell and bool(str(cell).strip())
