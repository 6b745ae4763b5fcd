"""Decoded tokens: read one by one over a growing cache, and described many at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from headwise._torch_private import is_eager
from headwise.masks import Window
from headwise.models import AttentionCall, Site, StackInputs, Text
from headwise.watch._request import Request

# Tokens of a site that are described together, and numbers in a cache up to which they wait: a
# larger one takes as long to compare with the calls before it as to describe at once.
_TOKENS, _NUMBERS = 32, 1 << 17
_INTEGERS: dict[int, type[np.signedinteger[Any]]] = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass
class _Run:
    """Private copies of the queries and keys of one site's latest tokens.

    Attributes:
        alike: A call that stands for all of them: they differ in queries and keys alone.
        q_bits, k_bits: The memory of `q` and `k`, as whole numbers.
        before: The number of keys before the first of these tokens.
        n: The number of tokens.
    """

    alike: AttentionCall
    forward_pass: int
    q: Float[Tensor, "B H n D"]
    k: Float[Tensor, "B Hkv S D"]
    q_bits: Int[np.ndarray, "B H n _"]
    k_bits: Int[np.ndarray, "B Hkv S _"]
    before: int
    n: int = 0

    @classmethod
    def of(cls, call: AttentionCall, forward_pass: int) -> "_Run":
        (B, H, _, D), (_, Hkv, S, _) = call.q.shape, call.k.shape
        with torch.inference_mode(False):  # so that calls in any mode can be added
            q = call.q.new_empty(B, H, _TOKENS, D)
            k = call.k.new_empty(B, Hkv, S + _TOKENS, D)
        alike = replace(call, q=q, k=k, v=k[..., :0], heads=q[..., :0])
        queries, keys = _bits(call.q), _bits(call.k)
        bits = _bits(q).view(queries.dtype), _bits(k).view(keys.dtype)
        run = cls(alike, forward_pass - 1, q, k, *bits, S - 1)
        run.k_bits[:, :, : S - 1] = keys[:, :, : S - 1]
        run._add(queries, keys)
        return run

    def continue_in(self, call: AttentionCall, forward_pass: int) -> bool:
        """Add a call, if it reads the next token over the keys of those before it, bit by bit."""
        q, k, rule = call.q, call.k, self.alike.rule
        (B, H, _, D), Hkv, S = self.q.shape, self.k.shape[1], self.before + self.n
        if q.shape != (B, H, 1, D) or k.shape != (B, Hkv, S + 1, D):
            return False
        if q.dtype != self.q.dtype or k.dtype != self.k.dtype:
            return False
        is_alike = call.rule is rule or call.rule == rule
        if not is_alike or forward_pass != self.forward_pass + 1:
            return False
        queries, keys = _bits(q), _bits(k)
        if queries.dtype != self.q_bits.dtype or keys.dtype != self.k_bits.dtype:
            return False
        if not (self.k_bits[:, :, :S] == keys[:, :, :S]).all():
            return False
        self._add(queries, keys)
        return True

    def _add(self, queries: Int[np.ndarray, "B H 1 _"], keys: Int[np.ndarray, "B Hkv S _"]) -> None:
        S = self.before + self.n
        self.q_bits[:, :, self.n] = queries[:, :, 0]
        self.k_bits[:, :, S] = keys[:, :, S]
        self.n += 1
        self.forward_pass += 1

    def part(self, start: int, stop: int) -> tuple[AttentionCall, Text]:
        """A call that reads some of these tokens at once: each sees the keys up to its own."""
        visible = self.alike.rule.visible
        window = Window(visible.left if isinstance(visible, Window) else None, 0)
        q, k = self.q[:, :, start:stop], self.k[:, :, : self.before + stop]
        rule = replace(self.alike.rule, visible=window)
        call = replace(self.alike, q=q, k=k, v=k[..., :0], heads=q[..., :0], rule=rule)
        return call, Text(cached=self.before + start, tokens=stop - start)


def _bits(x: Float[Tensor, "B H n D"]) -> Int[np.ndarray, "B H n _"]:
    """The memory of a tensor, which is written and compared faster as NumPy's whole numbers.

    Rows that lie in one piece are taken as numbers of eight bytes.
    """
    # NumPy has no bfloat16.
    memory = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    width = x.shape[-1] * x.itemsize
    whole = x.stride(-1) == 1 and width % 8 == 0 and width > 0
    bits: Int[np.ndarray, "B H n _"] = memory.view(_INTEGERS[8 if whole else x.itemsize])
    return bits


class Decoding:
    """The tokens that every site has read one at a time, and that are not described yet.

    Only calls wait whose statistics follow from copies of their queries and keys: by a rule without
    tensors, on texts without padding. That a cache was not cropped, reordered or changed since the
    call before is seen from its numbers.

    Attributes:
        runs: The tokens that wait, by site.
        expected: By site, the number of keys of the next call if it continues this one, and whether
            its cache only grows.
    """

    def __init__(self, request: Request) -> None:
        of_call = request.needs_projection or request.received or request.maps or request.per_query
        of_text = request.classes or request.relations or request.pairs or request.spans
        self._is_on = bool(request.names) and not (of_call or of_text)
        self.runs: dict[Site, _Run] = {}
        self.expected: dict[Site, tuple[int, bool]] = {}
        self._inputs: tuple[StackInputs, int, bool] | None = None

    def is_full(self, site: Site) -> bool:
        """Whether no further token of a site can wait with those that do."""
        return site in self.runs and self.runs[site].n == _TOKENS

    def take(self, site: Site, call: AttentionCall, inputs: StackInputs, forward_pass: int) -> bool:
        """Let a call wait, if it reads one more token of a text; False if it cannot wait."""
        if not self._is_on:
            return False
        S = call.k.shape[2]
        expected, grows = self.expected.get(site, (1, True))
        grows = grows or expected != S
        self.expected[site] = S + 1, grows
        if not grows or expected != S or site.cross or not self._may_wait(call, inputs):
            return False
        run = self.runs.get(site)
        if run is None:
            self.runs[site] = _Run.of(call, forward_pass)
            return True
        if not run.continue_in(call, forward_pass):
            self.expected[site] = S + 1, False
            return False
        return True

    def drop(self, forward_pass: int) -> None:
        """Forget the tokens of a pass, which has ended in an exception."""
        for site, run in list(self.runs.items()):
            if run.forward_pass == forward_pass:
                run.n, run.forward_pass = run.n - 1, forward_pass - 1
                if not run.n:
                    del self.runs[site]
        self.expected = {}

    def _may_wait(self, call: AttentionCall, inputs: StackInputs) -> bool:
        q, k = call.q, call.k
        is_token = type(call) is AttentionCall and q.shape[2] == 1 and call.real is None
        if not is_token or not call.rule.is_static or k.numel() > _NUMBERS:
            return False
        if not (q.is_cpu and k.is_cpu and k.itemsize in _INTEGERS and is_eager(q, k)):
            return False
        S = k.shape[2]
        if self._inputs is None or self._inputs[0] is not inputs or self._inputs[1] != S:
            self._inputs = inputs, S, _is_whole(inputs.text, S)
        return self._inputs[2]

    def take_all(self) -> Iterator[tuple[int, Site, AttentionCall, StackInputs]]:
        """Hand on all calls that wait: first those of earlier passes, then those of the latest.

        Yields:
            The pass that read the last of some tokens, their site, and one call that reads all of
            them with its inputs.
        """
        runs, self.runs = self.runs, {}
        latest = max((run.forward_pass for run in runs.values()), default=0)
        is_within_pass = any(run.forward_pass < latest for run in runs.values())
        inputs: dict[tuple[str, Text], StackInputs] = {}  # sites on one text share it
        for forward_pass in (latest - 1, latest):
            for site, run in runs.items():
                is_latest = run.forward_pass == latest
                split = (run.n - is_latest) if is_within_pass else 0
                start, stop = (0, split) if forward_pass < latest else (split, run.n)
                if start < stop:
                    call, text = run.part(start, stop)
                    shared = inputs.setdefault((site.stack, text), StackInputs(text))
                    yield forward_pass, site, call, shared


def _is_whole(text: Text, S: int) -> bool:
    """Whether `S` columns are a text without padding, of which this pass reads the last."""
    if text.tokens not in (None, 1) or text.cached not in (None, S - 1):
        return False
    if text.real is not None and (text.real.shape[1] != S or not _values(text.real).all()):
        return False
    position = text.positions
    return position is None or (position.shape[1] == 1 and bool((_values(position) == S - 1).all()))


def _values(x: Shaped[Tensor, "B n"]) -> Shaped[np.ndarray, "B n"]:
    """The values of a tensor of few numbers, of which NumPy makes less work."""
    values: Shaped[np.ndarray, "B n"] = x.cpu().numpy()
    return values
