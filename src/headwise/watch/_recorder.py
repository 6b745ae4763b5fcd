"""Records attention calls: sums over texts, and the tensors of the last batch."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._torch_private import in_backward, is_wrapped, without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import RowStatistics, is_packed
from headwise.models import AttentionCall, Capture, InputTracker, Site, StackInputs, open_capture
from headwise.models.ownership import output_projection
from headwise.tables import Totals
from headwise.watch._accumulator import Accumulator
from headwise.watch._queue import Queue
from headwise.watch._request import Request
from headwise.watch._row_sums import output_norms, row_request, sum_rows, without_autocast
from headwise.watch.layout import CallLayout, CallLayouts, Positions

# The largest relative difference between our heads and the model's own.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up


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


class Recorder:
    """Records the attention calls of one model, and may answer them in place of its kernels.

    Attributes:
        capture: The capture of the model, which knows its sites.
        covered: Which share of the texts' queries was captured at each site.
        calls: The last call of every site, if the request has maps.
        received: For each site the first text, and the attention that its keys received since the
            texts began.
        pairs: The pairs of queries and keys of the current texts.
        spans: The named stretches of the current texts.
    """

    def __init__(
        self, model: nn.Module, request: Request, layers: Collection[int] | None, every: int
    ) -> None:
        self._model, self._request = model, request
        self._layers, self._every = layers, every
        self.capture = Capture(model)
        self._inputs = InputTracker(model, self.capture.stacks)
        self._layouts = CallLayouts(request, self.capture.stacks)
        self._accumulator = Accumulator(request)
        self._queue = Queue(request, self._layouts, self._accumulator)
        self.pairs, self.spans = self._layouts.pairs, self._layouts.spans
        self._answered: set[Site] = set()
        self._verified: set[Site] = set()
        self.covered: dict[Site, Covered] = {}
        self._latest: dict[Site, Covered] = {}  # by the latest call of the site's module
        self.calls: dict[Site, AttentionCall] = {}
        self.received: dict[Site, tuple[int, Float[Tensor, "B H S"]]] = {}
        # The current pass, and what was before it.
        self._before: tuple[Any, ...] = (0, {}, {}, {}, {})
        self._inputs.on_begin, self._inputs.on_failure = self._begin, self._drop

    @property
    def passes(self) -> int:
        """The number of forward passes so far."""
        return self._inputs.passes

    @contextmanager
    def recording(
        self, exact: bool = True, condition: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Record the calls of the model while the block runs.

        Args:
            exact: False lets this library compute heads where it can; see `observe`.
            condition: Whether a pass counts, asked when it begins; None: every pass does.
        """
        self._condition = condition
        capturing = open_capture(self.capture, self._record, self._answer, answers_others=not exact)
        with self._inputs.follow(), capturing:
            yield

    def sites(self) -> list[Site]:
        """The sites of all calls so far; then modules that were not captured, and why."""
        return [*map(self._describe, self.capture.sites), *self.capture.uncaptured()]

    def totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The sites that attended, and the totals of each statistic, all heads side by side."""
        self._compute()
        return self._accumulator.totals()

    def take_totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The totals since the last time; the sums start again at zero."""
        totals = self.totals()
        self._accumulator.clear()
        return totals

    def _describe(self, site: Site) -> Site:
        if not self._is_watched(site):
            return replace(site, watched="not watched: left out by layers=", statistics="")
        kernel = site.kernel
        if site in self._answered:
            how = "in the call itself" if site.kernel == "headwise" else f"instead of {kernel}"
            kernel = f"{site.statistics}, {how}"
        return replace(site, kernel=kernel, coverage=str(self._latest.get(site, "")))

    def _is_watched(self, site: Site) -> bool:
        return self._layers is None or site.layer in self._layers

    def _record(self, call: AttentionCall) -> None:
        """Record a call that the model has computed."""
        # Gradient checkpointing runs layers again in the backward pass: they were counted already.
        if in_backward() and not self._inputs.inside:
            return
        site = self.capture.site_of(call)
        if self._is_watched(site):
            self._add(site, call, verify=call.exact and site not in self._verified)

    def _answer(self, call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
        """Record a call that the model has not computed, and return its heads; None: neither."""
        site = self.capture.known_site(call)
        if site is None or site not in self._verified or not self._is_watched(site):
            return None
        # What keys receive is summed over queries that are not packed: in another order.
        if call.ours and self._request.received and is_packed(call.q.shape[2]):
            return None
        rows = self._add(site, call, is_answer=True)
        self._answered.add(site)
        return None if rows is None or rows.heads is None else rows.heads.to(call.q.dtype)

    def _begin(self) -> None:
        """A forward pass begins: remember what was there before it."""
        calls, received = dict(self.calls), dict(self.received)
        self._before = self.passes, dict(self.covered), dict(self._latest), calls, received
        if self._request.spans:
            self.spans.begin()
        self._queue.begin_pass()
        is_counted = self._condition is None or self._condition()
        self.capture.is_paused = not is_counted or (self.passes - 1) % self._every > 0

    def _drop(self) -> None:
        """Forget the current forward pass, which has ended in an exception: it counts nowhere."""
        number, covered, latest, calls, received = self._before
        if number == self.passes:
            self.covered, self._latest = covered, latest
            self.calls, self.received = calls, received
            self._queue.drop(number)
            self._accumulator.drop(number)
            self.spans.drop()

    def _add(
        self, site: Site, call: AttentionCall, *, verify: bool = False, is_answer: bool = False
    ) -> RowStatistics | None:
        """Let a call wait, or compute the statistics of its rows and add their sums.

        Returns:
            Those of each row; None if the call waits, which it does not if heads are needed.
        """
        if is_wrapped(call.q):
            raise UnsupportedError(
                "observe: values are not available inside a transform of torch.func (grad, vmap, "
                "jvp). Watch a call outside of it; per-text statistics come from "
                "Request(per_text=True)."
            )
        inputs, request = self._inputs.of(site.stack), self._request
        need_heads = verify or is_answer
        # The function mode must not capture what is computed from the call.
        with without_function_modes():
            if not (need_heads or request.names or request.received):  # maps alone
                self.calls[site] = call
                return None
            kind = _kind(site, call, inputs)
            self._cover(site, call, inputs.text.tokens)
            if call.q.shape[2] == 1 and not need_heads and kind == "within":
                cache = self._inputs.cache
                if self._queue.add_token(site, call, inputs, self.passes, cache):
                    return None
            layout = self._layout(site, call, inputs, kind)
            columns, n_texts = layout.positions.columns, layout.positions.n_texts
            first = self._accumulator.number(site, self.passes, n_texts, columns)
            rows = None
            if need_heads or not self._queue.add(site, call, layout, first, self.passes):
                rows = self._add_rows(site, call, layout, first, need_heads, verify)
            if self._queue.is_full:
                self._compute()
            return rows

    def _cover(self, site: Site, call: AttentionCall, tokens: int | None) -> None:
        """Count the queries of a call. Calls within one call of a module share its tokens."""
        covered = _covered(call, tokens)
        if call.module_call is not None and site in call.module_call.counted:
            covered = covered._replace(tokens=0)
            self._latest[site] = self._latest[site].plus(covered)
        else:
            self._latest[site] = covered
        if call.module_call is not None:
            call.module_call.counted.add(site)
        self.covered[site] = self.covered.get(site, Covered()).plus(covered)

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
            _verify_heads(site, call.heads, heads, rows.lse, positions)
            self._verified.add(site)
        self._accumulator.add(sums, {(site, self.passes): [(0, first)]})
        if request.maps:
            self.calls[site] = call
        if rows.received is not None:
            self._add_received(site, rows.received, positions, first)
        if request.per_query:
            self.spans.keep(site, positions, layout.spans, rows)
        return rows

    def _add_received(
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


def _kind(site: Site, call: AttentionCall, inputs: StackInputs) -> str:
    """How keys relate to queries: of another text, of the same, or condensed.

    A model that drops or pools tokens leaves their positions unknown.
    """
    if site.cross:
        return "cross"
    T, S, tokens = call.q.shape[2], call.k.shape[2], inputs.text.tokens
    received = [] if call.module_call is None else call.module_call.inputs
    # More keys than queries come from a cache, unless the module received them all.
    condensed = T > S or (T < S and bool(received) and received[0].shape[1] == S)
    return "condensed" if condensed or (tokens is not None and tokens > T) else "within"


def _covered(call: AttentionCall, tokens: int | None) -> Covered:
    B, T = call.q.shape[0], call.q.shape[2]
    shape = None if call.module_call is None else call.module_call.shape
    if shape is not None and T not in shape and shape[1] > T:
        if shape[0] * shape[1] == B * T:
            return Covered(B * T, B * T, T)
        return Covered(B * T, B * shape[1])
    if tokens is not None and tokens > T:  # latents or pooled positions instead of tokens
        return Covered(B * T, B * tokens)
    return Covered(B * T, B * T)


def _verify_heads(
    site: Site, theirs: Tensor, ours: Tensor, lse: Tensor, positions: Positions
) -> None:
    """Refuse a call whose heads differ from those that its captured inputs give.

    Large logits are rounded by more, and so are their exponentials: `lse` bounds them. Rows with
    NaN logits are not compared, because kernels treat them differently.
    """
    real = positions.query_real[:, None, :, None] & ~lse.isnan().unsqueeze(-1)
    logits = _largest(torch.where(real[..., 0] & lse.isfinite(), lse, 0.0))
    rounding = _STEPS * torch.finfo(torch.float32).eps * logits
    if theirs.shape == ours.shape:
        differs = real & (theirs != ours) & ~(theirs.isnan() & ours.isnan())
        gap = _largest(torch.where(differs, theirs.to(ours.dtype) - ours, 0.0))
        size = _largest(torch.where(real, ours, 0.0).nan_to_num(0.0, 0.0, 0.0))
        if gap <= (_TOLERANCE.get(theirs.dtype, 1e-4) + rounding) * max(size, 1e-6):
            return
        if gap != gap:
            raise UnsupportedError(
                f"observe: {site.name} ({site.kernel}) returns NaN for queries "
                f"whose visible keys are all finite: NaN of padding spreads to them. Find its "
                f"source (eager attention in float64 can produce it), or leave the layer out with "
                f"layers=."
            )
        difference = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        difference = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    raise UnsupportedError(
        f"observe: {site.name} ({site.kernel}) does not compute attention from its captured "
        f"inputs: its heads and ours {difference}. Leave its layer out with layers=, and please "
        f"report it."
    )


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
