"""A step for pipelines of datatrove, which run locally, on Slurm or on Ray.

Import it as `from headwise.jobs.datatrove import WatchHeads`; it needs the extra `datatrove`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise._packages import require
from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError, UnsupportedError
from headwise.jobs._corpus import about_job, measurement_of
from headwise.jobs._job import CorpusJob
from headwise.jobs._model_source import ModelSource
from headwise.jobs._run_folder import RunFolder
from headwise.jobs._scoring import ImportanceRequest
from headwise.watch import Request

if TYPE_CHECKING:
    from typing import Any as PipelineStep
else:
    PipelineStep = require("datatrove.pipeline.base", "datatrove", "WatchHeads").PipelineStep

__all__ = ["WatchHeads"]


class WatchHeads(PipelineStep):  # type: ignore[misc]
    """Watches a model on the documents of a pipeline.

    Rank `i` of `n` computes shard `i` of `n` of a corpus job: `merge_corpus(out)` or
    `headwise merge OUT` adds them up. A rank whose shard is finished does not
    compute it again.

    Args:
        model: The folder or hub name of a model, or a `ModelSource`. Each rank opens it.
        out: The folder of the results.
        request: The statistics to compute, or an `ImportanceRequest`. None is `Request()`.
        name: A name for the documents: a later run with another name is another job.
        tokenizer: The model's tokenizer. None is the one beside it.
        max_tokens: The most tokens in one text. None is the model's context.
        keep: Whether documents are passed on to later steps. They are then all in memory until
            the shard is finished; without, memory does not grow with their number.
    Raises:
        ArgumentError: the request needs more than the texts of a shard.
    """

    type = "headwise"
    name = "watch heads"

    def __init__(
        self,
        model: ModelSource | str | Path,
        out: str | Path,
        request: Request | ImportanceRequest | None = None,
        *,
        name: str = "documents",
        tokenizer: Any = None,
        max_tokens: int | None = None,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self._model = model if isinstance(model, ModelSource) else ModelSource(str(model))
        self._out, self._documents_name = Path(out), name
        self._measurement = measurement_of(Request() if request is None else request)
        if self._measurement.surveys:
            raise ArgumentError(
                f"WatchHeads: request={request!r:.60}, which needs all texts, and a rank sees its "
                f"own. Use headwise.corpus for roles."
            )
        self._tokenizer, self._max_tokens, self._keep = tokenizer, max_tokens, keep

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Compute a rank's shard, then pass its documents on.

        Raises:
            ArgumentError: no step before this one reads documents.
            InputError: `out` belongs to another job, or the model is another one.
            UnsupportedError: memory ran out.
        """
        if data is None:
            raise ArgumentError(
                f"WatchHeads: rank {rank} gets no documents. Put a reader before it."
            )
        documents = _RankDocuments(data, self._documents_name, self._keep)
        about = about_job(self._measurement, documents.describe(), world_size, self._max_tokens)
        folder = RunFolder(self._out, about)
        job = CorpusJob(
            self._model,
            self._tokenizer,
            documents,
            self._measurement,
            folder,
            self._max_tokens,
        )
        with self.track_time("shard"):
            job.run(shard=rank)
        yield from documents.kept
        # A finished shard was not computed again, so that its documents are still unread.
        yield from data if self._keep else ()


class _RankDocuments:
    """The documents of one rank as the texts of its shard."""

    def __init__(self, data: Iterable[Any], name: str, keep: bool) -> None:
        self._data, self._name, self._keep = data, name, keep
        self._is_read = False
        self.kept: list[Any] = []

    def describe(self) -> dict[str, Any]:
        return {"documents": self._name}

    def check_shards(self, shards: int) -> None:
        """Accept any number: datatrove cuts the documents."""

    def default_shards(self) -> int:
        return 1

    def shard(self, index: int, shards: int) -> list[Any]:
        return [[self._name, index, shards]]

    def texts(self, index: int, shards: int) -> Iterator[AnnotatedText]:
        """The documents, once: those before a failure cannot be read again."""
        if self._is_read:
            raise UnsupportedError(
                f"WatchHeads: out of memory in shard {index}, whose documents cannot be read "
                f"again. Give fewer max_tokens, or run headwise.corpus on the files."
            )
        self._is_read = True
        for document in self._data:
            if self._keep:
                self.kept.append(document)
            yield AnnotatedText(document.text)
