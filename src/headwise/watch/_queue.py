"""The queue of a watch: short calls and decoded tokens, which are computed many at a time."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import is_eager, version_of, without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import row_statistics
from headwise.masks import Window
from headwise.models import AttentionCall, Site, StackInputs, Text, growing_layer
from headwise.watch._accumulator import FINISHED, Accumulator
from headwise.watch._request import Request
from headwise.watch._row_sums import row_request, sum_rows, without_autocast
from headwise.watch.layout import CallLayout, CallLayouts

# Numbers of queries and keys above which a call is computed at once: copies would cost more than
# they save. Numbers of all copies that wait: the fewer, the more often the kernel's code is cold.
LONG, WAIT = 1 << 18, 1 << 21
GROUPS = 8  # that wait at most: each may reserve memory for as many numbers as wait in all
# Decoded tokens of a site that are computed as one causal call.
TOKENS = 32
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Waiting(NamedTuple):
    """A call that waits."""

    site: Site
    forward_pass: int
    first_text: int


@dataclass(eq=False)
class _Group:
    """Calls that differ in queries and keys alone, and are computed as one, heads side by side.

    Masks, positions and columns have no axis of heads, or broadcast over it, so that they hold for
    several calls as for one, and grouped heads stay grouped.

    Attributes:
        call: One of them: its rule holds for all. Its tensors are copies of the queries and keys
            of all, where the kernel reads them, with room for `room` calls.
    """

    call: AttentionCall
    layout: CallLayout
    room: int
    waiting: list[_Waiting] = field(default_factory=list)

    def add(self, waiting: _Waiting, call: AttentionCall) -> None:
        n = len(self.waiting)
        for copies, x in ((self.call.q, call.q), (self.call.k, call.k)):
            H = x.shape[1]
            copies[:, n * H : (n + 1) * H] = x
        self.waiting.append(waiting)


@dataclass(eq=False)
class _Run:
    """The tokens that a site has read one at a time, over a cache that only appends.

    That a call continues them is known without comparing numbers: before its pass the cache held
    the very tensor that the token before has read, unchanged, and appending makes a new one.

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
    forward_pass: int = -1
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

    def add(self, call: AttentionCall, forward_pass: int, first_text: int) -> None:
        S = self.before + self.n
        self.queries[:, :, self.n] = call.q[:, :, 0]
        self.keys[:, :, S] = call.k[:, :, S]
        self.last, self.version = call.k, version_of(call.k)
        self.forward_pass, self.first_text, self.n = forward_pass, first_text, self.n + 1

    def check(self, site: Site) -> None:
        """Refuse keys whose change has left no trace: each token was to see them as they were."""
        if version_of(self.last) != self.version:
            return
        bits = _INTEGERS[self.keys.itemsize]  # by which NaN equals itself
        own = self.keys[:, :, : self.last.shape[2]].view(bits)
        if not torch.equal(own, self.last.view(bits)):
            raise UnsupportedError(
                f"observe: the keys of {site.name} were changed in their cache without a trace, as "
                f"through .data, while tokens were read one at a time. Change them in place "
                f"(keys.mul_(...)), or assign new ones."
            )

    def part(self, start: int, stop: int) -> tuple[AttentionCall, Text]:
        """A call that reads some of these tokens at once: each sees the keys up to its own."""
        visible = self.call.rule.visible
        window = Window(visible.left if isinstance(visible, Window) else None, 0)
        q, k = self.queries[:, :, start:stop], self.keys[:, :, : self.before + stop]
        rule = replace(self.call.rule, visible=window)
        call = replace(self.call, q=q, k=k, v=k[..., :0], heads=q[..., :0], rule=rule)
        return call, Text(cached=self.before + start, tokens=stop - start)


class Queue:
    """Calls on a CPU that wait, to be computed with others: of all layers, and of several passes.

    A short call waits if its statistics follow from queries, keys and a mask. A decoded token
    waits for the next one, if its text has no padding and its cache only appends.
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
        """Whether so much waits that it should be computed."""
        is_full = self._n_numbers > WAIT or len(self._groups) > GROUPS
        return is_full or self._accumulator.is_full

    def begin_pass(self) -> None:
        """A forward pass begins: tokens wait only as long as their texts go on."""
        if not all(run.may_go_on() for run in self._runs.values()):
            self.compute(None)

    def add(
        self, site: Site, call: AttentionCall, layout: CallLayout, first: int, forward_pass: int
    ) -> bool:
        """Let a call wait; False if it has to be computed at once."""
        q, rule = call.q, call.rule
        size = q.numel() + call.k.numel()
        may_wait = self._takes_calls and layout.may_wait and q.is_cpu and 0 < size <= LONG
        is_own = rule.bias is not None or rule.sinks is not None or type(rule.scale) is not float
        if not may_wait or is_own or type(call) is not AttentionCall:
            return False
        self._add(_Waiting(site, forward_pass, first), call, layout, forward_pass)
        return True

    def _add(
        self, waiting: _Waiting, call: AttentionCall, layout: CallLayout, unfinished: int | None
    ) -> None:
        q, k, rule = call.q, call.k, call.rule
        key = id(layout), q.shape, k.shape, q.dtype, k.dtype, rule.scale, rule.softcap
        group = self._groups.get(key)
        if group is not None and len(group.waiting) == group.room:
            self._compute(self._groups.pop(key), unfinished)
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
        group.add(waiting, call)
        self._n_numbers += q.numel() + k.numel()

    def add_token(
        self,
        site: Site,
        call: AttentionCall,
        inputs: StackInputs,
        forward_pass: int,
        cache: Any,
    ) -> bool:
        """Let a call wait that reads one more token of a text; False if it does not, or cannot."""
        if not self._takes_tokens:
            return False
        run = self._runs.get(site)
        if run is not None and not (self._is_whole(inputs, call) and run.continues(call)):
            self.compute(forward_pass)
            run = None
        if run is None:
            run = self._new_run(site, call, inputs, cache)
        if run is None:
            return False
        S, B = call.k.shape[2], len(call.q)
        first_text = self._accumulator.number(site, forward_pass, B, range(S - 1, S))
        run.add(call, forward_pass, first_text)
        self._runs[site] = run
        return True

    def _new_run(
        self, site: Site, call: AttentionCall, inputs: StackInputs, cache: Any
    ) -> _Run | None:
        """The beginning of a run, without its first token; None if a call has to stand alone."""
        q, k = call.q, call.k
        layer = growing_layer(cache, call.module, k)
        is_plain = type(call) is AttentionCall and call.real is None and call.rule.is_static
        if layer is None or not is_plain or site.cross or not q.is_cpu or q.is_inference():
            return None
        if k.itemsize not in _INTEGERS or not is_eager(q, k) or not self._is_whole(inputs, call):
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

    def drop(self, forward_pass: int) -> None:
        """Forget the calls of a pass, which has ended in an exception: they are the latest."""
        for key, group in list(self._groups.items()):
            group.waiting = [call for call in group.waiting if call.forward_pass != forward_pass]
            if not group.waiting:
                del self._groups[key]
        for site, run in list(self._runs.items()):
            if run.forward_pass == forward_pass:
                run.n -= 1
                run.version = -1  # the cache may hold the keys of this pass
                if not run.n:
                    del self._runs[site]

    def compute(self, unfinished: int | None) -> None:
        """Compute and add up what waits.

        Args:
            unfinished: The pass that runs, which may yet fail.
        """
        with without_function_modes(), torch.no_grad():
            for site, run in list(self._runs.items()):
                del self._runs[site]
                self._end(site, run, unfinished)
            for key in list(self._groups):
                self._compute(self._groups.pop(key), unfinished)
        self._n_numbers = 0
        self._accumulator.close()

    def _end(self, site: Site, run: _Run, unfinished: int | None) -> None:
        """Put the tokens of a run among the calls that wait: as one, or the latest by itself."""
        run.check(site)
        split = run.n - (run.forward_pass == unfinished)
        for start, stop, forward_pass in ((0, split, FINISHED), (split, run.n, run.forward_pass)):
            if start < stop:
                call, text = run.part(start, stop)
                inputs = StackInputs(text)
                layout = self._layouts.of(site, call, inputs, "within", run.forward_pass)
                self._add(_Waiting(site, forward_pass, run.first_text), call, layout, unfinished)

    def _compute(self, group: _Group, unfinished: int | None) -> None:
        """Compute the calls of a group as one, and add up the sums of each."""
        n, copies = len(group.waiting), (group.call.q, group.call.k)
        q, k = (x[:, : x.shape[1] // group.room * n] for x in copies)
        with without_autocast(q):
            needed = row_request(group.call, self._request, group.layout, None, need_heads=False)
            rows = row_statistics(q, k, k[..., :0], group.call.rule, needed)
            sums = sum_rows(rows, group.layout, self._request, n_calls=n)
        calls: dict[tuple[Site, int], list[tuple[int, int]]] = {}
        for number, call in enumerate(group.waiting):
            is_finished = call.forward_pass != unfinished
            of_pass = FINISHED if is_finished else call.forward_pass
            calls.setdefault((call.site, of_pass), []).append((number, call.first_text))
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
