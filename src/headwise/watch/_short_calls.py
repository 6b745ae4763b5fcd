"""Short calls, whose preparation would take longer than the kernel: their rows share tensors."""

from collections.abc import Hashable
from dataclasses import dataclass

from headwise.kernels import AttentionRule, SharedRequest, StatisticsBuffer, statistics_buffer
from headwise.models import AttentionCall
from headwise.watch._request import Request
from headwise.watch._row_sums import CallRows, row_request
from headwise.watch.layout import CallLayout

# Rows of a call up to which it is short, and for which a batch has room.
_SHORT, _ROWS = 1 << 12, 1 << 15
# Batches that are kept; layers may alternate between a few masks.
_BATCHES = 4


@dataclass(frozen=True, eq=False)
class CallBatch:
    """The calls of one layout that differ in queries and keys alone.

    Attributes:
        rule: Of each call, but for a mask of the same values.
        n_rows: The number of rows of each call.
    """

    layout: CallLayout
    rule: AttentionRule
    buffer: StatisticsBuffer
    n_rows: int

    def add(self, call: AttentionCall, layout: CallLayout) -> "ShortCall | None":
        """Compute the statistics of one more call; None if it has no place here."""
        is_same = layout is self.layout and _has_numbers_of(call.rule, self.rule)
        if not is_same or not self.buffer.add(call.q, call.k):
            return None
        return ShortCall(self, self.buffer.n - 1)

    def rows(self) -> CallRows:
        """The rows of all calls, one call after the other."""
        rows = self.buffer.statistics()
        return CallRows(rows, self.layout, None, knows_logits=True, n_calls=self.buffer.n)


@dataclass(frozen=True)
class ShortCall:
    """One of the calls of a batch."""

    batch: CallBatch
    number: int

    @property
    def layout(self) -> CallLayout:
        return self.batch.layout

    @property
    def n_rows(self) -> int:
        return self.batch.n_rows

    def kind(self, _: Request) -> Hashable:
        """What calls that are added up together have in common."""
        return id(self.batch)


class ShortCalls:
    """The batches of the latest short calls.

    They hold calls whose statistics follow from queries, keys and mask, on a layout that later
    calls may share.
    """

    def __init__(self, request: Request) -> None:
        of_call = request.needs_projection or request.received or request.maps or request.per_query
        of_text = request.classes or request.relations or request.pairs or request.spans
        self._request = request
        self._is_on = bool(request.names) and not (of_call or of_text)
        self._batches: list[CallBatch] = []

    def add(self, call: AttentionCall, layout: CallLayout) -> ShortCall | None:
        """Compute the rows of a call in a batch; None if it is not short, or needs more."""
        q, rule = call.q, call.rule
        is_plain = type(call) is AttentionCall and q.is_cpu and q.shape[2] > 1
        if not (self._is_on and is_plain and layout.is_shared):
            return None
        for batch in self._batches:
            added = batch.add(call, layout)
            if added is not None:
                return added
        n_rows = q.shape[0] * q.shape[1] * q.shape[2]
        has_own = rule.bias is not None or rule.sinks is not None
        if has_own or type(rule.scale) is not float or not 0 < n_rows <= _SHORT:
            return None
        request = row_request(call, self._request, layout, None, need_heads=False)
        assert isinstance(request, SharedRequest)  # since its layout is shared
        buffer = statistics_buffer(q, call.k, call.v, rule, request, _ROWS // n_rows + 1)
        if buffer is None:
            return None
        batch = CallBatch(layout, rule, buffer, n_rows)
        self._batches = [batch, *self._batches[: _BATCHES - 1]]
        return batch.add(call, layout)


def _has_numbers_of(rule: AttentionRule, other: AttentionRule) -> bool:
    """Whether a rule has the numbers of another one without bias and sinks."""
    has_own = rule.bias is not None or rule.sinks is not None
    return not has_own and rule.scale == other.scale and rule.softcap == other.softcap
