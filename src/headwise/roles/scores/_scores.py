"""What every head of a model scores on every role in each text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad as pad_columns

from headwise._evaluation import in_evaluation
from headwise._progress import Progress
from headwise._torch_private import without_function_modes
from headwise.errors import UnsupportedError
from headwise.kernels import HeadBlock
from headwise.models import device_of
from headwise.models.texts import (
    check_reads_text,
    pad,
    reads_two_texts,
    text_alone,
    without_logits,
)
from headwise.roles.relations import LEVELS, Item, Role
from headwise.roles.scores._eligible import (
    EligiblePairs,
    Nodes,
    RelationIndex,
    evenness_of,
    sink_keys,
)
from headwise.roles.scores._heuristics import heuristic_sums, planted_sums
from headwise.roles.scores._tag_rules import TagRows, tag_rows
from headwise.tables import Head
from headwise.watch import Layer, Request, observe

_TINY = 1e-30
_TOKENS = 2048  # in one batch
_Sums = dict[str, Tensor]


@dataclass(frozen=True)
class RoleScores:
    """Sums over the queries of every text, role and head, from one pass over the texts.

    The first columns are the heads of the model. Of a detailed pass the heuristics follow, as
    further heads, and last a planted head, which attends to nothing but the pairs of each role.

    Attributes:
        heads: The heads of the model.
        value: What each head scores.
        count: The number of queries.
        uniform: What uniform attention would score.
        masses: Of a detailed pass, the attention of the model's heads on the relation, `mass`, and
            `value`, the same with each key weighted by the norm of its projected value, as a
            share of the sum over all keys of the query; NaN without a known output projection.
        causal: Whether no head may attend to later tokens.
        tag_rows: The queries of structural roles with the nearest words of every part of speech;
            None without tags and usual keys, or without detail.
    """

    heads: tuple[Head, ...]
    value: Float[np.ndarray, "M R C"]
    count: Float[np.ndarray, "M R C"]
    uniform: Float[np.ndarray, "M R C"]
    masses: Mapping[str, Float[np.ndarray, "M R N"]] = field(default_factory=dict)
    causal: bool = False
    tag_rows: TagRows | None = None

    def only(self, roles: Sequence[int]) -> "RoleScores":
        """The sums of some roles, without masses and words by class."""
        value, count, uniform = (x[:, roles] for x in (self.value, self.count, self.uniform))
        return RoleScores(self.heads, value, count, uniform, causal=self.causal)


class Evaluator:
    """Items and roles, batched and indexed once, to score any number of models on."""

    def __init__(self, items: Sequence[Item], roles: Sequence[Role], tags: Sequence[str] = ()):
        """Index the items; `tags` are the parts of speech, or other classes, for rules."""
        self.roles, self.tags = tuple(roles), tuple(tags)
        self.items = tuple(items)
        rows = rows_of_batches([len(item.ids) for item in self.items], _TOKENS)
        self.batches = [_Batch([self.items[row] for row in batch], self.roles) for batch in rows]
        self._order = [row for batch in rows for row in batch]

    @torch.no_grad()
    def scores(
        self, model: nn.Module, on_progress: Progress | None = None, *, detailed: bool = False
    ) -> RoleScores:
        """Run a model over all texts once and score every head on every role.

        Weights are computed for some heads of one layer at a time, in a block that fits into
        the CPU cache. The model is in evaluation mode meanwhile.

        Args:
            on_progress: Called after each batch with the number of texts done and of all.
            detailed: Whether to score evenness, synthetic heads, words by class and masses too.
        Raises:
            UnsupportedError: the model reads no text, or two, or cannot be observed exactly.
        """
        check_reads_one_text("find_roles", model)
        parts: list[_Sums] = []
        rows: list[TagRows] = []
        done, causal = 0, True
        with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
            for batch in self.batches:
                with text_alone("find_roles", model):
                    batch.run(model)
                layers = watch.layers()
                batch.check(model, layers)
                # The function mode that captures attention need not see what follows from it.
                with without_function_modes():
                    sums, of_queries = batch.sums(layers, self.tags, detailed)
                parts.append(sums)
                texts = np.array(self._order[done : done + len(batch.items)])
                rows += [replace(of, item=texts[of.item]) for of in of_queries]
                causal &= not any(bool(layer.visible.triu(1).any()) for layer in layers)
                done += len(batch.items)
                if on_progress is not None:
                    on_progress(done, len(self._order))
        original_order = np.argsort(self._order)
        whole: dict[str, Any] = {
            name: np.concatenate([part[name].numpy() for part in parts])[original_order]
            for name in parts[0]
        }
        return RoleScores(
            heads=tuple(head for layer in layers for head in layer.heads),
            **{name: whole[name] for name in ("value", "count", "uniform")},
            masses={"mass": whole["mass"], "value": whole["value_mass"]} if detailed else {},
            causal=causal,
            tag_rows=TagRows.joined(rows) if rows else None,
        )


class _Batch:
    """Texts that one forward pass reads."""

    def __init__(self, items: Sequence[Item], roles: Sequence[Role]) -> None:
        self.items, self._n_roles = items, len(roles)
        self._inputs = pad([item.ids for item in items], "cpu")
        S = self._inputs["input_ids"].shape[1]
        levels = [level for level in LEVELS if any(role.level == level for role in roles)]
        self._indexes = [RelationIndex(Nodes(level, items, S), roles) for level in levels]
        self._sinks = sink_keys(items, S)

    def run(self, model: nn.Module) -> None:
        device = device_of(model)
        inputs = {name: x.to(device) for name, x in self._inputs.items()}
        model(**inputs, **without_logits(model))

    def check(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Refuse attention that is not self-attention within each of these texts."""
        if not layers:
            raise UnsupportedError(
                f"find_roles: no self-attention of {type(model).__name__} was captured. "
                f"Give a model with self-attention that takes input_ids."
            )
        B, S = self._inputs["input_ids"].shape
        shapes = {(len(layer.visible), *layer.visible.shape[2:]) for layer in layers}
        if shapes != {(B, S, S)}:
            unexpected = sorted(shapes - {(B, S, S)})[0]
            raise UnsupportedError(
                f"find_roles: {type(model).__name__} was given {B} texts of {S} tokens, and a "
                f"layer attends to {unexpected[0]} of {unexpected[2]}. Give a model that reads "
                f"all texts at once."
            )

    def sums(
        self, layers: Sequence[Layer], tags: Sequence[str], detailed: bool
    ) -> tuple[_Sums, list[TagRows]]:
        """Sums of every text and role, `B R C`, and rows of the levels that have parts of speech.

        The rows are empty without detail or tags.
        """
        masks = [layer.visible.cpu() for layer in layers]
        if detailed:  # heuristics and planted heads see what any head sees
            masks.append(torch.stack([mask.any(1, keepdim=True) for mask in masks]).any(0))
        of_masks = self._eligible_under(masks)
        parts = [
            self._layer_sums(layer, levels, detailed)
            for layer, levels in zip(layers, of_masks, strict=False)
        ]
        rows = []
        if detailed:
            parts.append(_synthetic_sums(of_masks[-1]))
            named = [x for x in of_masks[-1] if tags and x.index.nodes.level != "mention"]
            rows = [tag_rows(pairs, tags) for pairs in named]
        shape = (len(self.items), self._n_roles, -1)
        sums = {
            name: torch.cat([part[name] for part in parts if name in part], -1).view(shape)
            for name in parts[0]
        }
        return sums, rows

    def _eligible_under(
        self, masks: Sequence[Bool[Tensor, "B _ T S"]]
    ) -> list[list[EligiblePairs]]:
        """The eligible pairs of each level under each mask."""
        # Once for equal masks, which most layers have: .79 of the time of a null model's pass for
        # a small encoder of 4 layers, .91 of the detailed pass of MiniLM.
        known: list[list[EligiblePairs]] = []
        for mask in masks:
            same = (levels for levels in known if torch.equal(levels[0].visible, mask))
            anew = (EligiblePairs(index, mask) for index in self._indexes)
            known.append(next(same, []) or [*anew])
        return known

    def _layer_sums(self, layer: Layer, levels: Sequence[EligiblePairs], detailed: bool) -> _Sums:
        norms = layer.value_norms() if detailed else None
        blocks: list[_Sums] = []
        for block in layer.blocks():
            # No null model is compared by its evenness.
            evenness = evenness_of(block, layer.visible, self._sinks) if detailed else {}
            sums = {"value": _add(pairs.value(block, evenness) for pairs in levels)}
            if detailed:
                sums["mass"] = _add(pairs.mass(block, block.weights) for pairs in levels)
                sums["value_mass"] = torch.full_like(sums["mass"], torch.nan)
                if norms is not None:
                    shares = _value_shares(block, norms)
                    sums["value_mass"] = _add(pairs.mass(block, shares) for pairs in levels)
            blocks.append(sums)
        joined = {name: torch.cat([part[name] for part in blocks], -1).cpu() for name in blocks[0]}
        return joined | _counts(levels, len(layer.heads))


def rows_of_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Group texts of about equal length, at most so many tokens in a batch."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        size = len(batches[-1]) + 1 if batches else 0
        if not batches or size * lengths[row] > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def check_reads_one_text(who: str, model: nn.Module) -> None:
    """Refuse a model without text input, or with queries and keys from two texts."""
    check_reads_text(who, model)
    if reads_two_texts(model):
        raise UnsupportedError(
            f"{who}: {type(model).__name__} reads two texts, and a relation is of one. Give its "
            f"encoder (model.get_encoder())."
        )


def _synthetic_sums(levels: Sequence[EligiblePairs]) -> _Sums:
    """The sums of heuristics and, last, of the planted heads."""
    heuristics = [heuristic_sums(pairs) for pairs in levels]
    most = max(part.shape[-1] for part in heuristics)
    heuristic = _add(pad_columns(part, (0, most - part.shape[-1])) for part in heuristics)
    planted = _add(planted_sums(pairs) for pairs in levels)
    return {"value": torch.cat([heuristic, planted], -1)} | _counts(levels, most + 1)


def _counts(levels: Sequence[EligiblePairs], heads: int) -> _Sums:
    """The queries of each cell, and what uniform attention scores on them, for each head."""
    return {
        "count": _add(pairs.count for pairs in levels).expand(-1, heads),
        "uniform": _add(pairs.uniform for pairs in levels).expand(-1, heads),
    }


def _value_shares(block: HeadBlock, norms: Float[Tensor, "B H S"]) -> Float[Tensor, "B h T S"]:
    """Weights times value norms, as a share of their sum over all keys of a query."""
    weighted = block.weights * norms[:, block.heads, None]
    return weighted.div_(weighted.sum(-1, keepdim=True).clamp_(min=_TINY))


def _add(sums: Iterable[Tensor]) -> Tensor:
    """Add up the levels: a role is on one level, and its cells are 0 on the others."""
    return torch.stack(list(sums)).sum(0)
