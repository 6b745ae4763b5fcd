"""Decoding with a cache counts each query once, like one pass over the whole text."""

import numpy as np
import pytest
import torch
import zoo
from architectures import CASES as ARCHITECTURES
from transformers import Cache, DynamicCache, StaticCache

from headwise.watch import Request, observe
from oracles import assert_tables_close, padded

HOW = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
PADDED = padded([[5, 9, 7, 3, 11], [4, 6, 8]], "left")
PROMPT = {name: PADDED[name] for name in ("input_ids", "attention_mask")}
NAMES = ("BloomForCausalLM", "DeepseekV3", "Falcon", "GPT2", "GPTJForCausalLM", "GPTNeoX")
NAMES += ("GPTNeoForCausalLM", "Gemma3", "GptOss", "Mistral", "OPT", "Qwen3")
# These models have no static cache.
DYNAMIC = ("Falcon", "GPTNeoForCausalLM", "GPTJForCausalLM")
CLOSE = {"rtol": 1e-7, "atol": 1e-5}


CASES = [
    pytest.param(name, cache, marks=[pytest.mark.full] * (name != "Llama"))
    for name in ("Llama", *NAMES)
    for cache in ("dynamic", "static")
    if cache == "dynamic" or name not in DYNAMIC
]


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_decoders(name: str, cache: str) -> None:
    model = zoo.make(name)
    plain = model.generate(**PROMPT, **HOW, cache_implementation=cache)
    with observe(model) as watch:
        watched = model.generate(**PROMPT, **HOW, cache_implementation=cache)
    assert torch.equal(plain, watched)
    # The last token is written and never read.
    texts = [watched[0, :-1].tolist(), watched[1, 2:-1].tolist()]
    with torch.no_grad(), observe(model) as whole:
        for text in texts:
            model(torch.tensor([text]))
    assert_tables_close(watch.table(), whole.table(), **CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GptOss"])
def test_the_cache_gives_the_position_of_a_text(name: str, kind: type[Cache]) -> None:
    # Without a mask and after the window has moved, neither keys nor positions show it.
    model = zoo.make(name)
    text = torch.tensor([[5, 9, 7, 3, 11, 8, 2, 4], [1, 2, 3, 4, 5, 6, 7, 8]])
    tables = []
    for cuts in ([], [5], [2, 4, 6], [1, 2, 3, 4, 5, 6, 7]):
        size = {} if kind is DynamicCache else {"max_cache_len": 10}
        cache = kind(config=model.config, **size)
        with torch.no_grad(), observe(model, Request(per_text=True)) as watch:
            for piece in torch.tensor_split(text, cuts, dim=1):
                model(piece, cache=cache)
        tables.append(watch.table())
    for table in tables[1:]:
        assert_tables_close(table, tables[0], **CLOSE)
        counts = table.per_text("lse").count, tables[0].per_text("lse").count
        np.testing.assert_array_equal(*counts)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Bart", "T5"])
def test_encoder_decoders(kind: str) -> None:
    model, _ = ARCHITECTURES[f"{kind}ForConditionalGeneration"].make()
    prompt = {name: padded([[5, 9, 7, 3, 11], [4, 6, 8]], "right")[name] for name in PROMPT}
    plain = model.generate(**prompt, **HOW)
    with observe(model) as watch:
        watched = model.generate(**prompt, **HOW)
    assert torch.equal(plain, watched)
    with torch.no_grad(), observe(model) as whole:
        model(**prompt, decoder_input_ids=watched[:, :-1])
    assert_tables_close(watch.table(), whole.table(), **CLOSE)
    counts = dict(zip(map(str, watch.table().heads), watch.table().count("lse"), strict=True))
    # The encoder ran separately, and only it was given the padding.
    assert counts["encoder.L0.H0"] == 8
    assert counts["decoder.cross.L0.H0"] == 10


@pytest.mark.full
def test_speech() -> None:
    model, batch = ARCHITECTURES["WhisperForConditionalGeneration"].make()
    model.generation_config.begin_suppress_tokens = None
    with observe(model) as watch:
        model.generate(batch["input_features"], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    counts = dict(zip(map(str, watch.table().heads), watch.table().count("lse"), strict=True))
    assert counts["encoder.L0.H0"] == 20
    assert counts["decoder.L0.H0"] == counts["decoder.cross.L0.H0"] > 0
