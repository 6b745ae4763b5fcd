"""Every decoder of text of the installed transformers, in small, by the type of its model."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 61
# Those of these names that a configuration has are set. Every threshold is below TOKENS.
TOKENS = 40
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "sliding_window": 6,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "index_topk": 8, "index_n_heads": 2,
    "index_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "sliding_window_size": 6, "rel_extent": 5, "attention_chunk_size": 8,
    "vocab_size_per_layer_input": VOCABULARY, "unpadded_vocab_size": VOCABULARY,
}  # fmt: skip
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
# What some need besides: layers of each kind, and lower thresholds.
_MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR_FIRST,
    "deepseek_v4": {
        "num_hidden_layers": 3, "o_groups": 2, "o_lora_rank": 8, "head_dim": 16,
        "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    },
    "dory": {  # whose second layer runs twice
        "num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {  # whose last layer has sizes of its own
        "num_hidden_layers": 3, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 12, "swa_kv_lora_rank": 12, "swa_head_dim": 8,
        "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8,
    },
    "gemma4_text": {  # whose last two layers read keys of the first two
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm5_next_text": _LINEAR_FIRST | {
        "linear_head_dim": 8, "linear_num_heads": 4, "index_kpool": 4, "index_topk": 12,
        "qk_rope_head_dim": 0, "head_dim": 0,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR_FIRST,
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4,
        "index_topk_blocks": 2, "rotary_dim": 4,
    },
    "qwen3_5_moe_text": _LINEAR_FIRST,
    "qwen3_5_text": _LINEAR_FIRST,
    "qwen3_next": _LINEAR_FIRST,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "step3p5": {  # whose last layer has more heads
        "layer_types": ["full_attention", "sliding_attention"], "num_sliding_attention_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_LARGEST = 10_000_000
# Two have a language model of images and text alone.
CLASSES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | {
    "glm5_next_text": "Glm5NextTextModel", "step3p5": "Step3p7TextModel",
}  # fmt: skip


def make_decoder(model_type: str) -> nn.Module | None:
    """A model with random weights; None if sizes of other names are needed, or it is too large."""
    cls = getattr(transformers, CLASSES[model_type])
    config_cls = transformers.CONFIG_MAPPING[model_type]
    if not issubclass(cls, transformers.PreTrainedModel):
        return None
    known = {name: size for name, size in _SIZES.items() if hasattr(config_cls, name)}
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    torch.manual_seed(1)
    try:
        config = config_cls(**known | _MORE.get(model_type, {}))
        with torch.device("meta"):
            size = sum(weight.numel() for weight in cls(config).parameters())
        if size > _LARGEST:
            return None
        model: nn.Module = cls(config).eval()
    except Exception:  # whatever a configuration or a constructor says of sizes that do not fit
        return None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and weight.abs().max() < 0.2:  # so that no head is near uniform
                weight.mul_(5.0)
            elif weight.ndim == 1 and ("sink" in name or name.endswith("bias")):
                nn.init.normal_(weight, std=0.3)
    return model
