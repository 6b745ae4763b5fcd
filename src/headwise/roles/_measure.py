"""One reading of a corpus: what every head, and every rule, scores on every role in each text."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.heads import Head
from headwise.roles._score import GridBatch, Sums
from headwise.roles.relations import Grid, Item, Role
from headwise.watch import Request, Watch, observe

GRIDS: tuple[Grid, ...] = ("token", "word", "mention")
_TOKENS = 2048  # in one batch

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class GridScores:
    """The sums of each text on the roles of one grid.

    Attributes:
        roles: The roles, in the order of the second axis.
        value: Of every head.
        count: How many queries those are.
        even: What chance would score.
        rule_value: Of every rule.
        rule_count: How many queries those are: what any head may see counts.
    """

    roles: tuple[Role, ...]
    value: Float[np.ndarray, "M R N"]
    count: Float[np.ndarray, "M R N"]
    even: Float[np.ndarray, "M R N"]
    rule_value: Float[np.ndarray, "M R K"]
    rule_count: Float[np.ndarray, "M R"]


@dataclass(frozen=True)
class Measured:
    """What was seen in one reading.

    Attributes:
        causal: Whether no head may look ahead.
    """

    heads: tuple[Head, ...]
    causal: bool
    grids: dict[Grid, GridScores]


@torch.no_grad()
def measure(
    model: nn.Module,
    items: Sequence[Item],
    roles: Sequence[Role],
    tags: Sequence[str],
    on_text: Progress | None = None,
) -> Measured:
    """Read all items once, and score every head on every role.

    Weights are made for one layer of one batch at a time. The model is in evaluation mode
    meanwhile.

    Args:
        tags: The classes of words that rules may go by.
    """
    reading = _Reading(model, items, roles, tags)
    was_training = model.training
    model.eval()
    try:
        with observe(model, Request(statistics=(), maps=True)) as watch:
            done = 0
            for rows in _batches(items):
                reading.take(watch, rows)
                done += len(rows)
                if on_text is not None:
                    on_text(done, len(items))
    finally:
        model.train(was_training)
    return reading.measured()


def permuted(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy in which the entries of every weight matrix have been shuffled.

    It keeps the architecture and the scale of every matrix, and forgets what was learned.

    Raises:
        UnsupportedError: the model has no weight matrix.
    """
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    matrices = [one for one in copied.parameters() if one.ndim > 1 and one.is_floating_point()]
    if not matrices:
        raise UnsupportedError(
            f"find_roles: {type(model).__name__} has no weight matrix to permute. "
            f"Leave that null out with null_models=0."
        )
    with torch.no_grad():
        for one in matrices:
            order = torch.randperm(one.numel(), generator=generator).to(one.device)
            one.copy_(one.flatten()[order].view_as(one))
    return copied


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


class _Reading:
    """The sums so far."""

    def __init__(
        self, model: nn.Module, items: Sequence[Item], roles: Sequence[Role], tags: Sequence[str]
    ) -> None:
        self._model, self._items, self._tags = model, items, tags
        self._roles = {grid: [role for role in roles if role.grid == grid] for grid in GRIDS}
        self._heads: tuple[Head, ...] = ()
        self._causal = True
        self._sums: dict[Grid, list[Sums]] = {grid: [] for grid in GRIDS}
        self._rules: dict[Grid, list[Sums]] = {grid: [] for grid in GRIDS}
        self._order: list[int] = []

    def take(self, watch: Watch, rows: Sequence[int]) -> None:
        """Let the model read some items, and score them."""
        items = [self._items[row] for row in rows]
        self._run(items)
        self._order += rows
        layers = _layers(watch, self._model)
        self._heads = tuple(head for heads in layers for head in heads)
        S = max(len(item.ids) for item in items)
        seen = {head: watch.visible(head) for head in self._heads}
        anyone = torch.stack(list(seen.values())).any(0)[:, None]
        self._causal &= not bool(anyone.triu(1).any())
        grids = [GridBatch(grid, items, roles, S) for grid, roles in self._roles.items() if roles]
        for grid in grids:
            candidates = grid.candidates(grid.to_grid(anyone.float()) > 0)
            rules = grid.rules(candidates, self._tags)
            self._rules[grid.grid].append(_scored(grid, rules, anyone, on_grid=True))
        parts: dict[Grid, list[Sums]] = {grid.grid: [] for grid in grids}
        for heads in layers:
            weights = torch.stack([watch.weights(head) for head in heads], dim=1).float()
            visible = torch.stack([seen[head] for head in heads], dim=1)
            for grid in grids:
                parts[grid.grid].append(_scored(grid, weights, visible))
        for name, found in parts.items():
            self._sums[name].append(_join(found, -1))

    def measured(self) -> Measured:
        back = np.argsort(self._order)
        grids = {
            grid: _grid_scores(roles, _join(self._sums[grid], 0), _join(self._rules[grid], 0), back)
            for grid, roles in self._roles.items()
            if roles
        }
        return Measured(self._heads, self._causal, grids)

    def _run(self, items: Sequence[Item]) -> None:
        longest = max(len(item.ids) for item in items)
        ids = torch.zeros(len(items), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : len(item.ids)] = torch.tensor(item.ids)
            mask[row, : len(item.ids)] = 1
        device = next((one.device for one in self._model.parameters()), torch.device("cpu"))
        self._model(input_ids=ids.to(device), attention_mask=mask.to(device))


def _layers(watch: Watch, model: nn.Module) -> list[list[Head]]:
    """The heads of each layer that looks at its own text."""
    sites = [site for site in watch.sites() if site.heads() and not site.cross]
    if not sites:
        raise UnsupportedError(
            f"find_roles: no head of {type(model).__name__} was seen to attend to its own text. "
            f"Give a model with self-attention that takes input_ids."
        )
    return [list(site.heads()) for site in sorted(sites, key=lambda site: (site.stack, site.layer))]


def _scored(grid: GridBatch, weights: Tensor, visible: Tensor, on_grid: bool = False) -> Sums:
    seen = grid.to_grid(visible.float())
    even = grid.to_grid(visible / visible.sum(-1, keepdim=True).clamp(min=1))
    sums = grid.sums(weights if on_grid else grid.to_grid(weights), even, seen > 0)
    return Sums(sums.value.cpu(), sums.count.cpu(), sums.even.cpu())


def _join(parts: Sequence[Sums], axis: int) -> Sums:
    return Sums(
        torch.cat([one.value for one in parts], axis),
        torch.cat([one.count for one in parts], axis),
        torch.cat([one.even for one in parts], axis),
    )


def _grid_scores(roles: Sequence[Role], heads: Sums, rules: Sums, back: np.ndarray) -> GridScores:
    return GridScores(
        tuple(roles),
        value=heads.value.numpy()[back],
        count=heads.count.numpy()[back],
        even=heads.even.numpy()[back],
        rule_value=rules.value.numpy()[back],
        rule_count=rules.count.numpy()[back][..., 0],
    )
