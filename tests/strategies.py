"""Hypothesis strategies: one for each kind of object."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from headwise import reference
from headwise.tables import Head, HeadTable, Totals

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 4)


@dataclass(frozen=True)
class Problem:
    """Queries, keys and values in float64, and the arguments of `attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    how: dict[str, Any]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def numpy(self) -> dict[str, Any]:
        """The same arguments for the reference."""
        return {
            name: value.numpy() if isinstance(value, Tensor) else value
            for name, value in self.how.items()
        }

    def by_definition(self) -> reference.AttentionOutput:
        qkv = (x.numpy() for x in self.qkv)
        return reference.attention(*qkv, **self.numpy(), need_weights=True, need_lse=True)


@st.composite
def problems(draw: st.DrawFn, *, extras: bool = True, most: int = 4) -> Problem:
    """Every small size, grouped heads, more or fewer keys than queries, queries without keys.

    With `extras`, also softcap and sinks, which torch's kernel does not have. There are at most
    `most` texts, heads of a group and so on.
    """
    B, Hkv, G, D, Dv = (draw(st.integers(1, most)) for _ in range(5))
    T, S = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = torch.Generator().manual_seed(draw(seeds))
    H = Hkv * G

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, B])), draw(st.sampled_from([1, H])), T, S)
        options["mask"] = torch.rand(*shape, generator=rng) < draw(st.sampled_from([0.2, 0.8, 1.0]))
    if draw(st.booleans()):
        options["causal"] = True
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 4)
        options["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["bias"] = normal(1, H, T, S)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 1.0, 3.0]))
    if extras and draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0]))
    if extras and draw(st.booleans()):
        options["sinks"] = normal(H)
    q, k, v = normal(B, H, T, D), normal(B, Hkv, S, D), normal(B, Hkv, S, Dv)
    return Problem(q, k, v, options)


@st.composite
def tables(
    draw: st.DrawFn, n_heads: int = 3, texts: int | None = None, keep: bool = True
) -> HeadTable:
    """A table of a few texts; some heads have no eligible row for some statistics."""
    rng = np.random.default_rng(draw(seeds))
    M = draw(sizes) if texts is None else texts

    def totals() -> Totals:
        counts = rng.integers(0, 3, (M, n_heads)).astype(float)
        values = rng.standard_normal((M, n_heads)) * counts
        visible = counts.sum(0) > 0
        return Totals.of_texts(
            totals=values,
            counts=counts,
            maximum=np.where(visible, rng.standard_normal(n_heads), np.nan),
            uniform=rng.random((M, n_heads)) * counts if rng.random() < 0.5 else None,
            keep=keep,
        )

    return HeadTable(
        heads=tuple(Head("", 0, head) for head in range(n_heads)),
        kv_heads=np.zeros(n_heads, dtype=np.int64),
        totals={"entropy": totals(), "first": totals()},
        model="model",
        versions={"torch": "1"},
    )
