"""The contract of a kernel: what it is asked, what it returns, and the nonfinite guard."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise._torch_private import (
    can_read,
    in_forward_gradient,
    in_func_gradient,
    needs_gradient,
    under_autocast,
)
from headwise.errors import ShapeError
from headwise.kernels._rule import AttentionRule
from headwise.masks.tiles import Tile

# Results by their names.
Named = dict[str, Tensor]
# The statistics that are not float32.
_DTYPES = {"n_keys": torch.int64, "argmax": torch.int64, "key_seen": torch.bool}
# Fields of a request: measures of the weights, and the keys that each of them is measured on.
_MEASURES, _MEASURED = {"top", "key_norms"}, {"keys", "classes"}


@dataclass(frozen=True)
class RowRequest:
    """Which statistics of each row to compute; nothing else is computed.

    The largest weight and the log-sum-exp are free. Each of `keys` costs a gather of one number
    per row, each of `classes` one column of a matrix product; `top` and `key_norms` cost both once
    more. All others are cheap beside the two matrix products of attention.

    Attributes:
        entropy: Whether to compute the entropy.
        distance: Whether to compute the mean distance to what is attended to.
        participation: Whether to compute the participation ratio, an effective number of keys.
        argmax: Whether to find the key with the largest weight.
        received: The queries whose weights are summed up for each key; None: no such sums.
        keys: For each query, keys whose single weights are wanted; −1 where there is none.
        classes: For each key, its share in every class (usually 0 or 1).
        top: Whether to compute how much of the largest weight falls on `keys` and `classes`.
        key_norms: The factor of each key's weight in shares of the output, `‖v_j W_O[h]‖`.
            A nonfinite one counts as 0. None: no such shares.
        query_at: Positions of the queries, for distances. None: the last ones of the keys.
        key_at: Positions of the keys, for distances.
        heads: Whether to compute the heads too, from the same weights.
    """

    entropy: bool = True
    distance: bool = False
    participation: bool = False
    argmax: bool = False
    received: Bool[Tensor, "B T"] | None = None
    keys: Int[Tensor, "B T N"] | None = None
    classes: Float[Tensor, "B S C"] | None = None
    top: bool = False
    key_norms: Float[Tensor, "B H S"] | None = None
    query_at: Int[Tensor, "B T"] | None = None
    key_at: Int[Tensor, "B S"] | None = None
    heads: bool = False

    def outputs(
        self, n_rows: tuple[int, ...], has_sinks: bool
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each requested statistic of `[B, H, T]` rows.

        Heads and what keys receive, which kernels lay out in their own way, are left out.
        """
        requested = {
            "n_keys": True, "lse": True, "max_logit": True, "max_weight": True, "sink": has_sinks,
            "entropy": self.entropy, "participation": self.participation, "argmax": self.argmax,
            "distance": self.distance, "even_distance": self.distance,
        }  # fmt: skip
        outputs: dict[str, tuple[int, ...]] = {
            name: n_rows for name, is_requested in requested.items() if is_requested
        }
        measures = {"mass": True, "top": self.top, "share": self.key_norms is not None}
        for part, columns, others in ("key", self.keys, "seen"), ("class", self.classes, "keys"):
            if columns is not None:
                names = [others, *(name for name, is_requested in measures.items() if is_requested)]
                outputs |= {f"{part}_{name}": (*n_rows, columns.shape[-1]) for name in names}
        return {name: (shape, _DTYPES.get(name, torch.float32)) for name, shape in outputs.items()}

    @property
    def requested(self) -> set[str]:
        """The fields that request something."""
        return {name for name, x in vars(self).items() if x is not None and x is not False}

    def split(self, fields: Collection[str]) -> tuple["RowRequest", "RowRequest"]:
        """The request without some of its fields, and the request for these alone."""
        alone = {*fields, "query_at", "key_at"}
        # What is on keys and of a measure is missing without either.
        alone |= _MEASURED if _MEASURES.intersection(fields) else set()
        alone |= _MEASURES if _MEASURED.intersection(fields) else set()
        return self._without(fields), self._without(self.requested - alone)

    def _without(self, fields: Collection[str]) -> "RowRequest":
        off: dict[str, Any] = {
            name: False if getattr(self, name) is True else None for name in fields
        }
        return replace(self, **off)

    def inputs(self, B: int, S: int, device: torch.device) -> Named:
        """The tensors of the request as kernels read them: dense, and for each text."""
        found: Named = {}
        if self.query_at is not None and self.key_at is not None:
            found["query_at"] = self.query_at.to(device, torch.float32)
            found["key_at"] = self.key_at.to(device, torch.float32)
        if self.classes is not None:
            found["classes"] = self.classes.to(device, torch.float32)
        if self.key_norms is not None:
            norms = self.key_norms.to(device, torch.float32)
            found["key_norms"] = norms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if self.keys is not None:  # S is no key either
            found["keys"] = self.keys.clamp(-1, S).to(device, torch.int32)
        if self.received is not None:
            found["counted"] = self.received.to(device, torch.uint8)
        return {name: x.expand(B, *x.shape[1:]).contiguous() for name, x in found.items()}


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of every row; None where they were not requested.

    `n_keys` is how many keys the row may attend to. A row without any has an `lse` and a
    `max_logit` of −inf, shares of the output that are NaN, and zeros elsewhere.
    """

    kernel: str  # what computed them
    n_keys: Int[Tensor, "B H T"]
    lse: Float[Tensor, "B H T"]  # ln Σ exp z, sinks included
    max_logit: Float[Tensor, "B H T"]  # after softcap, before bias
    max_weight: Float[Tensor, "B H T"]
    entropy: Float[Tensor, "B H T"] | None = None  # nats, over real keys
    distance: Float[Tensor, "B H T"] | None = None  # Σ p |i − j|
    even_distance: Float[Tensor, "B H T"] | None = None  # the same for uniform weights
    participation: Float[Tensor, "B H T"] | None = None  # (Σ p)² / Σ p², 1 … n
    argmax: Int[Tensor, "B H T"] | None = None  # the first of those that tie; −1 without keys
    received: Float[Tensor, "B H S"] | None = None  # Σ p over queries, in the precision of p
    key_mass: Float[Tensor, "B H T N"] | None = None
    key_top: Float[Tensor, "B H T N"] | None = None  # 1 on the largest weight; ties share it
    key_share: Float[Tensor, "B H T N"] | None = None  # p ‖·‖ / Σ p ‖·‖; NaN where that is 0 / 0
    key_seen: Bool[Tensor, "B H T N"] | None = None  # the key exists and may be attended to
    sink: Float[Tensor, "B H T"] | None = None  # mass lost to the sink; None without one
    class_mass: Float[Tensor, "B H T C"] | None = None
    class_top: Float[Tensor, "B H T C"] | None = None
    class_share: Float[Tensor, "B H T C"] | None = None
    class_keys: Float[Tensor, "B H T C"] | None = None  # visible keys of the class
    heads: Float[Tensor, "B H T Dv"] | None = None

    def completed(self, rest: "RowStatistics", kernel: str) -> "RowStatistics":
        """These, and those of the rest that are missing here."""
        missing = {name: x for name, x in vars(rest).items() if getattr(self, name) is None}
        return replace(self, kernel=kernel, **missing)


class RowReduction(NamedTuple):
    """How the statistics of rows become sums by text.

    A row counts if it sees a key; for entropy, largest weight, participation, distance and masses
    if it sees several, unless `every` row counts; and for a mass if it sees such a key.

    Attributes:
        numbers: The number of each statistic by the name of its field: of masses on single keys
            the number of each, and of those on classes, which follow one another, the first.
        n_statistics: `K`, with those that have no number here, for which no row counts.
        real: The queries that are no padding.
        texts: The number of the text of each query, −1 for padding; None: each row is a text.
    """

    numbers: Mapping[str, Sequence[int]]
    n_statistics: int
    real: Bool[Tensor, "B T"]
    texts: Int[Tensor, "B T"] | None
    n_texts: int
    every: bool


class Extras(NamedTuple):
    """What is returned besides the heads."""

    weights: bool = False
    lse: bool = False
    entropy: bool = False


class AttentionProblem(NamedTuple):
    """The input of a kernel: to decide whether and how it computes this, and to compute it."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    dropout_p: float = 0.0  # the share of weights dropped
    extras: Extras = Extras()


class KernelChoice(NamedTuple):
    """The kernel that computes, the form of its input, and the reasons."""

    backend: str  # "native", "triton", "fused" or "rows"
    form: str  # of the mask: "none", "causal" (the kernel's own flag), "blocks" or "dense"
    packed: bool  # the heads of a group as rows of one head, so that keys are read once
    wide: bool  # half precision computed in float32
    reason: str


# The reason that is given where the heads of a group are packed.
PACKED = "the heads of a group are packed, so that keys and values are read once"
# The heads of queries, keys and values; None where `attend` has to look at their values.
ComputeHeads = Callable[[Tensor, Tensor, Tensor], Tensor | None]


class AttentionKernel(ABC):
    """One way to compute attention: each of the folders beside this one has one.

    A request asks for statistics of rows; without one it is about heads. No method that decides
    about an input reads its values.

    Attributes:
        name: How users name it: `backend=name`.
        guards_nonfinite: Whether the heads of `attend` are right where masked keys or values are
            NaN or infinite, without a guard around it.
    """

    name: str
    guards_nonfinite: bool = False

    @property
    def label(self) -> str:
        """How results name it."""
        return self.name

    @abstractmethod
    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        """Why the kernel cannot compute this, what it lacks aside; None if it can."""

    def lacks(self, request: RowRequest) -> Mapping[str, str]:
        """The fields of a request that are left to the rows kernel, and how users name them."""
        return {}

    def is_preferred(self, problem: AttentionProblem, request: RowRequest | None = None) -> bool:
        """Whether it is faster than the kernels after it, where both can compute this."""
        return True

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        """In what form the kernel takes the input of `attend`, after why it was chosen."""
        form = "none" if problem.rule.visible is None else "blocks"
        return KernelChoice(self.name, form, packed=False, wide=True, reason=reason)

    @abstractmethod
    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        """The `heads`, and of the extras those that come from the same pass."""

    def prepare(self, problem: AttentionProblem, choice: KernelChoice) -> ComputeHeads | None:
        """What computes the heads of all plain problems of this outline; None: `attend` does.

        A plain problem has no tensors but queries, keys and values, no dropout and no extras.
        """
        return None

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        """Statistics of the weights of every row."""
        raise NotImplementedError


def check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose sizes do not fit together.

    A width of 0 fits: logits that a model has computed by itself are the bias of such queries.

    Raises:
        ShapeError: they have other axes, no kv head, or sizes that differ.
    """
    listed = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(f"attend: {listed}. Give four axes each: batch, heads, tokens, width.")
    H, Hkv = q.shape[1], k.shape[1]
    if not Hkv or H % Hkv:
        raise ShapeError(
            f"attend: {H} query heads cannot share {Hkv} key/value heads evenly "
            f"({listed}). Make H a multiple of Hkv."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"attend: sizes do not fit ({listed}). Queries and keys share batch and "
            f"width, keys and values share batch, heads and length."
        )


def why_no_gradients_or_dropout(problem: AttentionProblem) -> str | None:
    """Why our kernels cannot compute this: dropout, or gradients that they do not have."""
    if problem.dropout_p:
        return f"it has no dropout (dropout_p={problem.dropout_p})"
    if problem.rule.bias is not None:
        T, S = problem.q.shape[2], problem.k.shape[2]
        sample = problem.rule.bias.tile(Tile.sample(T, S))
        if needs_gradient(sample):
            return "it has no gradients of a bias"
    if in_forward_gradient():
        return "it has no forward-mode gradients"
    if in_func_gradient():
        return "it has no gradients by torch.func"
    return None


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the precision to which autocast, if it is on, casts them."""
    if not under_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


# The nonfinite guard: what is masked reaches no other row, even if it is NaN or infinite. Kernels
# multiply a masked value by a weight of 0, and 0 · NaN is NaN; they add −inf to a masked logit, and
# −inf + inf is NaN. So values that are not finite, or so large that a product may not be, are
# replaced by zeros before a kernel reads them, and the rows that see them become NaN.


def compute_guarded(
    compute: Callable[[AttentionProblem], Named], problem: AttentionProblem, is_flag: bool = False
) -> Named:
    """Compute with the guard, where it is needed.

    Without gradients it is enough to check the heads: a nonfinite value that gets through a mask
    makes some of them NaN. Gradients can be NaN where heads are not, so with gradients the inputs
    are checked.

    Args:
        is_flag: Whether the mask is the kernel's own causal flag. Masked logits are then replaced
            and not added to, so that only values get through, and always into the last row.
    """
    if problem.rule.visible is None:
        return compute(problem)
    result, qkv = None, problem[:3]
    if can_read(*qkv) and not needs_gradient(*qkv):
        result = compute(problem)
        heads = result["heads"]
        # A bias may be mapped over, or learned, where queries, keys and values are not.
        is_enough = can_read(heads) and not heads.requires_grad
        if is_enough and is_finite(heads.select(2, -1) if is_flag else heads):
            return result
    safe = guard_nonfinite(problem)
    if safe.nan_rows is None and result is not None:
        return result
    return {name: safe.mark(rows) for name, rows in compute(safe.problem).items()}


class Guarded(NamedTuple):
    """A problem without nonfinite queries, keys and values, and the rows that become NaN."""

    problem: AttentionProblem
    nan_rows: Bool[Tensor, "B H T"] | None  # None: no row

    def mark(self, rows: Float[Tensor, "B H T *last"]) -> Float[Tensor, "B H T *last"]:
        """Set these rows to NaN; no gradient flows back from them."""
        if self.nan_rows is None:
            return rows
        nan_rows = self.nan_rows if rows.ndim == 3 else self.nan_rows.unsqueeze(-1)
        return rows.masked_fill(nan_rows, math.nan)


def guard_nonfinite(problem: AttentionProblem) -> Guarded:
    """Replace nonfinite values by zeros, and find the rows that may attend to them.

    The result of a query is NaN, without gradient, if the query is not finite and sees a key, or
    if it sees a key or value that is not finite. Values so large that logits or gradients may
    overflow count as not finite. No other row changes. Without a mask there is nothing to do:
    every row sees every key.
    """
    q, k, v, rule, *_ = problem
    if rule.visible is None or (can_read(q, k, v) and _all_small(q, k, v)):
        return Guarded(problem, None)
    groups, T = q.shape[1] // k.shape[1], q.shape[2]
    product, value = _limits(q.dtype)
    is_small = [x.abs() <= limit for x, limit in ((q, product), (k, product), (v, value))]
    queries, keys, values = (~small.all(-1) for small in is_small)
    nonfinite_key = (keys | values).repeat_interleave(groups, dim=1)
    sees_nonfinite = rule.visible.reaches(nonfinite_key, T)
    sees_any = rule.visible.reaches(torch.ones_like(nonfinite_key), T)
    q, k, v = (torch.where(small, x, 0.0) for small, x in zip(is_small, (q, k, v), strict=True))
    safe = problem._replace(q=q, k=k, v=v)
    return Guarded(safe, sees_nonfinite | (queries & sees_any))


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """The largest queries and keys whose logits cannot overflow, and the largest values.

    About 2e16 and 3e32 in float32, in which half precisions are computed. Values of that size
    times usual gradients do not overflow.
    """
    highest = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    own = torch.finfo(dtype).max
    return min(own, highest**0.5 / 2**10), min(own, highest / 2**20)


def _all_small(*tensors: Tensor) -> bool:
    """Whether no number is too large, by sums of squares, which a NaN makes NaN."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    most = _limits(wide)[0]
    return all(torch.linalg.vector_norm(x.detach(), dtype=wide).item() <= most for x in tensors)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are finite, by their sum, which is faster than checking each."""
    # A sum of many float16 may itself be too large for one.
    wide = torch.float32 if x.dtype == torch.float16 else None
    return math.isfinite(x.sum(dtype=wide).item())
