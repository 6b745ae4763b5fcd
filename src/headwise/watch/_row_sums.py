"""From statistics of rows to sums of texts: who is eligible for what."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.kernels import RowRequest, RowStatistics
from headwise.models import AttentionCall, Text
from headwise.watch._accumulator import CallSums
from headwise.watch._pairs import Columns
from headwise.watch._positions import Positions, offset_keys
from headwise.watch._request import OFFSETS, Request


@dataclass(frozen=True)
class Heard:
    """A call, and what is known of the texts in it.

    Attributes:
        keys: The text that the keys belong to.
        first: The number of the first text of the call.
        pairs: The keys of each query under every relation and all given pairs.
        per_head: The part of each head in the output projection, where it is asked for.
    """

    call: AttentionCall
    places: Positions
    keys: Text
    first: int
    pairs: Columns
    per_head: Float[Tensor, "H Dv d_model"] | None = None


@dataclass(frozen=True)
class _Question:
    """A row request, and which of its columns belong to which name."""

    rows: RowRequest
    key_columns: dict[str, slice]
    class_columns: dict[str, int]


def collect(heard: Heard, request: Request, heads_too: bool) -> tuple[CallSums, RowStatistics]:
    """The sums of one call for everything that was requested, and the rows behind them.

    Rows of padding are never counted. A row with a single visible key has its weights by
    necessity: it counts for logits alone, unless the means are over all queries.
    """
    question = _ask(heard, request, heads_too)
    rows = heard.call.row_statistics(question.rows)
    real = heard.places.query_real[:, None] & (rows.n_keys > 0)
    values = _values(rows, question, heard, request.queries == "all")
    return _sums({name: values[name] for name in request.names}, real, heard), rows


def _ask(heard: Heard, request: Request, heads_too: bool) -> _Question:
    places, call = heard.places, heard.call
    columns: list[Int[Tensor, "B T m"]] = []
    where: dict[str, slice] = {}
    offsets = {name: offset_keys(places, name) for name in OFFSETS if request.wants(name)}
    for name, keys in (offsets | heard.pairs).items():
        start = sum(one.shape[-1] for one in columns)
        where[name] = slice(start, start + keys.shape[-1])
        columns.append(keys)
    own_heads = "output_norm" in request.statistics and call.join is not None
    rows = RowRequest(
        entropy="entropy" in request.statistics,
        distance="distance" in request.statistics and not places.across,
        participation="participation" in request.statistics,
        received=places.query_real if request.received else None,
        keys=torch.cat(columns, dim=-1) if columns else None,
        classes=_members(heard, request) if request.classes else None,
        top=bool(request.top),
        key_norms=norms_behind(call.v, heard.per_head) if request.value else None,
        query_at=places.query_at,
        key_at=places.keys.at,
        heads=heads_too or own_heads,
    )
    return _Question(rows, where, {name: at for at, name in enumerate(request.classes)})


def _members(heard: Heard, request: Request) -> Float[Tensor, "B S C"]:
    text, places = heard.keys, heard.places
    if text.ids is None or text.ids.shape[1] != places.key_real.shape[1]:
        raise UnsupportedError(
            f"observe: the classes {', '.join(request.classes)} need whole texts as input_ids, "
            f"without a cache. Ask for them only there."
        )
    classes = [
        torch.isin(text.ids, torch.tensor(sorted(ids), device=text.ids.device))
        for ids in request.classes.values()
    ]
    return (torch.stack(classes, dim=-1) & places.key_real[..., None]).float()


def norms_behind(
    vectors: Float[Tensor, "B _ n Dv"],
    per_head: Float[Tensor, "H Dv d_model"] | None,
    work: torch.dtype = torch.float64,
) -> Float[Tensor, "B H n"]:
    """How long each vector is behind the output projection of each head that reads it."""
    if per_head is None:
        raise UnsupportedError("observe: there is no output projection. Leave value= out.")
    part = per_head.detach().double()
    # ‖x W‖² = x (W Wᵀ) xᵀ, and W Wᵀ is as small as a head.
    squared = (part @ part.transpose(-1, -2)).to(work)
    wide = vectors.to(work).repeat_interleave(len(part) // vectors.shape[1], 1)
    return ((wide @ squared) * wide).sum(-1).clamp(min=0.0).sqrt()


@dataclass(frozen=True)
class _Values:
    """One statistic of every row, which rows it speaks of, and its value under even weights."""

    values: Float[Tensor, "B H T"]
    eligible: Bool[Tensor, "B H T"] | None = None  # None: every real row
    even: Float[Tensor, "B H T"] | None = None


def _values(
    rows: RowStatistics, question: _Question, heard: Heard, every_query: bool
) -> dict[str, _Values]:
    """All that is known of these rows, by name."""
    n_keys = rows.n_keys.clamp(min=1).to(rows.lse.dtype)
    several = rows.n_keys > (0 if every_query else 1)
    nowhere = torch.zeros_like(several)
    # Attention that is written out does not tell it; but where nothing is a number, it is told.
    told = ~rows.max_logit.isnan() | rows.lse.isnan()
    known = {
        "max_weight": _Values(rows.max_weight, several, 1.0 / n_keys),
        "max_logit": _Values(rows.max_logit, told),
        "lse": _Values(rows.lse),
        "sink": _Values(rows.lse, nowhere) if rows.sink is None else _Values(rows.sink),
        "distance": _Values(rows.lse, nowhere),
    }
    if rows.entropy is not None:
        known["entropy"] = _Values(rows.entropy, several, n_keys.log())
    if rows.participation is not None:
        known["participation"] = _Values(rows.participation, several, n_keys)
    if rows.distance is not None:
        known["distance"] = _Values(rows.distance, several, rows.even_distance)
    if heard.per_head is not None:
        heads = heard.call.heads if heard.call.join is None else rows.heads
        if heads is not None and heads.shape[1] == len(heard.per_head):
            known["output_norm"] = _Values(norms_behind(heads, heard.per_head))
    return known | _masses(rows, question, several, n_keys, _of_all(question, heard, every_query))


def _of_all(question: _Question, heard: Heard, every_query: bool) -> tuple[str, ...]:
    """The masses that every query has; a neighbor in another text is nobody's."""
    if not every_query:
        return ()
    names = (*question.key_columns, *question.class_columns)
    return tuple(name for name in names if name == "first" or not heard.places.across)


def _masses(
    rows: RowStatistics,
    question: _Question,
    several: Bool[Tensor, "B H T"],
    n_keys: Float[Tensor, "B H T"],
    everywhere: tuple[str, ...],
) -> dict[str, _Values]:
    """What falls on the keys of each name: of the weights, the largest weight, the values.

    Args:
        everywhere: The names that are also counted, as 0, where a query sees no such key.
    """
    found: dict[str, tuple[Tensor | None, ...]] = {}
    for name, at in question.key_columns.items():
        measures = (rows.key_seen, rows.key_mass, rows.key_top, rows.key_share)
        found[name] = tuple(None if one is None else one[..., at].sum(-1) for one in measures)
    for name, column in question.class_columns.items():
        measures = (rows.class_keys, rows.class_mass, rows.class_top, rows.class_share)
        found[name] = tuple(None if one is None else one[..., column] for one in measures)
    known: dict[str, _Values] = {}
    for name, (seen, mass, top, share) in found.items():
        if seen is None or mass is None:
            continue
        eligible = several & ((seen > 0) | (name in everywhere))
        known[name] = _Values(mass, eligible, seen / n_keys)
        if top is not None:
            known[f"top({name})"] = replace(known[name], values=top)
        if share is not None:  # NaN where all visible values are zero
            share = torch.where(seen > 0, share, 0.0)
            known[f"value({name})"] = _Values(share, eligible & ~share.isnan())
    return known


def _sums(values: dict[str, _Values], real: Bool[Tensor, "B H T"], heard: Heard) -> CallSums:
    """Sums over the rows of each text, all statistics at once."""
    places, each = heard.places, values.values()
    shape = (len(values), *real.shape)
    numbers = real.new_zeros(shape, dtype=torch.float64)
    eligible = real.expand(shape).clone()
    even = torch.full_like(numbers, torch.nan)
    for at, one in enumerate(each):
        numbers[at] = one.values
        if one.eligible is not None:
            eligible[at] &= one.eligible
        if one.even is not None:
            even[at] = one.even
    highest = torch.where(eligible, numbers, -torch.inf).amax((1, 3))
    seen = eligible.any(3).any(1)
    has_even = [one.even is not None for one in each]
    evens = places.by_text(torch.where(eligible, even, 0.0)).cpu().numpy()
    evens[[not has for has in has_even]] = torch.nan
    return CallSums(
        names=tuple(values),
        count=places.by_text(eligible.double()).cpu().numpy(),
        total=places.by_text(torch.where(eligible, numbers, 0.0)).cpu().numpy(),
        even=evens,
        maximum=torch.where(seen, highest, torch.nan).cpu().numpy(),
        first=heard.first,
    )
