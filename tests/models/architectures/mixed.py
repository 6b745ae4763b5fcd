"""Models that read images beside text."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from architectures.cases import (
    HEADS,
    IMAGE,
    SIZES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    ArchitectureCase,
    Inputs,
    case,
    ids,
    image,
    video,
)

_TEXT = SIZES | TOKENS
_LLAMA = _TEXT | {"num_key_value_heads": 2}
_IMAGE_TOKEN = 4
_TWO_TOWERS: dict[str, Any] = {"text_config": _TEXT, "vision_config": IMAGE}


def _with_image(patches: int, side: int = 8) -> Inputs:
    """Ids with as many image tokens as there are patches."""
    first = torch.full((2, patches), _IMAGE_TOKEN)
    return {"input_ids": torch.cat([first, ids(2, 4)], 1)} | image(side)


def _paligemma() -> Inputs:
    inputs = _with_image(4)
    return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


def _both() -> Inputs:
    return {"input_ids": ids()} | image()


def _qwen() -> Inputs:
    start, end = torch.full((1, 1), 5), torch.full((1, 1), 6)
    middle = torch.full((1, 1), _IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([start, middle, end, ids(1, 4)], 1),
        "pixel_values": torch.randn(4, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": torch.tensor([[0, 1, 0, 0, 0, 0, 0]]),
    }


def _flava() -> Inputs:
    return {"input_ids": ids(2, 7), "bool_masked_pos": torch.zeros(2, 4)} | image()


_QWEN = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": HEADS, "patch_size": 4}
_QWEN |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2}
_ROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1], "rope_type": "default"}}

_CASES: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "AltCLIPModel": (_TWO_TOWERS | {"text_config": _TEXT | {"pad_token_id": 1, "project_dim": 24}}
                     | {"projection_dim": 24}, _both),
    "BlipForConditionalGeneration": (_TWO_TOWERS | {"text_config": _TEXT
                                     | {"encoder_hidden_size": WIDTH}}, _both),
    "CLIPModel": (_TWO_TOWERS, _both),
    "CLIPSegForImageSegmentation": (_TWO_TOWERS | {"extract_layers": [0, 1], "reduce_dim": 24}
                                    | {"decoder_num_attention_heads": HEADS, "projection_dim": 24}
                                    | {"decoder_intermediate_size": 32}, _both),
    "ChineseCLIPModel": (_TWO_TOWERS, _both),
    "FlavaModel": ({"text_config": _TEXT, "image_config": IMAGE}
                   | {"multimodal_config": {k: IMAGE[k] for k in list(IMAGE)[:4]}}
                   | {"hidden_size": 24}, _flava),
    "GitForCausalLM": (_TEXT | {"vision_config": IMAGE}, _both),
    "LlavaForConditionalGeneration": (
        {"vision_config": IMAGE | {"model_type": "clip_vision_model"}, "image_token_index": 4}
        | {"text_config": _LLAMA | {"model_type": "llama"}, "vision_feature_layer": -1},
        partial(_with_image, 4)),
    "Owlv2Model": (_TWO_TOWERS, _both),
    "PaliGemmaForConditionalGeneration": (
        {"vision_config": IMAGE | {"model_type": "siglip_vision_model"}, "image_token_index": 4}
        | {"text_config": _LLAMA | {"model_type": "gemma", "head_dim": 6}, "projection_dim": 24},
        _paligemma),
    "Qwen2VLForConditionalGeneration": (
        {"text_config": _LLAMA | _ROPE | {"hidden_size": 32}, "vision_config": _QWEN}
        | {"image_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
        | {"video_token_id": 7}, _qwen),
    "SiglipModel": (_TWO_TOWERS, _both),
    "TrOCRForCausalLM": ({"d_model": 24, "decoder_layers": 2, "decoder_attention_heads": HEADS}
                         | {"decoder_ffn_dim": 32, "vocab_size": VOCABULARY}
                         | {"max_position_embeddings": 40}, lambda: {"input_ids": ids()}),
    "ViltModel": (_TEXT | IMAGE, _both),
    "VisualBertModel": (_TEXT | {"visual_embedding_dim": 12},
                        lambda: {"input_ids": ids(), "visual_embeds": torch.randn(2, 3, 12)}),
    "XCLIPModel": (_TWO_TOWERS | {"vision_config": IMAGE | {"num_frames": 2, "mit_hidden_size": 24}
                   | {"mit_num_attention_heads": HEADS, "mit_intermediate_size": 32}
                   | {"mit_num_hidden_layers": 1}, "projection_dim": 24}
                   | {"prompt_num_attention_heads": HEADS, "prompt_layers": 1},
                   lambda: {"input_ids": ids()} | video()),
}  # fmt: skip

MIXED: dict[str, ArchitectureCase] = {
    name: case(name, config, inputs) for name, (config, inputs) in _CASES.items()
}
