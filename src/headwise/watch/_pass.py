"""A forward pass as a value: made when it begins, added when it succeeds, forgotten otherwise."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from headwise.capture import Site


@dataclass
class TextNumbers:
    """The numbers of the texts of a pass, in the order in which texts are read.

    A forward pass over a cache continues the texts of the pass before it.

    Attributes:
        first: The number of its first text.
        new: The number of the first text that no earlier pass has read.
        read: By stack, the number of texts, and the column after the last one that was read.
        of_site: The number of texts of each site in this pass.
    """

    first: int = 0
    new: int = 0
    read: dict[str, tuple[int, int]] = field(default_factory=dict)
    of_site: dict[Site, int] = field(default_factory=dict)

    @property
    def next(self) -> int:
        """The number of the next text that is new."""
        return max(self.new, self.first + max(self.of_site.values(), default=0))

    def number(self, site: Site, n_texts: int, columns: range | None) -> int:
        """The number of the first text of a call on `n_texts` texts.

        Several calls of a site in one pass are calls on different texts.

        Args:
            columns: Those of its queries in their texts; None if these are not among the keys.
        """
        stack = site.stack.removesuffix("cross").removesuffix(".")
        is_first = not self.of_site
        if is_first and not self._continues(stack, n_texts, columns.start if columns else 0):
            self.first = self.new
            self.read.clear()
        if columns is not None:
            self.read[stack] = n_texts, columns.stop
        number = self.first + self.of_site.get(site, 0)
        self.of_site[site] = self.of_site.get(site, 0) + n_texts
        return number

    def _continues(self, stack: str, n_texts: int, begin: int) -> bool:
        """Whether a pass continues the texts of the pass before it."""
        if stack in self.read:
            texts, end = self.read[stack]
            return texts == n_texts and 0 < end <= begin
        # An encoder that ran by itself has read the source side of the same texts.
        return any(texts == n_texts for texts, _ in self.read.values())


class Pass:
    """A forward pass. What it adds to a watch waits until the pass has succeeded.

    Its end is not always known: it has succeeded, too, if another begins or the watch is read.

    Attributes:
        number: Its number, from 1.
        before: The numbers of the texts of the latest pass that had succeeded.
        texts: The numbers of its own texts.
        is_in_graph: Whether a compiled graph has handed over any of it.
        calls: How often each site has attended.
        shared: What layers find for one another, such as where queries and keys lie.
        repeats: By `Place.key`, the place of calls that wait, and the `Group` that they wait in;
            none for tokens.
        has_succeeded: None while that is not known. What comes after a success is added at once;
            a pass that has ended in an exception counts nowhere.
    """

    def __init__(self, number: int, before: TextNumbers, is_in_graph: bool = False) -> None:
        self.number, self.before, self.is_in_graph = number, before, is_in_graph
        self.texts = TextNumbers(before.first, before.next, dict(before.read))
        self.calls: Counter[Site] = Counter()
        self.shared: dict[Hashable, Any] = {}
        self.repeats: dict[Hashable, Any] = {}
        self.has_succeeded: bool | None = None
        self._steps: list[Callable[[], object]] = []

    @property
    def latest_texts(self) -> TextNumbers:
        """The numbers of the texts of the latest pass that has succeeded: this one, if it has."""
        return self.texts if self.has_succeeded else self.before

    def add(self, step: Callable[[], object]) -> None:
        """Do something as soon as the pass has succeeded."""
        if self.has_succeeded:
            step()
        elif self.has_succeeded is None:
            self._steps.append(step)

    def settle(self, has_succeeded: bool = True) -> None:
        """The pass has succeeded, or has ended in an exception, unless that was known before."""
        if self.has_succeeded is None:
            self.has_succeeded = has_succeeded
            self.shared.clear()
            self.repeats.clear()
        while self.has_succeeded and self._steps:
            self._steps.pop(0)()
