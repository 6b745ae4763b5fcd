"""Models in other states (offloaded, empty, packed, adapted) work or are refused by name."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn

import headwise as hw
from folders import tiny_llama
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models import fingerprint
from headwise.models.texts import encode, token_offsets
from headwise.surgery import costs

IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 2, 1, 8]])
BATCHES = [{"input_ids": IDS}]


def _llama() -> Any:
    return tiny_llama(num_key_value_heads=4)


def _offloaded() -> nn.Module:
    accelerate, model = pytest.importorskip("accelerate"), _llama()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def _empty() -> nn.Module:
    with torch.device("meta"):
        return _llama()


def _packed(name: str) -> nn.Module:
    """A linear layer of each block, or the head, packed by torch, as on an edge device."""
    model = _llama()
    for module in [model, *(layer.self_attn for layer in model.model.layers)]:
        if hasattr(module, name):
            wrapped = nn.Sequential(getattr(module, name))
            packed = torch.ao.quantization.quantize_dynamic(wrapped, {nn.Linear})
            setattr(module, name, packed[0])
    return model


def _adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), _llama())


def _from_gguf() -> nn.Module:
    model = _llama()
    model.hf_quantizer = SimpleNamespace(is_serializable=lambda: False)
    return model


def _clip(model: nn.Module) -> None:
    with hw.HeadMonitor(model, every=1, statistics=["max_logit"]) as monitor:
        hw.QKClip(monitor, 1.0)


def _save(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as place:
        hw.save(model, Path(place) / "saved")


DOORS: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda model: hw.prune(model, "L0.H1"),
    "costs": costs,
    "save": _save,
    "QKClip": _clip,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("make", "door", "says"), [
    *((_offloaded, door, "is offloaded by accelerate.*Load the weights first") for door in DOORS),
    *((_empty, door, "has no values: it is on the meta device. Load the") for door in DOORS),
    (_from_gguf, "save", "opened by SimpleNamespace, which writes nothing back.*headwise.load"),
    (_adapted, "save", "holds adapters. Merge them first"),
    (lambda: _packed("lm_head"), "save", "_packed_params.* is a dtype.*before it is quantized"),
    (lambda: _packed("q_proj"), "QKClip", "come from no linear layer or norm whose weights"),
])  # fmt: skip
def test_a_door_that_needs_plain_weights_says_what_to_do(make, door: str, says: str) -> None:
    model = make()
    with pytest.raises(UnsupportedError, match=rf"^{door}: .*{says}"):
        DOORS[door](model)


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_heads_of_an_offloaded_model_are_ablated(mode: str) -> None:
    outputs = []
    for model in (_llama(), _offloaded()):
        with hw.ablate(model, {0: [1], 1: [2]}, mode), torch.no_grad():
            outputs.append(model(IDS).logits)
    assert torch.equal(*outputs)
    with pytest.raises(UnsupportedError, match=r"heads: model.* has no values"):
        hw.ablate(_empty(), "L0.H1").__enter__()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_gate_without_a_gradient_is_refused() -> None:
    model = _packed("lm_head")
    with pytest.raises(UnsupportedError, match=r"no gradient of the loss.*method='ablation'"):
        hw.importance(model, BATCHES, "half-gate")
    assert np.isfinite(hw.importance(model, BATCHES, "ablation").per_text).all()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
@pytest.mark.parametrize("method", ["half-gate", "ablation"])
def test_a_prompt_tuned_model_is_scored_on_the_tokens_of_its_texts(method: str) -> None:
    peft, model = pytest.importorskip("peft"), _llama()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(model, config).eval()

    def loss(output: Any, batch: Any) -> torch.Tensor:
        logits = output.logits[:, 3:-1]
        labels = batch["input_ids"][:, 1:]
        # Flat, as ours: the effects are small differences, in which another order of sums shows.
        flat = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return flat.view_as(labels).mean(-1)

    expected = hw.importance(tuned, BATCHES, method, loss=loss)
    np.testing.assert_allclose(
        hw.importance(tuned, BATCHES, method).per_text, expected.per_text, rtol=1e-6
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
def test_an_adapted_model_has_the_loss_of_the_model_inside() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(_llama(), peft.LoraConfig(target_modules=["q_proj"])).eval()
    assert type(adapted).__name__ == "PeftModel"  # no task is named
    scores = hw.importance(adapted, BATCHES).per_text
    np.testing.assert_array_equal(scores, hw.importance(adapted.base_model.model, BATCHES).per_text)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
def test_weights_changed_after_the_softmax_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=3)  # LLaMA-Adapter, gated
    adapted = peft.get_peft_model(_llama(), config).eval()
    message = r"1\.self_attn \(softmax\) .*Its weights are changed after the softmax, as by a gate"
    with pytest.raises(UnsupportedError, match=message), hw.observe(adapted):
        adapted(**BATCHES[0])
    with pytest.raises(UnsupportedError, match=message):
        hw.attentions(adapted, BATCHES[0], queries=-1)


def test_a_panic_of_a_tokenizer_is_an_error() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    tokenizer.pre_tokenizer = Split(Regex("(a+)+$|x"), "isolated")
    text = "a" * 40 + "b"
    for tokenize in (
        lambda: encode(tokenizer, text, _llama()),
        lambda: token_offsets(tokenizer, [text]),
    ):
        with pytest.raises(UnsupportedError, match=r"Tokenizer failed in a text .*retry-limit"):
            tokenize()


@pytest.mark.parametrize("load", [hw.Plan.load, hw.CachePlan.load, hw.load_study])
def test_a_pipe_in_place_of_a_file_is_not_read(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    os.mkfifo(path)
    with pytest.raises(HeadwiseError, match=r"regular file|has no study\.json"):
        load(tmp_path if load is hw.load_study else path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_wrapped_model_has_the_fingerprint_of_the_model(tmp_path: Path) -> None:
    model = _llama()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()
    for wrapped in (parallel, nn.DataParallel(model), torch.compile(model)):
        assert fingerprint(wrapped) == fingerprint(model)
