"""The compiled Triton kernel at sizes that are too slow for the interpreter.

Its laws are those of `tests/laws/test_triton.py`, which run on a GPU where there is one.
"""

import pytest
import torch
import torch.nn.functional as F

from describing import assert_same, cast, described
from headwise.kernels import RowRequest, attend
from headwise.kernels.triton import is_installed
from strategies import Problem

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
    pytest.mark.skipif(not is_installed(), reason="no Triton: pip install 'headwise[triton]'"),
]
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 0)}], ids=str)
def test_the_kernel_agrees_with_plain_pytorch(options: dict, dtype: torch.dtype, D: int) -> None:
    T, S = 997, 1511
    q = torch.randn(2, 8, T, D, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, 2, S, D, device="cuda", dtype=dtype) for _ in "kv")
    keys = torch.randint(-1, S, (2, T, 4), device="cuda")
    classes = torch.eye(8, device="cuda")[torch.randint(8, (2, S), device="cuda")]
    problem = Problem(q, k, v, options)
    request = RowRequest(distance=True, participation=True, keys=keys, classes=classes)
    exact = described(cast(problem, torch.float64, "cuda"), request, "rows")
    assert_same(described(problem, request, "triton"), exact, 1e-4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_are_as_good_as_those_of_torch(is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 2048, 64, device="cuda").to(dtype) for _ in "qkv")
    exact = attend(q.double(), k.double(), v.double(), causal=is_causal)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    ours = attend(q, k, v, causal=is_causal, backend="triton")
    errors = [(x.double() - exact).square().mean().sqrt() for x in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]
