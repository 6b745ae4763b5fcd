"""Records attention calls: sums over texts, and the tensors of the last batch.

A first or a long call is computed at once. Short calls and decoded tokens wait in a queue, and are
computed many at a time.
"""

from collections.abc import Collection, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._torch_private import (
    excuse_uncompiled_call,
    in_backward,
    is_compiler_loaded,
    is_materialized,
    is_wrapped,
    version_of,
    without_function_modes,
)
from headwise.capture import (
    AttentionCall,
    Capture,
    InputTracker,
    Site,
    StackInputs,
    Text,
    follow_graphs,
    open_capture,
)
from headwise.errors import UnsupportedError
from headwise.kernels import RowStatistics, is_packed, row_statistics
from headwise.masks import Window
from headwise.models import growing_layer, uncompiled
from headwise.ownership import output_projection
from headwise.tables import Totals
from headwise.watch._call_layouts import CallLayout, CallLayouts
from headwise.watch._graphs import Graphs
from headwise.watch._positions import Positions
from headwise.watch._request import Request
from headwise.watch._sums import (
    Accumulator,
    output_norms,
    row_request,
    sum_rows,
    without_autocast,
)

# The largest relative difference between our heads and the model's own.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up
# A call with more elements of queries and keys than this is computed at once: copying it would cost
# more than waiting saves.
LONG = 1 << 18
# Waiting calls are computed when their copies hold this many elements. A smaller limit computes
# them more often, each time after the model's pass has driven the kernel's code out of the cache.
WAIT = 1 << 21
GROUPS = 8  # wait at most: each may reserve memory for `WAIT` elements
# The number of decoded tokens of a site that are computed as one causal call.
TOKENS = 32
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        received: For each site the number of its first text, and the attention that the keys have
            received since the texts began.
        pairs: The pairs of queries and keys of the current texts.
        spans: The named stretches of the current texts.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        layers: Collection[int] | None,
        every: int,
        is_of_training: bool = False,
    ) -> None:
        self._model, self._request = model, request
        self._layers, self._every, self._is_of_training = layers, every, is_of_training
        self.capture = Capture(model)
        self._inputs = InputTracker(model, self.capture.stacks)
        self._layouts = CallLayouts(request, self.capture.stacks)
        self._accumulator = Accumulator(request)
        self._queue = Queue(request, self._layouts, self._accumulator)
        self.pairs, self.spans = self._layouts.pairs, self._layouts.spans
        self._answered: set[Site] = set()
        self._verified: set[Site] = set()
        self.covered: dict[Site, Covered] = {}
        # For each site, the number of its module's latest call, and what that call has covered.
        self._latest: dict[Site, tuple[int | None, Covered]] = {}
        self.calls: dict[Site, AttentionCall] = {}
        self.received: dict[Site, tuple[int, Float[Tensor, "B H S"]]] = {}
        # The attributes of each part as they were before the current pass.
        self._before: list[tuple[object, dict[str, Any]]] = []
        self._graphs = Graphs()
        self._inputs.on_begin, self._inputs.on_failure = self._begin, self._drop

    @property
    def passes(self) -> int:
        """The number of forward passes so far."""
        return self._inputs.passes

    @contextmanager
    def recording(self, exact: bool = True) -> Iterator[None]:
        """Record the calls of the model while the block runs.

        Compiled code runs uncompiled until a pass has shown that its graphs can be followed.

        Args:
            exact: False lets this library compute heads where it can; see `observe`.
        """
        capturing = open_capture(
            self.capture, self._record, self._answer, answers_others=not exact, compiled=True
        )
        try:
            with ExitStack() as graphs, self._inputs.follow(compiled=True), capturing:
                if not self._graphs.are_open:
                    graphs.enter_context(uncompiled())
                    if not self._is_of_training:  # else from the next step on
                        self._inputs.on_success = partial(self._follow_graphs, graphs)
                yield
        finally:
            self._inputs.on_success = lambda: None
            # A pass that this did not see begin counts nowhere.
            self.capture.is_paused = self._is_of_training
            self._before = []  # whose copies of calls would stay as long as the watch

    def _follow_graphs(self, uncompiled: ExitStack) -> None:
        """Let compiled code run compiled from now on, if its graphs can be followed."""
        if not self._graphs.are_open and self.can_follow_graphs():
            uncompiled.close()
            excuse_uncompiled_call()
            uncompiled.enter_context(self.following_graphs())

    @property
    def follows_graphs(self) -> bool:
        """Whether compiled code runs compiled, and its graphs hand over their calls."""
        return self._graphs.are_open

    def can_follow_graphs(self) -> bool:
        """Whether something may have been compiled, whose graphs can hand over all calls."""
        return is_compiler_loaded() and self._graphs.can_follow(self._watched_sites())

    @contextmanager
    def following_graphs(self) -> Iterator[None]:
        """Record what compiled graphs hand over while the block runs."""
        calls = [
            (*handle, partial(self._record_in_graph, site))
            for site, handle in self._graphs.sites.items()
            if handle is not None
        ]
        with follow_graphs(self._model, self._begin_in_graph, calls):
            self._graphs.are_open = True
            try:
                yield
            finally:
                self._graphs.are_open = False

    def _watched_sites(self) -> list[Site]:
        return [site for site in self.capture.sites if self._is_watched(site)]

    def sites(self) -> list[Site]:
        """The sites of all calls so far; then modules that were not captured, and why."""
        return [*map(self._describe, self.capture.sites), *self.capture.uncaptured()]

    def totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The sites that attended, and the totals of each statistic, all heads side by side."""
        self._queue.compute()
        self._graphs.check(self._watched_sites())
        return self._accumulator.totals()

    def take_totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The totals since the last time; the sums start again at zero."""
        totals = self.totals()
        self._accumulator.clear()
        self._graphs.clear()
        return totals

    def _describe(self, site: Site) -> Site:
        if not self._is_watched(site):
            return replace(site, watched="", reason="left out by layers=", statistics="")
        kernel = site.kernel
        if site in self._answered:
            how = "in the call itself" if site.kernel == "headwise" else f"instead of {kernel}"
            kernel = f"{site.statistics}, {how}"
        _, latest = self._latest.get(site, (None, ""))
        return replace(site, kernel=kernel, coverage=str(latest))

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
            self._graphs.count(site, is_in_graph=False)

    def _record_in_graph(self, site: Site, call: AttentionCall) -> None:
        """Record a call that a compiled graph hands over."""
        if not (in_backward() or self.capture.is_paused):
            self._add(site, call)
            self._graphs.count(site, is_in_graph=True)

    def _answer(self, call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
        """Record a call and return its heads; None leaves both to the model's own kernel."""
        site = self.capture.known_site(call)
        if site is None or site not in self._verified or not self._is_watched(site):
            return None
        # A single token is cheaper in the queue than as a call of its own. Packed queries would
        # add up what keys receive in another order, which changes its last bits.
        is_reordered = self._request.received and is_packed(call.q.shape[2])
        if call.ours and (self._queue.may_take_token(call) or is_reordered):
            return None
        rows = self._add(site, call, is_answer=True)
        self._graphs.count(site, is_in_graph=False)
        self._answered.add(site)
        return None if rows is None or rows.heads is None else rows.heads.to(call.q.dtype)

    def _begin_in_graph(self, text: Text, is_training: bool) -> None:
        """Begin a forward pass that runs in a compiled graph."""
        self._inputs.begin_in_graph(text)
        self._begin(is_training, is_in_graph=True)

    def _begin(self, is_training: bool, is_in_graph: bool = False) -> None:
        """Begin a forward pass, and remember the state before it."""
        self._queue.begin_pass()
        self._accumulator.begin_pass()
        self._layouts.begin_pass(self.passes)
        self._before = []  # else each state would hold the one before it
        is_counted = is_training or not self._is_of_training
        self.capture.is_paused = not is_counted or (self.passes - 1) % self._every > 0
        self._graphs.begin_pass(is_in_graph and not self.capture.is_paused)
        parts = [self, self._accumulator, self._queue, self._graphs]
        if self._request.spans:
            parts.append(self.spans)
        waiting = [(part, dict(vars(part))) for part in self._queue.waiting]
        self._before = [*((part, _state(part)) for part in parts), *waiting]

    def _drop(self) -> None:
        """Undo the current forward pass, which has ended in an exception and counts nowhere."""
        for part, state in self._before:
            vars(part).update(state)

    def _add(
        self, site: Site, call: AttentionCall, *, verify: bool = False, is_answer: bool = False
    ) -> RowStatistics | None:
        """Let a call wait, or compute the statistics of its rows and add their sums.

        Returns:
            The statistics of each row; None if the call waits. A call whose heads are needed does
            not wait.
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
            kind = _kind(site, call, inputs, self._inputs.kept)
            if site not in self._graphs.sites:
                self._graphs.add_site(site, call, self._is_alike(site, call, inputs, kind))
            self._cover(site, call, inputs.text.tokens)
            if not need_heads and kind == "within":
                cache = self._inputs.cache
                if self._queue.add_token(site, call, inputs, cache):
                    return None
            layout = self._layout(site, call, inputs, kind)
            columns, n_texts = layout.positions.columns, layout.positions.n_texts
            first = self._accumulator.number(site, n_texts, columns)
            rows = None
            if need_heads or not self._queue.add(site, call, layout, first):
                rows = self._add_rows(site, call, layout, first, need_heads, verify)
            if self._queue.is_full:
                self._queue.compute()
            return rows

    def _is_alike(self, site: Site, call: AttentionCall, inputs: StackInputs, kind: str) -> bool:
        """Whether an operator in a compiled graph would tell the same of a call."""
        request, tokens, bare = self._request, inputs.text.tokens, replace(call, module_call=None)
        return (
            kind == "within" == _kind(site, bare, inputs, None)
            and _covered(call, tokens) == _covered(bare, tokens)
            and self._inputs.follows_model(site.stack)
            and not (request.maps or request.needs_projection)
        )

    def _cover(self, site: Site, call: AttentionCall, tokens: int | None) -> None:
        """Count the queries of a call. Calls within one call of a module share its tokens."""
        covered, before = _covered(call, tokens), Covered()
        number = None if call.module_call is None else call.module_call.number
        latest = self._latest.get(site)
        if latest is not None and number is not None and latest[0] == number:
            covered, before = covered._replace(tokens=0), latest[1]
        self._latest[site] = number, before.plus(covered)
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
        self._accumulator.add(sums, {site: [(0, first)]})
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

    def _layout(
        self, site: Site, call: AttentionCall, inputs: StackInputs, kind: str
    ) -> CallLayout:
        """Where the queries and keys of a call lie in their texts."""
        if kind != "cross" and inputs.text.real is None and call.real is not None:
            self._inputs.learn(site.stack, call.real)
        return self._layouts.of(site, call, inputs, kind)

    def _per_head(self, site: Site) -> Float[Tensor, "H Dv d_model"]:
        projection = output_projection(self._model, site)
        if projection is None:
            raise UnsupportedError(
                f"observe: output_norm and value(...) need the output projection of {site}, "
                f"which was not found. Request neither, or leave its layer out with layers=."
            )
        return projection.per_head


def _state(part: object) -> dict[str, Any]:
    """The attributes of a part, dicts as copies; the values of dicts are never changed in place."""
    return {name: dict(x) if type(x) is dict else x for name, x in vars(part).items()}


def _kind(site: Site, call: AttentionCall, inputs: StackInputs, kept: int | Tensor | None) -> str:
    """How keys relate to queries: of another text, of the same, or condensed.

    A model that drops or pools tokens leaves their positions unknown.

    Args:
        kept: The logits that the pass returns: layers that write no keys may compute the queries
            of these alone.
    """
    if site.cross:
        return "cross"
    T, S, tokens = call.q.shape[2], call.k.shape[2], inputs.text.tokens
    received = [] if call.module_call is None else call.module_call.inputs
    if tokens is not None and T < tokens <= S and received and received[0].shape[1] == T:
        if isinstance(kept, Tensor) and kept.numel() == T:
            raise UnsupportedError(
                f"observe: {site} computes {T} of {tokens} queries, those of "
                f"logits_to_keep={kept.tolist()}. Leave logits_to_keep out, or give a number."
            )
        if kept == T:  # the last ones
            return "within"
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
    NaN logits or without a visible key are not compared, because kernels treat them differently:
    where a mask adds its lowest number to all keys, eager attention has uniform weights.
    """
    real = positions.query_real[:, None, :, None] & (lse > -torch.inf).unsqueeze(-1)
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
                f"observe: {site} ({site.kernel}) returns NaN for queries "
                f"whose visible keys are all finite: NaN of padding spreads to them. Find its "
                f"source (eager attention in float64 can produce it), or leave the layer out with "
                f"layers=."
            )
        difference = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        difference = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    advice = "Leave its layer out with layers=, and please report it."
    if site.kernel == "softmax":  # by hand: its heads are the product of its weights and values
        advice = (
            "Its weights are changed after the softmax, as by a gate. Leave its layer out with "
            "layers=."
        )
    raise UnsupportedError(
        f"observe: {site} ({site.kernel}) does not compute attention from its captured "
        f"inputs: its heads and ours {difference}. {advice}"
    )


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


@dataclass(eq=False)
class _Group:
    """Calls that differ in queries and keys alone, and are computed as one, heads side by side.

    Masks, positions and columns have no axis of heads, or broadcast over it, so that they hold for
    several calls as for one, and grouped heads stay grouped.

    Attributes:
        call: One of them: its rule holds for all. Its tensors are copies of the queries and keys
            of all, where the kernel reads them, with room for `room` calls.
        waiting: The site and the first text of each.
    """

    call: AttentionCall
    layout: CallLayout
    room: int
    waiting: tuple[tuple[Site, int], ...] = ()

    def add(self, site: Site, first_text: int, call: AttentionCall) -> None:
        n = len(self.waiting)
        for copies, x in ((self.call.q, call.q), (self.call.k, call.k)):
            H = x.shape[1]
            copies[:, n * H : (n + 1) * H] = x
        self.waiting = (*self.waiting, (site, first_text))


@dataclass(eq=False)
class _Run:
    """The tokens that a site has read one at a time, over a cache that only appends.

    No numbers are compared to see that a call continues the run: before its pass the cache holds,
    unchanged, the very tensor that the previous token has read, and appending makes a new one.

    Attributes:
        call: The first of them: the others differ in queries and keys alone.
        cache: The layer of the cache.
        queries: Copies, with room for further tokens.
        keys: Copies of all keys, with room for further ones.
        last: The keys of the latest token, as the cache holds them.
        version: How often these had been changed in place.
        n: The number of tokens.
    """

    call: AttentionCall
    cache: Any
    queries: Float[Tensor, "B H T D"]
    keys: Float[Tensor, "B Hkv S D"]
    last: Tensor
    first_text: int = -1
    version: int = -1
    n: int = 0

    @property
    def before(self) -> int:
        """The number of keys before the first of these tokens."""
        return self.call.k.shape[2] - 1

    def may_go_on(self) -> bool:
        """Whether the pass that begins may read one more token of the text."""
        is_same = self.cache.keys is self.last and version_of(self.last) == self.version
        return is_same and self.n < TOKENS

    def continues(self, call: AttentionCall) -> bool:
        """Whether a call reads the next token; `may_go_on` held when its pass began."""
        q, k, rule, S = call.q, call.k, self.call.rule, self.before + self.n
        is_next = k is self.cache.keys and k.shape[2] == S + 1 and not k.is_inference()
        is_alike = q.shape == self.call.q.shape and q.dtype == self.call.q.dtype
        return is_next and is_alike and (call.rule is rule or call.rule == rule)

    def add(self, call: AttentionCall, first_text: int) -> None:
        S = self.before + self.n
        self.queries[:, :, self.n : self.n + 1] = call.q
        self.keys[:, :, S] = call.k[:, :, S]
        self.last, self.version = call.k, version_of(call.k)
        self.first_text, self.n = first_text, self.n + 1

    def check(self, site: Site) -> None:
        """Refuse a run whose keys were changed unnoticed: each token has seen them as they were."""
        if version_of(self.last) != self.version:
            return
        bits = _INTEGERS[self.keys.itemsize]  # by which NaN equals itself
        own = self.keys[:, :, : self.last.shape[2]].view(bits)
        if not torch.equal(own, self.last.view(bits)):
            raise UnsupportedError(
                f"observe: the keys of {site} were changed in their cache without a trace, as "
                f"through .data, while tokens were read one at a time. Change them in place "
                f"(keys.mul_(...)), or assign new ones."
            )

    def as_call(self) -> tuple[AttentionCall, Text]:
        """A call that reads these tokens at once: each sees the keys up to its own."""
        visible = self.call.rule.visible
        window = Window(visible.left if isinstance(visible, Window) else None, 0)
        q, k = self.queries[:, :, : self.n], self.keys[:, :, : self.before + self.n]
        rule = replace(self.call.rule, visible=window)
        call = replace(self.call, q=q, k=k, v=k[..., :0], heads=q[..., :0], rule=rule)
        return call, Text(cached=self.before, tokens=self.n)


class Queue:
    """Calls on a CPU that wait to be computed together: those of all layers and of several passes.

    A short call waits if its statistics follow from queries, keys and a mask. A decoded token
    waits for the next one if its text has no padding and its cache only appends.
    """

    def __init__(self, request: Request, layouts: CallLayouts, accumulator: Accumulator) -> None:
        of_call = request.needs_projection or request.received or request.maps or request.per_query
        self._takes_calls = bool(request.names) and not of_call
        self._takes_tokens = self._takes_calls and not request.is_of_text
        self._request, self._layouts, self._accumulator = request, layouts, accumulator
        self._groups: dict[Hashable, _Group] = {}
        self._n_numbers = 0
        self._runs: dict[Site, _Run] = {}
        self._whole: tuple[StackInputs, int, bool] | None = None

    @property
    def is_full(self) -> bool:
        """Whether enough calls wait for them to be computed."""
        is_full = self._n_numbers > WAIT or len(self._groups) > GROUPS
        return is_full or self._accumulator.is_full

    @property
    def waiting(self) -> list[object]:
        """Groups and runs, which a forward pass adds to."""
        return [*self._groups.values(), *self._runs.values()]

    def begin_pass(self) -> None:
        """Begin a forward pass; tokens of texts that have ended are computed."""
        if not all(run.may_go_on() for run in self._runs.values()):
            self.compute()

    def add(self, site: Site, call: AttentionCall, layout: CallLayout, first_text: int) -> bool:
        """Let a call wait; False if it has to be computed at once."""
        q, rule = call.q, call.rule
        size = q.numel() + call.k.numel()
        may_wait = self._takes_calls and layout.may_wait and q.is_cpu and 0 < size <= LONG
        is_own = rule.bias is not None or rule.sinks is not None or type(rule.scale) is not float
        if not may_wait or is_own or type(call) is not AttentionCall:
            return False
        self._add(site, call, layout, first_text)
        return True

    def _add(self, site: Site, call: AttentionCall, layout: CallLayout, first_text: int) -> None:
        q, k, rule = call.q, call.k, call.rule
        key = id(layout), q.shape, k.shape, q.dtype, k.dtype, rule.scale, rule.softcap
        group = self._groups.get(key)
        if group is not None and len(group.waiting) == group.room:
            self._compute(self._groups.pop(key))
            group = None
        if group is None:
            room = 1 + WAIT // (q.numel() + k.numel())
            with torch.inference_mode(False):  # they may be written to outside of it, too
                queries, keys = (
                    x.new_empty(len(x), room * x.shape[1], *x.shape[2:]) for x in (q, k)
                )
            first = replace(
                call, q=queries, k=keys, v=keys[..., :0], heads=queries[..., :0],
                rule=replace(rule, visible=layout.visible), module_call=None,
            )  # fmt: skip
            group = self._groups[key] = _Group(first, layout, room)
        group.add(site, first_text, call)
        self._n_numbers += q.numel() + k.numel()

    def may_take_token(self, call: AttentionCall) -> bool:
        """Whether a call reads one token that may wait.

        In inference mode tensors have no version that would reveal a change of the keys.
        """
        q = call.q
        return self._takes_tokens and q.shape[2] == 1 and q.is_cpu and not q.is_inference()

    def add_token(self, site: Site, call: AttentionCall, inputs: StackInputs, cache: Any) -> bool:
        """Let a call wait if it reads one more token of a text; False if it cannot wait."""
        if not self.may_take_token(call):
            return False
        run = self._runs.get(site)
        if run is not None and not (self._is_whole(inputs, call) and run.continues(call)):
            self.compute()
            run = None
        if run is None:
            run = self._new_run(site, call, inputs, cache)
        if run is None:
            return False
        S, B = call.k.shape[2], len(call.q)
        run.add(call, self._accumulator.number(site, B, range(S - 1, S)))
        self._runs[site] = run
        return True

    def _new_run(
        self, site: Site, call: AttentionCall, inputs: StackInputs, cache: Any
    ) -> _Run | None:
        """The beginning of a run, without its first token; None if a call has to stand alone."""
        q, k = call.q, call.k
        layer = growing_layer(cache, call.module, k)
        is_plain = type(call) is AttentionCall and call.real is None and call.rule.is_static
        if layer is None or not is_plain or site.cross:
            return None
        is_copied = k.itemsize in _INTEGERS and is_materialized(q, k)
        if not is_copied or not self._is_whole(inputs, call):
            return None
        S = k.shape[2]
        queries = q.new_empty(*q.shape[:2], TOKENS, q.shape[3])
        keys = k.new_empty(*k.shape[:2], S + TOKENS, k.shape[3])
        keys[:, :, :S] = k
        first = replace(call, v=k[..., :0], heads=q[..., :0], module_call=None)
        return _Run(first, layer, queries, keys, k)

    def _is_whole(self, inputs: StackInputs, call: AttentionCall) -> bool:
        """Whether the keys are a text without padding, of which this pass reads the last token.

        Remembered for the layers of a pass: it takes 10 us for each, a tenth of what they cost.
        """
        S = call.k.shape[2]
        if self._whole is None or self._whole[0] is not inputs or self._whole[1] != S:
            self._whole = inputs, S, _is_whole(inputs.text, S)
        return self._whole[2]

    def compute(self) -> None:
        """Compute and add up what waits."""
        with without_function_modes(), torch.no_grad():
            # Taken out first, so that nothing counts twice after an error.
            for site in list(self._runs):
                run = self._runs.pop(site)
                run.check(site)
                call, text = run.as_call()
                layout = self._layouts.of(site, call, StackInputs(text), "within")
                self._add(site, call, layout, run.first_text)
            for key in list(self._groups):
                self._compute(self._groups.pop(key))
        self._n_numbers = 0
        self._accumulator.close()

    def _compute(self, group: _Group) -> None:
        """Compute the calls of a group as one, and add up the sums of each."""
        n, copies = len(group.waiting), (group.call.q, group.call.k)
        q, k = (x[:, : x.shape[1] // group.room * n] for x in copies)
        with without_autocast(q):
            needed = row_request(group.call, self._request, group.layout, None, need_heads=False)
            rows = row_statistics(q, k, k[..., :0], group.call.rule, needed)
            sums = sum_rows(rows, group.layout, self._request, n_calls=n)
        calls: dict[Site, list[tuple[int, int]]] = {}
        for number, (site, first_text) in enumerate(group.waiting):
            calls.setdefault(site, []).append((number, first_text))
        self._accumulator.add(sums, calls)


def _is_whole(text: Text, S: int) -> bool:
    """Whether `S` columns are a text without padding, of which a pass reads the last."""
    if text.tokens not in (None, 1) or text.cached not in (None, S - 1):
        return False
    real, positions = text.real, text.positions
    if real is not None and (real.shape[1] != S or not bool(real.all())):
        return False
    is_last = positions is not None and positions.shape[1] == 1 and bool((positions == S - 1).all())
    return positions is None or is_last
