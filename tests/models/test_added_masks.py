"""A float mask of zeros and ones is added to the logits, by the model and by a watch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

MASK = torch.ones(5, 5).tril()


class AddedMaskAttention(nn.Module):
    """Attention whose float mask is added, as `scaled_dot_product_attention` adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(q, q, q, attn_mask=MASK)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_mask_of_zeros_and_ones_is_watched_as_added(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    model = AddedMaskAttention() if kind == "function" else layer
    x = torch.randn(3, 5, 8)
    with torch.no_grad(), hw.observe(model) as watch:
        if kind == "function":
            model(x)
            q = k = x.unflatten(-1, (2, 4)).transpose(1, 2)
        else:
            model(x, x, x, attn_mask=MASK)
            q, k, _ = (x @ layer.in_proj_weight.T).unflatten(-1, (3, 2, 4)).unbind(-3)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
    weights = (q @ k.mT / 2 + MASK).softmax(-1)
    expected = -(weights * weights.log()).sum(-1).mean((0, 2))
    entropy = torch.tensor(watch.table().mean("entropy"), dtype=torch.float32)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-5)
