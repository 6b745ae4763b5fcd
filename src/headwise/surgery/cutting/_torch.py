"""Our layer where `nn.MultiheadAttention` stood, which cannot have fewer heads than fill its width.

Whoever calls it goes on as before.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.layer import MultiHeadAttention


class InPlaceOfTorch(nn.Module):
    """Is called as `nn.MultiheadAttention` and answers in its layout, computed by our layer.

    Masks say True where a query may not attend, as torch's do; masks of single heads are given
    for all heads that the layer once had. Weights are averaged over the heads that are left. A
    query that may attend to nothing gets zeros, and not NaN.

    Attributes:
        layer: What computes; its parameters have names of their own.
        heads: Which heads of the layer it stands for are left.
    """

    # What the layers of torch ask before they take a path of their own past the attention.
    in_proj_bias = None
    _qkv_same_embed_dim = False

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
        """Attend as `nn.MultiheadAttention` does; its documentation holds.

        Raises:
            ShapeError: `attn_mask` is of single heads, and not of all that there were.
        """
        single = query.ndim == 2
        given = [self._batched(x, single) for x in (query, key, value)]
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
        how = {
            "mask": _both(key_padding_mask, self._of_own_heads(attn_mask), query.dtype),
            "causal": is_causal and attn_mask is None,
        }
        if not need_weights:
            return self._laid_out(self.layer(*given, **how), single), None
        out, weights = self.layer(*given, **how, need_weights=True)
        weights = weights.mean(1) if average_attn_weights else weights
        return self._laid_out(out, single), weights[0] if single else weights

    def _batched(self, x: Tensor, single: bool) -> Float[Tensor, "B T d_model"]:
        if single:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _laid_out(self, out: Float[Tensor, "B T d_model"], single: bool) -> Tensor:
        if single:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _of_own_heads(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or mask.ndim == 2:
            return mask
        if mask.shape[0] % self.all_heads:
            raise ShapeError(
                f"attn_mask: {tuple(mask.shape)} is for {mask.shape[0]} heads of all texts, which "
                f"had {self.all_heads} each before some were cut out. Give a mask for all of them."
            )
        return mask.reshape(-1, self.all_heads, *mask.shape[1:])[:, self.heads]  # B H T S


def put_in_place(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The model, in place, with our layer where the modules of these names stood."""
    for name in names:
        own = InPlaceOfTorch(model.get_submodule(name))  # type: ignore[arg-type]
        if not name:
            return own
        model.set_submodule(name, own)
    for module in model.modules():
        if names and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its private path reads weights of torch's layer
    return model


def keep_heads(model: nn.Module, kept: Mapping[nn.Module, Sequence[int]]) -> None:
    """Let each layer that stands in torch's place know which of its heads are left."""
    for module in model.modules():
        if isinstance(module, InPlaceOfTorch) and module.layer.attention in kept:
            stay = kept[module.layer.attention]
            module.heads = [module.heads[head] for head in stay]


def _both(one: Tensor | None, other: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask under which both hide what they hide: True where a query may attend, or to add."""
    given = [mask for mask in (one, other) if mask is not None]
    if all(mask.dtype == torch.bool for mask in given):
        hidden = [~mask for mask in given]
        return hidden[0] & hidden[-1] if given else None
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask.to(dtype)
        for mask in given
    ]
    return added[0] + added[-1] if len(added) == 2 else added[0]
