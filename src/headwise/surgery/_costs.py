"""`Costs`: the cost of each head of a model, from which plans keep a budget."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from headwise._display import counted
from headwise.errors import ArgumentError
from headwise.files import JsonFile
from headwise.surgery._plan import amount
from headwise.tables import Head

_WHY_MISSING = {
    "cache_bytes": "The model keeps no cache, or latents that all heads share. ",
    "seconds": "Time is measured by headwise.costs(model, batch, timed=True). ",
}


@dataclass(frozen=True, eq=False)
class Costs(JsonFile):
    """What removing each head saves, and what removing the last query head of a kv head saves.

    Attributes:
        heads: The address of each head.
        kv_heads: The key/value head of its layer that each head reads.
        own: By name the cost of each head itself.
        shared: By name the cost of the key/value head that each head reads, which is saved once
            no head reads it.
        model: The fingerprint of the model's weights.
        seconds: For each layer, the time of its attention block with 0, 1, 2, ... heads; empty
            where no time was measured.
    """

    _format = "headwise-costs/1"
    _problem = "holds no costs"
    _indent = None

    heads: tuple[Head, ...]
    kv_heads: Int64[np.ndarray, " N"]
    own: Mapping[str, Float64[np.ndarray, " N"]]
    shared: Mapping[str, Float64[np.ndarray, " N"]]
    model: str = ""
    seconds: Mapping[tuple[str, int], Float64[np.ndarray, " _"]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the costs that this model has."""
        return (*self.own, *(["seconds"] if self.seconds else []))

    def __str__(self) -> str:
        """The cost of all heads together."""
        totals = {name: self.after((), name) for name in self.names}
        listed = (f"{name} {amount(total)}" for name, total in totals.items())
        return f"{counted(len(self.heads), 'head')}: {', '.join(listed)}"

    def __repr__(self) -> str:
        return f"Costs of {self}"

    def _content(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "heads": [str(head) for head in self.heads],
            "kv_heads": self.kv_heads,
            "own": self.own,
            "shared": self.shared,
            "seconds": [[*layer, values] for layer, values in self.seconds.items()],
        }

    @classmethod
    def _built(cls, content: dict[str, Any]) -> "Costs":
        heads = tuple(Head.parse(name) for name in content["heads"])
        own, shared = (
            {str(name): _column(values, heads) for name, values in content[part].items()}
            for part in ("own", "shared")
        )
        if own.keys() != shared.keys():
            raise ValueError(f"heads have {sorted(own)}, their key/value heads {sorted(shared)}")
        seconds = {
            (str(stack), int(layer)): np.array(values, dtype=np.float64)
            for stack, layer, values in content["seconds"]
        }
        in_layers = Counter((head.stack, head.layer) for head in heads)
        for layer, n in in_layers.items():
            if seconds and (layer not in seconds or seconds[layer].shape != (n + 1,)):
                raise ValueError(f"no seconds of 0 to {n} heads of the layer {layer}")
        kv_heads = _column(content["kv_heads"], heads)
        if not ((kv_heads == np.floor(kv_heads)) & (abs(kv_heads) < 2.0**53)).all():
            raise ValueError(f"kv_heads are {content['kv_heads']}, not all whole numbers")
        kv_heads = kv_heads.astype(np.int64)
        return cls(heads, kv_heads, own, shared, str(content["model"]), seconds)

    def after(self, removed: Iterable[Head], name: str) -> float:
        """The cost of the remaining heads after some are removed.

        Raises:
            ArgumentError: there is no cost of this name.
        """
        if name not in self.names:
            reason = _WHY_MISSING.get(name, "")
            raise ArgumentError(
                f"costs: {name!r} is not one of {', '.join(self.names)}. {reason}Give one of them."
            )
        removed = set(removed)
        remaining = [row for row, head in enumerate(self.heads) if head not in removed]
        if name == "seconds":
            counts = Counter((self.heads[row].stack, self.heads[row].layer) for row in remaining)
            return float(sum(self.seconds[layer][n] for layer, n in counts.items()))
        kv_rows = {
            (self.heads[row].stack, self.heads[row].layer, int(self.kv_heads[row])): row
            for row in remaining
        }
        own, shared = self.own[name][remaining], self.shared[name][[*kv_rows.values()]]
        return float(own.sum() + shared.sum())


def _column(values: Any, heads: Sequence[Head]) -> Float64[np.ndarray, " N"]:
    column = np.array(values, dtype=np.float64)
    if column.shape != (len(heads),):
        raise ValueError(f"{column.size} numbers for {len(heads)} heads")
    return column
