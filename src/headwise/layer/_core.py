"""The core of the layer: attention over projected heads as a module, and their cache."""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, cat, nn

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import AttendOutput, AttentionRule, BiasLike, MaskLike, attend, make_rule


class LayerOutput(NamedTuple):
    """The layer's result with `need_weights`. Weights of half precision inputs are float32."""

    out: Float[Tensor, "B T d_model"]
    weights: Float[Tensor, "B H T S"]  # per head, never averaged


class HeadNorm(nn.RMSNorm):
    """RMS normalization of each query or key, with learned factors."""

    def forward(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
        # Under autocast the factors are wider than `x`, and torch's kernel wants one dtype.
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class HeadAttention(nn.Module):
    """`attend` as a module, so that hooks can observe queries, keys and heads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ArgumentError(
                f"MultiHeadAttention: dropout={dropout}. Give a share from 0 up to 1."
            )
        self.dropout = dropout

    def forward(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
        *,
        mask: MaskLike | None = None,
        causal: bool = False,
        bias: BiasLike | None = None,
        need_weights: bool = False,
    ) -> Float[Tensor, "B H T Dv"] | AttendOutput:
        dropout_p = self.dropout if self.training else 0.0
        return attend(
            q, k, v,
            mask=mask, causal=causal, bias=bias, dropout_p=dropout_p, need_weights=need_weights,
        )  # fmt: skip

    def rule(
        self,
        q: Float[Tensor, "B H T D"],
        *,
        mask: MaskLike | None = None,
        causal: bool = False,
        bias: BiasLike | None = None,
    ) -> AttentionRule:
        """The rule by which a call with these arguments turns logits into weights."""
        return make_rule(head_dim=q.shape[-1], mask=mask, is_causal=causal, bias=bias)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


KeysValues = tuple[Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S Dv"]]


class KVCache:
    """The keys and values that one layer has computed so far, for one batch of texts."""

    def __init__(self) -> None:
        self._cached: KeysValues | None = None

    def __len__(self) -> int:
        """The number of tokens."""
        return 0 if self._cached is None else self._cached[0].shape[2]

    def joined(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> KeysValues:
        """All keys and values up to those of further tokens, which are not stored yet.

        Raises:
            ShapeError: sizes, dtype or device differ from those of the cached tensors.
        """
        if self._cached is None:
            return k, v
        for name, old, new in zip("kv", self._cached, (k, v), strict=True):
            kinds = [(x.shape[:2], x.shape[3], x.dtype, x.device) for x in (old, new)]
            if kinds[0] != kinds[1]:
                raise ShapeError(
                    f"KVCache: {name} {tuple(new.shape)} of {new.dtype} on {new.device} after "
                    f"{tuple(old.shape)} of {old.dtype} on {old.device}. Keep batch, heads, width, "
                    f"dtype and device; a cache belongs to one layer and batch."
                )
        old_k, old_v = self._cached
        return cat((old_k, k), 2), cat((old_v, v), 2)

    def store(self, k: Float[Tensor, "B Hkv S D"], v: Float[Tensor, "B Hkv S Dv"]) -> None:
        """Keep what `joined` returned."""
        self._cached = k, v
