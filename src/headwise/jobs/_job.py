"""A corpus job: shards computed anywhere, in any order, merged into one result."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headwise._display import counted
from headwise._progress import Progress
from headwise.corpora.streams import CorpusSource
from headwise.errors import ArgumentError, InputError, OutputError
from headwise.jobs._measurement import Corpus, Measurement, Opened, ShardTexts
from headwise.jobs._model_source import ModelSource, identify_tokenizer, open_model
from headwise.jobs._run_folder import RunFolder
from headwise.jobs._workers import compute_all, compute_with
from headwise.models import fingerprint, remember_fingerprint


@dataclass(frozen=True)
class CorpusJob:
    """A study of a corpus that is cut into shards; made by `corpus`.

    Each shard is computed by one process and written atomically with the model's fingerprint and
    its slice of the corpus. A process that is killed leaves its shard unfinished and nothing else.

    Attributes:
        model: The model in memory, or how each process opens it.
        tokenizer: Its tokenizer. None is the one beside the model.
        source: The corpus.
        measurement: What is computed on each shard.
        folder: Where the results are.
        max_tokens: The most tokens in one text. None is the model's context.
        fingerprint: The fingerprint of a model in memory, else empty.
    """

    model: nn.Module | ModelSource
    tokenizer: Any
    source: CorpusSource
    measurement: Measurement
    folder: RunFolder
    max_tokens: int | None = None
    fingerprint: str = ""

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self.folder.shards

    def unfinished(self) -> list[int]:
        """The shards that have no result yet, in order."""
        return self.folder.unfinished()

    def __repr__(self) -> str:
        done = self.shards - len(self.unfinished())
        return f"CorpusJob in {self.folder.path}: {done} of {self.shards} shards finished"

    def run(
        self,
        shard: int | None = None,
        *,
        workers: int = 1,
        on_progress: Progress | None = None,
    ) -> None:
        """Compute one shard in this process, or all that are unfinished in several.

        Finished shards are skipped. A shard that another process computes at the moment is left
        to it; processes on several machines may share a folder. Workers compute with one thread
        each, so that the result has the same bytes for any number of them; `shard=` computes with
        the threads that torch has. With more than one worker the call must stand under
        `if __name__ == "__main__":`, as Python starts new processes.

        Args:
            shard: The shard, from 0. None is all.
            workers: The number of processes; 1 is this one.
            on_progress: Called with the number of finished shards and of all.
        Raises:
            ArgumentError: there is no such shard, `workers` is below 1, both are named, or the
                model in memory cannot be sent to another process.
            InputError: the folder belongs to another model, or a text cannot be read.
            OutputError: the folder cannot be written, or another process computes the shard.
            WorkerError: a worker was killed.
        """
        if shard is None and isinstance(workers, int) and workers >= 1:
            report = on_progress or (lambda done, total: None)
            compute_all(self, report) if workers == 1 else compute_with(self, workers, report)
            return self.folder.sweep()
        if workers != 1 or not isinstance(shard, int) or not 0 <= shard < self.shards:
            also = "" if workers == 1 else f", workers={workers!r}"
            raise ArgumentError(
                f"CorpusJob.run: shard={shard!r}{also} of {self.shards} shards. "
                f"Give a shard from 0 to {self.shards - 1}, or a number of workers from 1 on."
            )
        if shard not in self.unfinished():
            return None
        if not self.compute_unclaimed(shard, self.open()):
            raise OutputError(
                f"CorpusJob.run: shard {shard} in {self.folder.path} is being computed by another "
                f"process. Wait for it, or run another shard."
            )
        return None

    def merge(self) -> Any:
        """The result on the whole corpus, added up in the order of the shards.

        Returns:
            A `HeadTable`, `Scores` for an `ImportanceRequest`, or `Roles` for a `RolesRequest`.
            Equal to the result of one
            process up to rounding, counts exactly; its bytes do not depend on who computed which
            shard.
        Raises:
            InputError: shards are missing or damaged, or of another job or model, or no text has
                a token.
        """
        return merged(self.folder, self.measurement)

    def open(self, worker: int = 0) -> Opened:
        """The model and the tokenizer in this process, after a check that they are the job's.

        Raises:
            InputError: they cannot be opened, or the model is another one.
        """
        weights = self.model.weights() if isinstance(self.model, ModelSource) else ""
        model, tokenizer = open_model(self.model, self.tokenizer, worker)
        known = self.fingerprint or self.folder.known_model(weights)
        if known:
            remember_fingerprint(model, known)
        opened = Opened(model, tokenizer, fingerprint(model), self.max_tokens)
        identity = identify_tokenizer(tokenizer, model)
        self.folder.check_model(opened.fingerprint, weights, identity)
        if not self.measurement.surveys:
            return opened
        corpus = Corpus(self._texts, self.shards)
        survey = self.folder.survey(lambda: self.measurement.survey(opened, corpus))
        return replace(opened, survey=self.measurement.read_survey(survey))

    def compute_unclaimed(self, shard: int, opened: Opened) -> bool:
        """Compute a shard unless it is finished; False if another process computes it."""
        with self.folder.claim(shard) as held:
            if held and shard in self.unfinished():
                self._compute(shard, opened)
            return held

    def _compute(self, shard: int, opened: Opened) -> None:
        texts = self._texts(shard)
        result = self.measurement.measure(opened, texts, shard)
        facts = {
            "model": opened.fingerprint,
            "slice": self.source.shard(shard, self.shards),
            "texts": texts.texts,
            "empty": texts.empty,
        }
        self.folder.write(shard, result, facts)

    def _texts(self, shard: int) -> ShardTexts:
        return ShardTexts(lambda: self.source.texts(shard, self.shards))


def merged(folder: RunFolder, measurement: Measurement) -> Any:
    """The sum of all shards; see `CorpusJob.merge`."""

    # All shards are checked before the first is added.
    paths = [path for _, path in folder.records() if path is not None]
    if not paths:
        raise InputError(
            f"corpus: {folder.path} has {counted(folder.shards, 'shard')}, and no text with a "
            f"token. Give texts with words."
        )
    survey = measurement.read_survey(folder.read_survey()) if measurement.surveys else None
    results = (measurement.load(path) for path in paths)
    return measurement.merge(results, survey, folder.model()["model"])
