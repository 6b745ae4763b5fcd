"""Records the attention calls of each forward pass of a model.

A first or a long call is computed at once. Short calls and decoded tokens wait in a queue.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._torch_private import (
    excuse_uncompiled_call,
    in_backward,
    is_compiler_loaded,
    is_wrapped,
    without_function_modes,
)
from headwise.capture import (
    AttentionCall,
    Capture,
    GraphCall,
    InputTracker,
    ModuleCall,
    OfGraph,
    Site,
    Text,
    follow_graphs,
    open_capture,
)
from headwise.errors import UnsupportedError
from headwise.kernels import attend_rows, is_packed
from headwise.models import uncompiled
from headwise.ownership import OutputProjection
from headwise.tables import Totals
from headwise.watch._accumulator import Accumulator
from headwise.watch._call_layouts import CallLayout, CallLayouts, Place, key_of_place
from headwise.watch._graphs import Graphs
from headwise.watch._pass import Pass, TextNumbers
from headwise.watch._projections import Gate, Projections
from headwise.watch._queue import Queue
from headwise.watch._recorded import Recorded
from headwise.watch._request import Request
from headwise.watch._spans import Spans
from headwise.watch._sums import (
    output_norms,
    projected_norms,
    sum_rows,
    without_autocast,
)
from headwise.watch._verification import verify_heads


class Recorder:
    """Records the attention calls of one model, and may answer them in place of its kernels.

    Attributes:
        capture: The capture of the model, which knows its sites.
        projections: The output projections that the request needs, as far as they were found.
        pairs: The pairs of queries and keys of the current texts.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        layers: Collection[int] | None,
        every: int = 1,
        is_of_training: bool = False,
        rows_of: Callable[[AttentionCall], Sequence[range]] | None = None,
    ) -> None:
        """
        Args:
            rows_of: The queries of a call whose weights to keep in its place; none keeps the call.
        """
        self.model, self.request, self.layers = model, request, layers
        self._every, self._is_of_training = every, is_of_training
        self.capture = Capture(model)
        self._inputs = InputTracker(model, self.capture.stacks, self._begin, self._drop)
        self._layouts = CallLayouts(request, self.capture.stacks)
        self._accumulator = Accumulator(request)
        self._queue = Queue(request, self._layouts, self._accumulator)
        self.projections = Projections(model, needs_gates="gate" in request.statistics)
        self._needs_projections = request.maps or request.needs_projection
        self.pairs = self._layouts.pairs
        self._rows_of = rows_of
        self._answered: set[Site] = set()
        self._verified: set[Site] = set()
        self._recorded, self._graphs = Recorded(), Graphs()
        self._thread: int | None = None  # of the current pass
        self._pass = self._new_pass(TextNumbers())

    @property
    def passes(self) -> int:
        """The number of forward passes so far."""
        return self._inputs.latest.number

    @property
    def recorded(self) -> Recorded:
        """What was recorded of each site so far."""
        self._settle()
        return self._recorded

    @property
    def spans(self) -> Spans:
        """The named stretches of the current texts."""
        self._settle()
        return self._layouts.spans

    @contextmanager
    def recording(self, exact: bool = True) -> Iterator[None]:
        """Record the calls of the model while the block runs.

        Compiled code runs uncompiled until a pass has shown that its graphs can be followed.

        Args:
            exact: False lets this library compute heads where it can; see `observe`.
        """
        capturing = open_capture(
            self.capture, self._record, self._answer, answers_others=not exact, compiled=True,
            on_repeat=self._repeat,
        )  # fmt: skip
        try:
            with ExitStack() as graphs:
                on_success: Callable[[], None] | None = None
                if self._needs_projections:  # whose inputs are in no graph
                    on_success = self.projections.flush
                elif not self._is_of_training:  # else graphs are followed from the next step on
                    on_success = partial(self._follow_graphs, graphs, exact)
                with self._inputs.follow(compiled=True, on_success=on_success), capturing:
                    if self._needs_projections:
                        graphs.enter_context(self.projections.following())
                    if not self.capture.follows_graphs:
                        graphs.enter_context(uncompiled())
                    yield
        finally:
            # A pass that this did not see begin counts nowhere.
            self.capture.is_paused = self._is_of_training

    def _follow_graphs(self, uncompiled: ExitStack, exact: bool) -> None:
        """Let compiled code run compiled from now on, if its graphs can be followed."""
        if not self.capture.follows_graphs and self.can_follow_graphs():
            uncompiled.close()
            excuse_uncompiled_call()
            uncompiled.enter_context(self.following_graphs(exact))

    def can_follow_graphs(self) -> bool:
        """Whether something may have been compiled, whose graphs can hand over all calls."""
        if not is_compiler_loaded():
            return False
        self._settle()
        can_follow = self._graphs.can_follow(self._watched_sites())
        return can_follow and self.capture.uncaptured.are_all_called(self.capture.sites.all)

    @contextmanager
    def following_graphs(self, exact: bool = True) -> Iterator[None]:
        """Record what compiled graphs hand over while the block runs.

        Args:
            exact: False lets their operators compute heads, as in `recording`.
        """
        calls = [
            (*known, partial(self._record_in_graph, site, known[1]))
            for site, known in self._graphs.sites.items()
            if known is not None
        ]
        with follow_graphs(self.model, self._begin_in_graph, calls, answers=not exact):
            self.capture.follows_graphs = True
            try:
                yield
            finally:
                self.capture.follows_graphs = False

    def _watched_sites(self) -> list[Site]:
        return [site for site in self.capture.sites.all if self._is_watched(site)]

    def sites(self) -> list[Site]:
        """The sites of all calls so far; then modules that were not captured, and why."""
        captured = self.capture.sites.all
        return [*map(self._describe, captured), *self.capture.uncaptured.sites(captured)]

    def totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The sites that attended, and the totals of each statistic, all heads side by side."""
        self._settle()
        self._add_up()
        self._graphs.check(self._watched_sites())
        self._layouts.check()
        return self._accumulator.totals(self._pass.texts.next)

    def take_totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The totals since the last time; the sums start again at zero."""
        totals = self.totals()
        self._accumulator.clear()
        self._graphs.clear()
        self._pass = self._new_pass(TextNumbers())
        return totals

    def _describe(self, site: Site) -> Site:
        if not self._is_watched(site):
            return replace(site, watched="", reason="left out by layers=", statistics="")
        kernel = site.kernel
        if site in self._answered:
            how = "in the call itself" if site.kernel == "headwise" else f"instead of {kernel}"
            kernel = f"{site.statistics}, {how}"
        _, latest = self.recorded.latest.get(site, (None, ""))
        return replace(site, kernel=kernel, coverage=str(latest))

    def _is_watched(self, site: Site) -> bool:
        return self.layers is None or site.layer in self.layers

    def _record(self, call: AttentionCall) -> None:
        """Record a call that the model has computed."""
        # Gradient checkpointing runs layers again in the backward pass: they were counted already.
        if in_backward() and not self._inputs.inside:
            return
        site = self.capture.sites.of(call)
        if self._is_watched(site):
            self._add(site, call, verify=call.exact and site not in self._verified)
            self._pass.calls[site] += 1

    def _repeat(
        self, site: Site, alike: Hashable, module_call: ModuleCall | None, q: Tensor, k: Tensor
    ) -> bool:
        """Let a call wait with others alike, if that is all that is wanted of it."""
        inputs, pass_ = self._inputs.of(site.stack), self._pass
        received = number = None
        if module_call is not None:
            received, number = module_call.shape, module_call.number
        repeated = pass_.repeats.get(key_of_place(alike, received, site, inputs))
        if repeated is None or site not in self._verified or in_backward():
            return False
        place, group = repeated
        with without_function_modes():
            if group is not None:
                positions = group.layout.positions
                first = pass_.texts.number(site, positions.n_texts, positions.columns)
                self._queue.wait(group, site, q, k, first, pass_)
            elif not self._queue.continue_run(site, q, k, place.rule, pass_):
                return False
        pass_.add(partial(self._recorded.cover, site, number, place.covered))
        pass_.calls[site] += 1
        return True

    def _record_in_graph(
        self, site: Site, describe: OfGraph, of: GraphCall | None
    ) -> Float[Tensor, "B H T Dv"] | None:
        """Record a call that a compiled graph hands over, or misses.

        Returns:
            Its heads, if the graph needs them.
        """
        if in_backward() or self.capture.is_paused:
            return None
        pass_ = self._pass
        pass_.is_in_graph = True
        self.capture.check_thread(self._thread)
        if of is None:
            return None
        alike = self._layouts.alike(of, pass_)
        if not of.needs_heads and self._repeat(site, alike, None, of.q, of.k):
            return None
        heads = self._add(site, replace(describe(of), alike=alike), is_answer=of.needs_heads)
        pass_.calls[site] += 1
        return heads

    def _answer(self, call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
        """Record a call and return its heads; None leaves both to the model's own kernel."""
        site = self.capture.sites.known(call.module, call.q, call.module_call)
        if site is None or site not in self._verified or not self._is_watched(site):
            return None
        # A single token is cheaper in the queue than as a call of its own. Packed queries would
        # add up what keys receive in another order, which changes its last bits.
        is_reordered = self.request.received and is_packed(call.q.shape[2])
        if call.ours and (self._queue.may_take_token(call) or is_reordered):
            return None
        if self.request.needs_projection and not self.projections.is_known(site):
            return None
        heads = self._add(site, call, is_answer=True)
        self._pass.calls[site] += 1
        return heads

    def _begin_in_graph(self, text: Text, is_training: bool) -> None:
        """Begin a forward pass that runs in a compiled graph."""
        self._inputs.begin_in_graph(text)
        self._begin(is_training, is_in_graph=True)

    def _begin(self, is_training: bool, is_in_graph: bool = False) -> None:
        """Begin a forward pass; the one before it has succeeded, or was dropped."""
        self._settle()
        self._thread = threading.get_ident()
        self._queue.begin_pass()
        if self._accumulator.is_full():
            self._add_up()
        is_counted = is_training or not self._is_of_training
        self.capture.is_paused = not is_counted or (self.passes - 1) % self._every > 0
        is_in_graph &= not self.capture.is_paused
        self._pass = self._new_pass(self._pass.texts, is_in_graph)

    def _settle(self) -> None:
        self.projections.flush()
        self._pass.settle()

    def _new_pass(self, before: TextNumbers, is_in_graph: bool = False) -> Pass:
        pass_ = Pass(self.passes, before, is_in_graph)
        pass_.add(partial(self._graphs.add, pass_))
        return pass_

    def _drop(self) -> None:
        """Forget the current forward pass, which has ended in an exception and counts nowhere."""
        self.projections.forget()
        self._pass.settle(has_succeeded=False)
        self._pass = self._new_pass(self._pass.before)

    def _add(
        self, site: Site, call: AttentionCall, *, verify: bool = False, is_answer: bool = False
    ) -> Float[Tensor, "B H T Dv"] | None:
        """Let a call wait, or compute the statistics of its rows and add their sums.

        A call whose heads are needed does not wait; it returns them.
        """
        if is_wrapped(call.q):
            raise UnsupportedError(
                "observe: values are not available inside a transform of torch.func (grad, vmap, "
                "jvp). Watch a call outside of it; per-text statistics come from "
                "Request(per_text=True)."
            )
        request, latest, pass_ = self.request, self._inputs.latest, self._pass
        may_wait = not (verify or is_answer)
        # The function mode must not capture what is computed from the call.
        with without_function_modes():
            inputs = self._inputs.of(site.stack)
            place = self._layouts.place(site, call, inputs, latest.kept, pass_)
            if site not in self._graphs.sites:
                self._graphs.add_site(site, call, self._is_alike(site, call, place))
            number = None if call.module_call is None else call.module_call.number
            pass_.add(partial(self._recorded.cover, site, number, place.covered))
            if self._rows_of is not None and (ranges := self._rows_of(call)):
                self._keep_weights(site, call, self._layout(place, site, call), ranges)
                return None
            if may_wait and not (request.names or request.received):  # maps alone
                self._keep(site, call)
                if not self.projections.is_known(site):
                    self.projections.wait(site, call, lambda *_: None)
                return None
            if may_wait and self._queue.add_token(site, call, place, latest.cache, pass_):
                return None
            layout = self._layout(place, site, call)
            positions = layout.positions
            first = pass_.texts.number(site, positions.n_texts, positions.columns)
            if may_wait and self._queue.add(site, call, place, layout, first, pass_):
                return None
            waits = self._needs_projections and not (is_answer or self.projections.is_known(site))
            if waits:  # and a gate may change the heads in place
                call = replace(call, heads=call.heads.clone())
            add = partial(self._add_rows, site, call, layout, first, not may_wait, verify)
            if is_answer:
                self._answered.add(site)
            if not waits:
                return add(self.projections.found.get(site))
            self.projections.wait(site, call, add)
            return None

    def _add_up(self) -> None:
        """Compute what waits, and add up the sums of texts that have ended: the host reads them."""
        self._queue.compute()
        self._accumulator.close(self._pass.latest_texts.first)

    def _is_alike(self, site: Site, call: AttentionCall, place: Place) -> bool:
        """Whether an operator in a compiled graph would tell the same of a call."""
        bare = replace(call, module_call=None)
        of_graph = self._layouts.place(site, bare, place.inputs, None, self._pass)
        return (
            place.kind == "within" == of_graph.kind
            and place.covered == of_graph.covered
            and self._inputs.follows_model(site.stack)
            and not self._needs_projections
        )

    def _add_rows(
        self,
        site: Site,
        call: AttentionCall,
        layout: CallLayout,
        first: int,
        need_heads: bool,
        verify: bool,
        projection: OutputProjection | None = None,
        gate: Gate | None = None,
    ) -> Float[Tensor, "B H T Dv"] | None:
        """Add the statistics of each row, and keep what else is requested; return any heads."""
        request, positions = self.request, layout.positions
        per_head = projection.per_head if projection and request.needs_weight else None
        if per_head is None and request.needs_weight:
            raise UnsupportedError(
                f"observe: output_norm and value(...) need the output projection of {site}, "
                f"which was not found. Request neither, or leave its layer out with layers=."
            )
        with without_autocast(call.q):
            needed = layout.row_request
            if need_heads or ("output_norm" in request.statistics and call.join is not None):
                needed = replace(needed, heads=True)
            if per_head is not None and request.value:
                needed = replace(needed, key_norms=projected_norms(call.v, per_head))
            rows = call.row_statistics(needed)
            norms = None if per_head is None else output_norms(rows, call, per_head)
            more = {"output_norm": norms, "gate": gate}
            sums = sum_rows(rows, layout, knows_logits=call.knows_logits, more=more)
        if verify and rows.heads is not None:
            verify_heads(site, call, rows.heads, rows.lse, positions)
            self._verified.add(site)
        pass_, recorded = self._pass, self._recorded
        pass_.add(partial(self._accumulator.add, site, sums, [first]))
        if request.maps:
            self._keep(site, call)
        if rows.received is not None:
            pass_.add(partial(recorded.receive, site, rows.received, positions, first))
        if request.per_query:
            self._layouts.spans.keep(site, positions, layout.spans, rows, pass_)
        return None if rows.heads is None else rows.heads.to(call.q.dtype)

    def _keep(self, site: Site, call: AttentionCall) -> None:
        """Keep a call for maps, without the heads and the module's inputs."""
        bare = replace(call, heads=call.q[..., :0], module_call=None)
        self._pass.add(partial(self._recorded.calls.__setitem__, site, bare))

    def _keep_weights(
        self, site: Site, call: AttentionCall, layout: CallLayout, ranges: Sequence[range]
    ) -> None:
        """Keep the weights of some queries; their heads must be those of the model."""
        weights, must_agree = [], call.exact and site not in self._verified
        with without_autocast(call.q):
            for part in ranges:
                own = attend_rows(call.q, call.k, call.v, call.rule, keep_weights=True, rows=part)
                weights.append(own["weights"].to(call.q.dtype))
                if must_agree:
                    rows = slice(part.start, part.stop)
                    verify_heads(site, call, own["heads"], own["lse"], layout.positions, rows)
                    self._verified.add(site)
        joined = torch.cat(weights, 2)
        self._pass.add(partial(self._recorded.weights.__setitem__, site, joined))

    def _layout(self, place: Place, site: Site, call: AttentionCall) -> CallLayout:
        """Where the queries and keys of a call lie in their texts."""
        if place.kind != "cross" and place.inputs.text.real is None and call.real is not None:
            self._inputs.learn(site.stack, call.real)
        return self._layouts.of(place, site, call, self._pass)
