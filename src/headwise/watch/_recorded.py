"""What the passes of a watch have recorded of each site, besides sums."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from headwise.capture import AttentionCall, Site
from headwise.errors import ArgumentError
from headwise.tables import HeadLike, resolve_heads
from headwise.watch._positions import Positions


class Covered(NamedTuple):
    """How many queries were captured, and how many tokens the module received.

    Attributes:
        window: Tokens per window, where each window counts as a text; 0: no windows.
    """

    captured: int = 0
    tokens: int = 0
    window: int = 0

    def plus(self, more: "Covered") -> "Covered":
        window = max(self.window, more.window)
        return Covered(self.captured + more.captured, self.tokens + more.tokens, window)

    def __str__(self) -> str:
        if self.captured < self.tokens:
            return f"{self.captured} queries for {self.tokens} tokens"
        return f"windows of {self.window} tokens, each as a text" if self.window else "all queries"


class Recorded:
    """What was recorded of each site.

    Attributes:
        covered: Which share of the texts' queries was captured.
        latest: The number of its module's latest call, and what that call has covered.
        calls: Its last call, if the request has maps.
        weights: Of its last call the weights of chosen queries, in place of the call.
        received: The number of its first text, and the attention that the keys have received since
            the texts began.
    """

    def __init__(self) -> None:
        self.covered: dict[Site, Covered] = {}
        self.latest: dict[Site, tuple[int | None, Covered]] = {}
        self.calls: dict[Site, AttentionCall] = {}
        self.weights: dict[Site, Float[Tensor, "B H R S"]] = {}
        self.received: dict[Site, tuple[int, Float[Tensor, "B H S"]]] = {}

    def cover(self, site: Site, number: int | None, covered: Covered) -> None:
        """Count the queries of a call. Calls within one call of a module share its tokens."""
        latest, before = self.latest.get(site), self.covered.get(site)
        if latest is not None and number is not None and latest[0] == number:
            covered = covered._replace(tokens=0)
            self.latest[site] = number, latest[1].plus(covered)
        else:
            self.latest[site] = number, covered
        self.covered[site] = covered if before is None else before.plus(covered)

    def receive(
        self, site: Site, received: Float[Tensor, "B H S"], positions: Positions, first: int
    ) -> None:
        """Add what keys received to what they received from earlier queries of the same texts."""
        among, columns = positions.query_columns, positions.columns
        if among is not None and columns is not None:
            received = pad(received, (columns.stop - among.stop, 0))  # what the cache evicted
        earlier, sums = self.received.get(site, (-1, received))
        if earlier == first and sums.shape[2] <= received.shape[2]:
            # A cache only grows: new keys have received nothing yet.
            received = received + pad(sums, (0, received.shape[2] - sums.shape[2]))
        self.received[site] = first, received


def find_head(head: HeadLike, sites: Iterable[Site]) -> tuple[Site, int]:
    """The site of one head, and its index there."""
    known = {address: site for site in sites for address in site.heads()}
    address, *more = resolve_heads(head, known)
    if more:
        raise ArgumentError(f"Watch: {head} are several heads. Give one head at a time.")
    return known[address], address.head - known[address].first_head
