"""Models of speech and music, of time series and of trajectories."""

from collections.abc import Callable
from typing import Any

import torch

from architectures.cases import (
    HEADS,
    SIZES,
    TOKENS,
    WIDTH,
    ArchitectureCase,
    Inputs,
    case,
    ids,
    wave,
)

_WAVE = {key: SIZES[key] for key in list(SIZES)[:4]} | {"vocab_size": 9}
_WAVE |= {
    "conv_dim": [8, 8],
    "conv_kernel": [8, 4],
    "conv_stride": [8, 4],
    "do_stable_layer_norm": False,
}
_WAVE |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
_WAVE |= {"num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
_ENCODER_ONLY = ("num_hidden_layers", "num_attention_heads")
_WHISPER = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
}
_WHISPER |= {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_WHISPER |= {"vocab_size": 23, "max_target_positions": 20, "decoder_start_token_id": 2} | TOKENS
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 24}
_SERIES |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS}
_SERIES |= {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
_SERIES |= {"num_time_features": 1, "input_size": 1}


def _whisper() -> Inputs:
    return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids(2, 5)}


def _speech2text() -> Inputs:
    return {"input_features": torch.randn(2, 20, 8), "decoder_input_ids": ids(2, 5)}


def _moonshine() -> Inputs:
    return {"input_values": torch.randn(2, 1200), "decoder_input_ids": ids(2, 5)}


def _speecht5() -> Inputs:
    return wave() | {"decoder_input_ids": ids(2, 5)}


def _bert_features() -> Inputs:
    return {"input_features": torch.randn(2, 6, 8)}


def _series() -> Inputs:
    return {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }


def _decisions() -> Inputs:
    return {
        "states": torch.randn(2, 3, 5),
        "actions": torch.randn(2, 3, 2),
        "rewards": torch.randn(2, 3, 1),
        "returns_to_go": torch.randn(2, 3, 1),
        "timesteps": torch.arange(3).expand(2, 3),
        "attention_mask": torch.ones(2, 3),
    }


def _codes() -> Inputs:
    return {
        "input_ids": torch.randint(0, 9, (4, 5)),  # two codebooks of two texts
        "encoder_hidden_states": torch.randn(2, 3, WIDTH),
    }


_SOUND: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "BarkCausalModel": ({"input_vocab_size": 23, "output_vocab_size": 23, "num_layers": 2}
                        | {"num_heads": HEADS, "hidden_size": 24, "block_size": 40},
                        lambda: {"input_ids": ids()}),
    "Data2VecAudioModel": (_WAVE | {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}, wave),
    "HubertModel": (_WAVE, wave),
    "MoonshineForConditionalGeneration": (
        {"hidden_size": 24, "vocab_size": 23, "intermediate_size": 32}
        | {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
        | {"encoder_num_attention_heads": HEADS, "decoder_num_attention_heads": HEADS} | TOKENS
        | {"decoder_start_token_id": 1}, _moonshine),
    "MusicgenForCausalLM": ({"vocab_size": 9, "num_hidden_layers": 2, "ffn_dim": 32}
                            | {"num_attention_heads": HEADS, "hidden_size": 24, "num_codebooks": 2}
                            | {"max_position_embeddings": 40, "pad_token_id": 9}, _codes),
    "SEWModel": (_WAVE | {"squeeze_factor": 2}, wave),
    "SEWDModel": (_WAVE | {"squeeze_factor": 2, "position_buckets": 4}
                  | {"pos_att_type": ["p2c", "c2p"]}
                  | {"max_position_embeddings": 40}, wave),
    "Speech2TextForConditionalGeneration": (
        _WHISPER | {"input_feat_per_channel": 8, "max_source_positions": 40, "conv_channels": 16}
        | {"num_conv_layers": 2, "conv_kernel_sizes": [3, 3]}, _speech2text),
    "SpeechT5ForSpeechToText": (
        {key: x for key, x in _WAVE.items() if key not in _ENCODER_ONLY}
        | {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS}
        | {"decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        | {"vocab_size": 23, "max_speech_positions": 40, "max_text_positions": 40} | TOKENS
        | {"decoder_start_token_id": 2}, _speecht5),
    "UniSpeechModel": (_WAVE, wave),
    "UniSpeechSatModel": (_WAVE, wave),
    "Wav2Vec2BertModel": (_WAVE | {"feature_projection_input_dim": 8}
                          | {"left_max_position_embeddings": 4}
                          | {"right_max_position_embeddings": 4}, _bert_features),
    "Wav2Vec2ConformerModel": (_WAVE | {"position_embeddings_type": "relative"}
                               | {"conv_depthwise_kernel_size": 3}, wave),
    "Wav2Vec2Model": (_WAVE, wave),
    "WavLMModel": (_WAVE | {"num_buckets": 8, "max_bucket_distance": 16}, wave),
    "WhisperForConditionalGeneration": (
        _WHISPER | {"num_mel_bins": 8, "max_source_positions": 10}, _whisper),
}  # fmt: skip

_SERIES_CASES: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "AutoformerForPrediction": (_SERIES | {"moving_average": 3, "label_length": 2}, _series),
    "DecisionTransformerModel": ({"state_dim": 5, "act_dim": 2, "hidden_size": 24, "n_layer": 2}
                                 | {"n_head": HEADS, "max_ep_len": 10, "n_positions": 40},
                                 _decisions),
    "InformerForPrediction": (_SERIES | {"distil": False}, _series),
    "PatchTSTModel": ({"num_input_channels": 3, "context_length": 16, "patch_length": 4}
                      | {"patch_stride": 4, "d_model": 24, "num_hidden_layers": 2, "ffn_dim": 32}
                      | {"num_attention_heads": HEADS},
                      lambda: {"past_values": torch.randn(2, 16, 3)}),
    "TimeSeriesTransformerForPrediction": (_SERIES, _series),
    "TimesFmModel": ({"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS}
                     | {"intermediate_size": 32, "head_dim": 6, "patch_length": 4}
                     | {"context_length": 16, "horizon_length": 4},
                     lambda: {"past_values": torch.randn(2, 16)}
                     | {"past_values_padding": torch.zeros(2, 16, dtype=torch.int64)}
                     | {"freq": torch.zeros(2, 1, dtype=torch.int64)}),
}  # fmt: skip

SOUND: dict[str, ArchitectureCase] = {
    name: case(name, config, inputs) for name, (config, inputs) in _SOUND.items()
}
SERIES: dict[str, ArchitectureCase] = {
    name: case(name, config, inputs) for name, (config, inputs) in _SERIES_CASES.items()
}
