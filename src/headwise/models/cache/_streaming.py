"""Attention of heads that stream over a whole text, without a cache."""

from jaxtyping import Float, Int
from torch import Tensor

from headwise.kernels import AttentionRule
from headwise.models.cache._attend import StreamingRule
from headwise.models.cache._storage import KeysValues, RecentKeys


def streaming_heads(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv T D"],
    v: Float[Tensor, "B Hkv T Dv"],
    rule: AttentionRule,
    kept: tuple[int, int],
    first: Int[Tensor, " B"] | None,
) -> Float[Tensor, "B H T Dv"]:
    """The heads of queries that see the first tokens of their text and the latest; differentiable.

    Args:
        rule: What the model itself hides besides.
        kept: How many of the first tokens are seen, and how many of the latest.
        first: The column of the first token of each text; None if no row is padded.
    """
    sinks, window = kept
    keys = KeysValues(k, v)
    T = k.shape[2]
    streaming = StreamingRule(rule, sinks, window, T, first)
    if first is None:
        return streaming.attend_many(q, RecentKeys(keys, 0, keys.map(lambda x: x[:, :, :sinks])))

    def first_tokens(x: Tensor) -> Tensor:
        columns = first[:, None] + first.new_tensor(range(min(sinks, T)))
        index = columns.clamp(max=T - 1)[:, None, :, None]
        return x.gather(2, index.expand(*x.shape[:2], -1, x.shape[3]))

    return streaming.attend_many(q, RecentKeys(keys, 0, keys.map(first_tokens)))
