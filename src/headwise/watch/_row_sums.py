"""From statistics of rows to sums over texts: which rows count for which statistic."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.kernels import RowRequest, RowStatistics
from headwise.models import AttentionCall, Text
from headwise.watch._eligible_rows import CallSums, EligibleRows, Rule, stacked
from headwise.watch._layouts import CallLayout
from headwise.watch._pairs import Columns
from headwise.watch._positions import Positions
from headwise.watch._request import Request

PerHead = Float[Tensor, "H Dv d_model"]
RowValues = Shaped[Tensor, "B H T"]


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
    return RowRequest(
        entropy="entropy" in request.statistics,
        distance="distance" in request.statistics and not positions.is_cross,
        participation="participation" in request.statistics,
        received=positions.query_real if request.received else None,
        keys=torch.cat([*columns.values()], dim=-1) if columns else None,
        classes=torch.cat(members, dim=-1) if members else None,
        top=bool(request.top),
        query_at=positions.query_position,
        key_at=positions.keys.position,
        heads=heads,
    )


def sum_rows(
    rows: RowStatistics,
    call: AttentionCall,
    request: Request,
    layout: CallLayout,
    per_head: PerHead | None,
) -> CallSums:
    """The sums of one call, by text, for every statistic of a request.

    Padding rows are never counted. A row with a single visible key has a fixed weight of 1, so
    it counts only for logits, unless means are taken over all queries.
    """
    statistics = _row_values(rows)
    if per_head is not None:
        # A call that is answered has no heads of the model's own yet.
        is_own = call.join is None and call.heads.shape[-1] > 0
        heads = call.heads if is_own else rows.heads
        if heads is not None and heads.shape[1] == len(per_head):
            statistics["output_norm"] = projected_norms(heads, per_head)
    columns = layout.columns
    statistics |= _by_mass("mass", rows, columns, request)
    if request.top:
        tops = _by_mass("top", rows, columns, request)
        statistics |= {f"top({name})": top for name, top in tops.items()}
    if request.value:
        statistics |= _shares(rows, columns, request)
    values = stacked([statistics[name] for name in request.names], rows.lse)
    return _eligible(rows, call, request, layout).sums_of(values, layout.positions)


def _eligible(
    rows: RowStatistics, call: AttentionCall, request: Request, layout: CallLayout
) -> EligibleRows:
    """The rows that count: the same for all calls of a layout, unless values decide."""
    kind = rows.n_keys.shape[1], rows.sink is not None
    # Whether the largest logit is known, and whether all values are zero, depends on the call.
    is_shared = call.knows_logits and not request.value
    if is_shared and kind in layout.eligible:
        return layout.eligible[kind]
    eligible = _eligible_rows(rows, request, layout)
    if is_shared:
        layout.eligible[kind] = eligible
    return eligible


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


def _row_values(rows: RowStatistics) -> dict[str, RowValues]:
    """The statistics of all rows except masses, by name; those that are undefined are any."""
    values = {
        "entropy": rows.entropy,
        "max_weight": rows.max_weight,
        "max_logit": rows.max_logit,
        "lse": rows.lse,
        "sink": rows.sink,
        "distance": rows.distance,
        "participation": rows.participation,
    }
    return {name: rows.lse if value is None else value for name, value in values.items()}


def _by_mass(
    measure: str, rows: RowStatistics, columns: Columns, request: Request
) -> dict[str, RowValues]:
    """One measure of the masses, by name: "seen" (keys), "mass", "top" or "share"."""
    of_keys = getattr(rows, f"key_{measure}")
    of_classes = getattr(rows, "class_keys" if measure == "seen" else f"class_{measure}")
    values: dict[str, RowValues] = {}
    if of_keys is not None and columns:
        values |= zip(columns, _sums_over(of_keys, columns), strict=True)
    if of_classes is not None:
        names = (*request.classes, *request.spans)
        values |= zip(names, of_classes.unbind(-1), strict=True)
    return values


def _sums_over(
    of_keys: Shaped[Tensor, "B H T N"], columns: Columns
) -> Sequence[Shaped[Tensor, "B H T"]]:
    """The sum over the keys of each name."""
    if len(columns) == of_keys.shape[-1]:  # one key for each
        return of_keys.unbind(-1)
    widths = [keys.shape[-1] for keys in columns.values()]
    return [part.sum(-1) for part in torch.split(of_keys, widths, -1)]


def _shares(rows: RowStatistics, columns: Columns, request: Request) -> dict[str, RowValues]:
    """The shares of value norms by the names of their statistics; NaN if all norms are zero."""
    seen = _by_mass("seen", rows, columns, request)
    shares = _by_mass("share", rows, columns, request)
    return {
        f"value({name})": torch.where(seen[name] > 0, share, 0.0) for name, share in shares.items()
    }


def _eligible_rows(rows: RowStatistics, request: Request, layout: CallLayout) -> EligibleRows:
    """The rows that count for each statistic of a request, and its value under even weights."""
    positions, columns = layout.positions, layout.columns
    real = positions.query_real[:, None] & (rows.n_keys > 0)
    n_keys = rows.n_keys.clamp(min=1).to(rows.lse.dtype)
    several = rows.n_keys > (0 if request.queries == "all" else 1)
    rules = _rules(rows, several, n_keys)
    shares = _shares(rows, columns, request) if request.value else {}
    for name, seen in _by_mass("seen", rows, columns, request).items():
        # In cross-attention, no query has a neighbor or a relation.
        over_all = request.queries == "all" and (name == "first" or not positions.is_cross)
        eligible = several & ((seen > 0) | over_all)
        if layout.spans is not None and name in request.spans:
            eligible = layout.spans.eligible(several, seen, request.queries)
        rules[name] = rules[f"top({name})"] = eligible, seen / n_keys
        share = shares.get(f"value({name})")
        rules[f"value({name})"] = eligible if share is None else eligible & ~share.isnan(), None
    return EligibleRows.of(
        {name: rules.get(name, (None, None)) for name in request.names}, real, positions
    )


def _rules(
    rows: RowStatistics, several: Bool[Tensor, "B H T"], n_keys: Float[Tensor, "B H T"]
) -> dict[str, Rule]:
    """The eligible rows and even values of statistics that are no masses; `several` marks rows
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
