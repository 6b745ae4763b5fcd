"""A few queries on many keys: the native kernel's statistics equal those of the weights."""

from typing import Any

import pytest
import torch

from describing import Shape, choose, problem_of
from headwise import masks
from headwise._native_library import Library, library
from headwise.kernels import (
    AttentionProblem,
    RowRequest,
    attend,
    cpu,
    make_rule,
    native_is_faster,
    row_statistics,
)
from headwise.kernels.native import _kernel
from headwise.kernels.native._kernel import FEW

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")


@pytest.mark.usefixtures("built")
def test_ties_go_to_the_first_key_of_all_chunks() -> None:
    q, (k, v) = torch.zeros(1, 4, 1, 8), torch.randn(2, 1, 2, 1000, 8)
    request = RowRequest(argmax=True, top=True, keys=torch.tensor([0, 400, 999]).view(1, 1, 3))
    for left in (999, 700, 3):
        rule = make_rule(head_dim=8, near=(left, 0))
        result = row_statistics(q, k, v, rule, request, backend="native")
        assert (result.argmax == 999 - left).all()
        assert (result.n_keys == left + 1).all()
        visible = torch.tensor([0, 400, 999]) >= 999 - left
        assert torch.equal(result.key_top, (visible / (left + 1)).expand(1, 4, 1, 3))


@pytest.mark.usefixtures("built")
def test_a_late_peak_outweighs_earlier_keys() -> None:
    q, k, v = torch.ones(1, 2, 1, 4), torch.zeros(1, 1, 900, 4), torch.zeros(1, 1, 900, 4)
    k[0, 0, 800], v[0, 0, 800] = 1e4, 7.0
    result = row_statistics(q, k, v, make_rule(head_dim=4), RowRequest(argmax=True, heads=True))
    assert result.kernel == f"native ({library().name})"
    assert (result.argmax == 800).all()
    assert (result.heads == 7.0).all()
    assert (result.entropy == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_chooses_the_native_kernel_for_few_queries(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in problem_of(Shape(1, 8, 2, 1, 4096, 64, 64), "full").qkv)
    output = attend(q, k, v, causal=True, need_lse=True)
    assert (output.backend, output.choice.packed) == ("native", True)
    assert "keys and values are read once" in output.choice.reason
    torch.testing.assert_close(output.heads, attend(q, k, v, backend="rows"))
    few_keys = attend(q, k[:, :, :9], v[:, :, :9], need_lse=True)
    unshared = attend(q[:, :2], k, v, need_lse=True)
    for other in few_keys, unshared:
        assert other.backend == "native"
    many = attend(q.expand(-1, -1, FEW + 1, -1), k, v, need_lse=True)
    assert (many.backend, many.choice.packed) == ("native", False)
    learned = attend(q, k.clone().requires_grad_(), v, need_lse=True, backend="native")
    assert (learned.backend, learned.choice.packed) == ("native", False)


BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
MASK = torch.rand(1, 1, 512, 512) < 0.5


def _with_amx(monkeypatch: pytest.MonkeyPatch, name: str = "amx") -> None:
    monkeypatch.setattr(cpu, "HAS_AMX", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(_kernel, "library", lambda: Library(name, "", library().functions))


@pytest.mark.parametrize(("dtype", "H", "T", "D", "rule", "without_tiles", "with_tiles"), [
    (BFLOAT, 2, 1, 64, {}, "native", "native"),
    (BFLOAT, 2, 8, 64, {}, "native", "native"),
    (BFLOAT, 8, 2, 64, {}, "native", "native"),
    (BFLOAT, 8, 3, 64, {}, "fused", "fused"),
    (BFLOAT, 2, 512, 64, {}, "fused", "native"),
    (BFLOAT, 2, 512, 80, {}, "fused", "fused"),  # not whole tiles
    (HALF, 8, 3, 64, {}, "native", "native"),
    (HALF, 2, 512, 64, {}, "native", "native"),
    (FLOAT, 2, 512, 64, {}, "native", "native"),
    (BFLOAT, 8, 512, 64, {"mask": masks.padding([500]), "is_causal": True}, "fused", "native"),
    # Reading a mask or a bias that is a tensor takes longer than all products.
    (BFLOAT, 8, 512, 64, {"mask": masks.as_mask(MASK)}, "fused", "fused"),
    (BFLOAT, 8, 512, 64, {"bias": MASK.bfloat16()}, "fused", "fused"),
])  # fmt: skip
def test_with_amx_bfloat16_is_native_in_tiles_or_for_few_rows_of_a_kv_head(
    dtype: torch.dtype, H: int, T: int, D: int, rule: dict[str, Any], without_tiles: str,
    with_tiles: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k = torch.zeros(1, H, T, D, dtype=dtype), torch.zeros(1, 2, 512, D, dtype=dtype)
    problem = AttentionProblem(q, k, k, make_rule(head_dim=D, **rule).simplify(T, 512))
    for name, expected in (("avx512bf16", without_tiles), ("amx", with_tiles)):
        _with_amx(monkeypatch, name)
        assert choose(problem, "auto").backend == expected


@pytest.mark.parametrize(("T", "expected"), [(128, "native"), (512, "fused")])
def test_with_amx_training_on_long_texts_in_bfloat16_stays_with_torch(
    T: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass of the native kernel multiplies logits alone in tiles."""
    _with_amx(monkeypatch)
    q = torch.zeros(1, 8, T, 64, dtype=BFLOAT, requires_grad=True)
    rule = make_rule(head_dim=64).simplify(T, T)
    for x, backend in ((q, expected), (q.detach(), "native")):
        assert choose(AttentionProblem(x, x, x, rule), "auto").backend == backend


@pytest.mark.parametrize(("dtype", "H", "S", "expected"), [
    (BFLOAT, 8, 4096, True),
    (BFLOAT, 8, 64, False),  # what a call takes in Python is more
    (BFLOAT, 2, 32768, True),
    (HALF, 2, 4096, True),
    (FLOAT, 8, 64, False),
])  # fmt: skip
def test_with_amx_a_token_is_native_where_that_is_faster_than_the_function_of_torch(
    dtype: torch.dtype, H: int, S: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_amx(monkeypatch)
    q, k = torch.zeros(1, H, 1, 64, dtype=dtype), torch.zeros(1, 2, S, 64, dtype=dtype)
    assert native_is_faster(q, k) is expected
