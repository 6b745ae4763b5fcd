"""From statistics of rows to totals of heads: who is eligible for what."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.kernels import RowRequest, RowStatistics
from headwise.models import Call, Text
from headwise.table import Totals
from headwise.watch._places import Places, offset_keys, related_keys
from headwise.watch._request import Request

_OFFSETS = ("first", "self", "previous", "next")


@dataclass(frozen=True)
class _Question:
    """A row request, and which of its columns belong to which name."""

    rows: RowRequest
    key_columns: dict[str, slice]
    class_columns: dict[str, int]


def collect(
    call: Call, places: Places, text: Text, request: Request, heads_too: bool
) -> tuple[dict[str, Totals], Float[Tensor, "B H T Dv"] | None]:
    """The totals of one call for everything that was requested, and the heads if asked for.

    Rows of padding are never counted. A row with a single visible key has its weights by
    necessity: it counts for logits alone.
    """
    question = _ask(call, places, text, request, heads_too)
    rows = call.row_statistics(question.rows)
    real = places.query_real[:, None] & (rows.n_keys > 0)
    found = {
        name: values.totals(real)
        for name, values in _values(rows, request, question, places.across).items()
    }
    return found, rows.heads


def _ask(call: Call, places: Places, text: Text, request: Request, heads_too: bool) -> _Question:
    columns: list[Int[Tensor, "B T m"]] = []
    where: dict[str, slice] = {}

    def add(name: str, keys: Int[Tensor, "B T m"]) -> None:
        start = sum(one.shape[-1] for one in columns)
        where[name] = slice(start, start + keys.shape[-1])
        columns.append(keys)

    for name in _OFFSETS:
        if name in request.statistics:
            add(name, offset_keys(places, name))
    for name, relation in request.relations.items():
        add(name, related_keys(places, relation, name, text))
    rows = RowRequest(
        entropy="entropy" in request.statistics,
        distance="distance" in request.statistics and not places.across,
        keys=torch.cat(columns, dim=-1) if columns else None,
        classes=_members(places, text, request) if request.classes else None,
        query_at=places.query_at,
        key_at=places.key_at,
        heads=heads_too,
    )
    return _Question(rows, where, {name: at for at, name in enumerate(request.classes)})


def _members(places: Places, text: Text, request: Request) -> Float[Tensor, "B S C"]:
    if text.ids is None or places.across or text.ids.shape[1] != places.key_real.shape[1]:
        raise UnsupportedError(
            f"observe: the classes {', '.join(request.classes)} need whole texts as input_ids, "
            f"without a cache. Ask for them only there."
        )
    classes = [
        torch.isin(text.ids, torch.tensor(sorted(ids), device=text.ids.device))
        for ids in request.classes.values()
    ]
    return (torch.stack(classes, dim=-1) & places.key_real[..., None]).float()


@dataclass(frozen=True)
class _Values:
    """One statistic of every row, which rows it speaks of, and its value under even weights."""

    values: Float[Tensor, "B H T"]
    eligible: Bool[Tensor, "B H T"] | None = None  # None: every real row
    even: Float[Tensor, "B H T"] | None = None

    def totals(self, real: Bool[Tensor, "B H T"]) -> Totals:
        eligible = real if self.eligible is None else real & self.eligible

        def sums(values: Tensor) -> np.ndarray:
            return torch.where(eligible, values, 0.0).double().sum(-1).cpu().numpy()

        highest = torch.where(eligible, self.values, -torch.inf).amax((0, 2)).double()
        seen = eligible.any(2).any(0)
        return Totals.of_texts(
            totals=sums(self.values),
            counts=eligible.sum(-1).double().cpu().numpy(),
            maximum=torch.where(seen, highest, torch.nan).cpu().numpy(),
            even=None if self.even is None else sums(self.even),
        )


def _values(
    rows: RowStatistics, request: Request, question: _Question, across: bool
) -> dict[str, _Values]:
    """What was requested, in the order in which it was requested."""
    n_keys = rows.n_keys.clamp(min=1).to(rows.lse.dtype)
    several = rows.n_keys > 1
    nowhere = torch.zeros_like(several)
    # Attention that is written out does not tell it; but where nothing is a number, it is told.
    told = ~rows.max_logit.isnan() | rows.lse.isnan()
    known = {
        "max_weight": _Values(rows.max_weight, several, 1.0 / n_keys),
        "max_logit": _Values(rows.max_logit, told),
        "lse": _Values(rows.lse),
        "sink": _Values(rows.lse, nowhere) if rows.sink is None else _Values(rows.sink),
    }
    if rows.entropy is not None:
        known["entropy"] = _Values(rows.entropy, several, n_keys.log())
    if rows.distance is not None and rows.even_distance is not None:
        known["distance"] = _Values(rows.distance, several, rows.even_distance)
    if across:
        known["distance"] = _Values(rows.lse, nowhere)
    for name, columns in question.key_columns.items():
        if rows.key_mass is not None and rows.key_seen is not None:
            seen = rows.key_seen[..., columns].sum(-1)
            mass = rows.key_mass[..., columns].sum(-1)
            known[name] = _Values(mass, several & (seen > 0), seen / n_keys)
    for name, column in question.class_columns.items():
        if rows.class_mass is not None and rows.class_keys is not None:
            keys = rows.class_keys[..., column]
            known[name] = _Values(rows.class_mass[..., column], several & (keys > 0), keys / n_keys)
    names = [*request.statistics, *request.classes, *request.relations]
    return {name: known[name] for name in names}
