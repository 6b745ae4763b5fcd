"""A plan for a cache: which tokens each kv head keeps. It can be saved and needs no model."""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from headwise._display import counted, first_line
from headwise._evaluation import in_evaluation
from headwise.errors import ArgumentError, HeadError, HeadwiseError, UnsupportedError
from headwise.files import JsonFile, typed
from headwise.models import cache_argument, check_model, fingerprint
from headwise.ownership import call_model, example_input
from headwise.shapes import is_size
from headwise.tables import Head, notebook_html, plot_categories

Window = int | None


@dataclass(frozen=True)
class LayerCachePlan:
    """Which tokens the kv heads of one layer keep.

    Attributes:
        layer: The layer, counted from 0.
        windows: For each kv head how many of the last tokens it keeps, a query's own included;
            None for all tokens.
        losses: For each kv head what it loses with its smallest window, in units of the score;
            empty if no scores decided.
        token_bytes: The bytes of one token in one kv head, its key and its value; 0 if unknown.
        sliding_window: The tokens that the model itself lets the layer see; None for all.
    Raises:
        ArgumentError: a window is below 1.
    """

    layer: int
    windows: tuple[Window, ...]
    losses: tuple[float, ...] = ()
    token_bytes: int = 0
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for head, window in enumerate(self.windows):
            if window is not None and not is_size(window):
                raise ArgumentError(
                    f"CachePlan: window={window!r} of L{self.layer}.KV{head}. Give a number of "
                    f"tokens from 1 on, or None for all."
                )

    @property
    def full(self) -> list[int]:
        """The kv heads that keep all tokens."""
        return [head for head, window in enumerate(self.windows) if window is None]

    def tokens(self, n_tokens: int, sinks: int) -> int:
        """How many tokens all kv heads of the layer keep of a text."""
        limit = self.sliding_window or n_tokens + 1
        return sum(
            min(n_tokens, limit if window is None or window >= limit else sinks + window)
            for window in self.windows
        )


@dataclass(frozen=True)
class CachePlan(JsonFile):
    """Which tokens each kv head of a model keeps: all of them, or the first and the latest.

    Attributes:
        layers: Every layer of the model.
        sinks: How many of the first tokens of each text heads with a window keep.
        model: The fingerprint of the model's weights; "" fits any model of these sizes.
        why: How the heads were chosen, for readers of the plan.
        measured: What was measured for the plan, by name: the loss of the full cache and of this
            one, and how stable the choice is.
    Raises:
        ArgumentError: the number of sinks is negative, or there is no layer.

    Example:
        >>> plan = CachePlan.of({0: [1]}, n_layers=2, n_kv_heads=2, sinks=4, window=64)
        >>> print(plan)
        1 of 4 kv heads keeps all tokens, the others 4 first and 64 last ones
        >>> plan.share(1024)
        0.2998046875
    """

    _format = "headwise-cache-plan/2"
    _problem = "holds no plan for a cache"

    layers: tuple[LayerCachePlan, ...]
    sinks: int = 4
    model: str = ""
    why: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sinks < 0 or not (is_size(self.sinks) or self.sinks == 0):
            raise ArgumentError(
                f"CachePlan: sinks={self.sinks!r}. Give a number of tokens from 0 on."
            )
        numbers = [layer.layer for layer in self.layers]
        if not numbers or numbers != list(range(len(numbers))):
            raise ArgumentError(
                f"CachePlan: layers {numbers}. Give every layer of the model, from 0 on, once."
            )

    @classmethod
    def of(
        cls,
        full: Mapping[int, Sequence[int]],
        *,
        n_layers: int,
        n_kv_heads: int | Sequence[int],
        sinks: int = 4,
        window: int = 256,
    ) -> "CachePlan":
        """The plan in which these kv heads of each layer keep all tokens.

        Args:
            full: For each layer its kv heads that keep all tokens; layers that are left out
                have none.
            n_kv_heads: The number of kv heads, of all layers or of each.
        Raises:
            ArgumentError: `full` is not heads by layer, or a window is below 1.
            HeadError: a layer or head does not exist, or is named twice.
        """
        counts = [n_kv_heads] * n_layers if isinstance(n_kv_heads, int) else list(n_kv_heads)
        if not (
            isinstance(full, Mapping) and all(isinstance(x, Collection) for x in full.values())
        ):
            raise ArgumentError(
                f"CachePlan: full={full!r}. Give the kv heads of each layer: {{layer: [kv heads]}}."
            )
        for layer, heads in full.items():
            if layer not in range(n_layers):
                raise HeadError(
                    f"CachePlan: there is no layer {layer!r}. There are {n_layers}, counted from 0."
                )
            for head in heads:
                if head not in range(counts[layer]) or list(heads).count(head) > 1:
                    raise HeadError(
                        f"CachePlan: L{layer}.KV{head} does not exist or is named twice; the "
                        f"layer has {counts[layer]} kv heads. Name each head once."
                    )
        return cls(
            tuple(
                LayerCachePlan(
                    layer,
                    tuple(None if head in full.get(layer, ()) else window for head in range(n)),
                )
                for layer, n in enumerate(counts)
            ),
            sinks,
        )

    @property
    def full(self) -> dict[int, list[int]]:
        """For each layer the kv heads that keep all tokens."""
        return {layer.layer: layer.full for layer in self.layers}

    @property
    def windows(self) -> dict[int, tuple[Window, ...]]:
        """For each layer the window of each kv head; None for all tokens."""
        return {layer.layer: layer.windows for layer in self.layers}

    def share(self, n_tokens: int) -> float:
        """The share of the full cache that is kept of a text of `n_tokens`, from 0 to 1.

        It is a share of bytes if those of every layer are known, else of tokens.
        """
        known = all(layer.token_bytes for layer in self.layers)
        kept = full = 0
        for layer in self.layers:
            size = layer.token_bytes if known else 1
            kept += size * layer.tokens(n_tokens, self.sinks)
            full += size * len(layer.windows) * min(n_tokens, layer.sliding_window or n_tokens)
        return kept / full

    def nbytes(self, n_tokens: int) -> int:
        """The bytes that are kept of a text of `n_tokens`, without slots reserved ahead.

        Layers whose `token_bytes` are unknown count nothing.
        """
        return sum(layer.token_bytes * layer.tokens(n_tokens, self.sinks) for layer in self.layers)

    def cache(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A cache that a model uses while the block runs, for one batch of texts.

        `with plan.cache(model) as cache: model.generate(**x, cache=cache)`, with `past_key_values=`
        before Transformers 5.24. Batches are padded on the left; the first tokens are those of
        each text. The model is unchanged when
        the block ends, also after an error. `cache.nbytes` is what the cache holds, and
        `cache.reset()` empties it for another text.

        Raises:
            ArgumentError: the plan is for another model.
            UnsupportedError: the model has no cache of keys and values alone.
        """
        if self.model and self.model != (known := fingerprint(model)):
            raise ArgumentError(
                f"CachePlan.cache: the plan is for a model with the weights {self.model}, this "
                f"{type(model).__name__} has {known}. Make a plan for this model."
            )
        return _open_cache(model, self.windows, self.sinks)

    def plot(self, *, ax: Any = None) -> Any:
        """Draw which kv heads keep all tokens, and which the first and latest ones.

        Args:
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes, with a row per layer and a column per kv head.
        Raises:
            ArgumentError: `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        kept = {
            Head("", layer.layer, head): (self._kept(window), 1.0)
            for layer in self.layers
            for head, window in enumerate(layer.windows)
        }
        ax = plot_categories("CachePlan.plot", list(kept), kept, ax)
        ax.set_xlabel("kv head")
        return ax

    def _repr_html_(self) -> str:
        return notebook_html(str(self), self.plot)

    def _kept(self, window: Window) -> str:
        return "all tokens" if window is None else f"{self.sinks} first, {window} latest tokens"

    def frame(self) -> pd.DataFrame:
        """A row for each kv head: name, layer, kv_head, window (NaN for all tokens), loss."""
        rows = [
            {
                "name": f"L{layer.layer}.KV{head}",
                "layer": layer.layer,
                "kv_head": head,
                "window": float("nan") if window is None else window,
                "loss": layer.losses[head] if layer.losses else float("nan"),
            }
            for layer in self.layers
            for head, window in enumerate(layer.windows)
        ]
        return pd.DataFrame(rows)

    @classmethod
    def _built(cls, content: dict[str, Any]) -> "CachePlan":
        return cls(
            tuple(_read_layer(entry) for entry in content["layers"]),
            typed(content["sinks"], int),
            str(content["model"]),
            str(content["why"]),
            {str(name): float(value) for name, value in content["measured"].items()},
        )

    def __str__(self) -> str:
        """How many kv heads keep all tokens, what the others keep, and why."""
        every = [window for layer in self.layers for window in layer.windows]
        n_full = every.count(None)
        keep = "keeps" if n_full == 1 else "keep"
        text = f"{n_full} of {counted(len(every), 'kv head')} {keep} all tokens"
        sizes = sorted({window for window in every if window is not None})
        if sizes:
            lasts = " or ".join(map(str, sizes))
            text += f", the others {self.sinks} first and {lasts} last ones"
        return text + (f" ({self.why})" if self.why else "")


def sized(plan: CachePlan, full: CachePlan) -> CachePlan:
    """The plan with the bytes and sliding windows that the full cache of its model has."""
    known = (
        replace(planned, token_bytes=layer.token_bytes, sliding_window=layer.sliding_window)
        for planned, layer in zip(plan.layers, full.layers, strict=True)
    )
    return replace(plan, layers=tuple(known))


def full_plan(model: nn.Module) -> CachePlan:
    """The plan of the full cache of a model, from one short run of it.

    Raises:
        UnsupportedError: the model has no cache of keys and values alone, or reads it outside of
            the attention interface of transformers.
    """
    with _open_cache(model, {}, 0) as cache, torch.no_grad(), in_evaluation(model):
        batch = example_input(model)
        name = str(cache_argument(model))  # open_cache refuses a model without one
        try:
            call_model(model, {**batch, name: cache, "use_cache": True})
        except ValueError as error:  # what transformers raises; ours say what to do
            if isinstance(error, HeadwiseError):
                raise
            raise UnsupportedError(
                f"CachePlan: {type(model).__name__} takes no other cache than its own "
                f"({first_line(error, 120)}). Use that of transformers."
            ) from error
        # A layer that runs again, as in Dory, has another cache under the same index.
        layers = {layer.index: layer for layer in cache.attending}
    return CachePlan(
        tuple(
            LayerCachePlan(
                index,
                (None,) * len(layer.windows),
                token_bytes=layer.token_bytes,
                sliding_window=layer.sliding_window,
            )
            for index, layer in layers.items()
        ),
        sinks=0,
    )


def _open_cache(
    model: nn.Module, windows: Mapping[int, Sequence[Window]], sinks: int
) -> AbstractContextManager[Any]:
    """A cache for one batch of texts; without windows of any layer all heads keep all tokens."""
    model = check_model("CachePlan.cache", model)
    name, transformers = type(model).__name__, sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedError(f"CachePlan: {name} is not a model of transformers. Give one.")
    # Not above, since models of other libraries should not import transformers.
    from headwise.cache.huggingface import attends, open_cache, own_layers

    layers = own_layers(model)
    n_layers = sum(map(attends, layers))
    if windows and len(windows) != n_layers:
        raise ArgumentError(
            f"CachePlan.cache: the plan has {len(windows)} layers, {name} has {n_layers} that "
            f"attend. Use a plan for this model."
        )
    return open_cache(model, windows, sinks, layers)


def _read_layer(entry: Mapping[str, Any]) -> LayerCachePlan:
    """The plan of a layer from a file.

    Raises:
        ValueError: an entry is not a number of the right kind.
    """
    windows, losses = tuple(entry["windows"]), tuple(map(float, entry["losses"]))
    if type(entry["layer"]) is not int or len(losses) not in (0, len(windows)):
        raise ValueError(f"layer {entry['layer']!r} has {len(losses)} losses of {len(windows)}")
    size, sliding = entry["token_bytes"], entry["sliding_window"]
    if type(size) is not int or size < 0 or not (sliding is None or is_size(sliding)):
        raise ValueError(f"token_bytes={size!r} or sliding_window={sliding!r} are not sizes")
    return LayerCachePlan(entry["layer"], windows, losses, size, sliding)
