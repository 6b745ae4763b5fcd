"""From statistics of rows to sums over texts, and from these to totals.

Which rows count for a statistic follows from masks; a text may be read in several passes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwise._torch_private import under_autocast
from headwise.capture import AttentionCall
from headwise.kernels import (
    AttentionProblem,
    AttentionRule,
    RowReduction,
    RowStatistics,
    summing_kernel,
)
from headwise.watch._call_layouts import CallLayout
from headwise.watch._positions import Positions

PerHead = Float[Tensor, "H Dv d_model"]
RowValues = Shaped[Tensor, "B H T"]
Rows = Mapping[str, Any]  # by field of `RowStatistics`, and those of `_OTHERS`
# The rows for which a statistic is defined (None: every real row), and its value in each row under
# uniform weights (None: there is no such value).
Rule = tuple[Bool[Tensor, "B H T"] | None, Float[Tensor, "B H T"] | None]


# Statistics that have a value under uniform weights, with the function that computes it from the
# rows and their numbers of keys. Rows with a single key do not count for them, unless the request
# says so.
_UNIFORM: dict[str, Callable[[Rows, Float[Tensor, "B H T"]], Float[Tensor, "B H T"]]] = {
    "entropy": lambda rows, n_keys: n_keys.log(),
    "max_weight": lambda rows, n_keys: 1.0 / n_keys,
    "participation": lambda rows, n_keys: n_keys,
    "distance": lambda rows, n_keys: rows["even_distance"],
}
_OTHERS = ("output_norm", "gate")  # follow from the output projection and its input
# The statistics of `tables.STATISTICS` other than masses. A kernel that does not compute one gives
# None, and then no row counts for it.
_OF_ROWS = (*_UNIFORM, "max_logit", "lse", "sink", *_OTHERS)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context without autocast, which would round our sums, too."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else nullcontext()


class RowSums(NamedTuple):
    """The sums of some calls over the rows of their texts, on their device until they are read.

    Attributes:
        parts: The number of rows, the sums over them, and the sums under uniform attention, of
            the texts of one call after the other.
        highest: The largest value of each statistic in each call; NaN where no row counts.
    """

    parts: Float[Tensor, "3 K M H"]
    highest: Float[Tensor, "n K H"]

    def split(self, counts: Sequence[int]) -> list["RowSums"]:
        """The sums of the first calls, of those after them, and so on."""
        n_texts = self.parts.shape[2] // len(self.highest)
        parts = torch.split(self.parts, [n * n_texts for n in counts], 2)
        return list(map(RowSums, parts, torch.split(self.highest, list(counts))))


def sum_rows(
    statistics: RowStatistics,
    layout: CallLayout,
    *,
    n_calls: int = 1,
    knows_logits: bool = True,
    more: Mapping[str, RowValues | None] | None = None,
) -> RowSums:
    """The sums of every statistic over the rows of each of some calls, by text.

    Padding rows are never counted. A row with a single visible key has a fixed weight of 1, so
    it counts only for logits, unless means are taken over all queries.

    Args:
        n_calls: The number of calls whose heads lie side by side.
        knows_logits: Whether the largest logit before any bias is known.
        more: The statistics of `_OTHERS` that are requested.
    """
    rows = vars(statistics) | dict.fromkeys(_OTHERS) | dict(more or {})
    B, H, T = len(rows["lse"]), rows["lse"].shape[1] // n_calls, rows["lse"].shape[2]
    # Masks alone decide which rows count, unless values do.
    shares = knows_logits and not layout.request.value and rows["gate"] is None
    kind = H, rows["sink"] is not None
    eligible = layout.eligible.get(kind) if shares else None
    if eligible is None:
        of_first = {name: x[:, :H] if isinstance(x, Tensor) else x for name, x in rows.items()}
        eligible = find_eligible(of_first, layout)
        if shares:
            layout.eligible[kind] = eligible
    values = _values(rows, layout)
    by_call = values.view(len(values), B, n_calls, H, T).movedim(2, 1)
    return eligible.sums_of(by_call, layout.positions)


def sums_of_kernel(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    rule: AttentionRule,
    layout: CallLayout,
    n_calls: int,
) -> RowSums | None:
    """What `sum_rows` gives, added up by a kernel that writes no rows; None if there is none.

    It has statistics of rows, offsets and classes within one text.
    """
    request, needed, positions = layout.request, layout.row_request, layout.positions
    others = request.relations, request.pairs, request.spans, request.top, request.value
    problem = AttentionProblem(q, k, k[..., :0], rule)
    kernel = summing_kernel(problem, needed)
    if kernel is None or positions.is_cross or any(others):
        return None
    number = {name: n for n, name in enumerate(request.names)}
    numbers = {name: [number[name]] for name in request.statistics if name in _OF_ROWS}
    for field, names in (("key_mass", layout.widths), ("class_mass", request.classes)):
        if names:
            numbers[field] = [number[name] for name in names]
    real, n_texts, texts = positions.query_real, positions.n_texts, None
    if n_texts != len(real):
        texts = positions.query_text.masked_fill(~real, -1)
    every = request.queries == "all"
    reduction = RowReduction(numbers, len(number), real, texts, n_texts, every)
    sums, highest = (
        x.view(*x.shape[:-1], n_calls, -1) for x in kernel.row_sums(problem, needed, reduction)
    )
    highest = highest.nan_to_num(torch.nan, torch.inf, torch.nan)
    return RowSums(sums.movedim(3, 2).flatten(2, 3), highest.transpose(0, 1))


def output_norms(rows: RowStatistics, call: AttentionCall, per_head: PerHead) -> RowValues | None:
    """The norm of each head's output after the output projection."""
    # A call that is answered has no heads of the model's own yet.
    is_own = call.join is None and call.heads.shape[-1] > 0
    heads = call.heads if is_own else rows.heads
    if heads is None or heads.shape[1] != len(per_head):
        return None
    return projected_norms(heads, per_head)


def projected_norms(
    vectors: Float[Tensor, "B _ n Dv"],
    per_head: PerHead,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "B H n"]:
    """The norm of each vector after the output projection of each head that reads it."""
    part = per_head.detach().double()
    # ‖x W‖² = x (W Wᵀ) xᵀ, and W Wᵀ is as small as a head.
    squared = (part @ part.transpose(-1, -2)).to(dtype)
    wide = vectors.to(dtype).repeat_interleave(len(part) // vectors.shape[1], 1)
    return ((wide @ squared) * wide).sum(-1).clamp(min=0.0).sqrt()


def _values(rows: Rows, layout: CallLayout) -> Shaped[Tensor, "K B H T"]:
    """The statistics of each row, in the order of the request; undefined ones are arbitrary."""
    request = layout.request
    statistics = {name: rows["lse"] if rows[name] is None else rows[name] for name in _OF_ROWS}
    statistics |= _by_mass("mass", rows, layout)
    if request.top:
        tops = _by_mass("top", rows, layout)
        statistics |= {f"top({name})": top for name, top in tops.items()}
    if request.value:
        statistics |= _shares(rows, layout)
    return _stacked([statistics[name] for name in request.names], rows["lse"])


def _by_mass(measure: str, rows: Rows, layout: CallLayout) -> dict[str, RowValues]:
    """One measure of the masses, by name: "seen" (keys), "mass", "top" or "share"."""
    of_keys = rows.get(f"key_{measure}")
    of_classes = rows.get("class_keys" if measure == "seen" else f"class_{measure}")
    request, widths = layout.request, layout.widths
    values: dict[str, RowValues] = {}
    if of_keys is not None and widths:
        single = len(widths) == of_keys.shape[-1]  # one key for each name
        parts = of_keys.unbind(-1) if single else torch.split(of_keys, [*widths.values()], -1)
        values |= zip(widths, parts if single else [x.sum(-1) for x in parts], strict=True)
    if of_classes is not None:
        names = (*request.classes, *request.spans)
        values |= zip(names, of_classes.unbind(-1), strict=True)
    return values


def _shares(rows: Rows, layout: CallLayout) -> dict[str, RowValues]:
    """The shares of value norms by the names of their statistics; NaN if all norms are zero."""
    seen, shares = (_by_mass(measure, rows, layout) for measure in ("seen", "share"))
    return {f"value({name})": torch.where(seen[name] > 0, x, 0.0) for name, x in shares.items()}


@dataclass(frozen=True)
class EligibleRows:
    """The rows that count for each of `K` statistics, and what follows from masks alone.

    Attributes:
        bits: All ones for rows that count, and zeros for the others.
        floor: 0 for rows that count, and minus infinity for the others.
        count: The number of rows of each of `M` texts.
        uniform: The sums under uniform attention; NaN where that has no meaning.
        undefined: Whether no row of a head counts.
    """

    bits: Int[Tensor, "K B H T"]
    floor: Float[Tensor, "K B H T"]
    count: Float[Tensor, "K M H"]
    uniform: Float[Tensor, "K M H"]
    undefined: Bool[Tensor, "K H"]

    def sums_of(self, values: Float[Tensor, "K n B H T"], positions: Positions) -> RowSums:
        """The sums and the largest values of each of `n` calls on the same `M` texts.

        Args:
            values: Overwritten, since new memory costs more than all the sums.
        """
        # As bits, since filling by a mask takes longer than all the rest.
        as_bits = torch.int64 if values.dtype == torch.float64 else torch.int32
        values.view(as_bits).bitwise_and_(self.bits[:, None])
        sums = _by_text(positions, values)
        count, uniform = (x[:, None].expand_as(sums) for x in (self.count, self.uniform))
        highest = values.add_(self.floor[:, None]).amax((2, 4)).double()
        undefined = self.undefined[:, None]
        highest = highest.masked_fill(undefined, torch.nan)
        parts = torch.stack([count, sums, uniform]).flatten(2, 3)
        return RowSums(parts, highest.transpose(0, 1))


def _by_text(
    positions: Positions, values: Shaped[Tensor, "*calls B H T"]
) -> Float[Tensor, "*calls M H"]:
    """Sums over the queries of each text, in double precision."""
    if positions.n_texts == len(positions.query_real):  # each row is a text
        # Short rows are converted faster by themselves: 0.3 ms in place of 0.45 for 60 calls.
        return values.double().sum(-1)
    rows = values.double().movedim((-3, -1), (0, 1)).flatten(0, 1)  # (B T) *calls H
    sums = rows.new_zeros(positions.n_texts, *rows.shape[1:])
    return sums.index_add_(0, positions.query_text.flatten(), rows).movedim(0, -2)


def _stacked(
    values: Sequence[Shaped[Tensor, "B H T"]], like: Shaped[Tensor, "B H T"]
) -> Shaped[Tensor, "K B H T"]:
    """The values of all statistics together; a request may have none."""
    return torch.stack(list(values)) if values else like.new_empty((0, *like.shape))


def find_eligible(rows: Rows, layout: CallLayout) -> EligibleRows:
    """The rows that count for each statistic of a request, and its value under uniform weights."""
    request, positions, spans = layout.request, layout.positions, layout.spans
    real = positions.query_real[:, None] & (rows["n_keys"] > 0)
    n_keys = rows["n_keys"].clamp(min=1).to(rows["lse"].dtype)
    several = rows["n_keys"] > (0 if request.queries == "all" else 1)
    rules = {name: _rule(name, rows, several, n_keys) for name in _OF_ROWS}
    shares = _shares(rows, layout) if request.value else {}
    for name, seen in _by_mass("seen", rows, layout).items():
        # In cross-attention, no query has a neighbor or a relation.
        crosses = name == "first" or name in request.spans
        over_all = request.queries == "all" and (crosses or not positions.is_cross)
        eligible = several & ((seen > 0) | over_all)
        if spans is not None and name in request.spans:
            eligible &= spans.queries[:, None]
        rules[name] = rules[f"top({name})"] = eligible, seen / n_keys
        share = shares.get(f"value({name})")
        rules[f"value({name})"] = eligible if share is None else eligible & ~share.isnan(), None
    chosen = [rules[name] for name in request.names]
    counting = _stacked([real if rows is None else rows for rows, _ in chosen], real) & real
    nowhere = torch.full_like(n_keys, torch.nan)
    uniforms = _stacked([nowhere if uniform is None else uniform for _, uniform in chosen], nowhere)
    no_uniform = torch.tensor(
        [uniform is None for _, uniform in chosen], dtype=torch.bool, device=real.device
    )
    count, uniform = (_by_text(positions, x) for x in (counting, uniforms.where(counting, 0.0)))
    return EligibleRows(
        bits=-counting.to(torch.int32),
        floor=torch.where(counting, 0.0, -torch.inf),
        count=count,
        uniform=uniform.masked_fill(no_uniform[:, None, None], torch.nan),
        undefined=count.sum(1) == 0,
    )


def _rule(
    name: str, rows: Rows, several: Bool[Tensor, "B H T"], n_keys: Float[Tensor, "B H T"]
) -> Rule:
    """The eligible rows and uniform value of a statistic other than a mass.

    Args:
        several: The rows that have several keys, or that the request wants nevertheless.
    """
    if rows[name] is None:
        return torch.zeros_like(several), None
    if name == "max_logit":
        # That of hand-written attention may be unknown; NaN rows count as known.
        return ~rows["max_logit"].isnan() | rows["lse"].isnan(), None
    if name == "gate":
        return ~rows["gate"].isnan(), None
    return (several, _UNIFORM[name](rows, n_keys)) if name in _UNIFORM else (None, None)
