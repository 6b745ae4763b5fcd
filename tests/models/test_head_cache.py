"""A model with a cache for each head equals the same model under a mask for each head."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from architectures.decoders import CLASSES, TOKENS, VOCABULARY, make_decoder
from torch import Tensor, nn
from transformers import DynamicCache

import headwise as hw
from headwise.cache._grouped_keys import CallKeys
from headwise.cache._storage import Entries
from headwise.caching import CachePlan, LayerCachePlan
from headwise.errors import HeadwiseError
from tiers import diagonal, tiers

Windows = Sequence[Sequence[int | None]]
IN_PLACE = CallKeys.plain.fget
FEW = ("Llama", "GptOss", "Gemma2", "GPT2")
# Layers without positions, rotations in part, one matrix of all; the others are like these.
OTHERS = ("Cohere2", "StableLm", "Phi3")
REST = ("Gemma3", "GPTNeoX", "Mistral", "Mixtral", "OPT", "Olmo2", "Qwen2", "Qwen3", "SmolLM3")
REST += ("Starcoder2",)
each_model = pytest.mark.parametrize("name", tiers(FEW, OTHERS, REST))
HOW = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "output_logits": True}
HOW |= {"return_dict_in_generate": True, "output_scores": True}
SINKS, LENGTH = 2, 19
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def kv_heads(model: nn.Module) -> int:
    config = model.config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def plan_of(windows: Windows, sinks: int = SINKS) -> CachePlan:
    layers = (LayerCachePlan(layer, tuple(heads)) for layer, heads in enumerate(windows))
    return CachePlan(tuple(layers), sinks)


def mixed(model: nn.Module) -> list[list[int | None]]:
    """All tokens, and two windows, in every layer where there are heads enough."""
    choices: list[int | None] = [None, 5, 3, 7]
    n = kv_heads(model)
    return [[choices[(layer + head) % 4] for head in range(n)] for layer in range(2)]


def texts(padding: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, zoo.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    real = torch.ones_like(ids)
    real[0, :padding] = 0
    return ids.masked_fill(real == 0, 0), real


def visible_by_definition(
    windows: Sequence[int | None], group: int, real: Tensor, sinks: int
) -> Tensor:
    """`[B, H, T, S]`, pair by pair, from what a window and sinks mean."""
    B, T = real.shape
    visible = torch.zeros(B, group * len(windows), T, T, dtype=torch.bool)
    for b in range(B):
        first = int(real[b].argmax())
        for i in range(T):
            for j in range(i + 1):
                for h, window in enumerate(windows):
                    in_reach = window is None or i - j < window or 0 <= j - first < sinks
                    visible[b, h * group : (h + 1) * group, i, j] = in_reach
    return visible


@contextmanager
def masked(model: nn.Module, windows: Windows, real: Tensor, sinks: int = SINKS) -> Iterator[None]:
    """The model with eager attention, whose additive masks also hide what each head drops."""
    model.set_attn_implementation("eager")
    H = model.config.num_attention_heads
    hooks = []

    def hide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = windows[module.layer_idx]
        visible = visible_by_definition(layer, H // len(layer), real, sinks)
        mask = kwargs["attention_mask"]
        lowest = torch.finfo(mask.dtype).min
        return args, kwargs | {
            "attention_mask": mask.expand(-1, H, -1, -1).masked_fill(~visible, lowest)
        }

    for module in model.modules():
        if hasattr(module, "layer_idx") and "ttention" in type(module).__name__:
            hooks.append(module.register_forward_pre_hook(hide, with_kwargs=True))
    assert len(hooks) == len(windows)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def by_definition(
    name: str, windows: Windows, ids: Tensor, real: Tensor, sinks: int = SINKS
) -> Tensor:
    """The logits of one pass over the texts without a cache."""
    model = zoo.make(name)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with masked(model, windows, real, sinks):
        inputs = {"input_ids": ids, "attention_mask": real, "position_ids": positions}
        return model(**inputs, use_cache=False).logits


@torch.no_grad()
def in_pieces(
    model: nn.Module, cache: Any, ids: Tensor, real: Tensor, pieces: Sequence[int]
) -> Tensor:
    """The logits of forward passes over pieces of the texts, with a cache."""
    positions, logits, stop = (real.cumsum(-1) - 1).clamp(min=0), [], cache.get_seq_length()
    for piece in pieces:
        start, stop = stop, stop + piece
        logits.append(
            model(
                input_ids=ids[:, start:stop],
                attention_mask=real[:, :stop],
                position_ids=positions[:, start:stop],
                cache=cache,
                use_cache=True,
            ).logits
        )
    return torch.cat(logits, 1)


def assert_equal_texts(actual: Tensor, expected: Tensor, real: Tensor) -> None:
    torch.testing.assert_close(actual[real.bool()], expected[real.bool()], **TOLERANCE)


PIECES = {
    "whole": [LENGTH],
    "chunks": [8, 6, 5],
    "tokens": [1] * LENGTH,
    "both": [9, 1, 1, 1, 5, 1, 1],
}


CASES = [(name, padding, pieces) for name in FEW for padding in (0, 4, 12) for pieces in PIECES]
QUICK = [*diagonal(["Llama"], (4, 0, 12), PIECES), *((name, 4, "both") for name in FEW)]
SLOW = [case for case in CASES if case[0] in ("Llama", "Gemma2")]
SLOW += [(name, 4, "both") for name in OTHERS]
CASES += [(name, padding, "both") for name in OTHERS + REST for padding in (0, 4)]


def check_under_masks(
    name: str,
    padding: int,
    pieces: str = "both",
    windows: Windows | None = None,
    sinks: int = SINKS,
    implementation: str | None = None,
) -> None:
    """A model reads texts in pieces, and gives what one pass under a mask for each head gives."""
    ids, real = texts(padding)
    model = zoo.make(name)
    windows = windows or mixed(model)
    expected = by_definition(name, windows, ids, real, sinks)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    with plan_of(windows, sinks).cache(model) as cache:
        actual = in_pieces(model, cache, ids, real, PIECES[pieces])
    assert_equal_texts(actual, expected, real)


@pytest.mark.parametrize(("name", "padding", "pieces"), tiers(QUICK, SLOW, CASES))
def test_it_equals_a_mask_for_each_head(name: str, padding: int, pieces: str) -> None:
    check_under_masks(name, padding, pieces)


@pytest.mark.parametrize("implementation", ["eager", "headwise"])
def test_every_implementation_gives_the_same(implementation: str) -> None:
    hw.register_attention()
    check_under_masks("Llama", padding=4, implementation=implementation)


@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (1, 2), (6, 4), (0, 4), (6, 1)])
def test_sinks_and_windows_of_every_size(sinks: int, window: int) -> None:
    windows = [[window, None], [window + 1, window]]
    check_under_masks("Llama", padding=3, windows=windows, sinks=sinks)


def generated(
    model: nn.Module, prompt: Mapping[str, Tensor], cache: Any = None, **more: Any
) -> Any:
    return model.generate(**prompt, **HOW, max_new_tokens=8, cache=cache, **more)


def prompt(padding: int = 0) -> dict[str, Tensor]:
    ids, real = texts(padding)
    return {"input_ids": ids, "attention_mask": real}


@each_model
@pytest.mark.parametrize("padding", [0, 4])
def test_all_heads_full_equals_the_stock_cache(
    name: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.make(name)
    full = plan_of([[None] * kv_heads(model)] * 2)
    stock = generated(model, prompt(padding))
    with full.cache(model) as cache:
        ours = generated(model, prompt(padding), cache)
    for logits, expected in zip(ours.logits, stock.logits, strict=True):
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    # Some processors multiply by other instructions where keys lie apart, as with slots ahead.
    monkeypatch.setattr(CallKeys, "plain", property(copied_keys))
    with full.cache(model) as cache:
        ours = generated(model, prompt(padding), cache)
    assert torch.equal(ours.sequences, stock.sequences)
    for logits, expected in zip(ours.logits, stock.logits, strict=True):
        assert torch.equal(logits, expected)


def copied_keys(call: CallKeys) -> Entries | None:
    """The keys that the model's own attention reads, laid out as in the stock cache."""
    assert IN_PLACE is not None
    plain = IN_PLACE(call)
    return plain and plain._replace(near=plain.near.map(torch.Tensor.contiguous))


# Windows that no mask applies, heads that are viewed as one vector, layers that run twice, windows
# that a mask applies.
ARCHITECTURES = ("moshi", "afmoe", "dory", "gemma2")
# Sinks, shared keys, layers of other kinds, layers with other numbers of heads, chunks, biases of
# positions, latent keys, and chunks that transformers cannot read.
SAMPLE = (
    "gpt_oss", "gemma4_text", "qwen3_next", "lfm2", "step3p5", "llama4_text", "bloom",
    "deepseek_v3", "recurrent_gemma",
)  # fmt: skip


@pytest.mark.parametrize("name", tiers(ARCHITECTURES, SAMPLE, CLASSES))
def test_full_heads_of_every_architecture_equal_the_stock_cache(name: str) -> None:
    model = make_decoder(name)
    if model is None or not hasattr(model, "generate"):
        return
    try:
        plan = hw.cache_plan(model, full={}, window=3)
    except HeadwiseError:  # for a reason of its own: other tests have them
        assert name not in ARCHITECTURES
        return
    full = replace(
        plan, layers=tuple(replace(x, windows=(None,) * len(x.windows)) for x in plan.layers)
    )
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (1, TOKENS))}
    for more in ({}, {"prefill_chunk_size": 7}):  # past every window
        if more and name == "recurrent_gemma":  # transformers cannot: its outputs name no cache
            continue
        stock = generated(model, inputs, DynamicCache(config=model.config), **more)
        with full.cache(model) as cache:
            ours = generated(model, inputs, cache, **more)
        assert torch.equal(ours.sequences, stock.sequences)
        for logits, expected in zip(ours.logits, stock.logits, strict=True):
            torch.testing.assert_close(logits, expected, **TOLERANCE)
    with plan.cache(model) as cache:
        generated(model, inputs, cache)


@pytest.mark.parametrize(
    ("padding", "gives"), [(4, "the whole conversation"), (0, "the new tokens")]
)
def test_a_second_turn_continues_the_cache_and_a_copy_of_it(padding: int, gives: str) -> None:
    model, turn = zoo.make("Llama"), torch.randint(3, zoo.VOCABULARY, (2, 5))
    windows = mixed(model)
    with plan_of(windows).cache(model) as cache:
        first = generated(model, prompt(padding), cache)
        ids = torch.cat((first.sequences, turn), 1)
        real = nn.functional.pad(texts(padding)[1], (0, ids.shape[1] - LENGTH), value=1)
        new = ids[:, cache.get_seq_length() :] if gives == "the new tokens" else ids
        inputs = {"input_ids": new, "attention_mask": real}
        answers = [generated(model, inputs, each) for each in (deepcopy(cache), cache)]
    for answer in answers:
        read = torch.cat((ids, answer.sequences[:, new.shape[1] :]), 1)
        expected = by_definition(
            "Llama", windows, read[:, :-1], nn.functional.pad(real, (0, 7), value=1)
        )
        assert_equal_texts(
            torch.stack(answer.logits, 1), expected[:, -8:], torch.ones(2, 8, dtype=torch.int)
        )


@pytest.mark.parametrize("name", tiers(["Llama"], FEW))
def test_a_window_wider_than_the_text_equals_full(name: str) -> None:
    model = zoo.make(name)
    stock = generated(model, prompt(4))
    windows: Windows = [[100, *[None] * (kv_heads(model) - 1)], [100] * kv_heads(model)]
    with plan_of(windows).cache(model) as cache:
        ours = generated(model, prompt(4), cache)
    for logits, expected in zip(ours.logits, stock.logits, strict=True):
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("name", tiers(["Llama"], ["GptOss"]))
@pytest.mark.parametrize("how", ["greedy", "beams", "assisted", "lookup", "chunks"])
def test_generate_equals_one_pass_under_the_masks(name: str, how: str) -> None:
    model = zoo.make(name)
    windows = mixed(model)
    more: dict[str, Any] = {
        "greedy": {},
        "beams": {"num_beams": 3, "num_return_sequences": 3},
        "assisted": {"assistant_model": zoo.make("Llama")},
        "lookup": {"prompt_lookup_num_tokens": 4},
        "chunks": {"prefill_chunk_size": 5},
    }[how]
    inputs = prompt(4 if how in ("greedy", "beams", "chunks") else 0)
    if how in ("assisted", "lookup"):
        inputs = {name: x[:1] for name, x in inputs.items()}
    with plan_of(windows).cache(model) as cache:
        ours = generated(model, inputs, cache, **more)
    ids = ours.sequences[:, :-1]
    real = inputs["attention_mask"].repeat_interleave(len(ids) // len(inputs["input_ids"]), 0)
    real = nn.functional.pad(real, (0, ids.shape[1] - LENGTH), value=1)
    expected = by_definition(name, windows, ids, real)[:, LENGTH - 1 :]
    if how == "beams":  # the logits are those of beams that were dropped, too
        scores = expected.log_softmax(-1).gather(2, ours.sequences[:, LENGTH:, None])[..., 0]
        torch.testing.assert_close(ours.sequences_scores, scores.mean(1), **TOLERANCE)
    else:
        assert torch.equal(ours.sequences[:, LENGTH:], expected.argmax(-1))


@pytest.mark.parametrize("recording", [False, True])
def test_crop_equals_never_having_read_the_tokens(recording: bool) -> None:
    model, (ids, real) = zoo.make("Llama"), texts(3)
    windows = mixed(model)
    expected = by_definition("Llama", windows, ids, real)
    with plan_of(windows).cache(model) as cache:
        if recording:
            cache.activate_past_recording()
        in_pieces(model, cache, ids, real, [11])
        cache.crop(0)
        steps = [6, 4, 1] if recording else [1]
        for step in steps:  # other tokens, which are taken back
            wrong = torch.cat((ids[:, :11], ids.flip(1)[:, :8]), 1)
            in_pieces(model, cache, wrong, real, [step])
            cache.crop(-step)
        actual = in_pieces(model, cache, ids, real, [3, 1, 1, 3])
    assert_equal_texts(actual, expected[:, 11:], real[:, 11:])


def test_rows_are_selected_and_repeated_with_their_texts() -> None:
    model, (ids, real) = zoo.make("Llama"), texts(5)
    windows = mixed(model)
    expected = by_definition("Llama", windows, ids, real)
    rows = torch.tensor([0, 0, 1, 1, 0, 0])
    with plan_of(windows).cache(model) as cache:
        in_pieces(model, cache, ids, real, [9, 1])
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0, 3, 2]))
        cache.batch_select_indices(torch.tensor([0, 1, 2, 3, 0, 1]))
        assert cache.batch_size == 6
        actual = in_pieces(model, cache, ids[rows], real[rows], [1, 5, 1])
    assert_equal_texts(actual, expected[rows, 10:17], real[rows, 10:17])


def test_memory_is_really_freed() -> None:
    model = zoo.make("Llama")
    ids = torch.randint(3, zoo.VOCABULARY, (1, 3000))
    with torch.no_grad():
        with plan_of([[None, None]] * 2).cache(model) as full:
            model(input_ids=ids, cache=full)
        with plan_of([[None, 16], [16, None]]).cache(model) as half:
            model(input_ids=ids, cache=half)
            bytes_of_storages = {
                x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for layer in half.layers
                for group in layer._groups
                for x in group.tensors
            }
        with plan_of([[None, 16], [16, None]]).cache(model) as step_by_step:
            for piece in ids.split(500, 1):
                model(input_ids=piece, cache=step_by_step)
    assert sum(bytes_of_storages.values()) == half.nbytes
    assert half.nbytes < 0.52 * full.nbytes
    assert step_by_step.nbytes < 0.54 * full.nbytes
    token = 2 * 6 * 4  # key and value, in bytes
    assert full.nbytes >= 4 * 3000 * token


def test_a_cache_is_emptied_for_another_text() -> None:
    model, (ids, real) = zoo.make("Llama"), texts()
    windows = mixed(model)
    with plan_of(windows).cache(model) as cache:
        first = in_pieces(model, cache, ids, real, [LENGTH])
        cache.reset()
        assert cache.nbytes == 0
        other = in_pieces(model, cache, ids.flip(1), real, [LENGTH])
    assert_equal_texts(first, by_definition("Llama", windows, ids, real), real)
    assert_equal_texts(other, by_definition("Llama", windows, ids.flip(1), real), real)


def test_two_caches_of_one_model_do_not_mix() -> None:
    model, (ids, real) = zoo.make("Llama"), texts()
    windows: tuple[Windows, ...] = (mixed(model), [[2, None], [None, 2]])
    with plan_of(windows[0]).cache(model) as first, plan_of(windows[1]).cache(model) as second:
        pieces = [
            [in_pieces(model, cache, ids, real, [piece]) for cache in (first, second)]
            for piece in (9, 1, 4, 5)
        ]
        whole = [torch.cat(parts, 1) for parts in zip(*pieces, strict=True)]
        stock = model(ids).logits
    for logits, heads in zip(whole, windows, strict=True):
        assert_equal_texts(logits, by_definition("Llama", heads, ids, real), real)
    assert_equal_texts(stock, model(ids).logits, real)
