"""Models that read one text: the zoo of the laws, and further ones."""

from functools import partial
from typing import Any

import zoo

from architectures.cases import HEADS, SIZES, TOKENS, VOCABULARY, ArchitectureCase, case, ids, text

_GROUPED = SIZES | TOKENS | {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
_LATENT |= {"v_head_dim": 5, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
_LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
_MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
_ATTENTION_SECOND = {"attn_layer_period": 2, "attn_layer_offset": 1}
_SPARSE = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
_LONG = SIZES | {"max_position_embeddings": 64}

_DECODERS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": _GROUPED,
    "BioGptForCausalLM": SIZES | TOKENS,
    "BitNetForCausalLM": _GROUPED,
    "CTRLLMHeadModel": {"n_embd": 24, "n_layer": 2, "n_head": HEADS, "dff": 32, "n_positions": 40}
    | {"vocab_size": VOCABULARY},
    "DeepseekV2ForCausalLM": _GROUPED | {"num_key_value_heads": HEADS} | _LATENT,
    "DiffLlamaForCausalLM": _GROUPED,
    "DogeForCausalLM": _GROUPED,
    "Ernie4_5ForCausalLM": _GROUPED,
    "Exaone4ForCausalLM": _GROUPED | {"sliding_window": 3},
    "FalconH1ForCausalLM": _GROUPED
    | {"mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 1}
    | {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_chunk_size": 4},
    "Glm4ForCausalLM": _GROUPED | {"head_dim": 6},
    "Glm4MoeForCausalLM": _GROUPED | {"head_dim": 6, "n_routed_experts": 4, "n_group": 2}
    | {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GPTBigCodeForCausalLM": {"n_embd": 24, "n_layer": 2, "n_head": HEADS, "n_positions": 40}
    | {"vocab_size": VOCABULARY},
    "GraniteMoeForCausalLM": _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "GraniteMoeHybridForCausalLM": _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2}
    | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 6, "mamba_d_head": 8}
    | {"mamba_d_state": 4, "mamba_n_groups": 1, "shared_intermediate_size": 16},
    "JambaForCausalLM": _GROUPED | _ATTENTION_SECOND | {"num_experts": 2, "mamba_dt_rank": 4}
    | _MAMBA | {"use_mamba_kernels": False, "num_experts_per_tok": 1},
    "JetMoeForCausalLM": _GROUPED | {"kv_channels": 6, "num_local_experts": 3}
    | {"num_experts_per_tok": 2, "num_key_value_heads": 2},
    "Lfm2ForCausalLM": _GROUPED | {"full_attn_idxs": [1]}
    | {"layer_types": ["conv", "full_attention"]},
    "Llama4ForCausalLM": _GROUPED | {"head_dim": 6, "num_local_experts": 2}
    | {"intermediate_size_mlp": 32, "num_experts_per_tok": 1},
    "MambaForCausalLM": {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
    "MiniMaxForCausalLM": _GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1}
    | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "Olmo3ForCausalLM": _GROUPED | {"sliding_window": 3},
    "OlmoeForCausalLM": _GROUPED | {"num_experts": 3, "num_experts_per_tok": 2},
    "PersimmonForCausalLM": SIZES | TOKENS | {"hidden_size": 32},
    "PhimoeForCausalLM": _GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3NextForCausalLM": _GROUPED | _EXPERTS
    | {"head_dim": 6, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "RwkvForCausalLM": {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    | {"context_length": 40, "attention_hidden_size": 24, "intermediate_size": 32},
    "SeedOssForCausalLM": _GROUPED | {"head_dim": 6},
    "ModernBertDecoderForCausalLM": SIZES | TOKENS | {"cls_token_id": 1, "sep_token_id": 2}
    | {"local_attention": 4},
    "XmodModel": SIZES | {"pad_token_id": 1, "languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip

_ENCODERS: dict[str, dict[str, Any]] = {
    "BigBird block-sparse": _LONG | _SPARSE | {"pad_token_id": 0},
    "CanineModel": SIZES | {"num_hash_buckets": 8, "local_transformer_stride": 4}
    | {"downsampling_rate": 2},
    "ConvBertModel": SIZES | {"embedding_size": 8, "head_ratio": 2, "pad_token_id": 0},
    "Data2VecTextModel": SIZES | {"pad_token_id": 1},
    "EsmModel": SIZES | {"pad_token_id": 1, "mask_token_id": 3}
    | {"position_embedding_type": "rotary"},
    "EuroBertModel": _GROUPED | {"mask_token_id": 3},
    "FNetModel": {key: size for key, size in SIZES.items() if key != "num_attention_heads"},
    "FunnelModel": {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1}
    | {"d_model": 24, "n_head": HEADS, "d_head": 6, "d_inner": 32},
    "LayoutLMModel": SIZES | {"pad_token_id": 0},
    "LongformerModel": _LONG | {"pad_token_id": 1, "attention_window": [4, 4]},
    "LukeModel": SIZES | {"pad_token_id": 1, "entity_vocab_size": 5, "entity_emb_size": 8},
    "MobileBertModel": SIZES | {"embedding_size": 8, "intra_bottleneck_size": 24}
    | {"true_hidden_size": 24, "pad_token_id": 0},
    "MraModel": _LONG | {"pad_token_id": 1},
    "NomicBertModel": SIZES | {"pad_token_id": 0},
    "NystromformerModel": SIZES | {"pad_token_id": 1, "num_landmarks": 4}
    | {"segment_means_seq_len": 8},
    "ReformerModel": {"attention_head_size": 6, "num_attention_heads": HEADS, "hidden_size": 24}
    | {"feed_forward_size": 32, "vocab_size": VOCABULARY, "attn_layers": ["local", "lsh"]}
    | {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [8, 16], "max_position_embeddings": 16}
    | {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_hashes": 1}
    | {"num_buckets": 2},
    "RoCBertModel": SIZES | {"pad_token_id": 0, "enable_pronunciation": False}
    | {"enable_shape": False},
    "RoFormerModel": SIZES | {"pad_token_id": 0, "embedding_size": 24},
    "SplinterModel": SIZES | {"pad_token_id": 0},
    "SqueezeBertModel": SIZES | {"pad_token_id": 0, "embedding_size": 24, "q_groups": 1}
    | {"k_groups": 1, "v_groups": 1, "post_attention_groups": 1},
    "TapasModel": SIZES | {"pad_token_id": 0},
    "XLMRobertaXLModel": SIZES | {"pad_token_id": 1},
    "YosoModel": _LONG | {"pad_token_id": 1, "use_expectation": True},
}  # fmt: skip
_CLASS = {"BigBird block-sparse": "BigBirdModel"}
_READ = {
    "BigBird block-sparse": lambda: {"input_ids": ids(2, 24)},
    "LongformerModel": lambda: {"input_ids": ids(2, 8)},
    "MraModel": lambda: {"input_ids": ids(2, 64)},
    "NystromformerModel": lambda: {"input_ids": ids(2, 8)},
    "ReformerModel": lambda: {"input_ids": ids(2, 16)},
    "CanineModel": lambda: {"input_ids": ids(2, 8)},
}

TEXT: dict[str, ArchitectureCase] = {
    **{name: ArchitectureCase(partial(zoo.make, name), text) for name in sorted(zoo.TEXT)},
    **{
        name: case(_CLASS.get(name, name), config, _READ.get(name, text))
        for name, config in sorted((_DECODERS | _ENCODERS).items())
    },
}
