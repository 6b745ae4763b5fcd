"""Tiny models of recent families: hybrids, gates, latents, heads of several widths."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 23
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "head_dim": 4,
}  # fmt: skip
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}

# Family -> the class of its configuration, and what it needs beyond the sizes.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "Qwen3.5-VL, text": ("Qwen3_5Config", {
        "text_config": {**SIZES, **_DELTA},
        "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
            "out_hidden_size": 24, "patch_size": 4, "num_position_embeddings": 16,
        },
    }),
    "Qwen3-Next": ("Qwen3NextConfig", _DELTA | _EXPERTS),
    "OLMo-Hybrid": ("OlmoHybridConfig", _DELTA),
    "Kimi-Linear": ("KimiLinearConfig", _LATENT | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4,
        "linear_head_dim": 8, "linear_num_heads": 4, "q_lora_rank": None,
    }),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    "Nemotron-H": ("NemotronHConfig", {
        "hybrid_override_pattern": "M*M*", "mamba_num_heads": 4, "mamba_head_dim": 8,
        "n_groups": 1, "ssm_state_size": 8,
    }),
    "Falcon-H1": ("FalconH1Config", _MAMBA),
    "Granite-4": ("GraniteMoeHybridConfig", {
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 6, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_n_groups": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    }),
    "Jamba": ("JambaConfig", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "num_experts": 2, "use_mamba_kernels": False,
    }),
    "gpt-oss": ("GptOssConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "Gemma 4": ("Gemma4TextConfig", {
        "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 4, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "Gemma 4, shared keys": ("Gemma4TextConfig", {
        "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 4, "sliding_window": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "DeepSeek-V3": ("DeepseekV3Config", _LATENT),
    "DeepSeek-V3.2": ("DeepseekV32Config", _LATENT | {
        "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8,
    }),
    "DeepSeek-V4": ("DeepseekV4Config", {"o_groups": 2}),
    "MiniMax-M3": ("MiniMaxM3VLTextConfig", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 32,
        "shared_intermediate_size": 16, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8,
        "index_block_size": 4, "index_topk_blocks": 2,
    }),
    "Zamba2": ("Zamba2Config", {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_headdim": 8,
        "n_mamba_heads": 6, "mamba_ngroups": 1, "num_mem_blocks": 1, "use_mem_rope": True,
        "num_key_value_heads": 4,
    }),
    "Bamba": ("BambaConfig", {
        "attn_layer_indices": [1, 3], "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1,
    }),
    "Hunyuan-V4": ("HYV4Config", _LATENT),
    "Bailing hybrid": ("BailingHybridConfig", _LATENT | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4,
        "q_lora_rank": None, "n_group": 2, "head_dim": 8,
    }),
    "MiniMax": ("MiniMaxConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Recurrent Gemma": ("RecurrentGemmaConfig", {"lru_width": 24, "attention_window_size": 6}),
    "ZAYA": ("ZayaConfig", {}),
    "LFM3": ("Lfm3Config", {}),
}  # fmt: skip


def make_family(name: str) -> nn.Module:
    """A tiny model of a family, with random weights: the same in each call."""
    config, more = FAMILIES[name]
    torch.manual_seed(0)
    sees = "vision_config" in more
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = kind.from_config(getattr(transformers, config)(**{**({} if sees else SIZES), **more}))
    for weight in model.parameters():
        if weight.ndim == 1:  # biases of zeros and norms of ones prove nothing
            nn.init.normal_(weight, 0.5, 0.1)
    return model.eval()
