"""`corpus`: a study of texts in shards, each measured by one call, in any process.

run/job.json             what is measured, on which texts, in how many shards, by which versions
run/shards/00003.parquet the result of a shard; one without a token has none
run/shards/00003.json    written last: the shard is finished, by which model and tokenizer

Two processes that measure one shard write the same, so none waits for another.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from hashlib import blake2b
from importlib.metadata import version
from operator import add
from pathlib import Path
from reprlib import repr as shortened
from types import CodeType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from headwise._display import counted
from headwise._evaluation import in_evaluation
from headwise._memory import halving
from headwise._methods import METHODS
from headwise._progress import Progress
from headwise.checkpoints import load, load_tokenizer
from headwise.corpora.streams import Stream, open_source, windows
from headwise.errors import ArgumentError, InputError
from headwise.files import build_from, make_folder, read_object, write_json
from headwise.models import check_model, device_of, fingerprint
from headwise.models.texts import (
    check_reads_text,
    inputs_of,
    iter_pieces,
    reads_two_texts,
    text_alone,
    tokenizer_of,
    without_logits,
)
from headwise.scoring import Loss, importance
from headwise.tables import HeadTable, Scores
from headwise.watch import Request, observe

SCHEMA = 2
_MOST_SHARDS = 2**20  # their numbers are listed in memory
_BATCH_SIZE = 16  # texts; halved where memory does not suffice
# Parts of a request that describe the latest batch, or that are passed for each batch.
_NOT_OF_SHARDS = ("pairs", "spans", "received", "per_query", "maps")
# A text whose tokens show how a tokenizer cuts and changes texts.
_PROBE = "The Cat's naïve 3rd  try:\n北京 IS ok…"
_ADVICE = "Give a folder that a corpus job made."

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class ModelSource:
    """A model that each process of a job opens for itself.

    Attributes:
        name: A folder, or a name on the Hugging Face hub.
        device: Where it runs.
        dtype: The dtype to compute in. None is that of the saved model.
        attn_implementation: What computes attention, as `load` takes it.
    """

    name: str
    device: str = "cpu"
    dtype: DtypeName | None = None
    attn_implementation: str | None = None

    def open(self) -> nn.Module:
        """The model.

        Raises:
            InputError: it cannot be opened.
        """
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        attention: Any = self.attn_implementation
        return load(self.name, device=self.device, dtype=dtype, attn_implementation=attention)


@dataclass(frozen=True)
class ImportanceRequest:
    """A corpus job that scores heads, in place of computing statistics.

    Attributes:
        method: A method of `importance` that scores each text by itself: half-gate, gradient,
            curvature or zero-ablation.
        loss: The loss, as `importance` takes it; None is that of the model's class.
    Raises:
        ArgumentError: the method is another one.
    """

    method: str = "half-gate"
    loss: Loss | str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        by_text = [name for name, method in METHODS.items() if method.by_text]
        if self.method not in by_text:
            raise ArgumentError(
                f"ImportanceRequest: method={self.method!r} needs all texts, and a shard has only "
                f"its own. Choose from {', '.join(by_text)}."
            )


@dataclass(frozen=True)
class CorpusJob:
    """A study of a corpus that is cut into shards; made by `corpus`.

    Attributes:
        model: The model in memory, or how each process opens it.
        tokenizer: Its tokenizer. None is the one beside the model.
        source: The corpus.
        request: What is measured on each shard.
        path: The folder of the results.
        shards: The number of shards.
        max_tokens: The most tokens in one text. None is the model's context.
    """

    model: nn.Module | ModelSource
    tokenizer: Any
    source: Stream
    request: Request | ImportanceRequest
    path: Path
    shards: int
    max_tokens: int | None = None

    def unfinished(self) -> list[int]:
        """The shards that have no result yet, in order."""
        return _unfinished(self.path, self.shards)

    def __repr__(self) -> str:
        done = self.shards - len(self.unfinished())
        return f"CorpusJob in {self.path}: {done} of {self.shards} shards finished"

    def run(self, shard: int | None = None, *, on_progress: Progress | None = None) -> None:
        """Measure one shard, or one after the other all that are unfinished.

        A finished shard is skipped. Processes and machines may share the folder: give each its
        shards, as the executors of datatrove, `torchrun`, an array of Slurm or a loop number them.

        Args:
            shard: The shard, from 0. None is all.
            on_progress: Called with the number of finished shards and of all.
        Raises:
            ArgumentError: there is no such shard, or a model in memory comes without a tokenizer.
            InputError: the model cannot be opened, or a text cannot be read.
            OutputError: the folder cannot be written.
        """
        if shard is not None and (type(shard) is not int or not 0 <= shard < self.shards):
            raise ArgumentError(
                f"CorpusJob.run: shard={shard!r} of {self.shards} shards. Give a shard from 0 to "
                f"{self.shards - 1}."
            )
        wanted = [n for n in self.unfinished() if shard in (None, n)]
        if not wanted:
            return
        model, tokenizer = self.model, self.tokenizer
        if isinstance(model, ModelSource):
            tokenizer = load_tokenizer(model.name) if tokenizer is None else tokenizer
            model = model.open()
        tokenizer = tokenizer_of(model, tokenizer)
        if tokenizer is None:
            raise ArgumentError(
                f"corpus: {type(model).__name__} without a tokenizer. Give tokenizer=."
            )
        model = check_model("corpus", model)
        identity = {"model": fingerprint(model), "tokenizer": _identify(tokenizer, model)}
        for number in wanted:
            read = partial(self.source.texts, number, self.shards)
            result = _measure(self.request, model, tokenizer, read, self.max_tokens)
            make_folder(self.path / "shards", "corpus")  # someone may have deleted it to begin anew
            if result is not None:
                result.save(_place(self.path, number, ".parquet"))
            job = _digest(read_object(self.path / "job.json", "corpus", _ADVICE))
            record = {"job": job, "shard": number, **identity, "has_tokens": result is not None}
            write_json(record, _place(self.path, number, ".json"))
            if on_progress is not None:
                on_progress(self.shards - len(self.unfinished()), self.shards)

    def merge(self) -> Any:
        """The result on the whole corpus: see `merge_corpus`."""
        return merge_corpus(self.path)


def corpus(
    model: nn.Module | ModelSource | str | Path,
    data: str | Path | Sequence[str | Path],
    request: Request | ImportanceRequest | None = None,
    *,
    out: str | Path,
    shards: int | None = None,
    tokenizer: Any = None,
    column: str = "text",
    max_tokens: int | None = None,
) -> CorpusJob:
    """Cut the study of a corpus into shards that any process can measure.

    The corpus is read text by text, so it may be larger than memory. Its files are dealt out to
    the shards in turn, or the texts of the files where there are fewer of them. A text is a row
    of a Parquet file, a line of a text file or of JSON, or a sentence of CoNLL-U; texts of white
    space alone are left out. Each shard's result is written into `out`; `job.merge()` adds them up.

    The same call in another process, or on another machine with the same files, is the same job.

    Args:
        model: The folder or hub name of a model, which each process opens; `ModelSource` has a
            device and a dtype too. Or a model in memory.
        data: One glob or several, of .parquet, .jsonl, .txt or .conllu files. Or
            `datasets:NAME:SPLIT`, a dataset that is streamed (the extra `datasets`).
        request: The statistics to compute, or `ImportanceRequest()` for the importance of heads.
            None is `Request()`.
        out: The folder of the results.
        shards: The number of shards. None is that of the job in `out`, or one for each 16 MiB.
        tokenizer: The model's tokenizer. None is the one beside it.
        column: The column of Parquet files and datasets, and the key of JSON lines, that holds
            the text.
        max_tokens: The most tokens in one text; a longer one becomes several. None is the
            model's context.
    Raises:
        ArgumentError: an argument is out of range or of the wrong type, or the request needs more
            than the texts of a shard.
        InputError: no file matches, or `out` belongs to another job.
        MissingPackageError: a dataset is named, and `datasets` is not installed.
        OutputError: `out` cannot be written.
    """
    source, folder = open_source(data, column), Path(out)
    request = Request() if request is None else request
    measured = _describe(request)
    if isinstance(model, str | Path):
        model = ModelSource(str(model))
    begun = (folder / "job.json").exists()
    if shards is None:
        shards = _read_job(folder)["shards"] if begun else source.shards
    if type(shards) is not int or not 1 <= shards <= _MOST_SHARDS:
        raise ArgumentError(
            f"corpus: shards={shards!r}. Give a whole number from 1 to {_MOST_SHARDS:,}."
        )
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 2):
        raise ArgumentError(f"corpus: max_tokens={max_tokens!r}. Give a whole number from 2 on.")
    about = {
        "headwise_job": SCHEMA,
        "measured": measured,
        "data": source.about,
        "shards": shards,
        "max_tokens": max_tokens,
        "versions": {name: version(name) for name in ("headwise", "torch", "transformers")},
    }
    if not begun:
        make_folder(folder / "shards", "corpus")
        entries = {entry.name for entry in folder.iterdir() if entry.name[0] != "."}
        if foreign := sorted(entries - {"shards"}):
            raise InputError(
                f"corpus: {folder} holds {foreign[0]}, and no job. Name an empty folder."
            )
        write_json(about, folder / "job.json")
    stored = _read_job(folder)
    for name, value in json.loads(json.dumps(about)).items():
        if stored.get(name) != value:
            raise InputError(
                f"corpus: {folder} is the folder of another job: its {name} is "
                f"{_difference(stored.get(name), value)}. Name another folder."
            )
    return CorpusJob(model, tokenizer, source, request, folder, shards, max_tokens)


def merge_corpus(folder: str | Path) -> HeadTable | Scores:
    """The result of a job from its folder alone, added up in the order of the shards.

    Returns:
        A `HeadTable`, or `Scores` for an `ImportanceRequest`. Equal to the result of one process
        up to rounding, counts exactly; its bytes do not depend on who computed which shard.
    Raises:
        InputError: the folder holds no job, or shards are missing, damaged, or of another job,
            model or tokenizer, or no text has a token.
    """
    path = Path(folder)
    job = _read_job(path)
    missing = _unfinished(path, job["shards"])
    if missing:
        numbers = ", ".join(map(str, missing[:20])) + (" and more" if missing[20:] else "")
        raise InputError(
            f"corpus: {path} lacks {len(missing)} of {counted(job['shards'], 'shard')}, with the "
            f"numbers {numbers}. Run the job again."
        )
    kinds: dict[str, Any] = {"statistics": HeadTable, "importance": Scores}
    problem = f"corpus: {path / 'job.json'} is damaged"
    kind = build_from(lambda: kinds[job["measured"]["kind"]], problem, "Copy it again.")
    results = []
    expected: dict[str, Any] = {"job": _digest(job)}
    for shard in range(job["shards"]):
        place = _place(path, shard, ".json")
        record = read_object(place, "corpus", f"Delete {place.name}, and run the shard again.")
        first = {name: record.get(name) for name in ("model", "tokenizer")}
        expected = first | expected | {"shard": shard}
        for name, value in expected.items():
            if record.get(name) != value:
                raise InputError(
                    f"corpus: shard {shard} in {path} is of {name} {record.get(name)!r}, not "
                    f"{value!r}. Delete {place.name}, and run it again."
                )
        if type(record.get("has_tokens")) is not bool:
            raise InputError(
                f"corpus: {place} does not say whether its texts have tokens. Delete {place.name}, "
                f"and run the shard again."
            )
        if record["has_tokens"]:
            results.append(kind.load(_place(path, shard, ".parquet")))
    if not results:
        raise InputError(
            f"corpus: {path / 'shards'} has {counted(job['shards'], 'shard')}, and no text with a "
            f"token. Give texts with words."
        )
    return _add_up(results)


def _measure(
    request: Request | ImportanceRequest,
    model: nn.Module,
    tokenizer: Any,
    read: Callable[[], Iterator[str]],
    max_tokens: int | None,
) -> HeadTable | Scores | None:
    """The result on some texts, in memory that does not grow with their number of tokens.

    Args:
        read: Gives the texts; called again if memory runs out.
    Returns:
        None if the texts have no token.
    Raises:
        UnsupportedError: the model cannot be watched or gated exactly, or reads more than text.
    """
    if isinstance(request, ImportanceRequest):
        settings: Any = {"loss": request.loss, "tokenizer": tokenizer, "max_tokens": max_tokens}
        parts = [
            importance(model, window, request.method, **settings)
            for window in windows(read())
            if any(iter_pieces(tokenizer, [(text, None) for text in window], model))
        ]
        return _add_up(parts) if parts else None
    check_reads_text("corpus", model)
    own_target, device = reads_two_texts(model), device_of(model)

    def watched(size: int) -> HeadTable | None:
        any_batch = False
        with in_evaluation(model), torch.no_grad(), observe(model, request) as watch:
            for window in windows(read()):
                pairs = [(text, text if own_target else None) for text in window]
                pieces = [*iter_pieces(tokenizer, pairs, model, max_tokens)]
                for batch in inputs_of(pieces, size, device):
                    with text_alone("corpus", model):
                        model(**batch, **without_logits(model))
                    any_batch = True
            return watch.table() if any_batch else None

    return halving("corpus", watched, _BATCH_SIZE)


def _add_up(parts: Sequence[Any]) -> Any:
    """The result on the texts of all parts, in their order; they are of one model."""
    if isinstance(parts[0], HeadTable):
        return reduce(add, parts)
    return replace(parts[0], per_text=np.concatenate([part.per_text for part in parts]))


def _describe(request: Request | ImportanceRequest) -> dict[str, Any]:
    """A request as JSON; functions by name, classes of tokens with a hash of their ids.

    Raises:
        ArgumentError: it is not a request, or needs more than the texts of a shard.
    """
    if isinstance(request, ImportanceRequest):
        loss = request.loss.of if isinstance(request.loss, Loss) else request.loss
        name = _name_of(loss) if callable(loss) else loss or ""
        return {"kind": "importance", "method": request.method, "loss": name}
    if not isinstance(request, Request):
        raise ArgumentError(
            f"corpus: request={request!r:.60}. Give a Request(...) or an ImportanceRequest(...)."
        )
    for part in _NOT_OF_SHARDS:
        if value := getattr(request, part):
            raise ArgumentError(
                f"corpus: the request has {part}={value!r}, which is passed or read batch by "
                f"batch. Use relations, or watch the model with headwise.observe."
            )
    return {
        "kind": "statistics",
        "names": list(request.names),
        "classes": {name: _digest(sorted(set(ids))) for name, ids in request.classes.items()},
        "relations": {name: _name_of(pairs) for name, pairs in request.relations.items()},
        "queries": request.queries,
        "per_text": request.per_text,
    }


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function with a hash of its code, but not of what it closes over."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    code = _code_of(getattr(function, "__code__", None))
    return f"{kind.__module__}.{kind.__qualname__} {_hash(code)}"


def _code_of(code: Any) -> bytes:
    """Instructions, names and constants of a function and of those inside it."""
    if not isinstance(code, CodeType):
        return repr(code).encode()
    return b"".join([code.co_code, repr(code.co_names).encode(), *map(_code_of, code.co_consts)])


def _identify(tokenizer: Any, model: nn.Module) -> str:
    """Identifies a tokenizer by its vocabulary and the tokens of one text."""
    vocabulary = sorted(getattr(tokenizer, "get_vocab", dict)().items())
    pieces = [[*piece.source] for piece in iter_pieces(tokenizer, [(_PROBE, None)], model)]
    return _hash(f"{vocabulary}{pieces}".encode("utf-8", "replace"))


def _digest(content: Any) -> str:
    return _hash(json.dumps(content, sort_keys=True).encode())


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _read_job(folder: Path) -> dict[str, Any]:
    description = folder / "job.json"
    if not description.exists():
        problem = "is not the folder of a corpus job: it has no job.json"
        if not folder.exists():
            problem = "does not exist"
        elif not folder.is_dir():
            problem = "is a file, not the folder of a corpus job"
        raise InputError(f"corpus: {folder} {problem}. {_ADVICE}")
    job = read_object(description, "corpus", _ADVICE)
    shards = job.get("shards")
    is_number = type(shards) is int and 1 <= shards <= _MOST_SHARDS
    if job.get("headwise_job") != SCHEMA or not is_number:
        raise InputError(
            f"corpus: {description} has schema {job.get('headwise_job')!r} and "
            f"{str(shards)[:40]} shards, not {SCHEMA} and a number from 1 to {_MOST_SHARDS:,}. "
            f"{_ADVICE}"
        )
    return job


def _unfinished(folder: Path, shards: int) -> list[int]:
    names: set[str] = set()
    with suppress(OSError):
        names = {entry.name for entry in (folder / "shards").iterdir()}
    return [n for n in range(shards) if _place(folder, n, ".json").name not in names]


def _place(folder: Path, shard: int, ending: str) -> Path:
    return folder / "shards" / f"{shard:05}{ending}"


def _difference(stored: Any, given: Any) -> str:
    """How two JSON values differ, for an error message."""
    if isinstance(stored, dict) and isinstance(given, dict):
        name = next(n for n in (*given, *stored) if stored.get(n) != given.get(n))
        return f"of {name} {_difference(stored.get(name), given.get(name))}"
    return f"{shortened(stored)}, not {shortened(given)}"
