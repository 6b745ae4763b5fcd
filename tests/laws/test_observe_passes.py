"""Many passes in one watch: each counts as it would alone, whatever the ones before it."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, StaticCache

from folders import tiny_bert, tiny_llama
from headwise import masks
from headwise.capture import AttentionCall, _interface
from headwise.errors import ArgumentError, UnsupportedError
from headwise.layer import KVCache, MultiHeadAttention
from headwise.models import cache_argument
from headwise.tables import COLUMNS, HeadTable
from headwise.watch import Request, Watch, _accumulator, _queue, observe
from oracles import assert_tables_close, modules_of, padded
from tiers import crossed

Batch = dict[str, Tensor]
TEXTS = [[5, 9, 7, 3, 11], [4, 6, 12], [2, 8, 10, 3, 1, 7, 6]]
REQUEST = Request(
    classes={"odd": {1, 3, 5, 7, 9, 11}},
    relations={"even": lambda ids: [(q, q) for q, token in enumerate(ids) if token % 2 == 0]},
    top=("first",),
    value=("previous",),
    per_text=True,
)


def _bert() -> Any:
    sizes = {"hidden_size": 12, "intermediate_size": 16, "max_position_embeddings": 32}
    return tiny_bert(**sizes, attn_implementation="sdpa")


def _llama() -> Any:
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return tiny_llama(attn_implementation="sdpa", **tokens)


def _batches() -> Iterator[Batch]:
    """Batches of several sizes, of which some have the same form but other texts or padding."""
    for side in ("right", "left"):
        for texts in (TEXTS[:2], [TEXTS[2]], TEXTS[:2], TEXTS[::-1], [[1, *TEXTS[2][1:]]], TEXTS):
            batch = padded(texts, side)
            yield {name: batch[name] for name in ("input_ids", "attention_mask")}
    yield {"input_ids": torch.tensor(TEXTS[:1])}
    yield {"input_ids": torch.tensor([TEXTS[0][::-1]])}


def _alone(model: Any, batches: list[Batch], request: Request) -> HeadTable:
    """The table of each batch in a watch of its own, added up."""
    tables = []
    for batch in batches:
        with torch.no_grad(), observe(model, request) as watch:
            model(**batch)
        tables.append(watch.table())
    return sum(tables[1:], tables[0])


REQUESTS = {"default": Request(), "of texts": REQUEST}
WAYS = REQUESTS, (_bert, _llama), (torch.no_grad, torch.inference_mode)


@pytest.mark.parametrize(("asked", "make", "mode"), crossed(*WAYS))
def test_passes_count_as_they_would_alone(
    asked: str, make: Callable[[], Any], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    torch.manual_seed(0)
    model, batches, request = make(), list(_batches()), REQUESTS[asked]
    with mode(), observe(model, request) as watch:
        for batch in batches:
            model(**batch)
    assert_tables_close(watch.table(), _alone(model, batches, request))


@pytest.mark.full
def test_a_watch_of_many_passes_holds_no_more_memory() -> None:
    model, batch, held = _bert(), padded(TEXTS, "right"), []
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tracemalloc.start()
    with torch.no_grad(), observe(model) as watch:
        for passes in (5, 25):
            for _ in range(passes):
                model(**batch)
            watch.table()
            gc.collect()
            held.append((tracemalloc.get_traced_memory()[0], _n_tensors()))
    tracemalloc.stop()
    assert held[1][0] < held[0][0] + 10_000
    assert held[1][1] <= held[0][1]


def _n_tensors() -> int:
    # By type: isinstance would ask torch.distributed for what it has deprecated.
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def test_a_mask_that_is_changed_in_place_is_another_one() -> None:
    model, ids = _bert(), torch.tensor(TEXTS[2:] * 2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), observe(model) as watch:
            real = torch.ones(2, 7, dtype=torch.bool)
            seen = []
            for length in (7, 7, 5, 5, 3):
                real[1, length:] = False
                model(input_ids=ids, attention_mask=real)
                seen.append({"input_ids": ids, "attention_mask": real.clone()})
        assert_tables_close(watch.table(), _alone(model, seen, Request()))


@pytest.mark.parametrize("together", [1, 5])
def test_calls_add_up_to_the_same_in_any_groups(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, prompt = _llama(), padded(TEXTS, "left")
    request = Request(per_text=True, top=("self",))
    prompt = {name: prompt[name] for name in ("input_ids", "attention_mask")}

    def generate() -> HeadTable:
        with torch.no_grad(), observe(model, request) as watch:
            for _ in range(2):
                model.generate(**prompt, max_new_tokens=9, do_sample=False)
                model(**prompt)
        return watch.table()

    expected = generate()
    monkeypatch.setattr(_accumulator, "_MOST", together)
    table = generate()
    assert_tables_close(table, expected)
    for name in table.statistics:
        mine, theirs = (x.totals[name].per_text for x in (table, expected))
        assert mine is not None
        assert theirs is not None
        np.testing.assert_allclose(mine.total, theirs.total, rtol=1e-6, atol=1e-9, err_msg=name)


# The numbers of a call that waits: none does, and each of them does.
_NONE, _ALL = 0, 1 << 18


def _table_of(
    model: Any, batches: list[Batch], monkeypatch: pytest.MonkeyPatch, most: int
) -> HeadTable:
    monkeypatch.setattr(_queue, "LONG", {"cpu": most})
    with observe(model, Request(per_text=True)) as watch:
        for number, batch in enumerate(batches):
            model(**batch)
            if number == len(batches) // 2:
                watch.table()  # the sums go on
    return watch.table()


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (_bert, torch.float32),
        (_llama, torch.bfloat16),
        # A window in one of two layers, and queries and keys that are parts of one tensor.
        (partial(zoo.make, "Gemma3"), torch.float32),
        (partial(zoo.make, "GPT2"), torch.bfloat16),
    ],
)
def test_short_calls_count_as_others_do(
    make: Callable[[], Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of several lengths, masks and paddings by turns, more of them than may wait."""
    model, batches = make().to(dtype), [*_batches()] * 2
    expected = _table_of(model, batches, monkeypatch, _NONE)
    for held in (5000, 0):  # several calls together, or each at once
        monkeypatch.setattr(_queue, "WAIT", {"cpu": held})
        table = _table_of(model, batches, monkeypatch, _ALL)
        assert_tables_close(table, expected, rtol=1e-12)


@torch.no_grad()
def test_short_calls_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above compares two ways only if both are taken."""
    heads: list[int] = []
    compute = _queue.row_statistics

    def counted(q: Tensor, *others: Any) -> Any:
        heads.append(q.shape[1])
        return compute(q, *others)

    monkeypatch.setattr(_queue, "row_statistics", counted)
    model, batch = _bert(), {"input_ids": torch.tensor(TEXTS[:1])}
    with observe(model) as watch:
        for _ in range(5):
            model(**batch)
        watch.table()
        model(**batch)
        watch.table()
    assert heads == [4 * 2 * 4, 4 * 2]  # the first pass is verified call by call


@pytest.mark.parametrize(("differ", "described"), [("no", 2), ("mask", 3), ("scale", 3)])
@torch.no_grad()
def test_a_call_is_described_unless_one_of_its_pass_is_alike(
    differ: str, described: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer of a pass repeats the first, unless it has another scale, or its mask was
    changed in place."""
    model, ids = _llama(), torch.tensor(TEXTS[2:])
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    second.scaling = first.scaling * (2 if differ == "scale" else 1)
    for module, hidden in ((first, False), (second, True)) if differ == "mask" else ():

        def hide(*_: Any, hidden: bool = hidden) -> None:
            mask[..., 2:, 1] = not hidden

        module.register_forward_pre_hook(hide)
    calls = [0]
    describe = _interface._describe

    def counted(*args: Any) -> AttentionCall:
        calls[0] += 1
        return describe(*args)

    monkeypatch.setattr(_interface, "_describe", counted)
    batches = [{"input_ids": ids, "attention_mask": mask}] * 3
    table = _table_of(model, batches, monkeypatch, _ALL)
    repeated, calls[0] = calls[0], 0
    expected = _table_of(model, batches, monkeypatch, _NONE)
    assert_tables_close(table, expected, rtol=1e-12)
    # Both layers in the first pass, which is verified; then one, or both, in two passes.
    assert (repeated, calls[0]) == (2 + 2 * (described - 1), 6)


@torch.no_grad()
def test_an_interrupted_call_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupt leaves in the queue without counting it changes no other call."""
    model, batches = _bert(), [*_batches()][:4]
    wait, calls = _queue.Queue.wait, iter(range(1, 100))  # the first pass does not wait

    def interrupted(*args: Any) -> None:
        if next(calls) == 2:  # the second layer of the second pass
            raise KeyboardInterrupt
        wait(*args)

    with observe(model, Request(per_text=True)) as watch:
        with monkeypatch.context() as patch:
            patch.setattr(_queue.Queue, "wait", interrupted)
            for batch in batches[:2]:
                with suppress(KeyboardInterrupt):
                    model(**batch)
        for batch in batches[2:]:
            model(**batch)
    table = watch.table()
    expected = _alone(model, batches, Request(per_text=True))
    layer = slice(0, 4)  # the first layer was not interrupted
    for name in table.statistics:
        np.testing.assert_allclose(table.mean(name)[layer], expected.mean(name)[layer], rtol=1e-6)
    np.testing.assert_array_less(table.count("lse")[4:], expected.count("lse")[4:])


FAILING = {
    "default": Request(),
    "all": Request(classes={"odd": {3, 5, 7}}, per_text=True, maps=True, received=True),
    "spans": Request(spans=("doc",), per_query=True),
}


@pytest.mark.parametrize("calls", [1, 256])
@pytest.mark.parametrize("kind", FAILING)
def test_a_pass_that_ends_in_an_exception_counts_nowhere(
    kind: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has attended, and the caller goes on: as if the pass had not been."""
    monkeypatch.setattr(_accumulator, "_MOST", calls)
    if calls == 1:
        monkeypatch.setattr(_queue, "WAIT", {"cpu": 0})
    model, ids = _llama(), torch.tensor(TEXTS[2:])
    layer = model.model.layers[1]
    inner = layer.forward

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    def read(fails: bool) -> Any:
        def run(part: Tensor, cache: Any) -> None:
            begins, name = not cache.get_seq_length(), str(cache_argument(model))
            for layer.forward in [fail, inner] if fails else [inner]:
                if kind == "spans" and begins:
                    watch.spans(doc=[(1, 3)])
                with suppress(RuntimeError):
                    model(part, **{name: deepcopy(cache) if layer.forward is fail else cache})

        with torch.no_grad(), observe(model, FAILING[kind]) as watch:
            run(ids[:, 1:], transformers.DynamicCache())
            cache = transformers.DynamicCache()
            for part in ids.split([3, 1, 1, 1, 1], 1):
                run(part, cache)
        return watch

    watch, known = read(True), read(False)
    assert_tables_close(watch.table(), known.table())
    np.testing.assert_array_equal(watch.table().covered, known.table().covered)
    assert [site.coverage for site in watch.sites()] == [site.coverage for site in known.sites()]
    if kind == "all":
        torch.testing.assert_close(watch.received("L0.H1"), known.received("L0.H1"))
        torch.testing.assert_close(watch.weights("L0"), known.weights("L0"))
    if kind == "spans":
        masses = [w.per_query("doc", "L0.H1") for w in (watch, known)]
        torch.testing.assert_close(*masses, equal_nan=True)


# Texts stay texts: packed into one row, decoded step by step, in any split and order.


lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
Pairs = list[tuple[int, int]]

OF_TEXTS = Request(
    statistics=(*Request().statistics, "participation", "output_norm"),
    pairs=("back",), top=("first", "back"), value=("previous", "back"),
    per_text=True, received=True,
)  # fmt: skip


def _layer(**how: object) -> MultiHeadAttention:
    torch.manual_seed(3)
    return MultiHeadAttention(12, 4, 2, **how).double().eval()


LAYER = _layer()


def _texts(sizes: Sequence[int]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, 12, generator=rng, dtype=torch.float64) for size in sizes]


def _back(size: int) -> Pairs:
    """Several keys for a query, or none."""
    return [(q, k) for q in range(size) for k in range(q + 1) if (q + k) % 3 == 1]


def _one_by_one(sizes: Sequence[int], order: Sequence[int] | None = None) -> HeadTable:
    with torch.no_grad(), observe(LAYER, OF_TEXTS) as watch:
        texts = _texts(sizes)
        for at in range(len(sizes)) if order is None else order:
            watch.pairs(back=[_back(sizes[at])])
            LAYER(texts[at][None], causal=True)
    return watch.table()


def assert_same(one: HeadTable, two: HeadTable) -> None:
    """Equal but for the order of texts."""
    assert one.statistics == two.statistics
    for name in one.statistics:
        mine, theirs = one.totals[name], two.totals[name]
        for part in COLUMNS:
            known = getattr(theirs, part)
            np.testing.assert_allclose(
                getattr(mine, part), known, rtol=1e-9, atol=1e-9, err_msg=f"{name}.{part}"
            )
        for ours, known in zip(one.per_text(name).parts, two.per_text(name).parts, strict=True):
            np.testing.assert_allclose(_ordered(ours), _ordered(known), atol=1e-9, err_msg=name)


def _ordered(texts: np.ndarray) -> np.ndarray:
    rounded = np.round(texts, 7)
    return texts[np.lexsort(rounded.T)]


@settings(max_examples=15)
@given(rows=st.lists(lengths, min_size=1, max_size=2), seed=st.integers(0, 9))
def test_packed_texts_are_texts(rows: list[list[int]], seed: int) -> None:
    width = max(map(sum, rows))
    x = torch.zeros(len(rows), width, 12, dtype=torch.float64)
    # Numbers in no order, and a row may end in padding.
    ids = torch.full((len(rows), width), -5)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    names = np.random.default_rng(seed).permutation(20)
    flat = [size for row in rows for size in row]
    texts = iter(_texts(flat))
    pairs = []
    for row, sizes in enumerate(rows):
        start, numbered = 0, names[: len(sizes)]
        for number, size in zip(numbered.tolist(), sizes, strict=True):
            at = slice(start, start + size)
            x[row, at], ids[row, at], real[row, at] = next(texts), number, True
            start += size
        pairs += map(_back, sizes)
    rule = masks.documents(ids) & masks.causal() & masks.as_mask(real[:, None, None])
    with torch.no_grad(), observe(LAYER, OF_TEXTS) as watch:
        watch.pairs(back=pairs)
        LAYER(x, mask=rule)
    assert_same(watch.table(), _one_by_one(flat))


@settings(max_examples=15)
@given(sizes=lengths, side=st.sampled_from(["left", "right"]))
def test_padding_never_counts(sizes: list[int], side: str) -> None:
    x, rule = _padded(sizes, side)
    with torch.no_grad(), observe(LAYER, OF_TEXTS) as watch:
        watch.pairs(back=[_back(size) for size in sizes])
        LAYER(x, mask=rule & masks.causal())
        received = [watch.received((0, head)) for head in range(4)]
    assert_same(watch.table(), _one_by_one(sizes))
    real = rule.dense(x.shape[1], x.shape[1])[:, 0, 0]
    for mass in received:
        assert (mass[~real] == 0).all()
        np.testing.assert_allclose(mass.sum(-1), sizes)


def _padded(sizes: Sequence[int], side: str) -> tuple[Tensor, masks.Mask]:
    width = max(sizes) + 1
    x = torch.full((len(sizes), width, 12), 99.0, dtype=torch.float64)
    for row, (size, text) in enumerate(zip(sizes, _texts(sizes), strict=True)):
        at = slice(0, size) if side == "right" else slice(width - size, width)
        x[row, at] = text
    return x, masks.padding(sizes, side)


@settings(max_examples=15)
@given(steps=st.lists(st.integers(1, 3), min_size=1, max_size=4), texts=st.integers(1, 3))
def test_decoding_goes_on_with_its_texts(steps: list[int], texts: int) -> None:
    size = sum(steps)
    x = torch.stack(_texts([size] * texts))
    with torch.no_grad(), observe(LAYER, OF_TEXTS) as watch:
        for _ in range(2):  # the second texts are others, though as long as the first
            cache = KVCache()
            for part, read in zip(x.split(steps, dim=1), np.cumsum(steps), strict=True):
                watch.pairs(back=[_back(int(read))] * texts)
                LAYER(part, causal=True, cache=cache)
            x = x.flip(0)
        received = watch.received((0, 3))
    with torch.no_grad(), observe(LAYER, OF_TEXTS) as whole:
        for _ in range(2):
            whole.pairs(back=[_back(size)] * texts)
            LAYER(x, causal=True)
    assert_same(watch.table(), whole.table())
    torch.testing.assert_close(received.flip(0), whole.received((0, 3)))


def test_every_nth_micro_batch_is_counted_once_whole_and_has_pairs() -> None:
    request = Request(statistics=("lse",), pairs=("back",))
    with observe(LAYER, request, every=2) as watch:
        for text in _texts([5, 3, 4, 6, 2]):  # gradients accumulate over five passes
            watch.pairs(back=[[(1, 0)]])
            LAYER(text[None], causal=True).sum().backward()
    LAYER.zero_grad()
    assert watch.table().count("lse").tolist() == [5 + 4 + 2] * 4
    assert watch.table().count("back").tolist() == [3] * 4


def test_pairs_of_one_text_are_nan_across_texts() -> None:
    with torch.no_grad(), observe(LAYER, OF_TEXTS) as watch:
        watch.pairs(back=[[(1, 0)]])
        LAYER(*(text[None] for text in _texts([5, 3])))
    table = watch.table()
    for name in ("back", "top(back)", "value(back)", "value(previous)"):
        assert np.isnan(table.mean(name)).all()
        assert (table.per_text(name).count == 0).all()
    assert np.isfinite(table.mean("top(first)")).all()


def _maps(watch: Watch) -> Tensor:
    return torch.stack([watch.weights((0, head)) for head in range(4)], 1)


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_asked_of_masses_is_that_of_the_weights(causal: bool) -> None:
    request = Request(
        statistics=("participation", "output_norm"), pairs=("back",),
        top=("first", "back"), value=("previous", "back"), received=True, maps=True,
    )  # fmt: skip
    x = torch.stack(_texts([7, 7]))
    with torch.no_grad(), observe(LAYER, request) as watch:
        watch.pairs(back=[_back(7), _back(7)])
        LAYER(x, causal=causal)
        weights = _maps(watch)
        values = LAYER.v_proj(x).unflatten(-1, (2, 3)).transpose(1, 2).repeat_interleave(2, 1)
        outputs = LAYER.out_proj.weight.detach().T.unflatten(0, (4, 3))
    table = watch.table()
    alone = 1 if causal else 0  # rows at the beginning that see a single key

    def mean(values: Tensor, eligible: Tensor | None = None) -> np.ndarray:
        kept = torch.ones(7, dtype=torch.bool) if eligible is None else eligible.clone()
        kept[:alone] = False
        return values[:, :, kept].mean((0, 2)).numpy()

    pairs = torch.zeros(7, 7, dtype=torch.bool)
    pairs[tuple(torch.tensor(_back(7)).T)] = True
    previous = torch.eye(7, dtype=torch.bool).roll(-1, 1).tril()
    first = torch.zeros_like(pairs).index_fill_(1, torch.tensor(0), True)
    top = (weights == weights.amax(-1, keepdim=True)).double()
    moved = weights * (values @ outputs).norm(dim=-1)[:, :, None]
    moved = moved / moved.sum(-1, keepdim=True)
    expected = {
        "participation": mean(1 / weights.square().sum(-1)),
        "output_norm": (weights @ values @ outputs).norm(dim=-1).mean((0, 2)).numpy(),
        "back": mean((weights * pairs).sum(-1), pairs.any(-1)),
        "top(first)": mean((top * first).sum(-1)),
        "top(back)": mean((top * pairs).sum(-1), pairs.any(-1)),
        "value(previous)": mean((moved * previous).sum(-1), previous.any(-1)),
        "value(back)": mean((moved * pairs).sum(-1), pairs.any(-1)),
    }
    assert table.statistics == tuple(expected)
    for name, known in expected.items():
        np.testing.assert_allclose(table.mean(name), known, rtol=1e-9, err_msg=name)
    for head in range(4):
        torch.testing.assert_close(watch.received((0, head)), weights[:, head].sum(1))


@pytest.mark.parametrize("block", [1, 1 << 22], ids=["a row at a time", "at once"])
def test_a_close_look_is_at_the_same_weights(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.watch._maps._BLOCK", block)
    x, rule = _padded([7, 5], "left")
    with torch.no_grad(), observe(LAYER, Request(statistics=(), maps=True)) as watch:
        LAYER(x, mask=rule & masks.causal())
        known = LAYER(x, mask=rule & masks.causal(), need_weights=True).weights
    for head in range(4):
        whole = known[:, head]
        torch.testing.assert_close(watch.weights((0, head)), whole)
        torch.testing.assert_close(watch.weights((0, head), slice(-3, None)), whole[:, -3:])
        torch.testing.assert_close(watch.weights((0, head), [-1, 4, 5]), whole[:, [-1, 4, 5]])
        top = watch.top_keys((0, head), k=3, rows=slice(2, 6))
        torch.testing.assert_close(top.weights, whole[:, 2:6].topk(3).values)
        assert ((top.keys == -1) == (top.weights == 0)).all()
        found = whole[:, 2:6].gather(-1, top.keys.clamp(min=0))
        torch.testing.assert_close(found.where(top.keys >= 0, 0.0), top.weights)


def test_asking_for_everything_changes_no_bit_and_leaves_nothing() -> None:
    layer = _layer()
    before = modules_of(layer)
    x = torch.stack(_texts([5, 5])).requires_grad_()
    plain = layer(x, causal=True)
    [gradient] = torch.autograd.grad(plain.sum(), x)
    with observe(layer, OF_TEXTS) as outer, observe(layer, OF_TEXTS) as inner:
        for watch in (outer, inner):
            watch.pairs(back=[_back(5)] * 2)
        watched = layer(x, causal=True)
        assert torch.equal(watched, plain)
        assert torch.equal(torch.autograd.grad(watched.sum(), x)[0], gradient)
        assert_same(outer.table(), inner.table())
        with pytest.raises(ArgumentError, match="no pairs were given"):
            layer(x, causal=True)
    assert modules_of(layer) == before


def test_uniform_attention_has_the_values_that_even_says() -> None:
    layer = _layer()
    torch.nn.init.zeros_(layer.q_proj.weight)
    request = Request(
        statistics=("participation",), pairs=("back",), top=("back", "previous", "first")
    )
    with torch.no_grad(), observe(layer, request) as watch:
        watch.pairs(back=[_back(7)])
        layer(_texts([7])[0][None], causal=True)
    table = watch.table()
    for name in table.statistics:
        np.testing.assert_allclose(table.mean(name), table.uniform(name), err_msg=name)


@settings(max_examples=15)
@given(size=st.integers(3, 9), seed=st.integers(0, 9))
def test_a_key_that_no_query_sees_is_a_token(size: int, seed: int) -> None:
    """A sparse mask says nothing about padding; `masks.padding` and a mask of keys alone do."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, size, 12, generator=rng, dtype=torch.float64)
    sparse = torch.rand(2, 1, size, size, generator=rng) > 0.3
    sparse[:, :, :, 1], sparse[:, :, :, 0] = False, True
    sparse[:, :, 0, 2], sparse[:, :, 1, 2] = False, True  # else it would be a mask of keys alone
    real = torch.ones(2, size, dtype=torch.bool)
    real[1, -1] = False
    for mask, expected in (
        (masks.as_mask(sparse), 2 * size),
        (masks.as_mask(sparse) & masks.padding([size, size - 1]), 2 * size - 1),
        (masks.as_mask(sparse) & masks.as_mask(real[:, None, None]), 2 * size - 1),
    ):
        with torch.no_grad(), observe(LAYER, Request(queries="all")) as watch:
            LAYER(x, mask=mask)
        assert (watch.table().count("first") == expected).all()
        assert (watch.table().count("lse") == expected).all()


# Decoded tokens that wait for one another count as they would one at a time.


PROMPT = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 12, 1, 2]])
Between = Callable[[int, Any], object]


def _mistral(window: int) -> Any:
    config = _llama().config.to_dict() | {"model_type": "mistral", "sliding_window": window}
    config = transformers.MistralConfig.from_dict(config)
    return transformers.MistralForCausalLM(config).eval()


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of every call of the kernel: alone, or of several layers together."""
    queries: list[int] = []
    alone, together = AttentionCall.row_statistics, _queue.row_statistics

    def count_alone(call: AttentionCall, request: Any) -> Any:
        queries.append(call.q.shape[2])
        return alone(call, request)

    def count(q: Tensor, *others: Any) -> Any:
        queries.append(q.shape[2])
        return together(q, *others)

    monkeypatch.setattr(AttentionCall, "row_statistics", count_alone)
    monkeypatch.setattr(_queue, "row_statistics", count)
    return queries


def _table(model: Any, work: Callable[[Any], Any], request: Request, **options: Any) -> HeadTable:
    with torch.no_grad(), observe(model, request, **options) as watch:
        work(watch)
    return watch.table()


def _assert_as_alone(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    work: Callable[[Any], Any],
    request: Request | None = None,
    **options: Any,
) -> None:
    """The table is that of calls of which none waits."""
    request = request or Request(per_text=True, top=("self",))
    table = _table(model, work, request, **options)
    monkeypatch.setattr(_queue, "TOKENS", 1)
    monkeypatch.setattr(_queue, "LONG", {"cpu": 0})
    alone = _table(model, work, request, **options)
    # The kernel adds up the keys of several queries in another order, in float32.
    assert_tables_close(table, alone, rtol=1e-4, atol=1e-6)


def _decode(
    model: Any, cache: Any, n: int, prompt: Tensor = PROMPT, between: Between = lambda *_: None
) -> None:
    """Read a prompt and then `n` tokens, one at a time."""
    output = model(input_ids=prompt, cache=cache, use_cache=True)
    for step in range(n):
        between(step, cache)
        ids = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=ids, cache=cache, use_cache=True)
    between(n, cache)


@pytest.mark.parametrize(
    ("together", "mode"), [(3, torch.no_grad), (16, torch.no_grad), (16, torch.inference_mode)]
)
def test_generated_tokens_count_as_they_would_alone(
    together: int,
    mode: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    described: list[int],
) -> None:
    monkeypatch.setattr(_queue, "TOKENS", together)
    model = _llama()

    def work(_: Any) -> None:
        with mode():
            for n in (19, 4):
                model.generate(PROMPT, max_new_tokens=n, do_sample=False)

    _assert_as_alone(monkeypatch, model, work)
    most = 1 if mode is torch.inference_mode else together  # whose changes leave no trace
    assert max(n for n in described if n != PROMPT.shape[1]) == most


def test_tokens_of_one_text_are_described_together(described: list[int]) -> None:
    model = _llama()
    _table(model, lambda _: _decode(model, DynamicCache(), 34), Request())
    # The prompt, by which the heads of both layers are verified; 32 tokens of both, and the rest.
    assert described == [5, 5, 32, 2]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_counts_by_either_name_of_the_argument(window: int | None, name: str) -> None:
    """Transformers 5.24 calls `past_key_values` `cache`; both continue the texts of a pass."""
    model = _llama() if window is None else _mistral(window)
    ids = torch.cat([PROMPT, PROMPT[:, :4]], 1)

    def in_pieces(_: Any) -> None:
        cache = DynamicCache(config=model.config)
        for piece in ids.split([5, 1, 1, 2], 1):
            model(piece, **{name: cache}, use_cache=True)

    request = Request(per_text=True, top=("self",))
    table = _table(model, in_pieces, request)
    whole = _table(model, lambda _: model(ids), request)
    assert_tables_close(table, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_precision_waits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, described: list[int]
) -> None:
    model = _llama().to(dtype)
    _assert_as_alone(monkeypatch, model, lambda _: _decode(model, DynamicCache(), 9))
    assert 9 in described


def _scale(step: int, model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 6**-0.5 * (2 if 6 <= step < 14 else 1)


def _replace(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys = torch.randn_like(layer.keys)


# What happens before a step, and after the last one.
CHANGES: dict[str, Callable[[int, Any, Any, Watch], object]] = {
    "cropped": lambda step, model, cache, _: step in (4, 5, 11) and cache.crop(-2),
    "keys scaled": lambda step, model, cache, _: (
        step in (3, 4, 9) and cache.layers[step % 2].keys.mul_(0.5)
    ),
    "reordered": lambda step, model, cache, _: (
        step in (5, 6, 9) and cache.reorder_cache(torch.tensor([1, 0]))
    ),
    "replaced": lambda step, model, cache, _: step == 7 and _replace(cache),
    "emptied": lambda step, model, cache, _: step == 14 and cache.layers[1].keys.zero_(),
    "another scale": lambda step, model, cache, _: _scale(step, model),
    "a table is read": lambda step, model, cache, watch: watch.table(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_calls_are_as_each_of_them_saw_model_and_keys(
    name: str, monkeypatch: pytest.MonkeyPatch, described: list[int]
) -> None:
    model = _llama()

    def work(watch: Any) -> None:
        torch.manual_seed(1)
        _decode(
            model, DynamicCache(), 14,
            between=lambda step, cache: CHANGES[name](step, model, cache, watch),
        )  # fmt: skip

    _assert_as_alone(monkeypatch, model, work)
    assert name == "a table is read" or described != [5] * 2 + [1] * 28, "nothing waited"


def test_keys_that_change_without_a_trace_are_refused() -> None:
    model = _llama()

    def change(step: int, cache: Any) -> None:
        if step == 7:
            cache.layers[0].keys.data[1, 0, 2] += 3.0

    with pytest.raises(UnsupportedError, match=r"keys of model.layers.0.self_attn .* without a tr"):
        _table(model, lambda _: _decode(model, DynamicCache(), 14, between=change), Request())


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_generate(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _llama()
    prompt = PROMPT[:1] if "prompt_lookup_num_tokens" in options else PROMPT

    def work(_: Any) -> None:
        model.generate(prompt, max_new_tokens=12, do_sample=False, **options)

    _assert_as_alone(monkeypatch, model, work)


@pytest.mark.full
def test_windows_static_caches_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed, model = _mistral(8), _llama()
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])

    def padded(_: Any) -> None:
        model.generate(PROMPT, attention_mask=real, max_new_tokens=9, do_sample=False)

    def static(_: Any) -> None:
        _decode(model, StaticCache(config=model.config, max_cache_len=20), 9)

    _assert_as_alone(monkeypatch, windowed, lambda _: _decode(windowed, DynamicCache(), 14))
    monkeypatch.undo()
    _assert_as_alone(monkeypatch, model, padded)
    monkeypatch.undo()
    _assert_as_alone(monkeypatch, model, static)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"every": 3}, {"layers": [1]}, {"exact": False}])
def test_options_of_a_watch_hold(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _llama()
    _assert_as_alone(monkeypatch, model, lambda _: _decode(model, DynamicCache(), 12), **options)


def test_two_texts_in_turn_are_two_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has a cache of its own, and both grow by a token at a time."""
    model = _llama()

    def work(_: Any) -> None:
        caches = DynamicCache(), DynamicCache()
        for cache, prompt in zip(caches, PROMPT, strict=True):
            model(input_ids=prompt[None], cache=cache, use_cache=True)
        for step in range(8):
            ids = torch.tensor([[1 + step]])
            model(input_ids=ids, cache=caches[step % 2], use_cache=True)

    _assert_as_alone(monkeypatch, model, work)


def test_requests_of_calls_see_every_call(described: list[int]) -> None:
    model = _llama()
    for request in (Request(received=True), Request(maps=True), Request(value=("first",))):
        described.clear()
        _table(model, lambda _: _decode(model, DynamicCache(), 4), request)
        assert described == [5, 5, *[1] * 8]
