"""A tiny model with random weights of every architecture that the laws are held to."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, HEADS = 23, 4

_SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = _SIZES | _TOKENS | {"num_key_value_heads": 2}
_WINDOWED = {"sliding_window": 3}
_ALTERNATING = _WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}

# Family -> what its configuration needs beyond the grouped sizes.
_DECODERS: Mapping[str, dict[str, Any]] = {
    "Arcee": {},
    "Cohere": {"use_qk_norm": True},
    "Cohere2": _ALTERNATING,
    "Gemma": {"head_dim": 8},
    "Gemma2": _WINDOWED | {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Glm": {"head_dim": 6},
    "GptOss": _ALTERNATING | _EXPERTS | {"head_dim": 6},
    "Granite": {"attention_multiplier": 0.3},
    "Helium": {"head_dim": 6},
    "Llama": {},
    "Mistral": _WINDOWED,
    "Mixtral": _EXPERTS,
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Phi": {"hidden_size": 32},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
}
_ENCODERS = (
    "Bert",
    "Camembert",
    "Electra",
    "Ernie",
    "Roberta",
    "XLMRoberta",
    "RobertaPreLayerNorm",
)

# These count positions from what is padding, and take no others.
COUNT_THEMSELVES = ("OPT", "Camembert", "Roberta", "XLMRoberta", "RobertaPreLayerNorm")


def _decoder(name: str, more: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**_GROUPED | more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _encoder(name: str) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**_SIZES | {"pad_token_id": 1})
    return getattr(transformers, f"{name}Model")(config)


def _albert() -> nn.Module:
    return transformers.AlbertModel(transformers.AlbertConfig(**_SIZES, embedding_size=8))


def _distilbert() -> nn.Module:
    return transformers.DistilBertModel(
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=24, n_layers=2, n_heads=HEADS, hidden_dim=32,
            max_position_embeddings=40,
        )
    )  # fmt: skip


def _modernbert() -> nn.Module:
    return transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **_SIZES, **_TOKENS, cls_token_id=1, sep_token_id=2,
            local_attention=4, global_attn_every_n_layers=2,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=24, n_layer=2, n_head=HEADS, vocab_size=VOCABULARY)
    )


def _opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **_TOKENS, vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2,
            num_attention_heads=HEADS, ffn_dim=32, max_position_embeddings=40,
            word_embed_proj_dim=24,
        )
    )  # fmt: skip


def _gpt_neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SIZES, **_TOKENS))


def _gemma3() -> nn.Module:
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **_GROUPED, **_ALTERNATING, head_dim=8, query_pre_attn_scalar=8
        )
    )


def _deepseek_v3() -> nn.Module:
    """Latent attention: queries and keys of another width than values."""
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **_GROUPED | {"num_key_value_heads": HEADS}, q_lora_rank=12, kv_lora_rank=12,
            qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=4, n_group=2,
            topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
        )
    )  # fmt: skip


# Models that read one text as `input_ids` and `attention_mask`.
TEXT: dict[str, Callable[[], nn.Module]] = {
    "Albert": _albert,
    "DeepseekV3": _deepseek_v3,
    "DistilBert": _distilbert,
    "GPT2": _gpt2,
    "GPTNeoX": _gpt_neox,
    "Gemma3": _gemma3,
    "ModernBert": _modernbert,
    "OPT": _opt,
    **{name: (lambda name=name: _encoder(name)) for name in _ENCODERS},
    **{
        name: (lambda name=name, more=more: _decoder(name, more))
        for name, more in _DECODERS.items()
    },
}


def make(name: str) -> nn.Module:
    """The model in evaluation mode, its weights so large that no head is near uniform."""
    torch.manual_seed(1)
    model = TEXT[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2 and weight.abs().max() < 0.2:
                weight.mul_(8.0)
    return model
