"""The folder of a job: its description, its model's fingerprint, and a result for each shard.

run/job.json             what is measured, on which texts, in how many shards, by which versions
run/model.json           the fingerprint of the model's weights
run/survey.json          for roles: statistics of the whole corpus
run/shards/00003.parquet the result of a shard (of roles .safetensors); one without a token has none
run/shards/00003.json    written last: the shard is finished, with a hash of its result
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count, groupby
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from headwise._display import counted
from headwise.errors import InputError, OutputError
from headwise.files import build_from, claim, read_object, sweep, write_json

SCHEMA = 1
# Their numbers are listed in memory.
MOST_SHARDS = 2**20
_ADVICE = "Give a folder that a corpus job made."
_SHARD = "headwise_shard"
# What a folder may hold before its job is described: a killed process may have left them.
_OURS = ("shards", "model.json", "survey.json")
_ENDINGS = {"roles": ".safetensors"}
_MODEL = ("model", "weights", "tokenizer")


class RunFolder:
    """A folder of one job; every file in it is written atomically.

    Args:
        path: The folder; it is created, unless `about` is None.
        about: The description of the job. None reads that of the folder.
    Raises:
        InputError: the folder belongs to another job, or `about` is None and it holds no job.
        OutputError: the folder cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any] | None) -> None:
        self.path = path
        description = path / "job.json"
        if about is not None and not description.exists():
            self._create(description, about)
        if problem := _not_a_job(path):
            raise InputError(f"corpus: {path} {problem}. {_ADVICE}")
        stored = read_object(description, "corpus", _ADVICE)
        if about is not None:
            self._check_same(stored, json.loads(json.dumps(about)))
        shards = stored.get("shards")
        is_number = type(shards) is int and 1 <= shards <= MOST_SHARDS
        if stored.get("headwise_job") != SCHEMA or not is_number:
            raise InputError(
                f"corpus: {description} has schema {stored.get('headwise_job')!r} and "
                f"{str(shards)[:40]} shards, not {SCHEMA} and a number from 1 to "
                f"{MOST_SHARDS:,}. {_ADVICE}"
            )
        self.about: Mapping[str, Any] = stored
        self.shards: int = stored["shards"]
        measured = stored.get("measured")
        kind = measured.get("kind") if isinstance(measured, dict) else None
        self._ending = _ENDINGS.get(str(kind), ".parquet")
        text = json.dumps(stored, sort_keys=True)
        self.job = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _create(self, description: Path, about: Mapping[str, Any]) -> None:
        try:
            present = sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            present = []
        except (OSError, ValueError) as error:
            raise _cannot_write(self.path, error) from error
        foreign = [name for name in present if name not in _OURS and not name.startswith(".")]
        if foreign:
            raise InputError(
                f"corpus: {self.path} holds {foreign[0]}, and no job. Name an empty folder."
            )
        try:
            (self.path / "shards").mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise _cannot_write(self.path, error) from error
        with claim(self.path / ".job.lock", wait=True):
            if not description.exists():
                write_json(about, description)

    def _check_same(self, stored: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        for name in about:
            if stored.get(name) != about[name]:
                raise InputError(
                    f"corpus: {self.path} is the folder of another job: its {name} is "
                    f"{_difference(stored.get(name), about[name])}. Name another folder."
                )

    def check_model(self, fingerprint: str, weights: str = "", tokenizer: str = "") -> None:
        """Record the model of the job and its tokenizer, or refuse others.

        Args:
            weights: What identifies its files; see `ModelSource.weights`.
            tokenizer: What identifies the tokenizer; empty if it is not opened yet.
        Raises:
            InputError: shards were computed with another model or tokenizer.
        """
        given = {"model": fingerprint, "weights": weights, "tokenizer": tokenizer}
        with claim(self.path / ".model.lock", wait=True):
            known = self.model()
            for name in ("model", "tokenizer"):
                before, now = known.get(name), given[name]
                if before and now and before != now:
                    raise InputError(
                        f"corpus: {self.path} was computed with the {name} {before}, not {now}. "
                        f"Name another folder, or give the same {name}."
                    )
            if not known or (tokenizer and not known["tokenizer"]):
                write_json(given, self.path / "model.json")

    def model(self) -> dict[str, str]:
        """What identifies the job's model, its files and its tokenizer; empty before the first run.

        Raises:
            InputError: the file is damaged.
        """
        path = self.path / "model.json"
        if not path.exists():
            return {}
        content = read_object(path, "corpus", "Delete it, and run a shard again.")
        if not all(isinstance(content.get(name), str) for name in _MODEL):
            raise InputError(
                f"corpus: {path} holds {str(content)[:60]}, not the fingerprint of a model. "
                f"Delete it, and run a shard again."
            )
        return content

    def survey(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Statistics of the whole corpus: the first process makes them, and others wait.

        Raises:
            InputError: the file is damaged.
            OutputError: it cannot be written.
        """
        with claim(self.path / ".survey.lock", wait=True):
            if not self._survey.exists():
                write_json(make(), self._survey)
        return self.read_survey()

    def read_survey(self) -> dict[str, Any]:
        """The survey of the texts.

        Raises:
            InputError: the file is missing or damaged.
        """
        return read_object(self._survey, "corpus", "Delete it, and run the job again.")

    @property
    def _survey(self) -> Path:
        return self.path / "survey.json"

    def known_model(self, weights: str) -> str:
        """The fingerprint of the model with these files, if a process has hashed them."""
        known = self.model()
        return known["model"] if weights and known.get("weights") == weights else ""

    def unfinished(self) -> list[int]:
        """The shards that have no result yet, in order."""
        with suppress(OSError):
            names = {entry.name for entry in (self.path / "shards").iterdir()}
            return [n for n in range(self.shards) if self._record(n).name not in names]
        return list(range(self.shards))

    def claim(self, shard: int) -> AbstractContextManager[bool]:
        """Keep other processes from computing a shard while a block runs."""
        with suppress(OSError):  # someone may have deleted the folder to begin anew
            self._lock(shard).parent.mkdir(exist_ok=True)
        return claim(self._lock(shard))

    def sweep(self) -> None:
        """Delete what killed processes left: temporary files, and locks of finished work."""
        finished = set(range(self.shards)) - set(self.unfinished())
        names = (".job.lock", ".model.lock", ".survey.lock")
        locks = [*(self.path / name for name in names), *map(self._lock, sorted(finished))]
        for lock in locks:
            with suppress(OSError):
                lock.unlink(missing_ok=True)
        for folder in (self.path, self.path / "shards"):
            sweep(folder)

    def write(self, shard: int, result: Any, facts: Mapping[str, Any]) -> None:
        """Write the result of a shard, then that it is finished.

        Args:
            result: An object with a method `save`, or None for a shard without a token.
            facts: Facts about the shard, written into its record.
        Raises:
            OutputError: it cannot be written; the shard stays unfinished.
        """
        path = self._result(shard)
        if result is not None:
            result.save(path)
        digest = "" if result is None else _digest(path)
        record = {_SHARD: SCHEMA, "job": self.job, "shard": shard, **facts, "digest": digest}
        write_json(record, self._record(shard))

    def records(self) -> Iterator[tuple[dict[str, Any], Path | None]]:
        """Each shard's record and the path of its result, in order.

        Raises:
            InputError: a shard is missing, damaged, or of another job, model or version.
        """
        missing = self.unfinished()
        if missing:
            raise InputError(
                f"corpus: {self.path} lacks {len(missing)} of {counted(self.shards, 'shard')}, "
                f"with the numbers {ranges(missing)}. Run the job again."
            )
        model = self.model()
        if not model:
            raise InputError(
                f"corpus: {self.path} lacks model.json, the fingerprint of its model. Delete "
                f"{self._record(0)} and run the job again: it writes both."
            )
        for shard in range(self.shards):
            record = self._read(shard)
            for name, expected in (("job", self.job), ("model", model["model"])):
                if record.get(name) != expected:
                    raise InputError(
                        f"corpus: shard {shard} in {self.path} is of {name} {record.get(name)!r}, "
                        f"not {expected!r}. Delete {self._record(shard).name}, and run it again."
                    )
            yield record, self._result(shard) if record["digest"] else None

    def _read(self, shard: int) -> dict[str, Any]:
        path, result = self._record(shard), self._result(shard)
        advice = f"Delete {path.name}, and run the shard again."
        record = read_object(path, "corpus", advice)
        digest = build_from(lambda: str(record["digest"]), f"corpus: {path} is damaged", advice)
        if record.get(_SHARD) != SCHEMA or record.get("shard") != shard:
            raise InputError(
                f"corpus: {path} is of shard {record.get('shard')!r}, not {shard}. {advice}"
            )
        if digest and (not result.is_file() or _digest(result) != digest):
            problem = "has changed since it was written" if result.is_file() else "is missing"
            raise InputError(f"corpus: {result}, the result of shard {shard}, {problem}. {advice}")
        return record

    def _lock(self, shard: int) -> Path:
        return self.path / "shards" / f".{shard:05}.lock"

    def _record(self, shard: int) -> Path:
        return self.path / "shards" / f"{shard:05}.json"

    def _result(self, shard: int) -> Path:
        return self.path / "shards" / f"{shard:05}{self._ending}"


def _not_a_job(path: Path) -> str:
    """Why a path cannot be the folder of a job; empty if it has a description."""
    if not path.is_dir():
        return "is a file, not the folder of a corpus job" if path.exists() else "does not exist"
    is_described = (path / "job.json").exists()
    return "" if is_described else "is not the folder of a corpus job: it has no job.json"


def _cannot_write(path: Path, error: Exception) -> OutputError:
    reason = getattr(error, "strerror", None) or error
    return OutputError(
        f"corpus: {path} cannot be written ({reason}). Name a folder that you may write to."
    )


def _difference(stored: Any, given: Any) -> str:
    """How two JSON values differ, for an error message."""
    if isinstance(stored, dict) and isinstance(given, dict):
        name = next(n for n in (*given, *stored) if stored.get(n) != given.get(n))
        return f"of {name} {_difference(stored.get(name), given.get(name))}"
    if isinstance(stored, list) and isinstance(given, list) and len(stored) != len(given):
        return f"{len(stored)} entries, not {len(given)}"
    return f"{shortened(stored)}, not {shortened(given)}"


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise InputError(
            f"corpus: {path} cannot be read ({error.strerror}). Run the shard again."
        ) from error


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, shortened: 0, 3-7, 9."""
    steps = count()
    groups = [list(group) for _, group in groupby(numbers, lambda number: number - next(steps))]
    shown = [f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups]
    return ", ".join(shown[:20]) + (" and more" if len(shown) > 20 else "")
