"""Small models with random weights that vLLM serves, and the same ones for `observe`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

import headwise as hw

# Before vLLM is imported; each is read once.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES),
    "mistral": MistralConfig(**_SIZES, sliding_window=48),
    "gemma2": Gemma2Config(
        **_SIZES, sliding_window=48, query_pre_attn_scalar=32, layer_types=_KINDS
    ),
    "gemma3": Gemma3TextConfig(
        **_SIZES, sliding_window=48, query_pre_attn_scalar=32, layer_types=_KINDS
    ),
}


def make(name: str, folder: Path) -> Path:
    """Save a model whose heads are far from uniform: queries and keys are scaled up."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "q_proj" in weight_name or "k_proj" in weight_name:
                weight *= 6
            if "q_norm" in weight_name or "k_norm" in weight_name:
                weight += 0.5
    model.save_pretrained(folder / name)
    return folder / name


def serve(folder: Path, dtype: str = "float32", **options: Any) -> Any:
    """An engine for token ids."""
    from vllm import LLM

    return LLM(
        str(folder), skip_tokenizer_init=True, dtype=dtype,
        **{"gpu_memory_utilization": 0.2, "enable_prefix_caching": False, "max_model_len": 512}
        | {"enforce_eager": True} | options,
    )  # fmt: skip


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def generate(llm: Any, texts: Sequence[list[int]], n_tokens: int = 20, **extra: Any) -> list[Any]:
    """The outputs for these prompts, chosen greedily."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=n_tokens, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra
    )
    given = [{"prompt_token_ids": text} for text in texts]
    return llm.generate(given, parameters, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    """What was generated."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def read(output: Any) -> list[int]:
    """The tokens that the model has read: the last one is only returned."""
    return [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]


def observed(folder: Path, texts: Sequence[list[int]], span: tuple[int, int]) -> hw.HeadTable:
    """The table of `observe` on the same tokens, in float32."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with hw.observe(model, hw.Request(spans=("passage",))) as watch, torch.no_grad():
        for text in texts:
            watch.spans(passage=[span])
            model(torch.tensor([text]))
    return watch.table()
