"""Records attention calls: sums over texts, and the tensors of the last batch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._torch_private import in_backward, is_wrapped, without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import RowStatistics, is_packed
from headwise.models import (
    AttentionCall,
    Capture,
    Coverage,
    InputTracker,
    ModuleCall,
    Site,
    Sites,
    StackInputs,
    open_capture,
)
from headwise.models.ownership import output_projection
from headwise.tables import Totals
from headwise.watch._accumulator import Accumulator
from headwise.watch._maps import Maps
from headwise.watch._queue import Queue
from headwise.watch._request import Request
from headwise.watch._row_sums import output_norms, row_request, sum_rows, without_autocast
from headwise.watch._verification import refuse_wrapped, verify_heads
from headwise.watch.layout import CallLayout, CallLayouts, TextPairs, TextSpans

# Where a call belongs: its site, what the site's stack reads, and the call of its module.
_Place = tuple[Site, StackInputs, ModuleCall | None]


class Recorder:
    """Records the attention calls of one model, and may answer them in place of its kernels.

    Attributes:
        coverage: Which share of a text's queries was captured at each site.
        maps: The tensors of the last batch.
        pairs: The pairs of queries and keys of the current texts.
        spans: The named stretches of the current texts.
    """

    def __init__(
        self, model: nn.Module, request: Request, layers: Collection[int] | None, every: int
    ) -> None:
        self._model, self._request = model, request
        self._layers, self._every = layers, every
        self._sites = Sites(model)
        self._inputs = InputTracker(model, self._sites.stacks.roots)
        self._capture = Capture(model)
        self._layouts = CallLayouts(request, self._sites.stacks.roots)
        self._accumulator = Accumulator(request)
        self._queue = Queue(request, self._layouts, lambda: self._accumulator)
        self.pairs, self.spans = self._layouts.pairs, self._layouts.spans
        self._answered: set[Site] = set()
        self._verified: set[Site] = set()
        self.coverage = Coverage()
        self.maps = Maps(request.maps, request.received)
        self._before = 0, self.coverage, self.maps  # the current pass, and what was before it
        self._inputs.on_begin, self._inputs.on_failure = self._begin, self._drop

    @property
    def passes(self) -> int:
        """The number of forward passes so far."""
        return self._inputs.passes

    def set_pairs(self, pairs: Mapping[str, Sequence[TextPairs]]) -> None:
        """Set the pairs of the next forward pass."""
        self.pairs.set(self.passes + 1, pairs)

    def set_spans(self, spans: TextSpans) -> None:
        """Set the named stretches of the next forward pass."""
        self.spans.set(self.passes + 1, spans)

    @contextmanager
    def recording(
        self, exact: bool = True, condition: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Record the calls of the model while the block runs.

        Args:
            exact: False lets this library compute heads where it can; see `observe`.
            condition: Whether a call counts, evaluated at each call; None: every call does.
        """

        def record(call: AttentionCall) -> None:
            if condition is None or condition():
                self._record(call)

        def answer(call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
            return self._answer(call) if condition is None or condition() else None

        capturing = open_capture(self._capture, record, answer, answers_others=not exact)
        with self._inputs.follow(), capturing:
            yield

    def captured_sites(self) -> list[Site]:
        """The sites of all calls so far, in the order of their first calls."""
        return self._sites.all()

    def sites(self) -> list[Site]:
        """The sites of all calls so far; then modules that were not captured, and why."""
        captured = [self._describe(site) for site in self._sites.all()]
        return captured + self._sites.uncaptured(self._capture)

    def totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of each site."""
        self._compute()
        return self._accumulator.totals()

    def take_totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of each site since the last time; the sums start again at zero."""
        totals = self.totals()
        self._accumulator = Accumulator(self._request)
        return totals

    def _describe(self, site: Site) -> Site:
        if not self._is_watched(site):
            return replace(site, watched="not watched: left out by layers=", statistics="")
        kernel = site.kernel
        if site in self._answered:
            how = "in the call itself" if site.kernel == "headwise" else f"instead of {kernel}"
            kernel = f"{site.statistics}, {how}"
        return replace(site, kernel=kernel, coverage=self.coverage.latest(site))

    def _is_watched(self, site: Site) -> bool:
        return self._layers is None or site.layer in self._layers

    def _record(self, call: AttentionCall) -> None:
        """Record a call that the model has computed."""
        place = None if self._is_skipped() else self._place(call)
        if place is None or not self._is_watched(place[0]):
            return
        site, inputs, module_call = place
        if is_wrapped(call.q):
            refuse_wrapped()
        # The function mode must not capture what is computed from the call.
        with without_function_modes():
            verify = call.exact and site not in self._verified
            if not (verify or self._request.names or self._request.received):  # maps alone
                self.maps.record(site, call, 0, None)
                return
            tokens = inputs.text.tokens
            is_token = call.q.shape[2] == 1 and not verify and _kind(call, place) == "within"
            cache, number = self._inputs.cache, self.passes
            if is_token and self._queue.add_token(site, call, inputs, number, cache):
                self.coverage.add(site, call, module_call, tokens)
            else:
                self._add(call, place, need_heads=verify, verify=verify)

    def _answer(self, call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
        """Record a call that the model has not computed, and return its heads; None: neither."""
        site = self._sites.known(call, self._capture)
        if site is None or site not in self._verified:
            return None
        if self._is_skipped() or not self._is_watched(site):
            return None
        # What keys receive is summed over queries that are not packed: in another order.
        if call.ours and self._request.received and is_packed(call.q.shape[2]):
            return None
        if is_wrapped(call.q):
            refuse_wrapped()
        place = site, self._inputs.of(site.stack), self._capture.call_of(call.module)
        with without_function_modes():
            rows = self._add(call, place, need_heads=True, verify=False)
        self._answered.add(site)
        return None if rows is None or rows.heads is None else rows.heads.to(call.q.dtype)

    def _begin(self) -> None:
        """A forward pass begins: remember what was there before it."""
        self._before = self.passes, self.coverage.copy(), self.maps.copy()
        self.spans.begin()
        self._queue.begin_pass()

    def _drop(self) -> None:
        """Forget the current forward pass, which has ended in an exception: it counts nowhere."""
        number, coverage, maps = self._before
        if number == self.passes:
            self.coverage, self.maps = coverage, maps
            self._queue.drop(number)
            self._accumulator.drop(number)
            self.spans.drop()

    def _is_skipped(self) -> bool:
        """Whether the current forward pass is not watched."""
        # Gradient checkpointing runs layers again in the backward pass: they were counted already.
        is_backward = in_backward() and not self._inputs.inside
        return is_backward or max(0, self._inputs.passes - 1) % self._every > 0

    def _place(self, call: AttentionCall) -> _Place:
        """Where a call belongs."""
        site = self._sites.of(call, self._capture)
        return site, self._inputs.of(site.stack), self._capture.call_of(call.module)

    def _add(
        self, call: AttentionCall, place: _Place, *, need_heads: bool, verify: bool
    ) -> RowStatistics | None:
        """Let a call wait, or compute the statistics of its rows and add their sums.

        Returns:
            Those of each row; None if the call waits, which it does not if heads are needed.
        """
        site, inputs, module_call = place
        layout = self._layout(site, call, inputs, _kind(call, place))
        columns, n_texts = layout.positions.columns, layout.positions.n_texts
        first = self._accumulator.number(site, self.passes, n_texts, columns)
        rows = None
        if need_heads or not self._queue.add(site, call, layout, first, self.passes):
            rows = self._add_rows(site, call, layout, first, need_heads, verify)
        self.coverage.add(site, call, module_call, inputs.text.tokens)
        if self._queue.is_full:
            self._compute()
        return rows

    def _add_rows(
        self,
        site: Site,
        call: AttentionCall,
        layout: CallLayout,
        first: int,
        need_heads: bool,
        verify: bool,
    ) -> RowStatistics:
        """Compute the statistics of each row, add them, and keep what else is requested."""
        request, positions = self._request, layout.positions
        per_head = self._per_head(site) if request.needs_projection else None
        with without_autocast(call.q):
            needed = row_request(call, request, layout, per_head, need_heads)
            rows = call.row_statistics(needed)
            norms = None if per_head is None else output_norms(rows, call, per_head)
            sums = sum_rows(rows, layout, request, knows_logits=call.knows_logits, norms=norms)
        if verify and rows.heads is not None:
            heads = rows.heads if call.join is None else call.join(rows.heads.to(call.heads.dtype))
            verify_heads(site, call.heads, heads, rows.lse, positions)
            self._verified.add(site)
        self._accumulator.add(sums, {(site, self.passes): [(0, first)]})
        if request.maps or request.received:
            received, evicted = rows.received, positions.evicted_columns
            if received is not None and evicted:
                received = pad(received, (evicted, 0))
            self.maps.record(site, call, first, received)
        if request.per_query:
            self.spans.keep(site, positions, layout.spans, rows)
        return rows

    def _compute(self) -> None:
        """Compute and add up the calls that wait."""
        self._queue.compute(self.passes if self._inputs.inside else None)

    def _layout(
        self, site: Site, call: AttentionCall, inputs: StackInputs, kind: str
    ) -> CallLayout:
        """Where the queries and keys of a call lie in their texts."""
        if kind != "cross" and inputs.text.real is None and call.real is not None:
            self._inputs.learn(site.stack, call.real)
        return self._layouts.of(site, call, inputs, kind, self._inputs.passes)

    def _per_head(self, site: Site) -> Float[Tensor, "H Dv d_model"]:
        projection = output_projection(self._model, site)
        if projection is None:
            raise UnsupportedError(
                f"observe: output_norm and value(...) need the output projection of {site.name}, "
                f"which was not found. Request neither, or leave its layer out with layers=."
            )
        return projection.per_head


def _kind(call: AttentionCall, place: _Place) -> str:
    """How keys relate to queries: of another text, of the same, or condensed.

    A model that drops or pools tokens leaves their positions unknown.
    """
    site, inputs, module_call = place
    if site.cross:
        return "cross"
    T, S, tokens = call.q.shape[2], call.k.shape[2], inputs.text.tokens
    received = [] if module_call is None else module_call.inputs
    # More keys than queries come from a cache, unless the module received them all.
    condensed = T > S or (T < S and bool(received) and received[0].shape[1] == S)
    return "condensed" if condensed or (tokens is not None and tokens > T) else "within"
