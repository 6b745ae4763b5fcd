"""Calls that wait to be computed many at a time: short ones, and decoded tokens."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import is_materialized, version_of, without_function_modes
from headwise.capture import AttentionCall, Site, StackInputs, Text
from headwise.errors import UnsupportedError
from headwise.kernels import AttentionRule, row_statistics
from headwise.masks import Window
from headwise.models import growing_layer
from headwise.watch._accumulator import Accumulator
from headwise.watch._call_layouts import CallLayout, CallLayouts, Group, Place, Waiting
from headwise.watch._pass import Pass
from headwise.watch._request import Request
from headwise.watch._sums import sum_rows, sums_of_kernel, without_autocast

# A call with more elements of queries and keys than this, by its device, does not wait: copying it
# would cost more than waiting saves. On a GPU the kernel adds up the rows of calls in a queue.
LONG = {"cpu": 1 << 18, "cuda": sys.maxsize}
# Calls are computed when they hold this many elements, the latest without a copy. On a CPU, a lower
# limit computes them more often, each time after the model has driven the kernel's code out of the
# cache.
WAIT = {"cpu": 1 << 21, "cuda": 1 << 24}
# The number of decoded tokens of a site that are computed as one causal call.
TOKENS = 32
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        last: The keys of the latest token, as the cache holds them, and how often these had been
            changed in place.
        passes: The pass of each token, and the number of its first text.
    """

    site: Site
    call: AttentionCall
    cache: Any
    queries: Float[Tensor, "B H T D"]
    keys: Float[Tensor, "B Hkv S D"]
    last: tuple[Tensor, int]
    passes: list[tuple[Pass, int]] = field(default_factory=list)

    @property
    def n(self) -> int:
        """The number of tokens."""
        return len(self.passes)

    @property
    def before(self) -> int:
        """The number of keys before the first of these tokens."""
        return self.call.k.shape[2] - 1

    def may_go_on(self) -> bool:
        """Whether the pass that begins may read one more token of the text."""
        last, version = self.last
        is_same = self.cache.keys is last and version_of(last) == version
        return is_same and self.n < TOKENS and self.passes[-1][0].has_succeeded is not False

    def continues(self, q: Tensor, k: Tensor, rule: AttentionRule) -> bool:
        """Whether a call reads the next token; `may_go_on` held when its pass began."""
        first, S = self.call, self.before + self.n
        is_next = k is self.cache.keys and k.shape[2] == S + 1 and not k.is_inference()
        is_alike = q.shape == first.q.shape and q.dtype == first.q.dtype
        return is_next and is_alike and (rule is first.rule or rule == first.rule)

    def add(self, q: Tensor, k: Tensor, pass_: Pass) -> None:
        S = self.before + self.n
        self.queries[:, :, self.n] = q[:, :, 0]
        self.keys[:, :, S] = k[:, :, S]
        self.last = k, version_of(k)
        self.passes.append((pass_, pass_.texts.number(self.site, len(q), range(S, S + 1))))

    def check(self) -> None:
        """Refuse a run whose keys were changed unnoticed: each token has seen them as they were."""
        last, version = self.last
        bits = _INTEGERS[last.itemsize]  # by which NaN equals itself
        own = self.keys[:, :, : last.shape[2]].view(bits)
        if version_of(last) == version and not torch.equal(own, last.view(bits)):
            raise UnsupportedError(
                f"observe: the keys of {self.site} were changed in their cache without a trace, as "
                f"through .data, while tokens were read one at a time. Change them in place "
                f"(keys.mul_(...)), or assign new ones."
            )

    def parts(self) -> list[tuple[int, int]]:
        """The tokens of passes that have succeeded, and the one of the pass that runs."""
        known = [pass_.has_succeeded for pass_, _ in self.passes]
        settled, n = known.count(True), self.n - known.count(False)
        return [(start, stop) for start, stop in ((0, settled), (settled, n)) if start < stop]

    def as_call(self, start: int, stop: int) -> tuple[AttentionCall, Text]:
        """A call that reads some of these tokens at once: each sees the keys up to its own."""
        visible = self.call.rule.visible
        window = Window(visible.left if isinstance(visible, Window) else None, 0)
        q, k = self.queries[:, :, start:stop], self.keys[:, :, : self.before + stop]
        rule = replace(self.call.rule, visible=window)
        call = replace(self.call, q=q, k=k, v=k[..., :0], heads=q[..., :0], rule=rule)
        return call, Text(cached=self.before + start, tokens=stop - start)


class Queue:
    """Calls that wait to be computed together: those of all layers and of several passes.

    A short call waits if its statistics follow from queries, keys and a mask. A token decoded on a
    CPU waits for the next one if its text has no padding and its cache only appends.
    """

    def __init__(self, request: Request, layouts: CallLayouts, accumulator: Accumulator) -> None:
        of_call = request.needs_projection or request.received or request.maps or request.per_query
        self._takes_calls = bool(request.names) and not of_call
        self._takes_tokens = self._takes_calls and not request.is_of_text
        self._layouts, self._accumulator = layouts, accumulator
        self._groups: list[Group] = []  # with calls that wait
        self._n_numbers = 0  # that the copies of all groups hold, of which there may be hundreds
        self._runs: dict[Site, _Run] = {}

    def begin_pass(self) -> None:
        """Begin a forward pass; tokens of texts that have ended are computed."""
        if not all(run.may_go_on() for run in self._runs.values()):
            self.compute()

    def add(
        self,
        site: Site,
        call: AttentionCall,
        place: Place,
        layout: CallLayout,
        first_text: int,
        pass_: Pass,
    ) -> bool:
        """Let a call wait; False if it has to be computed at once."""
        _, group = pass_.repeats.get(place.key, (place, None))
        if group is None:
            size, most = call.q.numel() + call.k.numel(), LONG.get(call.q.device.type, 0)
            is_short = self._takes_calls and place.is_plain and 0 < size <= most
            if not (is_short and layout.may_wait):
                return False
            group = _group_of(call, layout)
            pass_.repeats.setdefault(place.key, (place, group))  # unless tokens have come first
        self.wait(group, site, call.q, call.k, first_text, pass_)
        return True

    def wait(
        self, group: Group, site: Site, q: Tensor, k: Tensor, first_text: int, pass_: Pass
    ) -> None:
        """Let a call wait by copies of its queries and keys, or compute it with those that do."""
        self._n_numbers += group.size
        waits = self._n_numbers <= group.most
        if not group.waiting:
            self._groups.append(group)
        tensors = (q.clone(), k.clone()) if waits else (q, k)
        group.waiting.append(Waiting(*tensors, site, first_text, pass_))
        if not waits:
            self._compute_groups()

    def may_take_token(self, call: AttentionCall) -> bool:
        """Whether a call reads one token that may wait.

        In inference mode tensors have no version that would reveal a change of the keys.
        """
        q = call.q
        return self._takes_tokens and q.shape[2] == 1 and q.is_cpu and not q.is_inference()

    def add_token(
        self, site: Site, call: AttentionCall, place: Place, cache: Any, pass_: Pass
    ) -> bool:
        """Let a call wait if it reads one more token of a text; False if it cannot wait."""
        if place.kind != "within" or not self.may_take_token(call):
            return False
        goes_on = place.is_whole and self.continue_run(site, call.q, call.k, call.rule, pass_)
        if not goes_on:
            if site in self._runs:
                self.compute()
            run = self._new_run(site, call, cache) if place.is_whole else None
            if run is None:
                return False
            self._runs[site] = run
            run.add(call.q, call.k, pass_)
        pass_.repeats[place.key] = place, None
        return True

    def continue_run(
        self, site: Site, q: Tensor, k: Tensor, rule: AttentionRule, pass_: Pass
    ) -> bool:
        """Let a token of a whole text wait if it is the next one after those that wait."""
        run = self._runs.get(site)
        if run is None or not run.continues(q, k, rule):
            return False
        run.add(q, k, pass_)
        return True

    def _new_run(self, site: Site, call: AttentionCall, cache: Any) -> _Run | None:
        """The beginning of a run, without its first token; None if a call has to stand alone."""
        q, k = call.q, call.k
        layer = growing_layer(cache, call.module, k)
        is_plain = type(call) is AttentionCall and call.real is None and call.rule.is_static
        if layer is None or not is_plain or k.itemsize not in _INTEGERS:
            return None
        if not is_materialized(q, k):
            return None
        S = k.shape[2]
        queries = q.new_empty(*q.shape[:2], TOKENS, q.shape[3])
        keys = k.new_empty(*k.shape[:2], S + TOKENS, k.shape[3])
        keys[:, :, :S] = k
        first = replace(call, v=k[..., :0], heads=q[..., :0], module_call=None, alike=None)
        return _Run(site, first, layer, queries, keys, (k, version_of(k)))

    def compute(self) -> None:
        """Compute what waits, and add its sums."""
        with without_function_modes(), torch.no_grad():
            for site, run in list(self._runs.items()):
                run.check()
                del self._runs[site]
                for start, stop in run.parts():
                    call, text = run.as_call(start, stop)
                    pass_, first_text = run.passes[start]
                    place = self._layouts.place(site, call, StackInputs(text), None, pass_)
                    group = _group_of(call, self._layouts.of(place, site, call, pass_))
                    self.wait(group, site, call.q, call.k, first_text, pass_)
            self._compute_groups()

    def _compute_groups(self) -> None:
        """Compute the calls of each group as one, and add up the sums of each site."""
        for group in list(self._groups):
            layout, waiting = group.layout, sorted(group.waiting, key=_owner)
            q, k = map(_side_by_side, zip(*(each[:2] for each in waiting), strict=True))
            with without_autocast(q):
                sums = sums_of_kernel(q, k, group.rule, layout, len(waiting))
                if sums is None:
                    rows = row_statistics(q, k, k[..., :0], group.rule, layout.row_request)
                    sums = sum_rows(rows, layout, n_calls=len(waiting))
            self._groups.remove(group)  # first, so that nothing counts twice after an interrupt
            group.waiting.clear()
            self._n_numbers -= q.numel() + k.numel()
            parts = [list(part) for _, part in groupby(waiting, _owner)]
            for part, own in zip(parts, sums.split(list(map(len, parts))), strict=True):
                first = [each.first_text for each in part]
                part[0].of_pass.add(partial(self._accumulator.add, part[0].site, own, first))


def _side_by_side(heads: Sequence[Tensor]) -> Float[Tensor, "B H n D"]:
    return heads[0] if len(heads) == 1 else torch.cat(list(heads), 1)


def _group_of(call: AttentionCall, layout: CallLayout) -> Group:
    """The group of a call that may wait: that of earlier calls alike, or a new one."""
    q, k, rule = call.q, call.k, call.rule
    key = q.shape, k.shape, q.dtype, k.dtype, rule.scale, rule.softcap
    if key not in layout.groups:
        size, most = q.numel() + k.numel(), WAIT[q.device.type]
        layout.groups[key] = Group(replace(rule, visible=layout.visible), layout, size, most)
    return layout.groups[key]


def _owner(waiting: Waiting) -> tuple[int, int]:
    """Whose sums are added together: those of a site in all passes that have succeeded."""
    return id(waiting.site), 0 if waiting.of_pass.has_succeeded else id(waiting.of_pass)
