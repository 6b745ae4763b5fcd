"""What becomes of the attention calls that a watch hears: sums of texts, and a close look."""

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._torch_private import in_backward, is_wrapped, without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import RowStatistics
from headwise.models import (
    ActiveModules,
    AttentionCall,
    Coverage,
    InputTracker,
    Site,
    Sites,
    Text,
    output_projection,
    unsupported,
)
from headwise.watch._accumulator import Accumulator, CallSums
from headwise.watch._maps import Maps
from headwise.watch._pairs import Pairs
from headwise.watch._positions import Positions, positions_across, positions_within
from headwise.watch._request import Request
from headwise.watch._row_sums import Heard, collect

# How far our heads may lie from the model's own before we say that we misread the call.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up


class Recorder:
    """Takes in the calls of one model, and answers those that it may.

    Attributes:
        found: The sites of the calls so far.
        inputs: What the model is reading.
        running: Which of its modules are running.
        coverage: Which part of a text's queries was captured at each site.
        answered: The sites that were answered in place of the model's own kernel.
    """

    def __init__(
        self, model: nn.Module, request: Request, layers: Collection[int] | None, every: int
    ) -> None:
        self._model, self._request = model, request
        self._layers, self._every = layers, every
        self.found = Sites(model)
        self.inputs = InputTracker(model, self.found.stacks.roots)
        self.running = ActiveModules()
        self.ledger = Accumulator(request.per_text)
        self.pairs = Pairs(request)
        self.looks = Maps(request.maps, request.received)
        self.answered: set[Site] = set()
        self.coverage = Coverage()
        self._understood: set[Site] = set()

    def hear(self, call: AttentionCall) -> None:
        """Take in one attention call; `listen` is what tells of it."""
        if self._passes_over():
            return
        if not self._supports(call):
            return
        site = self.found.of(call, self.running)
        if self._layers is not None and site.layer not in self._layers:
            return
        _check_numbers(call)
        # What listens for attention need not listen to what is computed about it.
        with without_function_modes():
            self._take_in(site, call)

    def _supports(self, call: AttentionCall) -> bool:
        """Whether a call attends within a text; the module of one that does not is listed."""
        name = self.found.name_of(call.module)
        stack, _ = self.found.stacks.of(name, call.cross)
        tokens = self.inputs.of(stack).own.tokens
        why = unsupported(call, self.running.run_of(call.module), tokens)
        if why is not None:
            self.found.unsupported[name] = why
        return why is None

    def _take_in(self, site: Site, call: AttentionCall) -> None:
        ask = call.exact and site not in self._understood
        if not (ask or self._request.names or self._request.received):  # maps alone
            self.looks.take(site, call, 0, None)
            return
        heard = self._heard(site, call)
        sums, rows = self._collect(heard, heads_too=ask)
        if ask and rows.heads is not None:
            ours = rows.heads if call.join is None else call.join(rows.heads.to(call.heads.dtype))
            _compare(site, call.heads, ours, rows.lse, heard.places)
            self._understood.add(site)
        self._enter(site, heard, sums, rows)

    def answer(self, call: AttentionCall) -> Float[Tensor, "B H T Dv"] | None:
        """Take in a call that the model has not answered, and give its heads; or neither."""
        site = self.found.known(call, self.running)
        if site not in self._understood or self._passes_over():
            return None
        if self._layers is not None and site.layer not in self._layers:
            return None
        _check_numbers(call)
        site = self.found.of(call, self.running)
        with without_function_modes():
            heard = self._heard(site, call)
            sums, rows = self._collect(heard, heads_too=True)
            self._enter(site, heard, sums, rows)
        self.answered.add(site)
        return None if rows.heads is None else rows.heads.to(call.q.dtype)

    def _passes_over(self) -> bool:
        """Whether nothing is watched just now."""
        # In a backward pass, checkpointed layers run again: they have been counted already.
        again = in_backward() and not self.inputs.inside
        return again or max(0, self.inputs.passes - 1) % self._every > 0

    def _collect(self, heard: Heard, heads_too: bool) -> tuple[CallSums, RowStatistics]:
        # Autocast would round sums of ours, too.
        with torch.autocast(heard.call.q.device.type, enabled=False):
            return collect(heard, self._request, heads_too)

    def _enter(self, site: Site, heard: Heard, sums: CallSums, rows: RowStatistics) -> None:
        self.ledger.enter(site, sums)
        run, call = self.running.run_of(heard.call.module), heard.call
        self.coverage.enter(site, call, run, self.inputs.of(site.stack).own.tokens)
        received = rows.received
        if received is not None and heard.places.gone:  # keys that the cache has forgotten
            received = pad(received, (heard.places.gone, 0))
        self.looks.take(site, heard.call, heard.first, received)

    def _heard(self, site: Site, call: AttentionCall) -> Heard:
        text, keys, places = self._read(site, call)
        passes = self.inputs.passes
        return Heard(
            call=call,
            places=places,
            keys=keys,
            first=self.ledger.begin(site, places, passes),
            pairs=self.pairs.columns(places, text, passes),
            per_head=self._per_head(site) if self._request.needs_projection else None,
        )

    def _per_head(self, site: Site) -> Float[Tensor, "H Dv d_model"]:
        projection = output_projection(self._model, site)
        if projection is None:
            raise UnsupportedError(
                f"observe: output_norm and value(...) need the output projection of {site.name}, "
                f"which was not found. Ask for neither, or leave its layer out with layers=."
            )
        return projection.per_head

    def _read(self, site: Site, call: AttentionCall) -> tuple[Text, Text, Positions]:
        """The text of the queries, that of the keys, and where both stand in them."""
        reading = self.inputs.of(site.stack)
        if site.cross:
            keys = reading.other.filled(Text(real=call.real))
            return reading.own, keys, positions_across(call, reading.own, keys)
        if reading.own.real is None and call.real is not None:
            self.inputs.learn(site.stack, call.real)
        queries = reading.own.filled(Text(real=call.real))
        if self._is_condensed(call, reading.own.tokens):
            return queries, Text(), positions_across(call, queries, Text())
        return queries, queries, positions_within(call, queries)

    def _is_condensed(self, call: AttentionCall, tokens: int | None) -> bool:
        """Whether some of the text was left out or put together: who stands where is not known."""
        T, S = call.q.shape[2], call.k.shape[2]
        run = self.running.run_of(call.module)
        given = None if run is None or not run.texts else run.texts[0].shape[1]
        # More keys than queries are those of a cache, unless the module was given them all.
        return T > S or (T < S and given == S) or (tokens is not None and tokens > T)


def _check_numbers(call: AttentionCall) -> None:
    """Refuse what a transform computes: it has no numbers to be told from, only a way to them."""
    if is_wrapped(call.q):
        raise UnsupportedError(
            "observe: the model runs inside a transform of torch.func (grad, vmap, jvp). "
            "Watch a call outside of it; per-text statistics come from Request(per_text=True)."
        )


def _compare(site: Site, theirs: Tensor, ours: Tensor, lse: Tensor, places: Positions) -> None:
    """Refuse a call whose heads don't follow from what was understood of it.

    Large logits are rounded by more, and their exponentials with them: `lse` says how large. What
    becomes of a row whose logits are no numbers is left to the kernels, which differ.
    """
    real = places.query_real[:, None, :, None] & ~lse.isnan().unsqueeze(-1)
    logits = _largest(torch.where(real[..., 0] & lse.isfinite(), lse, 0.0))
    rounding = _STEPS * torch.finfo(torch.float32).eps * logits
    if theirs.shape == ours.shape:
        apart = real & (theirs != ours) & ~(theirs.isnan() & ours.isnan())
        gap = _largest(torch.where(apart, theirs.to(ours.dtype) - ours, 0.0))
        size = _largest(torch.where(real, ours, 0.0).nan_to_num(0.0, 0.0, 0.0))
        if gap <= (_TOLERANCE.get(theirs.dtype, 1e-4) + rounding) * max(size, 1e-6):
            return
        if gap != gap:
            raise UnsupportedError(
                f"observe: {site.name} ({site.kernel}) gives NaN where all that its queries may "
                f"attend to are numbers: NaN of padding reaches them. Find where it comes from "
                f"(eager attention in float64 makes it), or leave the layer out with layers=."
            )
        found = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        found = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    raise UnsupportedError(
        f"observe: {site.name} ({site.kernel}) does not compute what was understood of it: its "
        f"heads and ours {found}. Leave its layer out with layers=, and please report it."
    )


def _largest(amounts: Tensor) -> float:
    return amounts.abs().max().item() if amounts.numel() else 0.0
