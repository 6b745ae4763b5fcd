"""A layer of attention that a model of one's own may have."""

import torch.nn.functional as F
from torch import Tensor, nn


class SmallAttention(nn.Module):
    """Queries, keys and values from one matrix, by the function of torch or by hand."""

    def __init__(
        self, width: int = 12, num_heads: int = 4, *, by_hand: bool = False, causal: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.by_hand, self.causal = num_heads, by_hand, causal
        self.qkv, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            heads = (q @ k.mT * k.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(heads.transpose(1, 2).flatten(2))
