"""Requests for statistics of rows, and their results: the same for every kernel."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Results by their names.
Named = dict[str, Tensor]
# The statistics that are not float32.
_DTYPES = {"n_keys": torch.int64, "argmax": torch.int64, "key_seen": torch.bool}


@dataclass(frozen=True)
class RowRequest:
    """Which statistics of each row to compute; nothing else is computed.

    The largest weight and the log-sum-exp are free. Each of `keys` costs a gather of one number
    per row, each of `classes` one column of a matrix product; `top` and `key_norms` cost both once
    more. All others are cheap beside the two matrix products of attention.

    Attributes:
        entropy: Whether to compute the entropy.
        distance: Whether to compute the mean distance to what is attended to.
        participation: Whether to compute the participation ratio, an effective number of keys.
        argmax: Whether to find the key with the largest weight.
        received: The queries whose weights are summed up for each key; None: no such sums.
        keys: For each query, keys whose single weights are wanted; −1 where there is none.
        classes: For each key, its share in every class (usually 0 or 1).
        top: Whether to compute how much of the largest weight falls on `keys` and `classes`.
        key_norms: The factor of each key's weight in shares of the output, `‖v_j W_O[h]‖`.
            A nonfinite one counts as 0. None: no such shares.
        query_at: Positions of the queries, for distances. None: the last ones of the keys.
        key_at: Positions of the keys, for distances.
        heads: Whether to compute the heads too, from the same weights.
    """

    entropy: bool = True
    distance: bool = False
    participation: bool = False
    argmax: bool = False
    received: Bool[Tensor, "B T"] | None = None
    keys: Int[Tensor, "B T N"] | None = None
    classes: Float[Tensor, "B S C"] | None = None
    top: bool = False
    key_norms: Float[Tensor, "B H S"] | None = None
    query_at: Int[Tensor, "B T"] | None = None
    key_at: Int[Tensor, "B S"] | None = None
    heads: bool = False

    def outputs(
        self, n_rows: tuple[int, int, int], has_sinks: bool
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each requested statistic of `[B, H, T]` rows.

        Heads and what keys receive, which kernels lay out in their own way, are left out.
        """
        requested = {
            "n_keys": True, "lse": True, "max_logit": True, "max_weight": True, "sink": has_sinks,
            "entropy": self.entropy, "participation": self.participation, "argmax": self.argmax,
            "distance": self.distance, "even_distance": self.distance,
        }  # fmt: skip
        outputs: dict[str, tuple[int, ...]] = {
            name: n_rows for name, is_requested in requested.items() if is_requested
        }
        measures = {"mass": True, "top": self.top, "share": self.key_norms is not None}
        for part, columns, others in ("key", self.keys, "seen"), ("class", self.classes, "keys"):
            if columns is not None:
                names = [others, *(name for name, is_requested in measures.items() if is_requested)]
                outputs |= {f"{part}_{name}": (*n_rows, columns.shape[-1]) for name in names}
        return {name: (shape, _DTYPES.get(name, torch.float32)) for name, shape in outputs.items()}

    def inputs(self, B: int, S: int, device: torch.device) -> Named:
        """The tensors of the request as kernels read them: dense, and for each text."""
        found: Named = {}
        if self.query_at is not None and self.key_at is not None:
            found["query_at"] = self.query_at.to(device, torch.float32)
            found["key_at"] = self.key_at.to(device, torch.float32)
        if self.classes is not None:
            found["classes"] = self.classes.to(device, torch.float32)
        if self.key_norms is not None:
            norms = self.key_norms.to(device, torch.float32)
            found["key_norms"] = norms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if self.keys is not None:  # S is no key either
            found["keys"] = self.keys.clamp(-1, S).to(device, torch.int32)
        if self.received is not None:
            found["counted"] = self.received.to(device, torch.uint8)
        return {name: x.expand(B, *x.shape[1:]).contiguous() for name, x in found.items()}


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of every row; None where they were not requested.

    `n_keys` is how many keys the row may attend to. A row without any has an `lse` and a
    `max_logit` of −inf, shares of the output that are NaN, and zeros elsewhere.
    """

    kernel: str  # what computed them
    n_keys: Int[Tensor, "B H T"]
    lse: Float[Tensor, "B H T"]  # ln Σ exp z, sinks included
    max_logit: Float[Tensor, "B H T"]  # after softcap, before bias
    max_weight: Float[Tensor, "B H T"]
    entropy: Float[Tensor, "B H T"] | None = None  # nats, over real keys
    distance: Float[Tensor, "B H T"] | None = None  # Σ p |i − j|
    even_distance: Float[Tensor, "B H T"] | None = None  # the same for even weights
    participation: Float[Tensor, "B H T"] | None = None  # (Σ p)² / Σ p², 1 … n
    argmax: Int[Tensor, "B H T"] | None = None  # the first of those that tie; −1 without keys
    received: Float[Tensor, "B H S"] | None = None  # Σ p over queries, in the precision of p
    key_mass: Float[Tensor, "B H T N"] | None = None
    key_top: Float[Tensor, "B H T N"] | None = None  # 1 on the largest weight; ties share it
    key_share: Float[Tensor, "B H T N"] | None = None  # p ‖·‖ / Σ p ‖·‖; NaN where that is 0 / 0
    key_seen: Bool[Tensor, "B H T N"] | None = None  # the key exists and may be attended to
    sink: Float[Tensor, "B H T"] | None = None  # mass lost to the sink; None without one
    class_mass: Float[Tensor, "B H T C"] | None = None
    class_top: Float[Tensor, "B H T C"] | None = None
    class_share: Float[Tensor, "B H T C"] | None = None
    class_keys: Float[Tensor, "B H T C"] | None = None  # visible keys of the class
    heads: Float[Tensor, "B H T Dv"] | None = None
