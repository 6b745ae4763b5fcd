"""Evaluation of a model: what every head scores on every role in each text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._evaluation import in_evaluation
from headwise._memory import halving
from headwise._progress import Progress
from headwise._torch_private import without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import HeadBlock
from headwise.models import device_of
from headwise.models.texts import (
    check_reads_text,
    reads_two_texts,
    text_alone,
)
from headwise.roles.evaluation._eligible import (
    EligiblePairs,
    evenness_of,
    heads_last,
    sink_keys,
)
from headwise.roles.evaluation._relation_index import RelationIndex
from headwise.roles.evaluation._synthetic_heads import heuristic_sums, planted_sums
from headwise.roles.evaluation._tag_rules import TagRows, tag_rows
from headwise.roles.evaluation._units import Units, rows_of_batches
from headwise.roles.relations import GRIDS, Item, Role
from headwise.tables import Head
from headwise.watch import Layer, Request, observe

_TINY = 1e-30


@dataclass(frozen=True)
class RoleScores:
    """Per-text sums for every role and head, from one pass over the texts.

    Attributes:
        value: What each head scores.
        count: The number of queries.
    """

    value: Float[np.ndarray, "M R N"]
    count: Float[np.ndarray, "M R N"]


@dataclass(frozen=True)
class DetailedScores(RoleScores):
    """Scores with further measures, which are needed of the watched model alone.

    Attributes:
        causal: Whether no head may attend to later tokens.
        chance: What even attention would score.
        mass: The attention on the relation.
        value_mass: The same with each key weighted by the norm of its projected value, as a
            share of the sum over all keys of the query; NaN without a known output projection.
        heuristics: What each heuristic scores.
        heuristic_count: The number of its queries: those that are eligible for any head.
        planted: What a head scores that attends to nothing but the pairs of the role.
        planted_chance: What even attention scores on the same queries.
        tag_rows: The queries of structural roles with the nearest words of every part of speech;
            None without tags.
    """

    heads: tuple[Head, ...]
    causal: bool
    chance: Float[np.ndarray, "M R N"]
    mass: Float[np.ndarray, "M R N"]
    value_mass: Float[np.ndarray, "M R N"]
    heuristics: Float[np.ndarray, "M R K"]
    heuristic_count: Float[np.ndarray, "M R 1"]
    planted: Float[np.ndarray, "M R 1"]
    planted_chance: Float[np.ndarray, "M R 1"]
    tag_rows: TagRows | None


_Sums = dict[str, Tensor]


class Evaluator:
    """Items and roles, batched and indexed once, to evaluate any number of models on."""

    def __init__(self, items: Sequence[Item], roles: Sequence[Role], tags: Sequence[str] = ()):
        """Index the items; `tags` are the parts of speech that rules may use."""
        self.roles, self.tags = tuple(roles), tuple(tags)
        self.items = tuple(items)
        self._use_batches_of(len(self.items))

    def evaluate(self, model: nn.Module, on_progress: Progress | None = None) -> RoleScores:
        """Run a model over all texts once and score every head on every role but evenness.

        Weights are computed for some heads of one layer at a time, in a block that fits into
        the CPU cache. The model is in evaluation mode meanwhile.

        Args:
            on_progress: Called after each batch with the number of texts done and of all.
        """
        return RoleScores(**self._sums(model, on_progress, detailed=False))

    def evaluate_detailed(
        self, model: nn.Module, on_progress: Progress | None = None
    ) -> DetailedScores:
        """Evaluate with heuristics, words by class, and (value-weighted) mass for every role."""
        return DetailedScores(**self._sums(model, on_progress, detailed=True))

    def _use_batches_of(self, most: int) -> None:
        """Put at most this many texts into a batch."""
        rows = rows_of_batches(self.items, most)
        self.batches = [_Batch([self.items[row] for row in batch], self.roles) for batch in rows]
        self._order = [row for batch in rows for row in batch]
        self._most = max(map(len, rows), default=0)

    def _sums(
        self, model: nn.Module, on_progress: Progress | None, detailed: bool
    ) -> dict[str, Any]:
        """The sums of all texts; later passes keep the batches for which there was memory."""
        check_reads_one_text("find_roles", model)

        def summed(most: int) -> dict[str, Any]:
            if most < self._most:
                self._use_batches_of(most)
            return self._sums_of_batches(model, on_progress, detailed)

        return halving("find_roles", summed, self._most)

    @torch.no_grad()
    def _sums_of_batches(
        self, model: nn.Module, on_progress: Progress | None, detailed: bool
    ) -> dict[str, Any]:
        parts: list[_Sums] = []
        rows: list[TagRows] = []
        done = 0
        with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
            for batch in self.batches:
                with text_alone("find_roles", model):
                    batch.run(model)
                layers = watch.layers()
                batch.check(model, layers)
                # The function mode that captures attention need not see what follows from it.
                with without_function_modes():
                    parts.append(batch.sums(layers, detailed))
                    texts = np.array(self._order[done : done + len(batch.items)])
                    rows += batch.tag_rows(layers, self.tags, texts) if detailed else []
                done += len(batch.items)
                if on_progress is not None:
                    on_progress(done, len(self._order))
        original_order = np.argsort(self._order)
        sums: dict[str, Any] = {
            name: np.concatenate([part[name].numpy() for part in parts])[original_order]
            for name in parts[0]
        }
        if detailed:
            sums["causal"] = not sums.pop("ahead").any()
            sums["heads"] = tuple(head for layer in layers for head in layer.heads)
            sums["tag_rows"] = TagRows.joined(rows) if self.tags and rows else None
        return sums


class _Batch:
    """Texts that one forward pass reads."""

    def __init__(self, items: Sequence[Item], roles: Sequence[Role]) -> None:
        self.items, self._n_roles = items, len(roles)
        S = max(len(item.ids) for item in items)
        self._ids = torch.zeros(len(items), S, dtype=torch.int64)
        self._mask = torch.zeros_like(self._ids)
        for row, item in enumerate(items):
            self._ids[row, : len(item.ids)] = torch.tensor(item.ids)
            self._mask[row, : len(item.ids)] = 1
        grids = [grid for grid in GRIDS if any(role.grid == grid for role in roles)]
        self._indexes = [RelationIndex(Units(grid, items, S), roles) for grid in grids]
        self._sinks = sink_keys(items, S)
        self._cached: tuple[Tensor, list[EligiblePairs]] | None = None

    def run(self, model: nn.Module) -> None:
        device = device_of(model)
        model(input_ids=self._ids.to(device), attention_mask=self._mask.to(device))

    def check(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Refuse attention that is not self-attention within each of these texts."""
        if not layers:
            raise UnsupportedError(
                f"find_roles: no self-attention of {type(model).__name__} was captured. "
                f"Give a model with self-attention that takes input_ids."
            )
        B, S = self._ids.shape
        shapes = {(len(layer.visible), *layer.visible.shape[2:]) for layer in layers}
        if shapes != {(B, S, S)}:
            unexpected = sorted(shapes - {(B, S, S)})[0]
            raise UnsupportedError(
                f"find_roles: {type(model).__name__} was given {B} texts of {S} tokens, and a "
                f"layer attends to {unexpected[0]} of {unexpected[2]}. Give a model that reads "
                f"all texts at once."
            )

    def tag_rows(
        self, layers: Sequence[Layer], tags: Sequence[str], texts: Int[np.ndarray, " B"]
    ) -> list[TagRows]:
        """The rows of both grids that have parts of speech, with these numbers of the texts."""
        grids = self._eligible_under(_visible_to_any(layers)) if tags else []
        parts = [tag_rows(pairs, tags) for pairs in grids if pairs.index.units.grid != "mention"]
        return [replace(rows, item=texts[rows.item]) for rows in parts]

    def sums(self, layers: Sequence[Layer], detailed: bool) -> _Sums:
        """Sums of every text and role; in detail with heuristics and masses."""
        per_layer = [self._layer_sums(layer, detailed) for layer in layers]
        sums = {name: torch.cat([part[name] for part in per_layer], -1) for name in per_layer[0]}
        if detailed:
            visible = _visible_to_any(layers)
            grids = self._eligible_under(visible)
            heuristics = [heuristic_sums(pairs) for pairs in grids]
            most = max(part.shape[-1] for part in heuristics)
            sums["heuristics"] = _add(pad(part, (0, most - part.shape[-1])) for part in heuristics)
            sums["heuristic_count"] = _add(pairs.count for pairs in grids)
            sums["planted"] = _add(planted_sums(pairs, visible) for pairs in grids)
            sums["planted_chance"] = _add(pairs.chance for pairs in grids)
        shape = (len(self.items), self._n_roles, -1)
        sums = {name: part.view(shape) for name, part in sums.items()}
        if detailed:
            sums["ahead"] = visible.triu(1).any().cpu().expand(len(self.items))
        return sums

    def _layer_sums(self, layer: Layer, detailed: bool) -> _Sums:
        grids = self._eligible_under(layer.visible)
        H = len(layer.heads)
        norms = layer.value_norms() if detailed else None
        blocks: list[_Sums] = []
        for block in layer.blocks():
            table = heads_last(block.weights)
            # No null model is compared by its evenness.
            evenness = evenness_of(block, layer.visible, self._sinks) if detailed else {}
            sums = {"value": _add(pairs.value(block, table, evenness) for pairs in grids)}
            if detailed:
                sums["mass"] = _add(pairs.mass(block, table) for pairs in grids)
                shares = None if norms is None else _value_shares(block, norms)
                sums["value_mass"] = (
                    torch.full_like(sums["mass"], torch.nan)
                    if shares is None
                    else _add(pairs.mass(block, shares) for pairs in grids)
                )
            blocks.append(sums)
        joined = {name: torch.cat([part[name] for part in blocks], -1).cpu() for name in blocks[0]}
        joined["count"] = _add(pairs.count for pairs in grids).expand(-1, H)
        if detailed:
            joined["chance"] = _add(pairs.chance for pairs in grids).expand(-1, H)
        return joined

    def _eligible_under(self, visible: Bool[Tensor, "B hv T S"]) -> list[EligiblePairs]:
        """The eligible pairs of each grid under a mask; most layers of most models share one."""
        cached = self._cached
        if (
            cached is None
            or cached[0].shape != visible.shape
            or not torch.equal(cached[0], visible)
        ):
            pairs = [EligiblePairs(index, visible) for index in self._indexes]
            cached = self._cached = (visible, pairs)
        return cached[1]


def _visible_to_any(layers: Sequence[Layer]) -> Bool[Tensor, "B 1 T S"]:
    return torch.stack([layer.visible.any(1, keepdim=True) for layer in layers]).any(0)


def check_reads_one_text(who: str, model: nn.Module) -> None:
    """Refuse a model without text input, or with queries and keys from two texts.

    Raises:
        UnsupportedError: it is an encoder-decoder, or takes no token ids.
    """
    check_reads_text(who, model)
    if reads_two_texts(model):
        raise UnsupportedError(
            f"{who}: {type(model).__name__} reads two texts, and a relation is of one. Give its "
            f"encoder (model.get_encoder())."
        )


def _value_shares(block: HeadBlock, norms: Float[Tensor, "B H S"]) -> Float[Tensor, "N h"]:
    """Weights times value norms, as a share of their sum over all keys of a query."""
    weighted = block.weights * norms[:, block.heads, None]
    return heads_last(weighted.div_(weighted.sum(-1, keepdim=True).clamp_(min=_TINY)))


def _add(sums: Iterable[Tensor]) -> Tensor:
    """Add up the grids: a role is on one grid, and its cells are 0 on the others."""
    return torch.stack(list(sums)).sum(0)
