"""A forward pass as a value: made when it begins, added when it succeeds, forgotten otherwise."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headwise.capture import Site


@dataclass
class TextNumbers:
    """The numbers of the texts of a pass, in the order in which texts are read.

    A forward pass over a cache continues the texts of the pass before it.

    Attributes:
        first: The number of its first text.
        next: The number of the next text that is new.
        read: By stack, the number of texts, and the column after the last one that was read.
        of_site: The number of texts of each site in this pass.
    """

    first: int = 0
    next: int = 0
    read: dict[str, tuple[int, int]] = field(default_factory=dict)
    of_site: dict[Site, int] = field(default_factory=dict)

    def following(self) -> "TextNumbers":
        """Those of the next pass."""
        return TextNumbers(self.first, self.next, dict(self.read))

    def number(self, site: Site, n_texts: int, columns: range | None) -> int:
        """The number of the first text of a call on `n_texts` texts.

        Several calls of a site in one pass are calls on different texts.

        Args:
            columns: Those of its queries in their texts; None if these are not among the keys.
        """
        stack = site.stack.removesuffix("cross").removesuffix(".")
        is_first = not self.of_site
        if is_first and not self._continues(stack, n_texts, columns.start if columns else 0):
            self.first, self.read = self.next, {}
        if columns is not None:
            self.read[stack] = n_texts, columns.stop
        number = self.first + self.of_site.get(site, 0)
        self.of_site[site] = self.of_site.get(site, 0) + n_texts
        self.next = max(self.next, number + n_texts)
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
        texts: The numbers of its texts.
        is_in_graph: Whether a compiled graph has handed over any of it.
        calls: How often each site has attended.
        is_settled: Whether it has succeeded; what comes later is added at once.
        has_failed: Whether it has ended in an exception, and counts nowhere.
    """

    def __init__(self, number: int, texts: TextNumbers, is_in_graph: bool = False) -> None:
        self.number, self.texts, self.is_in_graph = number, texts, is_in_graph
        self.calls: Counter[Site] = Counter()
        self.is_settled = self.has_failed = False
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Do something as soon as the pass has succeeded."""
        if self.is_settled:
            step()
        elif not self.has_failed:
            self._steps.append(step)

    def settle(self) -> None:
        """The pass has succeeded, unless it has failed before."""
        self.is_settled = not self.has_failed
        while self._steps:
            self._steps.pop(0)()

    def fail(self) -> None:
        """The pass has ended in an exception."""
        if not self.is_settled:
            self.has_failed = True
            self._steps.clear()
