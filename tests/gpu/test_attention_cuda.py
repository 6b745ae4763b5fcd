"""Attention on a GPU: every backend equals the definition, watching changes no bit.

Compiled code cannot be traced with the shape checks of annotations: it has a process of its own.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from headwise import masks, reference
from headwise.kernels import attend
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE, T5Bias
from strategies import Problem, problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
KINDS = {
    "plain": {},
    "rope": {"rope": RoPE(8)},
    "alibi": {"position_bias": ALiBi(4)},
    "t5": {"position_bias": T5Bias(4, 8, 16)},
    "sinks": {"sinks": 0.5, "softcap": 3.0},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("backend", ["auto", "fused", "rows"])
@given(problem=problems(extras=False), grad=st.booleans())
def test_every_backend_equals_the_definition(backend: str, problem: Problem, grad: bool) -> None:
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in problem.how.items()}
    q, k, v = (x.cuda().requires_grad_(grad) for x in problem.qkv)
    ours = attend(q, k, v, **options, backend=backend, need_weights=True, need_lse=True)
    plain = attend(q, k, v, **options, backend=backend)
    theirs = reference.attention(
        *(x.detach().numpy() for x in problem.qkv),
        **problem.numpy(),
        need_weights=True,
        need_lse=True,
    )
    assert torch.equal(ours.heads, plain)
    for actual, expected in ((ours.heads, theirs.out), (ours.weights, theirs.weights),
                            (ours.lse, theirs.lse)):  # fmt: skip
        np.testing.assert_allclose(actual.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-12)


@each_half
@pytest.mark.parametrize("mask", [None, masks.window((70, 0)), masks.padding([300, 111])])
def test_half_precision_is_as_good_as_a_plain_implementation(
    dtype: torch.dtype, mask: masks.Mask | None
) -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda").to(dtype) for _ in "qkv")
    exact = attend(q.double(), k.double(), v.double(), mask=mask, causal=True)
    hidden = torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1)
    if mask is not None:
        hidden = hidden | ~mask.dense(300, 300, q.device)
    plain = (q @ k.mT / 8).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    error = (attend(q, k, v, mask=mask, causal=True).double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max()


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_what_is_hidden_reaches_nothing(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, device="cuda", requires_grad=True) for _ in "qkv")
    expected = attend(q, k, v, causal=True, backend=backend)[:, :, :-1]
    with torch.no_grad():
        k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    output = attend(q, k, v, causal=True, backend=backend)[:, :, :-1]
    torch.testing.assert_close(output, expected)
    for gradient in torch.autograd.grad(output.sum(), (q, k, v)):
        assert gradient[:, :, :-1].isfinite().all()


@each_kind
def test_a_layer_agrees_with_the_cpu_and_decodes_in_pieces(kind: str) -> None:
    layer = MultiHeadAttention(32, 4, 2, **KINDS[kind]).double().requires_grad_(False)
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    expected = layer(x, causal=True)
    layer, x, cache = layer.cuda(), x.cuda(), KVCache()
    torch.testing.assert_close(layer(x, causal=True).cpu(), expected)
    read = [layer(part, causal=True, cache=cache) for part in x.split([5, 1, 7], dim=1)]
    torch.testing.assert_close(torch.cat(read, dim=1).cpu(), expected)


@each_kind
def test_watched_outputs_are_the_same_bits(kind: str) -> None:
    model = torch.nn.Sequential(MultiHeadAttention(32, 4, 2, **KINDS[kind])).cuda()
    x = torch.randn(2, 13, 32, device="cuda")
    plain = model(x)
    with hw.observe(model) as watch:
        assert torch.equal(model(x), plain)
    assert watch.table().heads


def test_a_compiled_layer_gives_the_same_output() -> None:
    plain = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    laws = str(Path(__file__).with_name("attention_cuda_compiled.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, laws], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
