"""The native kernel equals the definition up to float32 rounding, in heads and statistics."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from describing import (
    CLOSE,
    RULES,
    Shape,
    assert_equals_definition,
    assert_heads_near,
    assert_hidden_keys_change_nothing,
    assert_nan_stays_in_its_row,
    assert_rule_holds,
    assert_same,
    assert_strides_are_read,
    cast,
    described,
    errors_of,
    everything,
    problem_of,
    threads,
)
from headwise import _native_library, masks
from headwise._native_library import BUILT, LAYOUT, SETS, layout_of, library, open_library
from headwise.kernels import RowRequest, RowStatistics, attend, make_rule, row_statistics
from headwise.kernels._rule import Lowered
from headwise.kernels.native._problem import MOST_TOKENS, check_counts, compute_heads, reach
from strategies import Problem, problems, seeds
from tiers import diagonal, tiers

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(problem=problems(), seed=seeds)
def test_every_statistic_is_that_of_the_weights(
    dtype: torch.dtype, problem: Problem, seed: int
) -> None:
    problem = Problem(*(x.to(dtype) for x in problem.qkv), cast(problem, torch.float32).how)
    # At a softcap float32 has ties that float64 does not have.
    clear = "softcap" not in problem.how
    request = everything(problem, seed, top=clear, argmax=clear)
    ours = described(problem, request, "native")
    exact = described(cast(problem, torch.float64), request, "rows")
    assert ours.kernel == f"native ({library().name})"
    assert ours.heads.dtype == dtype
    assert_heads_near(ours.heads, exact.heads)
    assert_same(replace(ours, heads=None), replace(exact, heads=None), CLOSE)


@pytest.mark.usefixtures("built")
@given(problem=problems())
def test_heads_and_weights_equal_the_definition(problem: Problem) -> None:
    assert_equals_definition(problem, "native")


BLOCKS = [
    Shape(2, 3, 3, T, S, 19, 37)
    for T, S in [(67, 67), (53, 67), (1, 67), (16, 64), (48, 65), (97, 67)]
]
FEW_QUERIES = [
    Shape(1, 1, 1, 1, 300, 16, 16),
    Shape(2, 12, 3, 1, 515, 64, 40),
    Shape(2, 13, 13, 1, 700, 19, 37),
    Shape(1, 71, 1, 1, 513, 16, 64),  # one group of many
    Shape(1, 20, 1, 1, 260, 48, 48),  # a group over two vectors
    Shape(2, 6, 2, 3, 77, 19, 37),
    Shape(1, 17, 1, 8, 1030, 33, 1),  # a group over three strips
    Shape(1, 1, 1, 8, 300, 5, 130),
    Shape(1, 4, 2, 5, 5, 3, 3),
    Shape(3, 8, 2, 1, 1, 128, 128),
    Shape(1, 4, 2, 7, 3, 8, 8),
]
# Heads of whole AMX tiles in bfloat16: two whole blocks of keys and a part of a third.
TILES = [Shape(2, 4, 2, 299, 300, 64, 32), Shape(2, 4, 2, 17, 300, 32, 64)]
MORE_TILES = [Shape(2, 4, 2, 300, 300, 32, 64), Shape(2, 4, 2, 49, 300, 96, 96)]
# Every rule in blocks, beside a cache and in tiles; every shape; then each rule in each shape.
CASES = tiers(
    [
        *product([torch.float32], [BLOCKS[1], FEW_QUERIES[1]], RULES),
        *diagonal([torch.float32], [*BLOCKS, *FEW_QUERIES], RULES),
        *product([torch.bfloat16, torch.float16], FEW_QUERIES, ["causal"]),
        *product([torch.bfloat16], TILES[:1], RULES),
    ],
    [
        *product([torch.float32], [*BLOCKS, *FEW_QUERIES], RULES),
        *product([torch.bfloat16], [*TILES, *MORE_TILES], RULES),
    ],
)


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize(("dtype", "shape", "rule"), CASES, ids=str)
def test_every_rule_holds_across_blocks(dtype: torch.dtype, shape: Shape, rule: str) -> None:
    if rule != "documents" or shape.T <= shape.S:
        assert_rule_holds("native", shape, rule, dtype)


@pytest.mark.usefixtures("built")
@given(data=st.data())
def test_hidden_keys_change_nothing(data: st.DataObject) -> None:
    assert_hidden_keys_change_nothing(data.draw(problems()), data, "native")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("backend", ["native", "rows"])
def test_nan_stays_in_its_row(backend: str) -> None:
    assert_nan_stays_in_its_row(backend)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("T", [3, 70])
@pytest.mark.parametrize("wild", [torch.nan, torch.inf, -torch.inf])
def test_the_kernel_reports_whether_heads_are_finite(T: int, wild: float) -> None:
    for dtype in torch.float32, torch.float16, torch.bfloat16:
        q, k, v = (torch.randn(2, 2, n, 9).to(dtype) for n in (T, 75, 75))
        for packed in {False, T < 9}:
            assert compute_heads(q, k, v, Lowered(right=0), packed=packed)[1]
            v[1, 0, 75 - T, 8] = wild
            assert not compute_heads(q, k, v, Lowered(right=0), packed=packed)[1]
            v[1, 0, 75 - T, 8] = 0


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [
    Shape(2, 3, 3, 211, 211, 32, 32),
    Shape(1, 8, 1, 2, 1900, 32, 32),
    Shape(1, 12, 12, 1, 200, 64, 64),  # one chunk of keys: threads share the heads
    Shape(2, 15, 5, 1, 130, 32, 48),
    Shape(1, 40, 40, 1, 600, 32, 32),
], ids=str)  # fmt: skip
def test_threads_do_not_change_a_bit(shape: Shape, dtype: torch.dtype) -> None:
    problem = cast(problem_of(shape, "causal"), dtype)
    request = everything(problem, 0, top=True, argmax=True)
    runs: list[RowStatistics] = []
    for n in (1, 2, 3):
        with threads(n):
            runs.append(described(problem, request, "native"))
    for name in (field.name for field in fields(runs[0]) if field.name != "kernel"):
        first, *others = (getattr(run, name) for run in runs)
        assert all(first is x or torch.equal(first, x) for x in others), name


TIED = {
    "full": masks.window((None, None)),
    "causal": masks.causal(),
    "window": masks.window((130, 9)),
    "lengths": masks.causal() & masks.padding([300, 170], side="left"),
    "mask": masks.as_mask(torch.rand(2, 3, 150, 300) < 0.2),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("mask_name", TIED)
@pytest.mark.parametrize("few", [1, 3, 150])
def test_ties_are_shared_by_all_keys_and_their_classes(mask_name: str, few: int) -> None:
    B, H, S, D = 2, 3, 300, 4
    # Small integers: many products are equal, and none is rounded.
    q, k = (torch.randint(-1, 2, (B, H, n, D)).float() for n in (few, S))
    classes = torch.rand(B, S, 5)  # a key is in several classes, or in none
    classes = classes.where(classes < 0.4, 0.0)
    keys = torch.randint(0, S, (B, few, 7))
    visible = TIED[mask_name].dense(150, S)[:, :, -few:]
    rule = make_rule(head_dim=D, mask=visible if mask_name == "mask" else TIED[mask_name])
    request = RowRequest(argmax=True, top=True, classes=classes, keys=keys)
    result = row_statistics(q, k, k, rule, request, backend="native")

    logits = (q @ k.mT).masked_fill(~visible, -torch.inf)
    largest = logits == logits.amax(-1, keepdim=True)
    shares = largest / largest.sum(-1, keepdim=True)
    assert (largest.sum(-1) > 1).any()
    assert torch.equal(result.argmax, largest.int().argmax(-1))
    torch.testing.assert_close(
        result.key_top, shares.gather(-1, keys[:, None].expand(B, H, few, 7))
    )
    torch.testing.assert_close(result.class_top, shares @ classes[:, None])
    visible_keys = visible.float().expand(B, H, few, S)
    torch.testing.assert_close(result.class_keys, visible_keys @ classes[:, None])


@pytest.mark.usefixtures("built")
def test_strides_of_any_kind_are_read() -> None:
    assert_strides_are_read("native")


SHARED = {
    "full": {},
    "causal": {"causal": True},
    "wide window": {"window": (230, 230)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("how", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(("n_kv_heads", "T"), [(4, 195), (2, 250)])
def test_a_copy_of_keys_that_tiles_share_changes_no_bit(
    how: dict[str, object], n_kv_heads: int, T: int
) -> None:
    """Keys with other heads between them are copied, where several tiles of queries read them."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, T, 21)
    k, v = (torch.randn(2, 260, n_kv_heads, D).transpose(1, 2) for D in (21, 13))
    arguments = {**how, "backend": "native", "need_lse": True, "need_entropy": True}
    apart = attend(q, k, v, **arguments)
    adjacent = attend(q, k.contiguous(), v.contiguous(), **arguments)
    for name in ("heads", "lse", "entropy"):
        assert torch.equal(getattr(apart, name), getattr(adjacent, name)), name


@HALVES
@pytest.mark.usefixtures("built_for_halves")
def test_a_widened_copy_of_keys_changes_no_bit(half: torch.dtype) -> None:
    """Half of the queries are too few for a copy, so each of their tiles widens the keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, 3, 40).transpose(1, 2).to(half) for T in (192, 230, 230))
    whole = attend(q, k, v, backend="native", need_lse=True)
    for rows in (slice(96), slice(96, 192)):
        part = attend(q[:, :, rows], k, v, backend="native", need_lse=True)
        assert torch.equal(part.heads, whole.heads[:, :, rows])
        assert torch.equal(part.lse, whole.lse[:, :, rows])


def _text(T: int, D: int) -> Shape:
    """Of short texts many: with large logits few rows determine the error."""
    return Shape(1 + min(2**14, 2**16 // T) // T, 8, 8, T, T, D, D)


SIZES = (1.0, 30.0, 3000.0)  # logits up to ten thousand and more
SHORT = (_text(7, 5), _text(129, 64), Shape(1, 8, 2, 1, 4099, 128, 128))
LONG = (_text(1, 64), _text(509, 61), _text(1021, 128), Shape(1, 8, 8, 1, 4099, 61, 61))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize(
    ("dtype", "size", "is_causal", "shape"),
    tiers(
        [*product(FLOATS, SIZES, [True], SHORT), *product(FLOATS[:1], SIZES, [False], SHORT[1:])],
        product(FLOATS, SIZES, [False, True], SHORT + LONG),
    ),
    ids=str,
)
def test_errors_are_at_most_twice_those_of_torch(
    dtype: torch.dtype, size: float, is_causal: bool, shape: Shape
) -> None:
    q, k, v = problem_of(shape, "full").qkv
    inputs = [x.to(dtype) for x in (q * size, k, v)]
    errors = errors_of("native", *inputs, is_causal)
    plain = dict.fromkeys(errors, 0.0)
    if dtype != torch.float32 and shape.T > 1:
        # With large logits few rows determine the error, so that rounding decides which is larger.
        found = errors_of("native", *(x.float() for x in inputs), is_causal)
        plain |= {name: ours for name, (ours, _) in found.items() if name != "heads"}
    for name, (ours, torchs) in errors.items():
        assert ours <= 2 * max(torchs, plain[name]) + 1e-7, name


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("T", "size"), [(1, 1.0), (300, 1.0), (300, 30.0)])
def test_errors_of_distances_are_at_most_twice_those_of_pytorch(T: int, size: float) -> None:
    """Of keys behind all queries of a vector, ahead of them, and on both sides."""
    q, k, v = size * torch.randn(2, 3, T, 32), torch.randn(2, 3, 700, 32), torch.empty(2, 3, 700, 0)
    at = torch.randint(1, 9, (2, 700)).cumsum(1)
    request = RowRequest(distance=True, query_at=at[:, 200 : 200 + T], key_at=at)
    for near in ((700, 700), (150, 90), (700, 0)):
        rule = make_rule(head_dim=32, near=near)
        exact = row_statistics(q.double(), k.double(), v.double(), rule, request, backend="rows")
        plain, ours = (
            row_statistics(q, k, v, rule, request, backend=name) for name in ("rows", "native")
        )
        for name in ("distance", "even_distance"):
            known = getattr(exact, name)
            error, allowed = (
                (getattr(x, name).double() - known).square().mean().sqrt() for x in (ours, plain)
            )
            assert error <= 2 * allowed + 1e-7 * known.mean(), name


@pytest.mark.full
def test_errors_stay_small_in_a_long_text() -> None:
    q, k, v = (torch.randn(1, 1, 65_537, 16) for _ in range(3))
    rule, request = make_rule(head_dim=16, is_causal=True), RowRequest(heads=True)
    ours = row_statistics(q, k, v, rule, request, backend="native")
    last = (q[:, :, -99:], k, v)
    plain = row_statistics(*last, rule, request, backend="rows")
    exact = row_statistics(*(x.double() for x in last), rule, request, backend="rows")
    for name in ("heads", "lse", "entropy"):
        errors = [
            (getattr(output, name)[:, :, -99:] - getattr(exact, name)).abs().max()
            for output in (ours, plain)
        ]
        assert errors[0] <= 2 * errors[1] + 1e-7, name


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own error under vmap
def test_transforms_use_the_kernel_of_pytorch_and_maps_the_native_one() -> None:
    q, k, v = (torch.randn(2, 2, 370, 16) for _ in range(3))  # long enough for the native kernel
    backends = []

    def heads(q: Tensor, k: Tensor) -> Tensor:
        found = attend(q, k, v, need_lse=True)
        backends.append(found.backend)
        return found.heads

    known = heads(q, k)
    with torch.autograd.forward_ad.dual_level():
        heads(q, k)
    torch.func.grad(lambda q: heads(q, k).sum())(q)
    mapped = torch.func.vmap(heads, in_dims=(0, None))(torch.stack([q, -q]), k)
    torch.testing.assert_close(mapped, torch.stack([known, heads(-q, k)]), rtol=1e-5, atol=1e-6)
    assert backends == ["native", "fused", "fused", "native", "native"]


def test_large_masks_of_unknown_rules_use_blocks_of_rows() -> None:
    q = torch.zeros(1, 1, 4096, 4)
    rule = make_rule(head_dim=4, mask=~masks.causal())  # each query sees later keys
    result = row_statistics(q, q, q, rule, RowRequest(entropy=False))
    assert result.kernel == "blocks of rows"
    assert result.n_keys[0, 0, 4095] == 0
    assert result.n_keys[0, 0, 7] == 4096 - 8


@pytest.mark.parametrize("T", [2**31 - 2**10 - 5, 2**31, 2**32 + 3])
def test_lengths_beyond_the_counter_of_a_lane_are_refused(T: int) -> None:
    with pytest.raises(ValueError, match=f"{T} queries and 6 keys"):
        check_counts((1, 1, T, 4), (1, 1, 6, 4), (1, 1, 6, 4))
    check_counts((2, 3, MOST_TOKENS - 6, 64), (2, 3, 6, 64), (2, 3, 6, 64))
    with pytest.raises(ValueError, match="too large to be counted"):
        check_counts((2**30, 2**30, 1, 1), (2**30, 1, 6, 1), (2**30, 1, 6, 1))


@pytest.mark.parametrize("steps", [2**31 - 1, 2**31, 2**32 + 8])
def test_array_sizes_are_64_bit(steps: int) -> None:
    assert reach((3, 2, 5, 4), (steps, 20, 4, 1)) == 2 * steps + 20 + 16 + 3 + 1
    assert reach((2**31, 0, 5, 4), (steps, 20, 4, 1)) == 0


LOADED = """
import torch
from headwise.kernels import attend
q = torch.randn(1, 4, 300, 8)
torch.mm(q[0, 0], q[0, 0].T)
assert attend(q, q, q, backend="native", need_lse=True).backend == "native"
maps = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}))
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_there_is_one_pool_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "1\n")


FORKED = """
import os, signal, torch
from headwise.kernels import attend
torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 32)
heads = attend(q, q, q, backend="native")
child = os.fork()
if not child:
    signal.alarm(20)  # who waits for lost threads is ended
    found = attend(q, q, q, backend="native").numpy()  # torch itself would wait
    os._exit(0 if (found == heads.numpy()).all() else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_computes_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "0\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("switch", "why"),
    [("0", "switched off by HEADWISE_NATIVE=0"), ("sse", "HEADWISE_NATIVE=sse is not one of 0")],
)
def test_without_the_native_kernel_everything_works_with_a_reason(switch: str, why: str) -> None:
    program = (
        "import torch; from headwise.kernels import *; q = torch.randn(1, 8, 400, 8)\n"
        "rows = row_statistics(q, q, q, make_rule(head_dim=8), RowRequest())\n"
        "print(rows.kernel, attend(q, q, q, need_lse=True).backend, sep=', ')"
    )
    environment = os.environ | {_native_library.SWITCH: switch}
    run = {"capture_output": True, "text": True, "env": environment}
    done = subprocess.run([sys.executable, "-c", program], **run)
    assert (done.stderr, done.stdout) == ("", "blocks of rows, fused\n")
    printed = subprocess.run([sys.executable, "-m", "headwise", "--version"], **run).stdout
    assert f"native kernel: none ({why}" in printed


def test_an_unusable_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / f"{SETS[0]}.so"
    copied.write_text("no library")
    assert "cannot be loaded" in open_library(copied).why
    monkeypatch.setattr(_native_library, "INTERFACE", -1)
    assert "built from other sources" in open_library(Path(library().functions._name)).why
    monkeypatch.delenv(_native_library.SWITCH, raising=False)
    monkeypatch.setattr(_native_library, "BUILT", tmp_path / "nothing")
    assert "none was built" in library.__wrapped__().why
    monkeypatch.setenv(_native_library.SWITCH, "neon")
    assert "neon was not built" in library.__wrapped__().why
    monkeypatch.setenv(_native_library.SWITCH, "\udcff.so")  # a byte that is not UTF-8
    assert "cannot be loaded" in library.__wrapped__().why


def test_the_choice_of_the_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(library().functions._name)
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv(_native_library.SWITCH, path.name)
    assert library.__wrapped__().why == f"asked for by HEADWISE_NATIVE={path.name}"
    monkeypatch.delenv(_native_library.SWITCH)
    if _native_library.BUILT.is_dir():
        assert library.__wrapped__().why == "the fastest that was built for this processor"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is but one build")
def test_a_slower_build_for_more_instructions_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intel's processors multiply pairs of bfloat16 more slowly than floats."""
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text("utf-8")
    built = {name: open_library(BUILT / f"{name}.so") for name in SETS}
    runs = [name for name, opened in built.items() if opened]
    outrun = [name for name in runs if built[name].is_outrun]
    assert outrun == [name for name in runs if name == "avx512bf16" and is_intel]
    monkeypatch.delenv(_native_library.SWITCH, raising=False)
    monkeypatch.setattr(_native_library, "BUILT", tmp_path)
    (tmp_path / f"{SETS[0]}.so").write_text("no library")
    copied = set[str]()
    for name in (*outrun, *(name for name in runs if name not in outrun)):
        shutil.copy(BUILT / f"{name}.so", tmp_path)
        copied.add(name)
        best = next((n for n in runs if n in copied and n not in outrun), name)
        assert library.__wrapped__().name == best


@pytest.mark.parametrize("lowest", [-1e28, -1e30, -0.7 * torch.finfo(torch.float32).max])
@pytest.mark.parametrize("backend", ["native", "rows", "fused"])
def test_an_added_mask_may_hold_the_lowest_numbers(backend: str, lowest: float) -> None:
    """Masks may hold such numbers: a row of nothing else is uniform on every kernel."""
    added = torch.zeros(5, 7)
    added[:, 3:] = lowest
    added[2] = lowest
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 3)
    output = attend(q, k, v, mask=added, causal=True, need_lse=True, backend=backend)
    expected = attend(q, k, v, mask=added == 0, causal=True, backend=backend)
    torch.testing.assert_close(output.heads[:, :, [0, 1, 3, 4]], expected[:, :, [0, 1, 3, 4]])
    torch.testing.assert_close(output.heads[:, :, 2], v[:, :, :5].mean(-2))
    assert output.lse.isfinite().all()


@pytest.mark.usefixtures("built")
def test_both_sides_of_the_interface_have_the_same_fields() -> None:
    layout = layout_of(library().functions)
    assert layout == LAYOUT
    assert list(layout) == [name for name, *_ in _native_library.Problem._fields_]
    assert sum(size for _, size in layout.values()) == ctypes.sizeof(_native_library.Problem)


@pytest.mark.parametrize(("first", "second"), [("q", "k"), ("lse", "max_logit"), ("dk", "dv")])
def test_a_library_whose_fields_are_swapped_is_not_loaded(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = BUILT / f"{library().name}.so"
    assert open_library(path)
    swapped = LAYOUT | {first: LAYOUT[second], second: LAYOUT[first]}
    monkeypatch.setattr(_native_library, "LAYOUT", swapped)
    assert "built from other sources" in open_library(path).why


# bfloat16 of whole AMX tiles, in every build: on a processor with AMX its own is among them.


def _tiled(T: int, D: int, Dv: int, n_kv_heads: int = 2) -> list[Tensor]:
    """Queries, keys and values of two texts, heads next to one another, as models have them."""
    torch.manual_seed(T + D)
    sizes = ((T, 4, D), (300, n_kv_heads, D), (300, n_kv_heads, Dv))
    return [torch.randn(2, n, H, width).to(torch.bfloat16).transpose(1, 2) for n, H, width in sizes]


@pytest.mark.usefixtures("built_for_halves")
def test_any_number_of_threads_and_a_part_of_the_queries_give_the_same_bits() -> None:
    """One thread copies keys and values; of many, and for few queries, each packs its own."""
    q, k, v = _tiled(300, 64, 64)
    options: dict[str, Any] = {"backend": "native", "need_lse": True}
    with threads(1):
        known = attend(q, k, v, **options)
        part = attend(q[:, :, 48:96], k, v, **options)
    with threads(7):
        many = attend(q, k, v, **options)
    for name in ("heads", "lse"):
        assert torch.equal(getattr(many, name), getattr(known, name))
        assert torch.equal(getattr(part, name), getattr(known, name)[:, :, 48:96])


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("wild", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(TILES[0], torch.bfloat16), (Shape(2, 6, 3, 1, 600, 16, 16), torch.float32)],
)
def test_hidden_numbers_change_nothing_and_nan_stays_in_its_group(
    shape: Shape, dtype: torch.dtype, wild: float
) -> None:
    q, k, v = (x.to(dtype) for x in problem_of(shape, "full").qkv)
    mask, group = masks.padding([200, 33]), slice(shape.H // shape.Hkv, 2 * shape.H // shape.Hkv)
    options: dict[str, Any] = {"mask": mask, "backend": "native", "need_lse": True}
    known = attend(q, k, v, **options)
    k[0, :, 200:], v[1, :, 33:] = wild, wild
    found = attend(q, k, v, **options)
    assert torch.equal(found.heads, known.heads)
    assert torch.equal(found.lse, known.lse)
    k[0, 1, 17] = torch.nan
    spoilt = attend(q, k, v, **options).heads
    assert spoilt[0, group].isnan().all()
    spoilt[0, group] = known.heads[0, group]
    assert torch.equal(spoilt, known.heads)


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("rule", ["full", "causal", "window", "scale", "softcap"])
def test_gradients_equal_those_of_the_definition(rule: str) -> None:
    inputs = [x.detach().requires_grad_() for x in _tiled(300, 64, 32)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    options = RULES[rule](Shape(2, 4, 2, 300, 300, 64, 32))
    grad = torch.randn(2, 4, 300, 32).to(torch.bfloat16)
    ours = attend(*inputs, **options, backend="native")
    exact = attend(*wide, **options, backend="rows")
    ours.backward(grad)
    exact.backward(grad.double())
    for x, y in zip(inputs, wide, strict=True):
        error = (x.grad.double() - y.grad).norm() / y.grad.norm()  # type: ignore[union-attr]
        assert error < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.usefixtures("built_for_halves")
def test_a_query_that_sees_one_key_has_no_gradient() -> None:
    """Weights are recomputed from the same logits to the last bit, however large these are."""
    q, k, v = (x.detach() for x in _tiled(300, 64, 64, n_kv_heads=4))
    q = (100 * q).requires_grad_()
    attend(q, k, v, window=(0, 0), backend="native").float().sum().backward()
    assert q.grad is not None
    assert not q.grad.any()
