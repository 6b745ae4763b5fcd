"""A replacement for `nn.MultiheadAttention`, whose heads must fill the width of its input.

The modules around it call it in the same way.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._torch_private import WithoutFastPath
from headwise.errors import ShapeError
from headwise.layer import MultiHeadAttention


class TorchCompatibleAttention(WithoutFastPath, nn.Module):
    """Our layer with the arguments and the outputs of `nn.MultiheadAttention`.

    As in torch, a mask is True where a query may not attend; a mask per head must cover all heads
    of the replaced layer. The returned weights are averaged over the heads that are left. A query
    that may attend to nothing gets zeros instead of NaN.

    Attributes:
        layer: Our layer, whose parameters have names of their own.
        heads: The heads of the replaced layer that are left.
    """

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = MultiHeadAttention.from_torch(module)
        self.batch_first = module.batch_first
        self.heads, self.all_heads = [*range(module.num_heads)], module.num_heads
        self.train(module.training)

    @property
    def num_heads(self) -> int:
        return self.layer.n_heads

    @property
    def embed_dim(self) -> int:
        return self.layer.d_model

    @property
    def kdim(self) -> int:
        return self.layer.kdim

    @property
    def vdim(self) -> int:
        return self.layer.vdim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `nn.MultiheadAttention` does, with the arguments that it documents.

        Raises:
            ShapeError: `attn_mask` has one mask per head, but not for all original heads.
        """
        single = query.ndim == 2
        inputs = [self._batched(x, single) for x in (query, key, value)]
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
        options = {
            "mask": _combine(key_padding_mask, self._select_heads(attn_mask), query.dtype),
            "causal": is_causal and attn_mask is None,
        }
        if not need_weights:
            return self._from_batched(self.layer(*inputs, **options), single), None
        out, weights = self.layer(*inputs, **options, need_weights=True)
        weights = weights.mean(1) if average_attn_weights else weights
        return self._from_batched(out, single), weights[0] if single else weights

    def _batched(self, x: Tensor, single: bool) -> Float[Tensor, "B T d_model"]:
        if single:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _from_batched(self, out: Float[Tensor, "B T d_model"], single: bool) -> Tensor:
        if single:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _select_heads(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or mask.ndim == 2:
            return mask
        if mask.shape[0] % self.all_heads:
            raise ShapeError(
                f"attn_mask: {tuple(mask.shape)} does not begin with a multiple of the "
                f"{self.all_heads} heads that the layer had before pruning. Give a mask for all of "
                f"them."
            )
        return mask.reshape(-1, self.all_heads, *mask.shape[1:])[:, self.heads]  # B H T S


def replace_torch_layers(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Replace the modules of these names, in place, with our layer; returns the model."""
    for name in names:
        replacement = TorchCompatibleAttention(model.get_submodule(name))  # type: ignore[arg-type]
        if not name:
            return replacement
        model.set_submodule(name, replacement)
    for module in model.modules():
        if names and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its fast path reads the weights of torch's layer
    return model


def update_heads(model: nn.Module, kept: Mapping[nn.Module, Sequence[int]]) -> None:
    """Record in each replacement which of its heads are left."""
    for module in model.modules():
        if isinstance(module, TorchCompatibleAttention) and module.layer.attention in kept:
            module.heads = [module.heads[head] for head in kept[module.layer.attention]]


def _combine(padding: Tensor | None, attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The two masks of torch as one: True where a query may attend, or a float mask to add."""
    masks = [mask for mask in (padding, attn_mask) if mask is not None]
    if all(mask.dtype == torch.bool for mask in masks):
        visible = [~mask for mask in masks]
        return visible[0] & visible[-1] if masks else None
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask.to(dtype)
        for mask in masks
    ]
    return added[0] + added[-1] if len(added) == 2 else added[0]
