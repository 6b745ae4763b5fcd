"""What a job measures on each shard, and how the results of shards add up."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Protocol, runtime_checkable

from torch import nn

from headwise.corpora import AnnotatedText


@dataclass(frozen=True)
class Corpus:
    """The texts of all shards, without those of white space alone.

    Attributes:
        read: Reads the texts of a shard, in order.
    """

    read: Callable[[int], Iterable[AnnotatedText]]
    shards: int


@dataclass(frozen=True)
class Opened:
    """A model in memory with its tokenizer.

    Attributes:
        fingerprint: The fingerprint of its weights.
        max_tokens: The most tokens in one text; a longer one becomes several. None is the
            model's context.
        survey: Statistics of the whole corpus, as `Measurement.read_survey` returns them; None for
            a measurement that needs none.
    """

    model: nn.Module
    tokenizer: Any
    fingerprint: str
    max_tokens: int | None = None
    survey: Any = None


@runtime_checkable
class Measurement(Protocol):
    """One kind of result: measured on the texts of a shard, saved, and added up.

    Attributes:
        surveys: Whether every shard needs statistics of the whole corpus.
    """

    @property
    def surveys(self) -> bool: ...

    def describe(self) -> dict[str, Any]:
        """What is measured, as JSON: equal for equal measurements."""

    def survey(self, opened: Opened, corpus: Corpus) -> dict[str, Any]:
        """Statistics of the whole corpus, as JSON."""

    def read_survey(self, content: Mapping[str, Any]) -> Any:
        """What `survey` returned, from JSON: read once in each process."""

    def measure(self, opened: Opened, texts: Iterable[AnnotatedText], shard: int) -> Any:
        """The result on some texts; None if they have no token.

        Args:
            texts: They are iterated over again if memory runs out.
        """

    def load(self, path: Path) -> Any:
        """A result from the file that its `save` wrote."""

    def merge(self, results: Iterable[Any], survey: Any, model: str) -> Any:
        """The result on the texts of all shards, added in order.

        Args:
            survey: Statistics of the whole corpus, as `read_survey` returns them.
            model: The fingerprint of the model.
        """


class WithoutSurvey:
    """A measurement for which each shard needs only its own texts."""

    surveys = False

    def survey(self, opened: Opened, corpus: Corpus) -> dict[str, Any]:
        """An empty survey."""
        return {}

    def read_survey(self, content: Mapping[str, Any]) -> None:
        """There is none."""


class ShardTexts:
    """The texts of a shard but those of white space alone; each iteration reads them anew.

    Attributes:
        texts: How many texts the latest iteration gave.
        empty: How many texts it left out as white space.
    """

    def __init__(self, read: Callable[[], Iterable[AnnotatedText]]) -> None:
        self._read = read
        self.texts = self.empty = 0

    def __iter__(self) -> Iterator[AnnotatedText]:
        self.texts = self.empty = 0
        for text in self._read():
            if text.text.strip():
                self.texts += 1
                yield text
            else:
                self.empty += 1


def code_of(function: Callable[..., Any]) -> str:
    """Identifies a function by its module, its name and a hash of its code.

    Values from outside the function, such as variables of an enclosing one, are not hashed.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    digest = hashlib.blake2b(_code_bytes(code), digest_size=8).hexdigest()
    return f"{function.__module__}.{function.__qualname__} {digest}"


def _code_bytes(code: CodeType) -> bytes:
    """The instructions, names and constants of a function and of functions inside it."""
    constants = b"".join(
        _code_bytes(c) if isinstance(c, CodeType) else repr(c).encode() for c in code.co_consts
    )
    return code.co_code + repr(code.co_names).encode() + constants
