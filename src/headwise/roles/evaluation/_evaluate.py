"""One reading of texts by a model: what every head scores on every role in each text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise._evaluation import in_evaluation
from headwise._torch_private import without_function_modes
from headwise.errors import UnsupportedError
from headwise.models import check_reads_text, reads_two_texts, text_alone
from headwise.roles.evaluation._eligible import EligiblePairs, Part, heads_last
from headwise.roles.evaluation._heuristics import rule_sums
from headwise.roles.evaluation._relation_index import RelationIndex
from headwise.roles.evaluation._units import Units
from headwise.roles.relations import GRIDS, Item, Role
from headwise.tables import Head
from headwise.watch import Layer, Request, observe

_TOKENS = 2048  # in one batch
_TINY = 1e-30

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RoleScores:
    """The sums of each text on every role, from one reading.

    Attributes:
        causal: Whether no head may look ahead.
        value: What each head scores.
        count: How many queries those are.
        even: What chance would score.
    """

    heads: tuple[Head, ...]
    causal: bool
    value: Float[np.ndarray, "M R N"]
    count: Float[np.ndarray, "M R N"]
    even: Float[np.ndarray, "M R N"]


@dataclass(frozen=True)
class DetailedScores(RoleScores):
    """The same, and what is of interest in the watched model alone.

    Attributes:
        mass: The attention on the relation.
        share: The same with keys weighted by the size of what they would write, as a share of
            what all keys of a query write; NaN where no output projection is known.
        rules: What each rule scores.
        rule_count: How many queries those are: what any head may see counts.
    """

    mass: Float[np.ndarray, "M R N"]
    share: Float[np.ndarray, "M R N"]
    rules: Float[np.ndarray, "M R K"]
    rule_count: Float[np.ndarray, "M R 1"]


class Reader:
    """Texts and roles, laid out once, for as many models as shall read them."""

    def __init__(self, items: Sequence[Item], roles: Sequence[Role], tags: Sequence[str] = ()):
        """`tags` are the classes of words that rules may go by."""
        self.roles, self.tags = tuple(roles), tuple(tags)
        rows = _batches(items)
        self.batches = [_Batch([items[at] for at in those], roles) for those in rows]
        self._order = [at for those in rows for at in those]

    def read(self, model: nn.Module, on_progress: Progress | None = None) -> RoleScores:
        """Let a model read all texts once, and score every head on every role.

        Weights are made for some heads of one layer at a time, in a block that stays in the
        cache. The model is in evaluation mode meanwhile.

        Args:
            on_text: Told after each batch how many texts are done, of how many.
        """
        return RoleScores(**self._sums(model, on_progress, closely=False))

    def read_closely(self, model: nn.Module, on_progress: Progress | None = None) -> DetailedScores:
        """Read, and score rules, too; mass and share are kept also where they are no score."""
        return DetailedScores(**self._sums(model, on_progress, closely=True))

    @torch.no_grad()
    def _sums(
        self, model: nn.Module, on_progress: Progress | None, closely: bool
    ) -> dict[str, Any]:
        check_reads_one_text("find_roles", model)
        parts: list[_Sums] = []
        done = 0
        with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
            for batch in self.batches:
                with text_alone("find_roles", model):
                    batch.run(model)
                layers = watch.layers()
                batch.check(model, layers)
                # What listens for attention need not listen to what is computed from it.
                with without_function_modes():
                    parts.append(batch.sums(layers, self.tags if closely else None))
                done += len(batch.items)
                if on_progress is not None:
                    on_progress(done, len(self._order))
        back = np.argsort(self._order)
        sums: dict[str, Any] = {
            name: np.concatenate([part[name].numpy() for part in parts])[back] for name in parts[0]
        }
        causal = not sums.pop("ahead").any()
        return sums | {
            "causal": causal,
            "heads": tuple(head for layer in layers for head in layer.heads),
        }


_Sums = dict[str, Tensor]


class _Batch:
    """Some texts that are read at once."""

    def __init__(self, items: Sequence[Item], roles: Sequence[Role]) -> None:
        self.items, self._n_roles = items, len(roles)
        S = max(len(item.ids) for item in items)
        self._ids = torch.zeros(len(items), S, dtype=torch.int64)
        self._mask = torch.zeros_like(self._ids)
        for row, item in enumerate(items):
            self._ids[row, : len(item.ids)] = torch.tensor(item.ids)
            self._mask[row, : len(item.ids)] = 1
        grids = [grid for grid in GRIDS if any(role.grid == grid for role in roles)]
        self._asked = [RelationIndex(Units(grid, items, S), items, roles) for grid in grids]
        self._seen: tuple[Tensor, list[EligiblePairs]] | None = None

    def run(self, model: nn.Module) -> None:
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
        model(input_ids=self._ids.to(device), attention_mask=self._mask.to(device))

    def check(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Refuse what is not attention of these texts, each within itself."""
        if not layers:
            raise UnsupportedError(
                f"find_roles: no head of {type(model).__name__} was seen to attend to its own "
                f"text. Give a model with self-attention that takes input_ids."
            )
        B, S = self._ids.shape
        seen = {(len(one.visible), *one.visible.shape[2:]) for one in layers}
        if seen != {(B, S, S)}:
            other = sorted(seen - {(B, S, S)})[0]
            raise UnsupportedError(
                f"find_roles: {type(model).__name__} was given {B} texts of {S} tokens, and a "
                f"layer attends to {other[0]} of {other[2]}. Give a model that reads all at once."
            )

    def sums(self, layers: Sequence[Layer], tags: Sequence[str] | None) -> _Sums:
        """Sums of every text and role; with `tags` also those of rules, and mass and share."""
        found = [self._of_layer(layer, closely=tags is not None) for layer in layers]
        sums = {name: torch.cat([one[name] for one in found], dim=-1) for name in found[0]}
        anyone = torch.stack([layer.visible.any(1, keepdim=True) for layer in layers]).any(0)
        if tags is not None:
            seen = self._seen_under(anyone)
            rules = [rule_sums(one, self.items, tags) for one in seen]
            most = max(one.shape[-1] for one in rules)
            sums["rules"] = torch.stack([pad(one, (0, most - one.shape[-1])) for one in rules]).sum(
                0
            )
            sums["rule_count"] = torch.stack([one.count for one in seen]).sum(0)
        sums = {name: one.view(len(self.items), self._n_roles, -1) for name, one in sums.items()}
        return sums | {"ahead": anyone.triu(1).any().cpu().expand(len(self.items))}

    def _of_layer(self, layer: Layer, closely: bool) -> _Sums:
        visible = layer.visible
        seen = self._seen_under(visible)
        H, n_keys = len(layer.heads), visible.sum(-1)
        even = 1.0 / n_keys.clamp(min=2).float().log()
        norms = layer.value_norms() if closely else None
        blocks: list[_Sums] = []
        for block in layer.blocks():
            here = even if even.shape[1] == 1 else even[:, block.heads]
            part = Part(block.heads, block.weights, block.entropy * here)
            sums = {"value": _all(one.value(part) for one in seen)}
            if closely:
                sums["mass"] = _all(one.mass(part, part.table) for one in seen)
                table = None if norms is None else _shares(part, norms)
                sums["share"] = (
                    torch.full_like(sums["mass"], torch.nan)
                    if table is None
                    else _all(one.mass(part, table) for one in seen)
                )
            blocks.append(sums)
        whole = {name: torch.cat([one[name] for one in blocks], -1).cpu() for name in blocks[0]}
        whole["count"] = _all(one.count for one in seen).expand(-1, H)
        whole["even"] = _all(one.even for one in seen).expand(-1, H)
        return whole

    def _seen_under(self, visible: Bool[Tensor, "B hv T S"]) -> list[EligiblePairs]:
        """What counts under a mask, which most layers of most models share."""
        known = self._seen
        if known is None or known[0].shape != visible.shape or not torch.equal(known[0], visible):
            known = self._seen = (visible, [EligiblePairs(asked, visible) for asked in self._asked])
        return known[1]


def check_reads_one_text(who: str, model: nn.Module) -> None:
    """Refuse a model that reads no text, or whose queries are of another text than its keys.

    Raises:
        UnsupportedError: it is an encoder-decoder, or takes no token ids.
    """
    check_reads_text(who, model)
    if reads_two_texts(model):
        raise UnsupportedError(
            f"{who}: {type(model).__name__} reads two texts, and a relation is of one. Give its "
            f"encoder (model.get_encoder())."
        )


def _batches(items: Sequence[Item]) -> list[list[int]]:
    """Items of about equal length together, so that little is padding."""
    order = sorted(range(len(items)), key=lambda at: len(items[at].ids))
    batches: list[list[int]] = []
    for at in order:
        longest = len(items[at].ids)
        if not batches or (len(batches[-1]) + 1) * longest > _TOKENS:
            batches.append([])
        batches[-1].append(at)
    return batches


def _shares(part: Part, norms: Float[Tensor, "B H S"]) -> Float[Tensor, "N h"]:
    """What each key writes, as a share of what all keys of a query write."""
    written = part.weights * norms[:, part.heads, None]
    return heads_last(written.div_(written.sum(-1, keepdim=True).clamp_(min=_TINY)))


def _all(sums: Iterable[Tensor]) -> Tensor:
    """What the grids have in each cell: a role is of one grid, and 0 in the others."""
    return torch.stack(list(sums)).sum(0)
