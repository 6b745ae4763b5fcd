"""Row statistics from vLLM's pages equal those of the same keys side by side."""

import ctypes
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise._native_library import Library, library
from headwise.errors import UnsupportedError
from headwise.kernels import (
    AttentionProblem,
    RowRequest,
    RowStatistics,
    attend_by_rule,
    make_rule,
    row_statistics,
)
from headwise.kernels.pages import (
    STATISTICS,
    PageLayer,
    add_rows,
    answer_prompt,
    empty_sums,
    make_step,
    open_layer,
    prompt_request,
)
from strategies import seeds

pytestmark = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")

CLOSE = 1e-5
# The end of each request, and how many of its last positions are queries of this step.
LENGTHS, QUERIES = (1, 67, 301, 40), (1, 67, 37, 1)
REGIONS = [(0, 3), (30, 70), (5, 5), (0, 0)]  # the spans of each request


def packed(keys: Tensor, isa: str) -> Tensor:
    """The keys `[..., page, D]` of pages as vLLM stores them."""
    *before, page, D = keys.shape
    if isa == "amx":
        by_group = keys.reshape(*before, page // 16, 16, D // 2, 2)
        return by_group.transpose(-2, -3).reshape(*before, page, D)
    return keys.transpose(-1, -2).reshape(*before, page, D)


class Served(NamedTuple):
    """Requests in a cache, and the rows of a step."""

    cache: Tensor
    table: Tensor
    query: Tensor
    keys: list[Tensor]  # [Hkv, S, D] of each request
    groups: list[tuple[int, int, int]]  # first row, one past the last row, request
    rows: np.ndarray


def served(
    isa: str, dtype: torch.dtype, H: int = 6, Hkv: int = 2, D: int = 32, page: int = 32,
    every: int = 1, seed: int = 0,
) -> Served:  # fmt: skip
    """Requests whose blocks are scattered; the third shares its first block with the second."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in LENGTHS]
    blocks = iter(torch.randperm(sum(counts) + 3, generator=rng).tolist())
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([next(blocks) for _ in range(count)])
    table[2, 0] = table[1, 0]
    stored = torch.randn(sum(counts) + 3, Hkv, page, D, generator=rng).to(dtype)
    keys = [
        stored[table[request, : counts[request]].long()].transpose(0, 1).flatten(1, 2)[:, :length]
        for request, length in enumerate(LENGTHS)
    ]
    # What a page holds behind its last key, and all values, must not matter.
    for request in (0, 2, 3):  # not the shared block
        stored[table[request, counts[request] - 1], :, LENGTHS[request] % page or page :] = (
            torch.nan
        )
    cache = torch.full((len(stored), Hkv, page, 2 * D), torch.nan, dtype=dtype)
    cache.view(len(stored), Hkv, 2 * page, D)[:, :, :page] = packed(stored, isa)
    query = 2 * torch.randn(sum(QUERIES), H, 2 * D, generator=rng).to(dtype)[..., :D]
    groups, rows, token = [], [], 0
    for request, (length, n) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        counted = [i for i in range(length - n, length) if i % every == 0 or i == length - 1]
        first, begin = len(rows), length - n
        rows += [(token + i - begin, i) for i in counted]
        groups.append((first, len(rows), request))
        token += n
    return Served(cache, table, query, keys, groups, np.array(rows, np.int64))


def opened(
    isa: str, cache: Tensor, H: int, window: int = -1, softcap: float = 0.0, first_head: int = 0
) -> PageLayer:
    impl = SimpleNamespace(scale=0.3, logits_soft_cap=softcap, sliding_window=window)
    fields = {"layer_name": "layers.0", "isa": isa, "num_heads": H, "kv_cache": cache}
    layer = open_layer(SimpleNamespace(impl=impl, **fields))
    layer.first_head = first_head
    return layer


def add(layer: PageLayer, served: Served, sums: np.ndarray, part: slice = slice(None)) -> None:
    groups = [
        (*group, request_sums.ctypes.data, *np.ravel(REGIONS))
        for group, request_sums in zip(served.groups, sums, strict=True)
    ]
    step = make_step(np.array(groups[part], np.int64), served.rows)
    add_rows(layer, step, served.table, served.query)


def summed(isa: str, served: Served, **how: Any) -> np.ndarray:
    """The sums of each request, of the second of two layers."""
    H = served.query.shape[1]
    sums = empty_sums(len(LENGTHS), 3 + H)
    add(opened(isa, served.cache, H, first_head=3, **how), served, sums)
    np.testing.assert_array_equal(sums[:, :3], empty_sums(len(LENGTHS), 3))
    return sums[:, 3:]


def known(served: Served, dtype: torch.dtype, window: int = 0, softcap: float = 0.0) -> np.ndarray:
    """The same by the project's row statistics, over keys side by side."""
    sums = empty_sums(len(LENGTHS), served.query.shape[1])
    rule = make_rule(
        head_dim=served.query.shape[2], is_causal=True, near=(window - 1, 0) if window else None,
        softcap=softcap or None, scale=0.3,
    )  # fmt: skip
    token = 0
    for (first, stop, request), n in zip(served.groups, QUERIES, strict=True):
        k = served.keys[request].to(dtype)[None]
        q = served.query[token : token + n].to(dtype).movedim(0, 1)[None]
        token += n
        S = k.shape[2]
        at, keys = torch.arange(S - n, S), torch.arange(S)
        single = torch.stack([torch.zeros_like(at), at, at - 1], -1)
        inside = torch.stack([(keys >= a) & (keys < b) for a, b in REGIONS], -1)
        request_ = RowRequest(distance=True, keys=single[None], classes=inside[None].to(dtype))
        rows = row_statistics(q, k, k, rule, request_, backend="rows")
        chosen = served.rows[first:stop, 1] - (S - n)
        _add(sums[request], rows, chosen, served.rows[first:stop, 1], window or S)
    return sums


def _add(
    sums: np.ndarray, rows: RowStatistics, chosen: np.ndarray, i: np.ndarray, window: int
) -> None:
    start = np.maximum(0, i + 1 - window)
    n_keys = i + 1.0 - start
    always, several = np.full(len(i), True), n_keys > 1
    single = dict(zip(("first", "self", "previous"), rows.key_mass.unbind(-1), strict=True))
    values = vars(rows) | single
    counts = dict.fromkeys(STATISTICS, several) | {"max_logit": always, "lse": always}
    counts["first"] = several & (start == 0)
    even = dict.fromkeys(STATISTICS, 1 / n_keys) | {"entropy": np.log(n_keys)}
    even |= {"distance": (n_keys - 1) / 2, "max_logit": n_keys * np.nan, "lse": n_keys * np.nan}
    for c, (a, b) in enumerate(REGIONS):
        seen = np.maximum(0, np.minimum(b, i + 1) - np.maximum(a, start))
        values[f"span {c}"] = rows.class_mass[..., c]
        counts[f"span {c}"], even[f"span {c}"] = several & (seen > 0), seen / n_keys
    for k, name in enumerate(counts):
        rows_of = counts[name]
        x = values[name][0].double().numpy()[:, chosen[rows_of]]
        of_rows = x.sum(1), rows_of.sum(), even[name][rows_of].sum()
        for part, value in enumerate((*of_rows, np.fmax.reduce(x, 1, initial=np.nan))):
            sums[:, k, part] = value


def assert_equal(ours: np.ndarray, expected: np.ndarray, close: float = CLOSE) -> None:
    np.testing.assert_array_equal(ours[..., 1], expected[..., 1])
    np.testing.assert_allclose(ours[..., 2], expected[..., 2], rtol=1e-12, atol=1e-12)
    rows = np.maximum(1, ours[..., 1])
    means, known_means = ours[..., 0] / rows, expected[..., 0] / rows
    np.testing.assert_allclose(means, known_means, rtol=close, atol=close)
    np.testing.assert_allclose(ours[..., 3], expected[..., 3], rtol=close, atol=close)


RULES: dict[str, dict[str, Any]] = {
    "all": {}, "window": {"window": 33}, "one key": {"window": 1}, "softcap": {"softcap": 1.5},
}  # fmt: skip


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("how", RULES.values(), ids=list(RULES))
def test_rows_over_pages_are_those_over_keys_side_by_side(how: dict[str, Any]) -> None:
    here = served("vec", torch.float32)
    assert_equal(summed("vec", here, **how), known(here, torch.float64, **how))


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_bfloat16_is_as_near_as_plain_pytorch(isa: str) -> None:
    here = served(isa, torch.bfloat16, D=64, page=96)
    ours, exact = summed(isa, here), known(here, torch.float64)
    # Queries and keys are in bfloat16, and their products are added up in float32 all the same.
    assert_equal(ours, exact)


@given(
    sizes=st.sampled_from([(1, 1, 2, 32), (7, 1, 46, 64), (33, 3, 10, 32), (5, 5, 96, 160)]),
    every=st.integers(1, 19),
    seed=seeds,
)
def test_every_size_and_every_nth_position(
    sizes: tuple[int, int, int, int], every: int, seed: int
) -> None:
    H, Hkv, D, page = sizes
    here = served("vec", torch.float32, H, Hkv, D, page, every, seed)
    assert_equal(summed("vec", here), known(here, torch.float64))


@pytest.mark.usefixtures("built_for_halves")
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_no_bit_depends_on_the_number_of_threads(isa: str) -> None:
    here, n = served(isa, torch.bfloat16, H=12), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(summed(isa, here))
    finally:
        torch.set_num_threads(n)
    np.testing.assert_array_equal(*results)


def test_rows_add_up_over_steps() -> None:
    here = served("vec", torch.float32)
    layer, sums = opened("vec", here.cache, 6), empty_sums(len(LENGTHS), 6)
    for half in (slice(None, 2), slice(2, None)):
        add(layer, here, sums, half)
    np.testing.assert_array_equal(sums, summed("vec", here))


def test_a_query_that_is_not_a_number_is_not_hidden() -> None:
    here = served("vec", torch.float32)
    here.query[3] = torch.nan
    sums = summed("vec", here)
    assert np.isnan(sums[1, ..., 0]).any(-1).all()
    assert np.isfinite(sums[[0, 2, 3], ..., 0]).all()


@pytest.mark.parametrize("how", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("every", [1, 5])
def test_a_prompt_is_answered_in_the_pass_that_describes_it(
    how: dict[str, Any], every: int
) -> None:
    here = served("vec", torch.float32, every=every)
    q, k = here.query[1:68], here.keys[1].movedim(0, 1)
    rule = make_rule(
        head_dim=32, is_causal=True, scale=0.3, softcap=how.get("softcap"),
        near=(how["window"] - 1, 0) if "window" in how else None,
    )  # fmt: skip
    first, stop, _ = here.groups[1]
    sums, output = empty_sums(6), torch.empty(67, 6 * 32)
    spans = np.ravel(REGIONS).tolist()
    request = prompt_request(67, spans)
    answer_prompt(rule, request, q, k, k, output, here.rows[first:stop, 1], sums)
    assert_equal(sums, known(here, torch.float64, **how)[1])
    problem = AttentionProblem(*(x.transpose(0, 1)[None] for x in (q, k, k)), rule)
    heads = attend_by_rule(problem, "rows")
    assert isinstance(heads, Tensor)
    torch.testing.assert_close(output.view(67, 6, 32), heads[0].transpose(0, 1))


REFUSED: dict[str, tuple[str, torch.dtype, tuple[int, ...], str]] = {
    "layout": ("neon", torch.float32, (2, 2, 32, 64), "layout 'neon'. Those of vec, vec16, amx"),
    "dtype": ("amx", torch.float32, (2, 2, 32, 64), "Read are torch.bfloat16"),
    "half": ("vec", torch.float16, (2, 2, 32, 64), "Read are torch.float32, torch.bfloat16"),
    "page": ("vec", torch.float32, (2, 2, 16, 64), "pages of 16 keys"),
    "width": ("amx", torch.bfloat16, (2, 2, 32, 96), "keys of 48 numbers"),
}


@pytest.mark.parametrize(("isa", "dtype", "shape", "says"), REFUSED.values(), ids=list(REFUSED))
def test_unknown_pages_are_refused_by_name(
    isa: str, dtype: torch.dtype, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"layers\.0: .*{says}"):
        opened(isa, torch.zeros(shape, dtype=dtype), 2)


def test_a_library_that_is_missing_or_too_old_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = torch.zeros(2, 2, 32, 64)
    for here, says in (
        (Library("avx2", "built", ctypes.CDLL(None)), "the native kernel avx2 is too old"),
        (Library("none", "there is no compiler"), "layers.0: there is no compiler"),
    ):
        monkeypatch.setattr("headwise.kernels.pages.library", lambda here=here: here)
        with pytest.raises(UnsupportedError, match=says):
            opened("vec", cache, 2)
