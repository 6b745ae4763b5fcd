"""Which kernel computes on a GPU: the one in Triton wherever it is the fastest."""

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from describing import assert_same, cast, described
from headwise.kernels import (
    AttentionProblem,
    RowReduction,
    RowRequest,
    attend,
    make_rule,
    row_statistics,
)
from headwise.kernels.triton import TRITON, is_installed
from headwise.layer import MultiHeadAttention
from strategies import Problem

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
    pytest.mark.skipif(not is_installed(), reason="no Triton: pip install 'headwise[triton]'"),
]


def _backend(dtype: torch.dtype, **options: object) -> str:
    q = torch.randn(1, 2, 5, 16, device="cuda", dtype=dtype)
    return attend(q, q, q, need_lse=True, **options).backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_under_a_mask_in_half_precision(dtype: torch.dtype) -> None:
    assert _backend(dtype, causal=True) == "triton"
    assert _backend(dtype) == "fused"


def test_heads_in_single_precision_and_with_gradients() -> None:
    assert _backend(torch.float32, causal=True) == "fused"
    q = torch.randn(1, 2, 5, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert attend(q, q, q, causal=True, need_lse=True).backend == "fused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 5, 16, device="cuda", dtype=dtype)
    for switch, name in (("0", "blocks of rows"), ("1", "triton"), ("", "triton")):
        monkeypatch.setenv("HEADWISE_TRITON", switch)
        assert row_statistics(q, q, q, make_rule(head_dim=16), RowRequest()).kernel == name


def test_a_watch_changes_no_bit_and_agrees_with_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(MultiHeadAttention(64, 4, 2)).to("cuda", torch.bfloat16)
    x, tables = torch.randn(2, 300, 64, device="cuda", dtype=torch.bfloat16), []
    for switch in ("1", "0"):
        monkeypatch.setenv("HEADWISE_TRITON", switch)
        with torch.no_grad():
            plain = model(x)
            with hw.observe(model) as watch:
                assert torch.equal(model(x), plain)
        tables.append(watch.table().frame().select_dtypes("number").to_numpy())
    torch.testing.assert_close(*map(torch.tensor, tables), rtol=1e-3, atol=1e-4, equal_nan=True)


# The compiled Triton kernel at sizes that are too slow for the interpreter.


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
    counted = torch.rand(2, T, device="cuda") < 0.7
    of_rows = {"distance": True, "participation": True, "received": counted}
    request = RowRequest(**of_rows, keys=keys, classes=classes)
    exact = described(cast(problem, torch.float64, "cuda"), request, "rows")
    assert_same(described(problem, request, "triton"), exact, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("is_packed", [False, True])
def test_sums_of_the_kernel_are_those_of_its_rows(is_packed: bool, dtype: torch.dtype) -> None:
    T, names = 997, ("entropy", "max_weight", "distance", "lse", "max_logit")
    q = torch.randn(2, 8, T, 64, device="cuda", dtype=dtype)
    k, v = q[:, :2].roll(1, -1), q[:, :2, :, :0]
    rule, request = make_rule(head_dim=64, is_causal=True), RowRequest(distance=True)
    texts = torch.arange(2 * T, device="cuda").view(2, T) // (67 if is_packed else T)
    real = torch.rand(2, T, device="cuda") < 0.9
    real[:, 0] = False  # which sees one key alone
    M, numbers = int(texts.max()) + 1, {name: [n] for n, name in enumerate(names)}
    given = texts.masked_fill(~real, -1) if is_packed else None
    reduction = RowReduction(numbers, len(names), real, given, M, False)
    parts, highest = TRITON.row_sums(AttentionProblem(q, k, v, rule), request, reduction)
    rows = row_statistics(q, k, v, rule, request, backend="triton")
    values = torch.stack([getattr(rows, name).double() for name in names])
    counted = (values * real[:, None]).transpose(2, 3).flatten(1, 2)  # K (B T) H
    sums = values.new_zeros(len(names), M, 8).index_add_(1, texts.flatten(), counted)
    torch.testing.assert_close(parts[1], sums, rtol=1e-6, atol=1e-6)
    largest = values.where(real[:, None], -torch.inf).amax((1, 3))
    torch.testing.assert_close(highest, largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_are_as_good_as_those_of_torch(is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 2048, 64, device="cuda").to(dtype) for _ in "qkv")
    exact = attend(q.double(), k.double(), v.double(), causal=is_causal)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    ours = attend(q, k, v, causal=is_causal, backend="triton")
    errors = [(x.double() - exact).square().mean().sqrt() for x in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]
