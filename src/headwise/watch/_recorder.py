"""Records attention calls: sums over texts, and the tensors of the last batch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._interrupts import reversible
from headwise._torch_private import in_backward, is_wrapped, without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import RowStatistics, is_packed, under_autocast
from headwise.models import (
    ActiveModules,
    AttentionCall,
    Coverage,
    InputTracker,
    Site,
    Sites,
    Text,
    Understanding,
    capture_calls,
    output_projection,
    reason_unsupported,
)
from headwise.tables import Totals
from headwise.watch._accumulator import Accumulator
from headwise.watch._layouts import CallLayout, CallLayouts
from headwise.watch._maps import Maps
from headwise.watch._pairs import Pairs, TextPairs
from headwise.watch._positions import Positions, positions_across, positions_within
from headwise.watch._request import Request
from headwise.watch._row_sums import CallRows, row_request
from headwise.watch._spans import Spans

# The largest relative difference between our heads and the model's own.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up


class Recorder:
    """Records the attention calls of one model, and may answer them in place of its kernels.

    Attributes:
        coverage: Which share of a text's queries was captured at each site.
        maps: The tensors of the last batch.
        spans: The named stretches of the current texts.
    """

    def __init__(
        self, model: nn.Module, request: Request, layers: Collection[int] | None, every: int
    ) -> None:
        self._model, self._request = model, request
        self._layers, self._every = layers, every
        self._sites = Sites(model)
        self._inputs = InputTracker(model, self._sites.stacks.roots)
        self._understanding = Understanding()
        self._active = ActiveModules(understanding=self._understanding)
        self._layouts = CallLayouts(request)
        self._accumulator = Accumulator(request)
        self._pairs = Pairs(request)
        self.spans = Spans(request, self._sites.stacks.roots)
        self._answered: set[Site] = set()
        self._verified: set[Site] = set()
        self.coverage = Coverage()
        self.maps = Maps(request.maps, request.received)

    @property
    def passes(self) -> int:
        """The number of forward passes so far."""
        return self._inputs.passes

    @reversible
    def recording(
        self, exact: bool = True, condition: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Record the calls of the model while the block runs.

        Args:
            exact: False lets this library compute heads where it can; see `observe`.
            condition: Whether a call counts, evaluated at each call.
        """

        def record(call: AttentionCall) -> None:
            if condition():
                self._record(call)

        def answer(call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
            return self._answer(call) if condition() else None

        capturing = capture_calls(
            self._model,
            record,
            answer,
            answers_others=not exact,
            understanding=self._understanding,
        )
        with self._inputs.follow(), capturing as self._active:
            yield

    def captured_sites(self) -> list[Site]:
        """The sites of all calls so far, in the order of their first calls."""
        return self._sites.all()

    def sites(self) -> list[Site]:
        """The sites of all calls so far; then modules that were not captured, and why."""
        captured = [self._describe(site) for site in self._sites.all()]
        return captured + self._sites.uncaptured(self._active)

    def totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of each site."""
        return self._accumulator.totals()

    def take_totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of each site since the last time; the sums start again at zero."""
        totals = self._accumulator.totals()
        self._accumulator = Accumulator(self._request)
        return totals

    def set_pairs(self, pairs: Mapping[str, Sequence[TextPairs]]) -> None:
        """Set the pairs of each text of the next forward pass."""
        self._pairs.set(self._inputs.passes + 1, pairs)

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
        if self._is_skipped() or not self._supports(call):
            return
        site = self._sites.of(call, self._active)
        if not self._is_watched(site):
            return
        _check_values(call)
        # The function mode must not capture what is computed from the call.
        with without_function_modes():
            verify = call.exact and site not in self._verified
            if verify or self._request.names or self._request.received:
                self._add(site, call, need_heads=verify, verify=verify)
            else:  # maps alone
                self.maps.record(site, call, 0, None)

    def _answer(self, call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
        """Record a call that the model has not computed, and return its heads; None: neither."""
        site = self._sites.known(call, self._active)
        if site is None or site not in self._verified:
            return None
        if self._is_skipped() or not self._is_watched(site):
            return None
        # What keys receive is summed over queries that are not packed: in another order.
        if call.ours and self._request.received and is_packed(call.q.shape[2]):
            return None
        _check_values(call)
        with without_function_modes():
            rows = self._add(site, call, need_heads=True, verify=False)
        self._answered.add(site)
        return None if rows.heads is None else rows.heads.to(call.q.dtype)

    def _is_skipped(self) -> bool:
        """Whether the current forward pass is not watched."""
        # A backward pass runs checkpointed layers again, but they were counted already.
        is_backward = in_backward() and not self._inputs.inside
        return is_backward or max(0, self._inputs.passes - 1) % self._every > 0

    def _supports(self, call: AttentionCall) -> bool:
        """Whether a call attends within a text; if not, its module is listed as unsupported."""
        stack, _ = self._sites.place_of(call, self._active)
        tokens = self._inputs.of(stack).text.tokens
        reason = reason_unsupported(call, self._active.call_of(call.module), tokens)
        if reason is not None:
            self._sites.unsupported[self._sites.name_of(call.module)] = reason
        return reason is None

    def _add(
        self, site: Site, call: AttentionCall, *, need_heads: bool, verify: bool
    ) -> RowStatistics:
        """Compute the statistics of a call and add their sums."""
        request, layout = self._request, self._layout(site, call)
        per_head = self._per_head(site) if request.needs_projection else None
        with _without_autocast(call.q):
            rows = call.row_statistics(row_request(call, request, layout, per_head, need_heads))
            call_rows = CallRows.of(rows, call, layout, per_head)
        if verify and rows.heads is not None:
            heads = rows.heads if call.join is None else call.join(rows.heads.to(call.heads.dtype))
            _verify(site, call.heads, heads, rows.lse, layout.positions)
            self._verified.add(site)
        self._enter(site, call, call_rows, rows.received)
        if request.per_query:
            self.spans.keep(site, layout.positions, layout.spans, rows)
        return rows

    def _layout(self, site: Site, call: AttentionCall) -> CallLayout:
        """Where the queries and keys of a call lie in their texts."""
        inputs, passes = self._inputs.of(site.stack), self._inputs.passes
        kind = self._kind(site, call, inputs.text.tokens)
        layout = self._layouts.find(call, inputs, kind)
        if layout is None:
            text, key_text, positions = self._locate(site, call, kind)
            columns = self._pairs.columns(positions, text, passes)
            spans = self.spans.members(site, positions, key_text, inputs.text, passes)
            layout = CallLayout(key_text, positions, columns, spans)
            self._layouts.add(call, inputs, kind, layout)
        return layout

    def _enter(
        self,
        site: Site,
        call: AttentionCall,
        rows: CallRows,
        received: Float[Tensor, "B H S"] | None,
    ) -> None:
        first_text = self._accumulator.add(site, self._inputs.passes, rows)
        tokens = self._inputs.of(site.stack).text.tokens
        self.coverage.add(site, call, self._active.call_of(call.module), tokens)
        if received is not None and (evicted := rows.layout.positions.evicted_columns):
            received = pad(received, (evicted, 0))
        self.maps.record(site, call, first_text, received)

    def _per_head(self, site: Site) -> Float[Tensor, "H Dv d_model"]:
        projection = output_projection(self._model, site)
        if projection is None:
            raise UnsupportedError(
                f"observe: output_norm and value(...) need the output projection of {site.name}, "
                f"which was not found. Request neither, or leave its layer out with layers=."
            )
        return projection.per_head

    def _locate(self, site: Site, call: AttentionCall, kind: str) -> tuple[Text, Text, Positions]:
        """The text of the queries, the text of the keys, and the positions of both."""
        inputs = self._inputs.of(site.stack)
        if kind == "cross":
            key_text = inputs.cross_text.filled(Text(real=call.real))
            return inputs.text, key_text, positions_across(call, inputs.text, key_text)
        if inputs.text.real is None and call.real is not None:
            self._inputs.learn(site.stack, call.real)
        text = inputs.text.filled(Text(real=call.real))
        if kind == "condensed":
            return text, Text(), positions_across(call, text, Text())
        return text, text, positions_within(call, text)

    def _kind(self, site: Site, call: AttentionCall, tokens: int | None) -> str:
        """How keys relate to queries: of another text, of the same, or condensed.

        A model that drops or pools tokens leaves their positions unknown.
        """
        T, S = call.q.shape[2], call.k.shape[2]
        if site.cross:
            return "cross"
        module_call = self._active.call_of(call.module)
        length = None
        if module_call is not None and module_call.inputs:
            length = module_call.inputs[0].shape[1]
        # More keys than queries come from a cache, unless the module received them all.
        condensed = T > S or (T < S and length == S) or (tokens is not None and tokens > T)
        return "condensed" if condensed else "within"


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context without autocast, which would round our sums, too."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else nullcontext()


def _check_values(call: AttentionCall) -> None:
    """Refuse tensors without values, as torch.func transforms make them."""
    if is_wrapped(call.q):
        raise UnsupportedError(
            "observe: values are not available inside a transform of torch.func (grad, vmap, jvp). "
            "Watch a call outside of it; per-text statistics come from Request(per_text=True)."
        )


def _verify(site: Site, theirs: Tensor, ours: Tensor, lse: Tensor, positions: Positions) -> None:
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
                f"observe: {site.name} ({site.kernel}) gives NaN where all that its queries may "
                f"attend to are numbers: NaN of padding reaches them. Find where it comes from "
                f"(eager attention in float64 makes it), or leave the layer out with layers=."
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
