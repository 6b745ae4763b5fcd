"""Many passes in one watch: each counts as it would alone, whatever the ones before it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from headwise.models import cache_argument
from headwise.tables import HeadTable
from headwise.watch import Request, _accumulator, _queue, observe
from oracles import assert_tables_close, padded

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
    config = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=4, vocab_size=13,
        intermediate_size=16, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def _llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=13, intermediate_size=16, attn_implementation="sdpa", bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


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


@pytest.mark.parametrize("request_", [Request(), REQUEST], ids=["default", "of texts"])
@pytest.mark.parametrize("make", [_bert, _llama])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_count_as_they_would_alone(
    make: Callable[[], Any], request_: Request, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    torch.manual_seed(0)
    model, batches = make(), list(_batches())
    with mode(), observe(model, request_) as watch:
        for batch in batches:
            model(**batch)
    assert_tables_close(watch.table(), _alone(model, batches, request_))


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


@pytest.mark.parametrize("together", [1, 2, 5, 64])
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


def test_totals_can_be_read_at_any_time() -> None:
    model, batches = _bert(), list(_batches())
    with torch.no_grad(), observe(model) as watch:
        for batch in batches:
            model(**batch)
            middle = watch.table()
    assert_tables_close(watch.table(), middle)
    assert_tables_close(middle, _alone(model, batches, Request()))


def _two_masks() -> Any:
    """Layers that alternate between a window and every key."""
    config = transformers.Gemma3TextConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=6, vocab_size=13, intermediate_size=16, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


def _fused_projections() -> Any:
    """Queries and keys are parts of one tensor."""
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=4, n_positions=32, vocab_size=13, bos_token_id=None,
        eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


# The numbers of a call that waits: none does, and each of them does.
_NONE, _ALL = 0, 1 << 18


def _table_of(
    model: Any, batches: list[Batch], monkeypatch: pytest.MonkeyPatch, most: int
) -> HeadTable:
    monkeypatch.setattr(_queue, "LONG", most)
    with observe(model, Request(per_text=True)) as watch:
        for number, batch in enumerate(batches):
            model(**batch)
            if number == len(batches) // 2:
                watch.table()  # the sums go on
    return watch.table()


@pytest.mark.parametrize("make", [_bert, _llama, _two_masks, _fused_projections])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_calls_count_as_others_do(
    make: Callable[[], Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of several lengths, masks and paddings by turns, more of them than may wait."""
    monkeypatch.setattr(_queue, "WAIT", 5000)
    model, batches = make().to(dtype), [*_batches()] * 3
    expected = _table_of(model, batches, monkeypatch, _NONE)
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


@torch.no_grad()
def test_an_interrupted_call_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupt leaves in the queue without counting it changes no other call."""
    model, batches = _bert(), [*_batches()][:4]
    add, calls = _queue.Queue.add, iter(range(1, 100))  # the first pass does not wait

    def interrupted(*args: Any) -> bool:
        if next(calls) == 2:  # the second layer of the second pass
            raise KeyboardInterrupt
        return add(*args)

    with observe(model, Request(per_text=True)) as watch:
        with monkeypatch.context() as patch:
            patch.setattr(_queue.Queue, "add", interrupted)
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
        monkeypatch.setattr(_queue, "WAIT", 0)
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
