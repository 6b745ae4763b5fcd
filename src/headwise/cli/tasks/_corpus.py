"""Corpus jobs as the options of a command ask for them."""

from collections.abc import Sequence
from typing import Any

from headwise.cli._options import ModelOptions
from headwise.cli._print import print_note, progress_bar
from headwise.cli.tasks._study import RequestedStatistics
from headwise.jobs import CorpusJob, ImportanceRequest, ModelSource, corpus
from headwise.models import check_device, load_tokenizer
from headwise.watch import Request


def open_job(
    name: str,
    data: Sequence[str],
    requested: RequestedStatistics | str,
    options: ModelOptions,
    **settings: Any,
) -> CorpusJob:
    """The job of a model; each process opens the model for itself.

    Args:
        requested: The statistics, or a method of importance.
        settings: Further arguments of `corpus`.
    """
    device = str(check_device(options.device or "cpu", "--device"))
    source = ModelSource(name, device, options.dtype, options.attention)
    tokenizer = load_tokenizer(name)
    request: Request | ImportanceRequest | None
    if isinstance(requested, str):
        request = ImportanceRequest(requested)
    else:
        request = requested.request(tokenizer)
    settings |= {"tokenizer": tokenizer, "max_tokens": options.max_tokens}
    return corpus(source, list(data), request, **settings)


def run_job(job: CorpusJob, shard: int | None) -> None:
    """Compute one shard, or all, behind a progress bar."""
    try:
        with progress_bar(f"Computing shards of {job.path}") as on_progress:
            job.run(shard, on_progress=on_progress)
    except KeyboardInterrupt:
        print_note(f"Run the same command again: it skips the finished shards in {job.path}.")
        raise
