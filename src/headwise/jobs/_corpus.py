"""`corpus`: a study of texts on several processes or machines."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from headwise.corpora.streams import open_source
from headwise.errors import ArgumentError, InputError
from headwise.files import build_from
from headwise.jobs._job import CorpusJob, merged
from headwise.jobs._measurement import Measurement
from headwise.jobs._model_source import ModelSource, fingerprint_in_memory
from headwise.jobs._roles import RoleEvidence, RolesRequest
from headwise.jobs._run_folder import MOST_SHARDS, SCHEMA, RunFolder
from headwise.jobs._scoring import Importance, ImportanceRequest
from headwise.jobs._statistics import Statistics
from headwise.roles import Roles
from headwise.tables import HeadTable, Scores
from headwise.watch import Request


def corpus(
    model: nn.Module | ModelSource | str | Path,
    data: str | Path | Sequence[str | Path],
    request: Request | ImportanceRequest | RolesRequest | None = None,
    *,
    out: str | Path,
    shards: int | None = None,
    tokenizer: Any = None,
    column: str = "text",
    max_tokens: int | None = None,
) -> CorpusJob:
    """Cut the study of a corpus into shards that any process can compute.

    The corpus is read text by text, so it may be larger than memory. It is cut into shards of
    equally many bytes: Parquet files by rows, other files by their lines, paragraphs or
    sentences. Texts of white space alone are left out. Each shard's result is written into `out`;
    `job.merge()` adds them up.

    The same call in another process, or on another machine with the same files, is the same job.

    Args:
        model: The folder or hub name of a model, which each process opens; `ModelSource` has a
            device and a dtype too. Or a model in memory.
        data: One glob or several, of .parquet, .jsonl, .txt or .conllu files. Or
            `datasets:NAME:SPLIT`, a dataset that is streamed (the extra `datasets`).
        request: The statistics to compute, `ImportanceRequest()` for the importance of heads, or
            `RolesRequest()` for their roles. None is `Request()`.
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
    source = open_source(data, column)
    measurement = measurement_of(Request() if request is None else request)
    if isinstance(model, str | Path):
        model = ModelSource(str(model))
    folder = Path(out)
    if shards is None:
        stored = (folder / "job.json").exists()
        shards = RunFolder(folder, None).shards if stored else source.default_shards()
    if type(shards) is not int or not 1 <= shards <= MOST_SHARDS:
        raise ArgumentError(
            f"corpus: shards={shards!r}. Give a whole number from 1 to {MOST_SHARDS:,}."
        )
    source.check_shards(shards)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 2):
        raise ArgumentError(f"corpus: max_tokens={max_tokens!r}. Give a whole number from 2 on.")
    about = about_job(measurement, source.describe(), shards, max_tokens)
    digest = fingerprint_in_memory(model)
    run = RunFolder(folder, about)
    if digest:
        run.check_model(digest)
    return CorpusJob(model, tokenizer, source, measurement, run, max_tokens, digest)


def merge_corpus(folder: str | Path) -> HeadTable | Scores | Roles:
    """The result of a job from its folder alone, without the model; see `CorpusJob.merge`.

    Raises:
        InputError: the folder holds no job, or shards are missing, damaged, or of another job,
            model or version.
    """
    run = RunFolder(Path(folder), None)
    versions = run.about.get("versions")
    if versions != _versions():
        raise InputError(
            f"corpus: the shards in {folder} were made with {versions}, and this is "
            f"{_versions()}. Merge them with the versions that made them."
        )
    path = run.path / "job.json"
    measurement = build_from(
        lambda: _described(run.about["measured"]), f"corpus: {path} is damaged", "Copy it again."
    )
    return merged(run, measurement)


def _described(measured: Mapping[str, Any]) -> Measurement:
    """The measurement of a job's description, which can merge shards but not measure."""
    if measured["kind"] == "importance":
        return Importance(ImportanceRequest())
    if measured["kind"] == "roles":
        return RoleEvidence.described(measured)
    if measured["kind"] == "statistics":
        return Statistics(Request())
    raise ValueError(f"it measures {measured['kind']!r:.40}")


def measurement_of(request: Request | ImportanceRequest | RolesRequest) -> Measurement:
    """What a request measures.

    Raises:
        ArgumentError: it is not a request, or one that needs more than the texts of a shard.
    """
    if isinstance(request, ImportanceRequest):
        return Importance(request)
    if isinstance(request, RolesRequest):
        return RoleEvidence(request)
    if not isinstance(request, Request):
        raise ArgumentError(
            f"corpus: request={request!r:.60}. Give a Request(...), an ImportanceRequest(...) or "
            f"a RolesRequest(...)."
        )
    return Statistics(request)


def about_job(
    measurement: Measurement, data: Mapping[str, Any], shards: int, max_tokens: int | None
) -> dict[str, Any]:
    """The description of a job; another description is another job."""
    return {
        "headwise_job": SCHEMA,
        "measured": measurement.describe(),
        "data": data,
        "shards": shards,
        "max_tokens": max_tokens,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("headwise", "torch", "transformers")}
