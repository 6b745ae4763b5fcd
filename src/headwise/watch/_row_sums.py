"""From statistics of rows to sums over texts: which rows count for which statistic."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.kernels import OF_MASK, RowRequest, RowStatistics, SharedRequest, under_autocast
from headwise.models import AttentionCall, Text
from headwise.watch._request import Request
from headwise.watch.layout import CallLayout, EligibleRows, Positions, Rule, stacked

PerHead = Float[Tensor, "H Dv d_model"]
RowValues = Shaped[Tensor, "B H T"]
Rows = Mapping[str, Any]  # by field of `RowStatistics`, those of several calls together
Widths = dict[str, int]  # the most keys of a query, by name


def row_request(
    call: AttentionCall,
    request: Request,
    layout: CallLayout,
    per_head: PerHead | None,
    need_heads: bool,
) -> RowRequest:
    """What the kernel must compute for each row of a call.

    Args:
        per_head: The part of each head in the output projection, if a statistic needs it.
    """
    heads = need_heads or ("output_norm" in request.statistics and call.join is not None)
    if heads not in layout.requests:
        layout.requests[heads] = _row_request(request, layout, heads)
    shared = layout.requests[heads]
    if not request.value:
        return shared
    return replace(shared, key_norms=projected_norms(call.v, per_head))


def _row_request(request: Request, layout: CallLayout, heads: bool) -> RowRequest:
    """The part of a request that does not depend on the values of a call."""
    positions, columns = layout.positions, layout.columns
    members = [_class_members(request, positions, layout.key_text)] if request.classes else []
    members += [layout.spans.keys.float()] if layout.spans else []
    kind = SharedRequest if layout.is_shared and not request.value else RowRequest
    return kind(
        entropy="entropy" in request.statistics,
        distance="distance" in request.statistics and not positions.is_cross,
        participation="participation" in request.statistics,
        received=positions.query_real if request.received else None,
        keys=torch.cat([*columns.values()], dim=-1) if columns else None,
        classes=torch.cat(members, dim=-1) if members else None,
        top=bool(request.top),
        query_at=None if positions.are_columns else positions.query_position,
        key_at=None if positions.are_columns else positions.keys.position,
        heads=heads,
    )


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context without autocast, which would round our sums, too."""
    return torch.autocast(x.device.type, enabled=False) if under_autocast(x) else nullcontext()


@dataclass(frozen=True)
class CallRows:
    """The statistics of the rows of one call, not yet added up.

    Attributes:
        norms: The norm of each head's output after the output projection, if it is requested.
        knows_logits: Whether the largest logit before any bias is known.
        n_calls: The number of calls on the same texts, one after the other in `rows`.
    """

    rows: RowStatistics
    layout: CallLayout
    norms: RowValues | None
    knows_logits: bool
    n_calls: int = 1

    @classmethod
    def of(
        cls, rows: RowStatistics, call: AttentionCall, layout: CallLayout, per_head: PerHead | None
    ) -> "CallRows":
        """The rows of a call, without what it has computed for its keys and heads."""
        norms = None if per_head is None else _output_norms(rows, call, per_head)
        if rows.heads is not None or rows.received is not None:
            rows = replace(rows, heads=None, received=None)
        return cls(rows, layout, norms, call.knows_logits)

    @property
    def n_rows(self) -> int:
        return self.rows.lse.numel()

    def kind(self, request: Request) -> Hashable:
        """What calls that are added up together have in common: texts, and which rows count."""
        lse, missing = self.rows.lse, (self.rows.sink is None, self.norms is None)
        own = None if self._shares_eligible(request) else id(self)
        return id(self.layout), own, lse.shape, lse.dtype, *missing

    def eligible(self, request: Request) -> EligibleRows:
        """The rows that count: the same for all calls of a layout, unless values decide."""
        if not self._shares_eligible(request):
            return _eligible_rows(self, request)
        known, kind = self.layout.eligible, (self.rows.n_keys.shape[1], self.rows.sink is not None)
        if kind not in known:
            known[kind] = _eligible_rows(self._first(), request)
        return known[kind]

    def _first(self) -> "CallRows":
        """The first of the calls."""
        if self.n_calls == 1:
            return self
        B = len(self.rows.lse) // self.n_calls
        parts: dict[str, Any] = {
            name: x[:B] for name, x in vars(self.rows).items() if isinstance(x, Tensor)
        }
        return replace(self, rows=replace(self.rows, **parts), n_calls=1)

    def _shares_eligible(self, request: Request) -> bool:
        # Whether the largest logit is known, and whether all values are zero, depends on the call.
        return self.knows_logits and not request.value


def _output_norms(rows: RowStatistics, call: AttentionCall, per_head: PerHead) -> RowValues | None:
    # A call that is answered has no heads of the model's own yet.
    is_own = call.join is None and call.heads.shape[-1] > 0
    heads = call.heads if is_own else rows.heads
    if heads is None or heads.shape[1] != len(per_head):
        return None
    return projected_norms(heads, per_head)


def sum_rows(
    calls: Sequence[CallRows], request: Request
) -> tuple[Float[Tensor, "3 K n M H"], Float[Tensor, "K n H"]]:
    """The sums of `n` calls of one kind by text, and the largest values, for every statistic.

    Padding rows are never counted. A row with a single visible key has a fixed weight of 1, so
    it counts only for logits, unless means are taken over all queries.
    """
    first, (B, H, T) = calls[0], calls[0].rows.lse.shape
    values = _values(_joined(calls), first.layout.widths, request)
    n = len(calls) * first.n_calls
    by_call = values.view(len(values), n, B // first.n_calls, H, T)
    return first.eligible(request).sums_of(by_call, first.layout.positions)


def _joined(calls: Sequence[CallRows]) -> Rows:
    """The statistics of the rows of one call after the other, and norms of outputs."""
    parts = [vars(call.rows) | {"norms": call.norms} for call in calls]
    if len(calls) == 1:
        return parts[0]
    return {
        name: torch.cat([part[name] for part in parts])
        for name, x in parts[0].items()
        if isinstance(x, Tensor) and name not in OF_MASK
    }


def _values(rows: Rows, widths: Widths, request: Request) -> Shaped[Tensor, "K B H T"]:
    """The statistics of each row, in the order of the request."""
    statistics = _row_values(rows)
    statistics |= _by_mass("mass", rows, widths, request)
    if request.top:
        tops = _by_mass("top", rows, widths, request)
        statistics |= {f"top({name})": top for name, top in tops.items()}
    if request.value:
        statistics |= _shares(rows, widths, request)
    return stacked([statistics[name] for name in request.names], rows["lse"])


def projected_norms(
    vectors: Float[Tensor, "B _ n Dv"],
    per_head: PerHead | None,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "B H n"]:
    """The norm of each vector after the output projection of each head that reads it."""
    if per_head is None:
        raise UnsupportedError("observe: there is no output projection. Leave value= out.")
    part = per_head.detach().double()
    # ‖x W‖² = x (W Wᵀ) xᵀ, and W Wᵀ is as small as a head.
    squared = (part @ part.transpose(-1, -2)).to(dtype)
    wide = vectors.to(dtype).repeat_interleave(len(part) // vectors.shape[1], 1)
    return ((wide @ squared) * wide).sum(-1).clamp(min=0.0).sqrt()


def _class_members(
    request: Request, positions: Positions, key_text: Text
) -> Float[Tensor, "B S C"]:
    """Which keys belong to each class of tokens."""
    if key_text.ids is None or key_text.ids.shape[1] != positions.key_real.shape[1]:
        raise UnsupportedError(
            f"observe: the classes {', '.join(request.classes)} need whole texts as input_ids, "
            f"without a cache. Request them only there."
        )
    classes = [
        torch.isin(key_text.ids, torch.tensor(sorted(ids), device=key_text.ids.device))
        for ids in request.classes.values()
    ]
    return (torch.stack(classes, dim=-1) & positions.key_real[..., None]).float()


# By statistic, what holds it; `lse` stands in where a statistic is undefined.
_ROW_VALUES = {
    "entropy": "entropy", "max_weight": "max_weight", "max_logit": "max_logit", "lse": "lse",
    "sink": "sink", "distance": "distance", "participation": "participation",
    "output_norm": "norms",
}  # fmt: skip


def _row_values(rows: Rows) -> dict[str, RowValues]:
    """The statistics of all rows except masses, by name; undefined ones hold arbitrary
    values."""
    values = {name: rows.get(field) for name, field in _ROW_VALUES.items()}
    return {name: rows["lse"] if value is None else value for name, value in values.items()}


def _by_mass(measure: str, rows: Rows, widths: Widths, request: Request) -> dict[str, RowValues]:
    """One measure of the masses, by name: "seen" (keys), "mass", "top" or "share"."""
    of_keys = rows.get(f"key_{measure}")
    of_classes = rows.get("class_keys" if measure == "seen" else f"class_{measure}")
    values: dict[str, RowValues] = {}
    if of_keys is not None and widths:
        values |= zip(widths, _sums_over(of_keys, widths), strict=True)
    if of_classes is not None:
        names = (*request.classes, *request.spans)
        values |= zip(names, of_classes.unbind(-1), strict=True)
    return values


def _sums_over(
    of_keys: Shaped[Tensor, "B H T N"], widths: Widths
) -> Sequence[Shaped[Tensor, "B H T"]]:
    """The sum over the keys of each name."""
    if len(widths) == of_keys.shape[-1]:  # one key for each
        return of_keys.unbind(-1)
    return [part.sum(-1) for part in torch.split(of_keys, [*widths.values()], -1)]


def _shares(rows: Rows, widths: Widths, request: Request) -> dict[str, RowValues]:
    """The shares of value norms by the names of their statistics; NaN if all norms are zero."""
    seen = _by_mass("seen", rows, widths, request)
    shares = _by_mass("share", rows, widths, request)
    return {
        f"value({name})": torch.where(seen[name] > 0, share, 0.0) for name, share in shares.items()
    }


def _eligible_rows(call: CallRows, request: Request) -> EligibleRows:
    """The rows that count for each statistic of a request, and its value under even weights."""
    rows, layout = call.rows, call.layout
    positions, widths, spans = layout.positions, layout.widths, layout.spans
    real = positions.query_real[:, None] & (rows.n_keys > 0)
    n_keys = rows.n_keys.clamp(min=1).to(rows.lse.dtype)
    several = rows.n_keys > (0 if request.queries == "all" else 1)
    rules = _rules(rows, several, n_keys)
    shares = _shares(vars(rows), widths, request) if request.value else {}
    for name, seen in _by_mass("seen", vars(rows), widths, request).items():
        # In cross-attention, no query has a neighbor or a relation.
        crosses = name == "first" or name in request.spans
        over_all = request.queries == "all" and (crosses or not positions.is_cross)
        eligible = several & ((seen > 0) | over_all)
        if spans is not None and name in request.spans:
            eligible &= spans.queries[:, None]
        rules[name] = rules[f"top({name})"] = eligible, seen / n_keys
        share = shares.get(f"value({name})")
        rules[f"value({name})"] = eligible if share is None else eligible & ~share.isnan(), None
    return EligibleRows.of(
        [rules.get(name, (None, None)) for name in request.names], real, positions
    )


def _rules(
    rows: RowStatistics, several: Bool[Tensor, "B H T"], n_keys: Float[Tensor, "B H T"]
) -> dict[str, Rule]:
    """The eligible rows and even values of statistics other than masses; `several` marks rows
    that count.
    """
    undefined = torch.zeros_like(several)
    # The largest logit of hand-written attention may be unknown; NaN rows count as known.
    is_known = ~rows.max_logit.isnan() | rows.lse.isnan()
    return {
        "max_weight": (several, 1.0 / n_keys),
        "max_logit": (is_known, None),
        "sink": (undefined if rows.sink is None else None, None),
        "entropy": (several, n_keys.log()),
        "participation": (several, n_keys),
        "distance": (undefined if rows.distance is None else several, rows.even_distance),
    }
