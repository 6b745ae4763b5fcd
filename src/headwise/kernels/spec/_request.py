"""Requests for statistics of rows, and their results: the same for every kernel."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

# Results by their names.
Named = dict[str, Tensor]


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

    @property
    def is_static(self) -> bool:
        """Whether it holds flags only, and no tensor."""
        is_positioned = self.query_at is not None or self.key_at is not None
        is_of_keys = self.keys is not None or self.classes is not None
        of_call = self.received is not None or self.key_norms is not None
        return not (is_positioned or is_of_keys or of_call)


@dataclass(frozen=True, eq=False)
class SharedRequest(RowRequest):
    """The request of several calls that share a mask, whatever their queries, keys and values.

    Neither its tensors nor the mask may change: a kernel keeps with the request what it has
    prepared for a call, and uses it for all others of the same outline. They may share the results
    in `OF_MASK`.
    """

    prepared: dict[tuple[Hashable, ...], Any] = field(default_factory=dict, init=False, repr=False)


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


# The statistics that follow from the mask and the request alone, whatever queries and keys hold.
OF_MASK = frozenset(("n_keys", "key_seen", "class_keys", "even_distance"))
