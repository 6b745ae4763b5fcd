"""Decoded tokens that wait for one another count as they would one at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

from headwise.errors import UnsupportedError
from headwise.models import AttentionCall
from headwise.tables import HeadTable
from headwise.watch import Request, _queue, observe
from oracles import assert_tables_close

PROMPT = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 12, 1, 2]])
Between = Callable[[int, Any], None]


def _model(kind: str = "llama", **options: Any) -> Any:
    shape = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 13, "intermediate_size": 16,
        "attn_implementation": "sdpa", "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    make = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[kind]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(make(**shape | options)).eval()


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
    monkeypatch.setattr(_queue, "TOKENS", 0)
    monkeypatch.setattr(_queue, "LONG", 0)
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
    model = _model()

    def work(_: Any) -> None:
        with mode():
            for n in (19, 4):
                model.generate(PROMPT, max_new_tokens=n, do_sample=False)

    _assert_as_alone(monkeypatch, model, work)
    most = 1 if mode is torch.inference_mode else together  # whose changes leave no trace
    assert max(n for n in described if n != PROMPT.shape[1]) == most


def test_tokens_of_one_text_are_described_together(described: list[int]) -> None:
    model = _model()
    _table(model, lambda _: _decode(model, DynamicCache(), 34), Request())
    # The prompt, by which the heads of both layers are verified; 32 tokens of both, and the rest.
    assert described == [5, 5, 32, 2]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_cache_counts_by_either_name_of_the_argument(kind: str, name: str) -> None:
    """Transformers 5.24 calls `past_key_values` `cache`; both continue the texts of a pass."""
    model = _model(kind, **{"sliding_window": 4} if kind == "mistral" else {})
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
    model = _model().to(dtype)
    _assert_as_alone(monkeypatch, model, lambda _: _decode(model, DynamicCache(), 9))
    assert 9 in described


def _crop(step: int, cache: Any) -> None:
    if step in (4, 5, 11):
        cache.crop(-2)


def _scale(step: int, cache: Any) -> None:
    if step in (3, 4, 9):
        cache.layers[step % 2].keys.mul_(0.5)


def _reorder(step: int, cache: Any) -> None:
    if step in (5, 6, 9):
        cache.reorder_cache(torch.tensor([1, 0]))


def _replace(step: int, cache: Any) -> None:
    if step == 7:
        for layer in cache.layers:
            layer.keys = torch.randn_like(layer.keys)


@pytest.mark.parametrize("change", [_crop, _scale, _reorder, _replace])
def test_keys_are_those_that_each_call_saw(
    change: Between, monkeypatch: pytest.MonkeyPatch, described: list[int]
) -> None:
    model = _model()

    def work(_: Any) -> None:
        torch.manual_seed(1)
        _decode(model, DynamicCache(), 14, between=change)

    _assert_as_alone(monkeypatch, model, work)
    assert described != [PROMPT.shape[1]] * 2 + [1] * 28, "nothing waited"


def test_keys_that_change_without_a_trace_are_refused() -> None:
    model = _model()

    def change(step: int, cache: Any) -> None:
        if step == 7:
            cache.layers[0].keys.data[1, 0, 2] += 3.0

    with pytest.raises(UnsupportedError, match=r"keys of model.layers.0.self_attn .* without a tr"):
        _table(model, lambda _: _decode(model, DynamicCache(), 14, between=change), Request())


def test_what_is_changed_after_a_call_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()

    def work(_: Any) -> None:
        cache = DynamicCache()
        _decode(model, cache, 9)
        for layer in cache.layers:
            layer.keys.zero_()

    _assert_as_alone(monkeypatch, model, work)


def test_a_scale_that_changes_between_tokens_counts_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rules of calls without a mask are made once for each scale, not once for each module."""
    model = _model()
    seen: list[tuple[float, int]] = []
    scale = model.model.layers[0].self_attn.scaling
    alone, together = AttentionCall.row_statistics, _queue.row_statistics

    def note_alone(call: AttentionCall, request: Any) -> Any:
        seen.append((call.rule.scale, call.q.shape[2]))
        return alone(call, request)

    def note(q: Tensor, k: Tensor, v: Tensor, rule: Any, request: Any) -> Any:
        seen.append((rule.scale, q.shape[2] * q.shape[1] // 4))  # of layers side by side
        return together(q, k, v, rule, request)

    def double(step: int, cache: Any) -> None:
        if step == 6:
            for layer in model.model.layers:
                layer.self_attn.scaling = 2 * scale

    monkeypatch.setattr(AttentionCall, "row_statistics", note_alone)
    monkeypatch.setattr(_queue, "row_statistics", note)
    _table(model, lambda _: _decode(model, DynamicCache(), 10, between=double), Request())
    tokens = {x: sum(n for found, n in seen if found == x) for x in {found for found, _ in seen}}
    assert tokens == {scale: 2 * (PROMPT.shape[1] + 6), 2 * scale: 2 * 4}


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}],
    ids=lambda options: next(iter(options)),
)
def test_every_way_to_generate(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    prompt = PROMPT[:1] if "prompt_lookup_num_tokens" in options else PROMPT

    def work(_: Any) -> None:
        model.generate(prompt, max_new_tokens=12, do_sample=False, **options)

    _assert_as_alone(monkeypatch, model, work)


@pytest.mark.full
def test_windows_static_caches_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed, model = _model("mistral", sliding_window=8), _model()
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
    model = _model()
    _assert_as_alone(monkeypatch, model, lambda _: _decode(model, DynamicCache(), 12), **options)


def test_a_table_may_be_read_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()

    def work(watch: Any) -> None:
        _decode(model, DynamicCache(), 12, between=lambda *_: watch.table())

    _assert_as_alone(monkeypatch, model, work)


def test_two_texts_in_turn_are_two_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has a cache of its own, and both grow by a token at a time."""
    model = _model()

    def work(_: Any) -> None:
        caches = DynamicCache(), DynamicCache()
        for cache, prompt in zip(caches, PROMPT, strict=True):
            model(input_ids=prompt[None], cache=cache, use_cache=True)
        for step in range(8):
            ids = torch.tensor([[1 + step]])
            model(input_ids=ids, cache=caches[step % 2], use_cache=True)

    _assert_as_alone(monkeypatch, model, work)


def test_requests_of_calls_see_every_call(described: list[int]) -> None:
    model = _model()
    for request in (Request(received=True), Request(maps=True), Request(value=("first",))):
        described.clear()
        _table(model, lambda _: _decode(model, DynamicCache(), 4), request)
        assert described == [5, 5, *[1] * 8]
