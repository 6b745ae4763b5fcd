"""The layer compiled on a GPU; run by `test_attention_cuda` in a process without shape checks."""

import pytest
import torch

from headwise.layer import ALiBi, MultiHeadAttention, RoPE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")


@pytest.mark.parametrize("options", [{}, {"rope": RoPE(8)}, {"position_bias": ALiBi(4)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_compiled_without_graph_breaks_gives_the_same_output(
    options: dict, dtype: torch.dtype
) -> None:
    torch.compiler.reset()
    layer = MultiHeadAttention(32, 4, 2, **options).to("cuda", dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 17, 32, device="cuda", dtype=dtype, requires_grad=True)
    inputs = [x, *layer.parameters()]
    outs = [module(x, causal=True) for module in (compiled, layer)]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad(out.float().square().sum(), inputs) for out in outs]
    torch.testing.assert_close(*gradients)
