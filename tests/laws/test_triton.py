"""The Triton kernel equals the definition: on a GPU, or else in Triton's interpreter."""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from describing import (
    RULES,
    Shape,
    assert_equals_definition,
    assert_hidden_keys_change_nothing,
    assert_nan_stays_in_its_row,
    assert_rule_holds,
    assert_same,
    assert_strides_are_read,
    cast,
    described,
    errors_of,
    everything,
)
from headwise import masks
from headwise.errors import ArgumentError
from headwise.kernels import RowRequest, attend, make_rule, row_statistics
from headwise.kernels.triton import is_installed
from headwise.layer import ALiBi, MultiHeadAttention
from strategies import Problem, problems, seeds

pytestmark = [
    pytest.mark.full,  # the interpreter is slow; refusals are in the quick tier
    pytest.mark.skipif(not is_installed(), reason="no Triton: pip install 'headwise[triton]'"),
    # The interpreter computes in NumPy, which warns of NaN and overflow; a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16, so that short texts have several of them."""
    if DEVICE == "cpu":  # a GPU keeps its usual blocks
        from headwise.kernels.triton import _launch

        small = _launch.Tiles(rows=16, keys=16, warps=4, stages=1)
        monkeypatch.setattr(_launch, "tiles_for", lambda *_: small)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE)


def _everything(problem: Problem, seed: int, **more: Any) -> RowRequest:
    """A request for all statistics of this kernel."""
    request = everything(cast(problem, torch.float32, DEVICE), seed, **more)
    return replace(request, key_norms=None)


def _compare(problem: Problem, request: RowRequest, close: float = 8e-5) -> None:
    exact = described(cast(problem, torch.float64, DEVICE), request, "rows")
    ours = described(cast(problem, torch.float32, DEVICE), request, "triton")
    assert ours.kernel == "triton"
    assert_same(ours, exact, close)


@settings(max_examples=7)
@given(problem=problems(most=2), seed=seeds)
def test_every_statistic_is_that_of_the_weights(problem: Problem, seed: int) -> None:
    # At a softcap float32 has ties that float64 does not have.
    problem = cast(problem, torch.float32)
    _compare(problem, _everything(problem, seed, argmax="softcap" not in problem.how))


def test_what_it_lacks_comes_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWISE_TRITON", "1")
    q, k, v = _random(2, 2, 23, 16), _random(2, 1, 43, 16), _random(2, 1, 43, 16)
    problem = Problem(q, k, v, {"causal": True})
    request = everything(problem, 0, top=True)
    ours = described(problem, request, "auto")
    assert ours.kernel == "triton (top, value: blocks of rows)"
    assert_same(ours, described(cast(problem, torch.float64, DEVICE), request, "rows"), 8e-5)


@settings(max_examples=5)
@given(problem=problems(most=2))
def test_heads_and_weights_equal_the_definition(problem: Problem) -> None:
    assert_equals_definition(problem, "triton", DEVICE)


# Lengths and widths; the biases by distance have a test of their own.
SHAPES = [
    *(Shape(1, 1, 1, *x, 5, 3) for x in [(1, 47), (47, 1), (47, 16), (5, 0), (0, 5), (32, 32)]),
    *(Shape(1, 1, 1, 20, 20, *x) for x in [(1, 1), (80, 96), (256, 200)]),
]
CASES = [
    *((Shape(2, 2, 1, 23, 43, 19, 37), rule) for rule in RULES if "alibi" not in rule),
    *product(SHAPES, ["full", "causal"]),
]


@pytest.mark.parametrize(("shape", "rule"), CASES, ids=str)
def test_every_rule_shape_and_width_holds(shape: Shape, rule: str) -> None:
    lacking = ("key_norms", "top")
    assert_rule_holds("triton", shape, rule, device=DEVICE, without=lacking)


@pytest.mark.parametrize("more", [{}, {"bias": torch.randn(1, 3, 23, 43)}])
def test_biases_by_distance_are_read_from_a_table(more: dict[str, Tensor]) -> None:
    q, k = _random(1, 3, 23, 8), _random(1, 3, 43, 8)

    def found(dtype: torch.dtype, backend: str) -> Tensor:
        bias = ALiBi(3).bias(dtype)
        for values in more.values():
            bias = bias + make_rule(head_dim=8, bias=values.to(DEVICE, dtype)).bias
        inputs = (x.to(dtype) for x in (q, k, k))
        return attend(*inputs, bias=bias, causal=True, backend=backend).double()

    ours, exact = found(torch.float32, "triton"), found(torch.float64, "rows")
    torch.testing.assert_close(ours, exact, rtol=2e-5, atol=2e-5)


@settings(max_examples=5)
@given(data=st.data())
def test_hidden_keys_change_nothing(data: st.DataObject) -> None:
    assert_hidden_keys_change_nothing(data.draw(problems(most=2)), data, "triton", DEVICE)


def test_nan_stays_in_its_row() -> None:
    assert_nan_stays_in_its_row("triton", DEVICE)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": masks.padding([29, 41])}])
@pytest.mark.parametrize("is_placed", [False, True])
def test_distances_are_those_of_the_positions(options: dict[str, Any], is_placed: bool) -> None:
    problem = Problem(_random(2, 2, 37, 8), _random(2, 2, 41, 8), _random(2, 2, 41, 8), options)
    places: dict[str, Tensor] = {}
    if is_placed:  # packed texts, and such as begin anywhere
        columns = torch.arange(41, device=DEVICE)
        places["key_at"] = torch.stack([columns % 17, (columns - 5).clamp(min=0)])
        places["query_at"] = places["key_at"][:, 4:]
    _compare(problem, RowRequest(distance=True, **places))


def test_ties_go_to_the_first_key() -> None:
    q, k = torch.zeros(1, 1, 40, 8, device=DEVICE), _random(1, 1, 70, 8)
    result = described(Problem(q, k, k, {"window": (9, 9)}), RowRequest(argmax=True), "triton")
    assert torch.equal(result.argmax[0, 0].cpu(), (torch.arange(30, 70) - 9).clamp(min=0))


def test_strides_of_any_kind_are_read() -> None:
    # On a GPU other strides are read in another layout, so that sums are added in another order.
    assert_strides_are_read("triton", DEVICE, 1e-5 if DEVICE == "cuda" else 0)


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])  # logits up to ten thousand and more
def test_errors_are_at_most_twice_those_of_torch(size: float) -> None:
    q, k, v = (_random(1, 4, 70, 61) for _ in range(3))
    for name, (ours, torchs) in errors_of("triton", q * size, k, v, is_causal=True).items():
        assert ours <= 2 * torchs + 1e-7, name


def test_half_precision_is_as_good_as_a_plain_implementation() -> None:
    dtype = torch.float16  # Triton's interpreter has no products of bfloat16: see tests/gpu
    q, k, v = (_random(1, 2, 70, 32).to(dtype) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    plain = (q @ k.mT / 32**0.5).softmax(-1) @ v
    ours = attend(q, k, v, backend="triton")
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()
    rule, request = make_rule(head_dim=32), RowRequest(keys=torch.zeros(1, 70, 1).long().to(DEVICE))
    result = row_statistics(q, k, v, rule, request, backend="triton")
    assert_same(result, row_statistics(q, k, v, rule, request, backend="rows"), 2e-5)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-46, -8.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_every_scale_equals_the_definition(scale: float, softcap: float | None) -> None:
    q, k = _random(1, 4, 19, 8), _random(1, 2, 23, 8)
    options = {"causal": True, "scale": scale, "softcap": softcap}
    exact = attend(q.double(), k.double(), k.double(), **options, backend="rows", need_lse=True)
    ours = attend(q, k, k, **options, backend="triton", need_lse=True)
    torch.testing.assert_close(ours.heads.double(), exact.heads, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.lse.double(), exact.lse, rtol=1e-5, atol=1e-4)


def test_huge_scales_are_refused() -> None:
    q = _random(1, 2, 5, 4)
    with pytest.raises(ArgumentError, match=r"'triton' cannot.*scale=1e\+30"):
        attend(q, q, q, scale=1e30, backend="triton")


def test_the_switch_serves_a_whole_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(MultiHeadAttention(32, 4, 2)).to(DEVICE)
    x = _random(2, 13, 32)
    monkeypatch.setenv("HEADWISE_TRITON", "0")
    with torch.no_grad(), hw.observe(model) as watch:
        plain = model(x)
    monkeypatch.setenv("HEADWISE_TRITON", "1")
    with torch.no_grad(), hw.observe(model) as switched:
        assert torch.equal(model(x), plain)
    assert [site.statistics.split(" (")[0] for site in switched.sites()] == ["triton"]
    assert not watch.sites()[0].statistics.startswith("triton")
    actual, expected = (w.table().frame().select_dtypes("number") for w in (switched, watch))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), hw.observe(model, hw.Request(top=("first",))) as more:
        model(x)  # which Triton does not support, so another kernel computes it
    assert more.table().frame()["top(first)"].notna().all()


@pytest.mark.full
@pytest.mark.parametrize(("arch", "memory"), [(80, 163), (86, 99), (90, 227)])
def test_the_kernel_compiles_without_a_gpu_and_fits_shared_memory(arch: int, memory: int) -> None:
    program = str(Path(__file__).with_name("triton_compiled.py"))
    done = subprocess.run([sys.executable, program, str(arch)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    taken = dict(line.split() for line in done.stdout.splitlines())
    assert list(taken) == ["heads", "watch", "everything", "sums"]
    assert max(map(int, taken.values())) <= memory * 1024
