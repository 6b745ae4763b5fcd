"""All that Hugging Face models are used for, on our kernel: the same results as under `sdpa`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import zoo
from architectures import CASES
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import headwise as hw
from children import run_laws
from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch
from oracles import padded

pytestmark = pytest.mark.usefixtures("at_any_size")

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6, 13]]
HOW = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
T5 = "T5ForConditionalGeneration"


def _prompt(side: str = "left") -> dict[str, Tensor]:
    batch = padded(TEXTS, side)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _both(model: nn.Module, run: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """What a run gives under `sdpa` and on our kernel."""
    results = []
    for implementation in ("sdpa", "headwise"):
        model.set_attn_implementation(implementation)
        results.append(run(model))
    return results[0], results[1]


class _EightBits(QuantizedLayer):
    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().amax(-1, keepdim=True) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, q_tensor: tuple[Tensor, Tensor]) -> Tensor:
        whole, scale = q_tensor
        return whole * scale


def _cache(kind: str, model: nn.Module) -> Cache:
    if kind == "quantized":
        return Cache(layers=[_EightBits(residual_length=3) for _ in range(2)])
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=20)
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_greedy_tokens_are_the_same(name: str, kind: str) -> None:
    model = zoo.make(name)  # Gemma3 has sliding caches, too
    known, ours = _both(model, lambda m: m.generate(**_prompt(), **HOW, cache=_cache(kind, m)))
    assert torch.equal(known, ours)


@pytest.mark.parametrize("how", ["beams", "assisted", "prompt lookup"])
def test_other_ways_to_decode(how: str) -> None:
    model, options = zoo.make("Llama"), dict[str, Any](HOW)
    prompt = {name: x[:1] for name, x in _prompt().items()}
    if how == "beams":
        prompt, options["num_beams"] = _prompt(), 3
    elif how == "assisted":
        options["assistant_model"] = zoo.make("Qwen2")
    else:
        options["prompt_lookup_num_tokens"] = 3
    known, ours = _both(model, lambda m: m.generate(**prompt, **options))
    assert torch.equal(known, ours)


@pytest.mark.parametrize("kind", ["Bart", "T5"])
def test_encoder_decoders_decode(kind: str) -> None:
    model, _ = CASES[f"{kind}ForConditionalGeneration"].make()
    known, ours = _both(model, lambda m: m.generate(**_prompt("right"), **HOW))
    assert torch.equal(known, ours)


@torch.no_grad()
def test_packed_texts_stay_apart() -> None:
    model = zoo.make("Llama")
    model.set_attn_implementation("headwise")
    whole = torch.tensor([[token for text in TEXTS for token in text]])
    positions = torch.tensor([[at for text in TEXTS for at in range(len(text))]])
    packed = model(whole, position_ids=positions, use_cache=False).logits
    alone = [model(torch.tensor([text])).logits for text in TEXTS]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["booleans", "floats"])
def test_a_mask_of_the_callers_own(kind: str) -> None:
    visible = torch.rand(2, 1, 7, 7) < 0.6
    visible |= torch.eye(7, dtype=torch.bool)
    mask = visible if kind == "booleans" else torch.where(visible, 0.0, -1e38)
    ids = padded(TEXTS, "right")["input_ids"]
    known, ours = _both(zoo.make("Llama"), lambda m: m(ids, attention_mask=mask).logits)
    torch.testing.assert_close(ours, known, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Bert", "Gemma2", "GptOss", "Llama", T5])
def test_the_weights_are_there_if_asked_for(name: str) -> None:
    model, batch = CASES[name].make()[0], dict[str, Any](_prompt("right"))
    if name == T5:
        batch["decoder_input_ids"] = batch["input_ids"][:, :3]
    outs = []
    for implementation in ("eager", "headwise"):
        model.set_attn_implementation(implementation)
        outs.append(model(**batch, output_attentions=True))
    names = [key for key in outs[0] if key.endswith("attentions")]
    assert any(outs[1][key] for key in names)
    for key in names:
        known, ours = outs[0][key], outs[1][key]
        assert len(known) == len(ours)
        for theirs, mine in zip(known, ours, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert not getattr(model(**batch), "attentions", None)


def test_dropout_is_left_to_torch(left_to_torch: list[str]) -> None:
    model = zoo.make("Bert").train()

    def seeded(m: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return m(**_prompt("right"))[0]

    known, ours = _both(model, seeded)
    assert torch.equal(known, ours)
    assert left_to_torch == ["BertSelfAttention"] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = zoo.make("Llama").train()
        model.set_attn_implementation("headwise")
        if checkpointed:
            how = {"use_reentrant": reentrant}
            model.activation_checkpointing_enable(how)
            model.enable_input_require_grads()
        model(**_prompt("right"), use_cache=False).logits.square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    # Without gradients, as the first pass of reentrant checkpoints is, few queries are packed.
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_autocast_computes_in_its_precision(name: str, left_to_torch: list[str]) -> None:
    model = zoo.make(name)
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        exact = model(**_prompt("right")).logits
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**_prompt("right")).logits
    real = _prompt("right")["attention_mask"].bool()
    assert (out.float() - exact)[real].norm() <= 0.1 * exact[real].norm()
    assert not left_to_torch


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in peft
def test_adapters_by_the_same_name(left_to_torch: list[str]) -> None:
    def trained(m: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(0)
        adapted = peft.get_peft_model(m, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        adapted(**_prompt("right")).logits.square().mean().backward()
        grads = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
        adapted.unload()
        return grads

    known, ours = _both(zoo.make("Llama"), trained)
    assert known.keys() == ours.keys()
    assert any("lora" in name for name in ours)
    for name, grad in known.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6)
    assert not left_to_torch


@pytest.mark.full
def test_a_trainer_learns_the_same(tmp_path: Path) -> None:
    data = [{"input_ids": text, "labels": text} for text in ([5, 9, 7, 3], [4, 6, 13, 2])]

    def trained(implementation: str) -> list[float]:
        model = zoo.make("Llama")
        model.set_attn_implementation(implementation)
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, learning_rate=0.01, seed=3, use_cpu=True,
            report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    known, ours = trained("sdpa"), trained("headwise")
    assert len(ours) == 3
    assert ours == pytest.approx(known, rel=1e-4)


@pytest.mark.full
def test_compiled_models_run_on_the_kernel() -> None:
    run_laws(Path(__file__).with_name("attention_compiled.py"))


@torch.no_grad()
@pytest.mark.full
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_exported_for_other_places(name: str) -> None:
    model, batch = zoo.make(name), _prompt("right")
    model.set_attn_implementation("headwise")
    plain = model(**batch, use_cache=False).logits
    program = torch.export.export(model, (), {**batch, "use_cache": False}, strict=False)
    assert "headwise" not in str(program.graph)  # a program runs where headwise is not
    real = batch["attention_mask"].bool()
    out = program.module()(**batch, use_cache=False).logits
    torch.testing.assert_close(out[real], plain[real], rtol=1e-4, atol=1e-5)


def test_models_that_do_not_ask_for_it_do_not_change(left_to_torch: list[str]) -> None:
    model = zoo.make("Llama")
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        known = model(**_prompt("right")).logits
        transformers.AttentionInterface._global_mapping.pop("headwise")
        transformers.AttentionMaskInterface._global_mapping.pop("headwise")
        assert torch.equal(model(**_prompt("right")).logits, known)
    assert not left_to_torch


def test_the_name_is_not_saved(tmp_path: Path) -> None:
    model = zoo.make("Llama")
    model.set_attn_implementation("headwise")
    model.save_pretrained(tmp_path)
    assert "headwise" not in (tmp_path / "config.json").read_text("utf-8")


@pytest.mark.parametrize("name", ["Bert", "Gemma2", "Llama"])
def test_a_model_is_loaded_on_the_kernel(
    name: str, tmp_path: Path, left_to_torch: list[str]
) -> None:
    zoo.make(name).save_pretrained(tmp_path)
    known, ours = hw.load(tmp_path), hw.load(tmp_path, attn_implementation="headwise")
    assert ours.config._attn_implementation == "headwise"
    with torch.no_grad():
        one, other = (model(**_prompt("right"))[0] for model in (known, ours))
    real = _prompt("right")["attention_mask"].bool()
    torch.testing.assert_close(other[real], one[real], rtol=1e-4, atol=1e-5)
    assert not torch.equal(other[real], one[real])
    assert not left_to_torch
