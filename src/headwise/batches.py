"""Large corpora: a batch of texts becomes one row of bytes, and rows add up in any order."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from glob import glob
from importlib.util import find_spec
from itertools import chain, count, islice, repeat
from json import loads
from operator import add
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import dataset
from torch import Tensor, nn
from tqdm.auto import tqdm

from headwise._choices import METHODS
from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise._extras import require
from headwise.checkpoints import load, load_tokenizer
from headwise.corpora import list_texts
from headwise.errors import ArgumentError, InputError, UnsupportedError
from headwise.models import check_model
from headwise.models.texts import check_reads_text, iter_pieces, reads_two_texts, tokenizer_of
from headwise.scoring import Inputs, Loss, importance
from headwise.tables import HeadTable, Scores
from headwise.watch import Request, watch_pieces

__all__ = ["BatchImportance", "BatchObserver", "observe_files", "read_rows"]

_ENDINGS = (".parquet", ".csv", ".jsonl", ".txt")
_ROWS = 256  # in a batch of texts of files


class _Batches:
    """Opens a model once, and turns each batch of texts into a row."""

    _name = ""  # in errors; Ray makes a class of its own of the one that it is given

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
        if isinstance(model, str | Path):
            tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            model = load(model, **opening)
        elif opening:
            problem = f"{', '.join(opening)} for a model in memory"
            raise ArgumentError(f"{self._name}: {problem}. Leave it out, or give a folder.")
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
            InputError: a text is refused, and `on_error` is not "skip".
        """
        names = [*map(str, batch)]
        if self._column not in names:
            problem = f"there is no column {self._column!r}, only {', '.join(names)}"
            raise ArgumentError(f"{self._name}: {problem}. Give column=.")
        paths = batch["path"] if "path" in names else repeat("the batch")
        rows = batch["row"] if "row" in names else count()
        filled = [  # a missing text of a frame is NaN, which differs from itself
            (text, path, row)
            for text, path, row in zip(batch[self._column], paths, rows, strict=False)
            if text is not None and text == text and str(text).strip()
        ]
        together, tables, skipped = [filled] if filled else [], [], 0
        for group in together:
            try:
                tables.append(self._measure([text for text, *_ in group]))
            except UnsupportedError:  # the model's fault, not a text's
                raise
            except Exception as error:
                if len(group) > 1:  # one of them is refused, or memory is short
                    together += [[place] for place in group]
                elif self._skips:
                    skipped += 1
                else:
                    [(text, path, row)] = group
                    raise InputError(
                        f"{self._name}: row {row} of {path}, {str(text)[:40]!r}, cannot be "
                        f"measured ({first_line(error)}). Correct it, or give on_error='skip'."
                    ) from error
        measured = [table for table in tables if table is not None]
        table = reduce(add, measured).to_bytes() if measured else b""
        return {"table": [table], "skipped": [skipped]}

    def _measure(self, texts: Sequence[Any]) -> Any:
        """The result on some texts; None if none of them has a token."""
        raise NotImplementedError


class BatchObserver(_Batches):
    """Computes the statistics of every head on batches of texts, one row of bytes for each batch.

    Engines make one object for each worker and call it on batches: Ray Data by `map_batches`,
    datasets by `map(batched=True)`, Spark in `mapInPandas`. `HeadTable.sum` adds the rows up.

    Args:
        model: What `load` opens, or a model in memory.
        request: The statistics; None is `Request()`.
        options: `tokenizer`; `column`, which holds the texts; `max_tokens` in one text, beyond
            which it becomes several; `on_error`, "raise" or "skip" for counting a text that the
            model refuses, in `HeadTable.skipped`; options of `load`, such as `device`.
    Raises:
        ArgumentError: there is no tokenizer, or the request has pairs or spans.
        InputError: the model cannot be opened.
        UnsupportedError: the model reads no text.
    """

    _name = "BatchObserver"

    def __init__(
        self, model: str | Path | nn.Module, request: Request | None = None, **options: Any
    ) -> None:
        self._request = request or Request()
        if named := (*self._request.pairs, *self._request.spans):
            raise ArgumentError(
                f"BatchObserver: the request has pairs or spans ({', '.join(named)}), which are "
                f"given pass by pass. Use relations, or watch the model with headwise.observe."
            )
        super().__init__(model, **options)

    def _measure(self, texts: Sequence[Any]) -> HeadTable | None:
        model, two = self._model, reads_two_texts(self._model)
        pairs = [(text, text if two else None) for text in list_texts(self._name, texts)]
        pieces = [*iter_pieces(self._tokenizer, pairs, model, self._max_tokens)]
        with in_evaluation(model):
            return watch_pieces(self._name, model, pieces, self._request, None) if pieces else None


class BatchImportance(_Batches):
    """Scores the importance of every head on batches of texts; `Scores.sum` adds the rows up.

    Args:
        model: What `load` opens, or a model in memory.
        method: A method of `importance` that scores each text by itself.
        loss: The loss, as `importance` takes it.
        options: As in `BatchObserver`.
    Raises:
        ArgumentError: the method needs all texts, or there is no tokenizer.
    """

    _name = "BatchImportance"

    def __init__(
        self,
        model: str | Path | nn.Module,
        method: str = "half-gate",
        *,
        loss: Loss | str | Callable[[Any, Inputs], Tensor] | None = None,
        **options: Any,
    ) -> None:
        by_text = [name for name, alone in METHODS.items() if alone]
        if method not in by_text:
            problem = f"method={method!r} needs all texts, and a batch has only its own"
            raise ArgumentError(f"BatchImportance: {problem}. Choose from {', '.join(by_text)}.")
        super().__init__(model, **options)
        self._method, self._loss = method, loss

    def _measure(self, texts: Sequence[Any]) -> Scores | None:
        pairs = [(text, None) for text in list_texts(self._name, texts)]
        if not any(iter_pieces(self._tokenizer, pairs, self._model, self._max_tokens)):
            return None
        options: Any = {"tokenizer": self._tokenizer, "max_tokens": self._max_tokens}
        return importance(self._model, texts, self._method, loss=self._loss, **options)


def observe_files(
    patterns: Sequence[str],
    *,
    model: str | Path,
    column: str = "text",
    address: str | None = None,
    workers: int | None = None,
    device: Any = "cpu",
    **options: Any,
) -> HeadTable:
    """The statistics of every head on the texts of some files.

    Args:
        patterns: Globs of .parquet, .csv, .jsonl or .txt files; a line of the last is a text.
        address: A Ray cluster. None is a Ray of this machine or, without Ray, this process.
        workers: How many processes of Ray open the model. None is one for each CPU, or for each
            GPU if the device is one.
        options: Further arguments of `BatchObserver`.
    Raises:
        InputError: no file matches, or a file or a text cannot be read.
        MissingPackageError: `address` is given, and Ray is not installed.
        UnsupportedError: the device is a GPU, and Ray has none.
    """
    names = {os.path.abspath(path) for each in patterns for path in glob(each, recursive=True)}
    paths = sorted(names)  # absolute, as the processes of a cluster work in folders of their own
    wrong = [path for path in paths if Path(path).suffix not in _ENDINGS]
    if wrong or not paths:
        raise InputError(
            f"observe: {wrong[0] if wrong else ', '.join(patterns)} is no file of texts. Name "
            f"files that end in {', '.join(_ENDINGS)}, such as 'data/*.parquet'."
        )
    options |= {"model": os.path.abspath(model) if Path(model).exists() else model}
    options |= {"column": column, "device": device}
    if address is None and find_spec("ray") is None:
        observer = BatchObserver(**options)
        texts = chain.from_iterable(read_rows(path, column) for path in paths)
        rows = iter(tqdm(texts, desc="Observing", unit=" texts"))
        batches = iter(lambda: [*islice(rows, _ROWS)], [])
        columns = ({name: [row[name] for row in batch] for name in batch[0]} for batch in batches)
        return HeadTable.sum(map(observer, columns))
    ray, data = (require(module, "ray", "observe") for module in ("ray", "ray.data"))
    ray.init(address or "local", include_dashboard=False, ignore_reinit_error=True)
    gpu, resources = str(device).startswith("cuda"), ray.cluster_resources()
    if gpu and "GPU" not in resources:
        raise UnsupportedError(
            f"observe: device {str(device)!r}, and Ray knows of no GPU. Leave the device out, or "
            f"give the address of a cluster that has one."
        )
    # Readers need CPUs of their own: what cuts their texts into batches waits for a whole one.
    size = workers or int(resources["GPU" if gpu else "CPU"])
    tables = (
        data.from_items([{"path": path} for path in paths])
        # A reader waits for the models most of the time.
        .flat_map(lambda row: read_rows(row["path"], column), num_cpus=0.1)
        .repartition(target_num_rows_per_block=_ROWS)
        .map_batches(
            BatchObserver,
            fn_constructor_kwargs=options,
            batch_size=_ROWS,
            compute=data.ActorPoolStrategy(size=size),
            num_cpus=round(min(0.5, (resources["CPU"] - 1) / 2 / size), 2),
            num_gpus=int(gpu),
        )
    )
    try:
        return HeadTable.sum(tables)
    except ray.exceptions.RayError as error:
        # Of an error in a worker Ray keeps the text alone, within that of a traceback.
        ours = re.findall(r"^headwise\.errors\.\w+: (.*)", str(error), re.MULTILINE)
        if not ours:
            raise
        raise InputError(ours[-1]) from error


def read_rows(path: str, column: str) -> Iterator[dict[str, Any]]:
    """The texts of a file, with their path and their row, from 1."""
    row = 0
    try:
        for row, text in enumerate(_texts(path, column), 1):
            yield {"path": path, "row": row, column: text}
    except (OSError, ValueError, TypeError, KeyError) as error:  # pyarrow's are among them
        where = f" after row {row}" if row else ""
        raise InputError(
            f"observe: {path} cannot be read{where} ({first_line(error)}). Give a file whose "
            f"column or key {column!r} holds the texts, or another --column."
        ) from error


def _texts(path: str, column: str) -> Iterator[Any]:
    suffix = Path(path).suffix
    if suffix == ".parquet":
        for batch in dataset.dataset(path).to_batches(columns=[column], batch_size=_ROWS):
            yield from batch.column(0).to_pylist()
    elif suffix == ".csv":
        options: Any = {"usecols": [column], "dtype": str, "keep_default_na": False}
        for frame in pd.read_csv(path, chunksize=_ROWS, **options):
            yield from frame[column]
    else:
        is_text = suffix == ".txt"
        with Path(path).open(encoding="utf-8-sig") as file:
            for line in file:
                yield line.rstrip("\r\n") if is_text or line.isspace() else loads(line)[column]
