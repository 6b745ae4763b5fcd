"""The core of the layer: attention over projected heads, as a module that hooks can observe."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from headwise import masks
from headwise.errors import ArgumentError
from headwise.kernels import (
    AttendOutput,
    AttentionRule,
    BiasLike,
    MaskLike,
    WindowLike,
    attend,
    check_numbers,
    make_rule,
)


class LayerOutput(NamedTuple):
    """The layer's result with `need_weights`. Weights of half precision inputs are float32."""

    out: Float[Tensor, "B T d_out"]
    weights: Float[Tensor, "B H T S"]  # per head, never averaged


class LayerOutputWithLse(NamedTuple):
    """The layer's result with `need_lse`, with or without weights.

    Weights and log-sum-exps of half precision inputs are float32.
    """

    out: Float[Tensor, "B T d_out"]
    weights: Float[Tensor, "B H T S"] | None
    lse: Float[Tensor, "B H T"]  # nats; −inf for a query that may attend to nothing


class HeadNorm(nn.RMSNorm):
    """RMS normalization of each query or key, with learned factors."""

    def forward(self, x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
        # Under autocast the factors are wider than `x`, and torch's kernel wants one dtype.
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class HeadAttention(nn.Module):
    """`attend` as a module, so that hooks can observe queries, keys and heads.

    The constructor takes what is the same in every call, as `MultiHeadAttention` has it; a call
    adds its mask, causality and bias.
    """

    sinks: Tensor | float | None

    def __init__(
        self,
        dropout: float = 0.0,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: WindowLike | None = None,
        sinks: Float[Tensor, " H"] | float | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ArgumentError(
                f"MultiHeadAttention: dropout={dropout}. Give a share from 0 up to 1."
            )
        check_numbers("MultiHeadAttention", scale, softcap)
        if window is not None:
            masks.window(window)  # refuses negative sides
        self.dropout, self.scale, self.softcap, self.window = dropout, scale, softcap, window
        if sinks is None or isinstance(sinks, nn.Parameter):
            self.register_parameter("sinks", sinks)
        elif isinstance(sinks, Tensor):  # in the state, or the meta device would lose it
            self.register_buffer("sinks", sinks)
        elif sinks < math.inf:
            self.sinks = float(sinks)
        else:
            raise ArgumentError(
                f"MultiHeadAttention: sinks={sinks}. Give a finite number, or None."
            )

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
        need_lse: bool = False,
    ) -> Float[Tensor, "B H T Dv"] | AttendOutput:
        return attend(
            q, k, v,
            mask=mask,
            causal=causal,
            window=self.window,
            scale=self.scale,
            bias=bias,
            softcap=self.softcap,
            sinks=self._sinks_of(q),
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
            need_lse=need_lse,
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
        return make_rule(
            head_dim=q.shape[-1], mask=mask, is_causal=causal, near=self.window,
            scale=self.scale, bias=bias, softcap=self.softcap, sinks=self._sinks_of(q),
        )  # fmt: skip

    def _sinks_of(self, q: Tensor) -> Tensor | None:
        if self.sinks is None or isinstance(self.sinks, Tensor):
            return self.sinks
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_full((q.shape[1],), self.sinks, dtype=wide)

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("scale", "softcap", "window")}
        options = {"dropout": self.dropout} | {n: x for n, x in options.items() if x is not None}
        return ", ".join(f"{name}={value}" for name, value in options.items())
