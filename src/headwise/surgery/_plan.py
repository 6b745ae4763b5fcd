"""A plan: which heads to remove from each layer. It can be saved and needs no model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwise._display import counted
from headwise.errors import HeadError
from headwise.files import JsonFile, number, typed
from headwise.tables import Head, HeadsLike, notebook_html, plot_removed, resolve_heads

# More heads than a layer of any model has.
_MOST_HEADS = 2**16


def amount(x: float) -> str:
    """A number for display: four significant digits, or a whole number if it is large."""
    return f"{x:,.4g}" if x < 1e4 else f"{x:,.0f}"


@dataclass(frozen=True)
class LayerPlan:
    """The heads to remove from one layer.

    Attributes:
        remove: The heads to remove, in order.
    Raises:
        HeadError: a head does not exist, is named twice, or no head would be left.
    """

    stack: str
    layer: int
    n_heads: int
    remove: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for head in self.remove:
            if not 0 <= head < self.n_heads:
                raise HeadError(
                    f"Plan: there is no head {self._head(head)}. Its layer has {self.n_heads} "
                    f"heads, counted from 0."
                )
            if self.remove.count(head) > 1:
                raise HeadError(f"Plan: {self._head(head)} is named twice. Name each head once.")
        if len(self.remove) == self.n_heads:
            raise HeadError(
                f"Plan: {self._head(self.remove[-1])} is the last head of its layer. Leave one "
                f"head in each layer."
            )

    @property
    def keep(self) -> tuple[int, ...]:
        """The heads that stay, in order."""
        return tuple(head for head in range(self.n_heads) if head not in self.remove)

    def _head(self, head: int) -> Head:
        return Head(self.stack, self.layer, head)


@dataclass(frozen=True)
class Plan(JsonFile):
    """Which heads to remove from a model.

    Attributes:
        layers: Every layer of the model, including those without removed heads.
        model: The fingerprint of the model's weights; "" fits any model of these sizes.
        why: How the heads were chosen, for readers of the plan.
        costs: By name, the costs of all heads before and after, if they were counted.

    Example:
        >>> heads = [Head("", layer, head) for layer in range(2) for head in range(3)]
        >>> plan = Plan.of({0: [1], 1: [0, 2]}, heads)
        >>> [str(head) for head in plan.removed], plan.uniform
        (['L0.H1', 'L1.H0', 'L1.H2'], False)
        >>> print(plan)
        3 of 6 heads removed: L0.H1, L1.H0, L1.H2
    """

    _format = "headwise-plan/1"
    _problem = "holds no plan"
    _keep = (HeadError,)

    layers: tuple[LayerPlan, ...]
    model: str = ""
    why: str = ""
    costs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = [(layer.stack, layer.layer) for layer in self.layers]
        for stack, layer in layers:
            if layers.count((stack, layer)) > 1:
                raise HeadError(
                    f"Plan: layer {layer} of {stack or 'the model'} is listed twice. List each "
                    f"layer once."
                )

    @classmethod
    def of(cls, remove: HeadsLike, heads: Iterable[Head], model: str = "", why: str = "") -> "Plan":
        """The plan that removes these heads.

        Args:
            remove: `"L5.H3"`, `(5, 3)`, a list of either, or `{5: [3]}`.
            heads: All heads of the model, such as the column `heads` of a table.
        Raises:
            HeadError: a head does not exist, is named twice, or is the last of its layer.
        """
        known = sorted(heads)
        removed = set(resolve_heads(remove, known))
        layers: dict[tuple[str, int], list[Head]] = {}
        for head in known:
            layers.setdefault((head.stack, head.layer), []).append(head)
        return cls(
            tuple(
                LayerPlan(
                    stack, layer, len(group), tuple(head.head for head in group if head in removed)
                )
                for (stack, layer), group in layers.items()
            ),
            model,
            why,
        )

    @property
    def removed(self) -> tuple[Head, ...]:
        """The heads to remove."""
        return tuple(
            Head(layer.stack, layer.layer, head) for layer in self.layers for head in layer.remove
        )

    def __str__(self) -> str:
        """Which heads are removed, of how many, and why; the saved costs, if they were counted."""
        names = ", ".join(map(str, self.removed)) or "none"
        why = f" ({self.why})" if self.why else ""
        lines = [f"{self._count}: {names}{why}"]
        for name, (before, after) in self.costs.items():
            saved = f" ({after / before - 1:+.1%})" if before else ""
            unit = " per token" if name == "cache_bytes" else ""
            lines.append(
                f"{name} of heads{unit}: {amount(before)} before, {amount(after)} after{saved}"
            )
        return "\n".join(lines)

    @property
    def uniform(self) -> bool:
        """Whether all layers keep the same number of heads."""
        return len({len(layer.keep) for layer in self.layers}) <= 1

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the heads that stay and those that go, a row per layer.

        Args:
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes.
        Raises:
            ArgumentError: `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        return plot_removed("Plan.plot", self._heads, self.removed, self._count, ax)

    def _repr_html_(self) -> str:
        return notebook_html(str(self), self.plot)

    @property
    def _heads(self) -> list[Head]:
        return [
            Head(layer.stack, layer.layer, head)
            for layer in self.layers
            for head in range(layer.n_heads)
        ]

    @property
    def _count(self) -> str:
        return f"{len(self.removed)} of {counted(len(self._heads), 'head')} removed"

    @classmethod
    def _built(cls, content: dict[str, Any]) -> "Plan":
        layers = tuple(_layer(entry) for entry in content["layers"])
        if not layers:
            raise ValueError("it has no layer")
        costs: dict[str, tuple[float, float]] = {}
        for name, amounts in content["costs"].items():
            before, after = map(number, amounts)
            if before < 0 or after < 0:
                raise ValueError(f"its costs {name!r} are {amounts!r}, which are no amounts")
            costs[name] = before, after
        return cls(layers, typed(content["model"], str), typed(content["why"], str), costs)


def _layer(entry: Mapping[str, Any]) -> LayerPlan:
    layer, n_heads = typed(entry["layer"], int), typed(entry["n_heads"], int)
    remove = [typed(head, int) for head in typed(entry["remove"], list)]
    # A grid of heads is drawn, so they take memory.
    if not 1 <= n_heads <= _MOST_HEADS or layer < 0:
        raise ValueError(f"{n_heads} heads in layer {layer}; from 1 to {_MOST_HEADS} are read")
    return LayerPlan(typed(entry["stack"], str), layer, n_heads, tuple(remove))
