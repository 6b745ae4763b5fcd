"""From statistics of rows to sums over texts: which rows count for which statistic."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.kernels import RowRequest, RowStatistics
from headwise.models import AttentionCall, Text
from headwise.watch._accumulator import CallSums
from headwise.watch._pairs import Columns
from headwise.watch._positions import Positions
from headwise.watch._request import Request

PerHead = Float[Tensor, "H Dv d_model"]


def row_request(
    call: AttentionCall,
    request: Request,
    positions: Positions,
    columns: Columns,
    key_text: Text,
    per_head: PerHead | None,
    need_heads: bool,
) -> RowRequest:
    """What the kernel must compute for each row of a call.

    Args:
        columns: The keys of each query under every offset, relation and set of pairs.
        per_head: The part of each head in the output projection, if a statistic needs it.
    """
    projects_heads = "output_norm" in request.statistics and call.join is not None
    return RowRequest(
        entropy="entropy" in request.statistics,
        distance="distance" in request.statistics and not positions.is_cross,
        participation="participation" in request.statistics,
        received=positions.query_real if request.received else None,
        keys=torch.cat([*columns.values()], dim=-1) if columns else None,
        classes=_class_members(request, positions, key_text) if request.classes else None,
        top=bool(request.top),
        key_norms=projected_norms(call.v, per_head) if request.value else None,
        query_at=positions.query_position,
        key_at=positions.keys.position,
        heads=need_heads or projects_heads,
    )


def sum_rows(
    rows: RowStatistics,
    call: AttentionCall,
    request: Request,
    positions: Positions,
    columns: Columns,
    per_head: PerHead | None,
) -> CallSums:
    """The sums of one call, by text, for every statistic of a request.

    Padding rows are never counted. A row with a single visible key has a fixed weight of 1, so
    it counts only for logits, unless means are taken over all queries.
    """
    real = positions.query_real[:, None] & (rows.n_keys > 0)
    n_keys = rows.n_keys.clamp(min=1).to(rows.lse.dtype)
    several = rows.n_keys > (0 if request.queries == "all" else 1)
    statistics = _row_values(rows, several, n_keys)
    if per_head is not None:
        # A call that is answered has no heads of the model's own yet.
        is_own = call.join is None and call.heads.shape[-1] > 0
        heads = call.heads if is_own else rows.heads
        if heads is not None and heads.shape[1] == len(per_head):
            statistics["output_norm"] = _RowValues(projected_norms(heads, per_head))
    for name, (seen, mass, top, share) in _mass_columns(rows, columns, request).items():
        if seen is None or mass is None:
            continue
        # In cross-attention, no query has a neighbor or a relation.
        over_all = request.queries == "all" and (name == "first" or not positions.is_cross)
        eligible = several & ((seen > 0) | over_all)
        statistics[name] = _RowValues(mass, eligible, seen / n_keys)
        if top is not None:
            statistics[f"top({name})"] = replace(statistics[name], values=top)
        if share is not None:  # NaN if all visible values are zero
            share = torch.where(seen > 0, share, 0.0)
            statistics[f"value({name})"] = _RowValues(share, eligible & ~share.isnan())
    return _sums({name: statistics[name] for name in request.names}, real, positions)


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


@dataclass(frozen=True)
class _RowValues:
    """One statistic of every row, the rows it is defined for, and its value under even weights."""

    values: Float[Tensor, "B H T"]
    eligible: Bool[Tensor, "B H T"] | None = None  # None: every real row
    even: Float[Tensor, "B H T"] | None = None


def _row_values(
    rows: RowStatistics, several: Bool[Tensor, "B H T"], n_keys: Float[Tensor, "B H T"]
) -> dict[str, _RowValues]:
    """The statistics of all rows except masses, by name; `several` marks rows that count."""
    undefined = torch.zeros_like(several)
    # The largest logit of hand-written attention may be unknown; NaN rows count as known.
    is_known = ~rows.max_logit.isnan() | rows.lse.isnan()
    statistics = {
        "max_weight": _RowValues(rows.max_weight, several, 1.0 / n_keys),
        "max_logit": _RowValues(rows.max_logit, is_known),
        "lse": _RowValues(rows.lse),
        "sink": _RowValues(rows.lse, undefined) if rows.sink is None else _RowValues(rows.sink),
        "distance": _RowValues(rows.lse, undefined),
    }
    if rows.entropy is not None:
        statistics["entropy"] = _RowValues(rows.entropy, several, n_keys.log())
    if rows.participation is not None:
        statistics["participation"] = _RowValues(rows.participation, several, n_keys)
    if rows.distance is not None:
        statistics["distance"] = _RowValues(rows.distance, several, rows.even_distance)
    return statistics


def _mass_columns(
    rows: RowStatistics, columns: Columns, request: Request
) -> dict[str, tuple[Tensor | None, ...]]:
    """By mass: the number of its visible keys, its mass, top and share of value norms."""
    masses: dict[str, tuple[Tensor | None, ...]] = {}
    by_key = (rows.key_seen, rows.key_mass, rows.key_top, rows.key_share)
    start = 0
    for name, keys in columns.items():
        part = slice(start, start + keys.shape[-1])
        masses[name] = tuple(None if x is None else x[..., part].sum(-1) for x in by_key)
        start = part.stop
    by_class = (rows.class_keys, rows.class_mass, rows.class_top, rows.class_share)
    for column, name in enumerate(request.classes):
        masses[name] = tuple(None if x is None else x[..., column] for x in by_class)
    return masses


def _sums(
    statistics: dict[str, _RowValues], real: Bool[Tensor, "B H T"], positions: Positions
) -> CallSums:
    """Sums over the rows of each text, for all statistics at once."""
    shape = (len(statistics), *real.shape)
    values = real.new_zeros(shape, dtype=torch.float64)
    eligible = real.expand(shape).clone()
    even = torch.full_like(values, torch.nan)
    for row, statistic in enumerate(statistics.values()):
        values[row] = statistic.values
        if statistic.eligible is not None:
            eligible[row] &= statistic.eligible
        if statistic.even is not None:
            even[row] = statistic.even
    maximum = torch.where(eligible, values, -torch.inf).amax((1, 3))
    is_defined = eligible.any(3).any(1)
    even_sums = positions.by_text(torch.where(eligible, even, 0.0)).cpu().numpy()
    even_sums[[statistic.even is None for statistic in statistics.values()]] = torch.nan
    return CallSums(
        names=tuple(statistics),
        count=positions.by_text(eligible.double()).cpu().numpy(),
        total=positions.by_text(torch.where(eligible, values, 0.0)).cpu().numpy(),
        even=even_sums,
        maximum=torch.where(is_defined, maximum, torch.nan).cpu().numpy(),
    )
