"""Encoder-decoders of text."""

from typing import Any

from architectures.cases import HEADS, TOKENS, VOCABULARY, ArchitectureCase, case, pair

_BART = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32}
_BART |= {"decoder_ffn_dim": 32, "encoder_attention_heads": HEADS}
_BART |= {"decoder_attention_heads": HEADS, "vocab_size": VOCABULARY}
_BART |= TOKENS | {"max_position_embeddings": 40, "decoder_start_token_id": 2}
_T5 = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2}
_T5 |= {"num_heads": HEADS, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
_EXPERTS = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}

_CONFIGS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": _BART,
    "BigBirdPegasusForConditionalGeneration": _BART | {"attention_type": "original_full"},
    "BlenderbotForConditionalGeneration": _BART,
    "BlenderbotSmallForConditionalGeneration": _BART,
    "FSMTForConditionalGeneration": _BART
    | {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "LEDForConditionalGeneration": _BART
    | {"attention_window": [4, 4], "max_encoder_position_embeddings": 40}
    | {"max_decoder_position_embeddings": 40},
    "LongT5ForConditionalGeneration": _T5 | {"local_radius": 3},
    "M2M100ForConditionalGeneration": _BART,
    "MBartForConditionalGeneration": _BART,
    "MT5ForConditionalGeneration": _T5,
    "MarianMTModel": _BART,
    "MvpForConditionalGeneration": _BART,
    "NllbMoeForConditionalGeneration": _BART | {"num_experts": 2, "encoder_sparse_step": 2}
    | {"decoder_sparse_step": 2, "expert_capacity": 8},
    "PLBartForConditionalGeneration": _BART,
    "PegasusForConditionalGeneration": _BART,
    "PegasusXForConditionalGeneration": _BART | {"block_size": 4, "num_global_tokens": 2},
    "ProphetNetForConditionalGeneration": {"hidden_size": 24, "vocab_size": VOCABULARY}
    | {"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 32}
    | {"num_encoder_attention_heads": HEADS, "num_decoder_attention_heads": HEADS}
    | {"decoder_ffn_dim": 32, "max_position_embeddings": 40, "ngram": 2} | TOKENS,
    "SwitchTransformersForConditionalGeneration": _T5 | _EXPERTS,
    "T5ForConditionalGeneration": _T5,
    "UMT5ForConditionalGeneration": _T5,
}  # fmt: skip

PAIRS: dict[str, ArchitectureCase] = {
    name: case(name, config, pair) for name, config in _CONFIGS.items()
}
