"""A tiny model with random weights of every architecture that the laws are held to."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from headwise.kernels import make_rule, statistics_kernel
from tiers import tiers

VOCABULARY, HEADS = 23, 4
# What computes the statistics of small models in float32: it depends on what was built.
KERNEL = statistics_kernel(*[torch.zeros(1, 1, 1, 1)] * 3, make_rule(head_dim=1))

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
_FALCON = {key: _SIZES[key] for key in list(_SIZES)[:3]} | _TOKENS
_FALCON |= {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}
_OLD, _OPENAI = {"new_decoder_architecture": False}, {"n_embd": 24, "n_layer": 2, "n_head": HEADS}
_OPENAI |= {"vocab_size": VOCABULARY}
_XLM = {"emb_dim": 24, "n_layers": 2, "n_heads": HEADS, "vocab_size": VOCABULARY}

# Family of decoders -> what its configuration needs beyond the grouped sizes.
_DECODERS: Mapping[str, dict[str, Any]] = {
    "Arcee": {},
    "Cohere": {"use_qk_norm": True},
    "Cohere2": _ALTERNATING,
    # Latent attention: queries and keys of another width than values.
    "DeepseekV3": {"num_key_value_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 12}
    | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 4}
    | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"n_shared_experts": 1},
    "Gemma": {"head_dim": 8},
    "Gemma2": _WINDOWED | {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3": _ALTERNATING | {"head_dim": 8, "query_pre_attn_scalar": 8},
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
    "Bert", "Camembert", "Electra", "Ernie", "Roberta", "XLMRoberta", "RobertaPreLayerNorm",
)  # fmt: skip
# Others, by class.
_CLASSES: Mapping[str, dict[str, Any]] = {
    "AlbertModel": _SIZES | {"embedding_size": 8},
    "DistilBertModel": {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 2, "n_heads": HEADS}
    | {"hidden_dim": 32, "max_position_embeddings": 40},
    "GPT2LMHeadModel": _OPENAI,
    "GPTNeoXForCausalLM": _SIZES | _TOKENS,
    "ModernBertModel": _SIZES | _TOKENS | {"cls_token_id": 1, "sep_token_id": 2}
    | {"local_attention": 4, "global_attn_every_n_layers": 2},
    "OPTForCausalLM": _TOKENS | {"vocab_size": VOCABULARY, "hidden_size": 24, "ffn_dim": 32}
    | {"num_hidden_layers": 2, "num_attention_heads": HEADS, "max_position_embeddings": 40}
    | {"word_embed_proj_dim": 24},
}  # fmt: skip
_FALCONS = {
    "Falcon": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "FalconMultiQuery": _FALCON | _OLD | {"multi_query": True},
    # With biases its fused kernel gives other answers than its own eager code.
    "FalconAlibi": _FALCON | _OLD
    | {"multi_query": False, "alibi": True, "attn_implementation": "eager"},
}  # fmt: skip

# These write their softmax out: class -> configuration.
_WRITTEN_OUT: Mapping[str, dict[str, Any]] = {
    "BigBirdModel": _SIZES | {"attention_type": "original_full", "pad_token_id": 0},
    "BloomForCausalLM": {"hidden_size": 24, "n_layer": 2, "n_head": HEADS}
    | {"vocab_size": VOCABULARY},
    "CodeGenForCausalLM": _OPENAI | {"n_embd": 32, "n_positions": 40, "rotary_dim": 4},
    "DebertaModel": _SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "DebertaV2Model": _SIZES
    | {"relative_attention": True, "position_biased_input": False, "position_buckets": 16}
    | {"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "FlaubertModel": _XLM | {"pad_token_id": 0},
    "GPTJForCausalLM": _OPENAI | {"n_positions": 40, "rotary_dim": 4},
    "GPTNeoForCausalLM": {"hidden_size": 24, "num_layers": 2, "num_heads": HEADS}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 3}
    | {"vocab_size": VOCABULARY, "max_position_embeddings": 40},
    "GPTNeoXJapaneseForCausalLM": {
        key: size for key, size in _SIZES.items() if key != "intermediate_size"
    }
    | _TOKENS,
    "IBertModel": _SIZES | {"pad_token_id": 1},
    "MPNetModel": _SIZES | {"pad_token_id": 1},
    "MegatronBertModel": _SIZES,
    "MptForCausalLM": {"d_model": 24, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 40}
    | {"vocab_size": VOCABULARY},
    "OpenAIGPTModel": _OPENAI | {"n_positions": 40},
    "RemBertModel": _SIZES | {"pad_token_id": 0},
    "XGLMForCausalLM": {"d_model": 24, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": 32}
    | {"vocab_size": VOCABULARY, "max_position_embeddings": 40},
    "XLMModel": _XLM | {"pad_token_id": 0},
    "XLNetModel": {"d_model": 24, "n_layer": 2, "n_head": HEADS, "d_inner": 32}
    | {"vocab_size": VOCABULARY},
}

# These count positions from what is padding, and take no others.
COUNT_THEMSELVES = (
    "OPT", "Camembert", "IBertModel", "MPNetModel", "Roberta", "XLMRoberta", "RobertaPreLayerNorm",
)  # fmt: skip


def _made(name: str, config: Mapping[str, Any]) -> nn.Module:
    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**config))
    return model


# Models that read one text as `input_ids` and `attention_mask`: name -> class and configuration.
TEXT: dict[str, Callable[[], nn.Module]] = {
    name: partial(_made, *made)
    for name, made in {
        **{name: (name, config) for name, config in _WRITTEN_OUT.items()},
        **{name: ("FalconForCausalLM", config) for name, config in _FALCONS.items()},
        **{re.sub("(Model|LMHeadModel|ForCausalLM)$", "", name): (name, config)
           for name, config in _CLASSES.items()},
        **{name: (f"{name}Model", _SIZES | {"pad_token_id": 1}) for name in _ENCODERS},
        **{name: (f"{name}ForCausalLM", _GROUPED | more) for name, more in _DECODERS.items()},
    }.items()
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model in evaluation mode, its weights so large that no head is near uniform."""
    torch.manual_seed(1)
    model = TEXT[name]().eval().to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others know no float64
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2 and weight.abs().max() < 0.2:
                weight.mul_(8.0)
    return model


def use_eager(model: nn.Module) -> None:
    """Attention by the model's own code in eager mode."""
    model.set_attn_implementation("eager")
    model.config._attn_implementation = "eager"  # by which alone Falcon chooses


# Their heads are mixed by something other than a linear layer.
MIX_OTHERWISE = ("IBertModel", "XLNetModel")
# Shared layers, an encoder, one matrix of queries, keys and values in three orders, softmax by
# hand, sinks and experts, grouped heads, and a norm of queries.
_FEW = ("Albert", "Bert", "FalconMultiQuery", "GPT2", "GPTJForCausalLM", "GptOss", "Llama", "Qwen3")
# Of every other kind one: a bias of positions in two ways, positions as queries and keys, latent
# keys, softcap, windows by hand and of an encoder, integers, positions from padding, one matrix
# of grouped heads, layers without positions, a gated norm, and memory.
SAMPLE = (
    "BloomForCausalLM", "FalconAlibi", "DebertaV2Model", "DeepseekV3", "Gemma2",
    "GPTNeoForCausalLM", "ModernBert", "IBertModel", "OPT", "Phi3", "Cohere2", "Qwen3Moe",
    "XLNetModel",
)  # fmt: skip


def each(quick: Iterable[str] = _FEW, without: Collection[str] = ()) -> list[Any]:
    """The architectures: a few in the quick tier, one of each kind in the long one, all by hand."""
    every = (quick, _FEW + SAMPLE, sorted(TEXT))
    return tiers(*([name for name in names if name not in without] for names in every))


def mixing(without: Collection[str] = ()) -> list[Any]:
    """The architectures with a linear output projection."""
    return each(without=(*MIX_OTHERWISE, *without))
