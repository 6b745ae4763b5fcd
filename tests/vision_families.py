"""Small random models of images, one for each family, with the processors of transformers.

Image processors are those for PIL, which need no torchvision. Ids are made here: as many image
tokens as the model itself makes features.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

SIDE = {"height": 112, "width": 112}
TEXT = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 112, "patch_size": 14,
}  # fmt: skip
IMAGE = 50  # the id of an image token
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

Process = Callable[..., Mapping[str, Any]]
Family = tuple[nn.Module, Process, float]  # with the side of a token, in the pixels it is made of


def _finished(model: nn.Module) -> nn.Module:
    """In evaluation, without a weight that is zero: nothing would pass it."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.requires_grad_(False).parameters():
        if weight.dim() and not weight.any():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.eval()


def _reading(model: Any, processor: Any, side: float) -> Family:
    """A model of images and text: two words, all image tokens, a word."""
    _finished(model)

    def process(images: list[Any]) -> dict[str, Any]:
        inputs = dict(processor(images=images, return_tensors="pt"))
        inputs.pop("num_crops", None)
        with torch.no_grad():
            features = model.get_image_features(**inputs).pooler_output
        n_tokens = sum(x.numel() // x.shape[-1] for x in features)
        ids = torch.tensor([[5, 6, *[IMAGE] * n_tokens, 7]])
        types = (ids == IMAGE).int()
        needs = {"mm_token_type_ids": types} if "image_grid_thw" in inputs else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **needs, **inputs}

    return model, process, side


def _encoder(model: nn.Module, processor: Any, side: float = 14) -> Family:
    return _finished(model), partial(processor, return_tensors="pt"), side


def _llava(crop: bool = True) -> Family:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT),
        image_token_id=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    sizes = (
        {"size": {"shortest_edge": 112}, "crop_size": 112}
        if crop
        else {"size": SIDE, "do_center_crop": False}
    )
    processor = hf.CLIPImageProcessorPil(**sizes)
    return _reading(hf.LlavaForConditionalGeneration(config), processor, 14)


def _llava_next() -> Family:
    pins = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT),
        image_token_id=IMAGE, image_grid_pinpoints=pins, vision_feature_layer=-1,
    )  # fmt: skip
    processor = hf.LlavaNextImageProcessorPil(
        size={"shortest_edge": 112}, crop_size=112, image_grid_pinpoints=pins
    )
    return _reading(hf.LlavaNextForConditionalGeneration(config), processor, 14)


def _one_vision() -> Family:
    """Features of many tiles are interpolated: tokens share pixels."""
    pins = [[112 * i, 112 * j] for i in range(1, 3) for j in range(1, 3)]
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT), image_token_id=IMAGE, image_grid_pinpoints=pins,
        vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip
    processor = hf.LlavaOnevisionImageProcessorPil(size=SIDE, image_grid_pinpoints=pins)
    model = hf.LlavaOnevisionForConditionalGeneration(config)
    return _reading(model, processor, 20)


def _qwen(kind: str) -> Family:
    ids = {
        "image_token_id": IMAGE, "video_token_id": 51, "vision_start_token_id": 52,
        "vision_end_token_id": 53,
    }  # fmt: skip
    text: dict[str, Any] = {**TEXT, "rope_parameters": ROPE}
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 32,
              "intermediate_size": 48, "patch_size": 14}  # fmt: skip
    merged: dict[str, Any] = {"spatial_merge_size": 2, "temporal_patch_size": 2}
    side, model = 28, None
    if kind == "2":
        vision = {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 32, "patch_size": 14}
        config = hf.Qwen2VLConfig(text_config=text, vision_config=vision | merged, **ids)
        model = hf.Qwen2VLForConditionalGeneration(config)
    elif kind == "2.5":  # windows: patches change their order in the tower
        windows = {"window_size": 56, "fullatt_block_indexes": [1]}
        vision |= merged | windows
        config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    elif kind == "3":
        vision |= merged | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        text["rope_parameters"] = ROPE | {"mrope_interleaved": True}
        config = hf.Qwen3VLConfig(text_config={**text, "head_dim": 8}, vision_config=vision, **ids)
        model = hf.Qwen3VLForConditionalGeneration(config)
    else:  # a linear layer stands before the first layer of attention
        text |= {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True},
        }  # fmt: skip
        vision |= merged | {"num_position_embeddings": 64}
        config = hf.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
        model = hf.Qwen3_5ForConditionalGeneration(config)
    processor = hf.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 100 * 784}, merge_size=2, patch_size=14
    )
    return _reading(model, processor, side)


def _glm() -> Family:
    """Not among the families that the rule was made on."""
    ids = {
        "image_token_id": IMAGE, "video_token_id": 51, "image_start_token_id": 52,
        "image_end_token_id": 53, "video_start_token_id": 54, "video_end_token_id": 55,
    }  # fmt: skip
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 32,
              "intermediate_size": 48, "image_size": 112, "patch_size": 14}  # fmt: skip
    rope = ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    text = {**TEXT, "rope_parameters": rope}
    config = hf.Glm4vConfig(text_config=text, vision_config=vision, **ids)
    processor = hf.Glm4vImageProcessorPil(size={"shortest_edge": 12544, "longest_edge": 150_000})
    return _reading(hf.Glm4vForConditionalGeneration(config), processor, 28)


def _siglip_and(config: type, model: type, text: Any, processor: Any, **more: Any) -> Family:
    vision = hf.SiglipVisionConfig(**VISION, vision_use_head=False, projection_dim=32)
    made = config(vision_config=vision, text_config=text, image_token_id=IMAGE, **more)
    side = 28 if "mm_tokens_per_image" in more else 14
    return _reading(model(made), processor, side)


def _internvl() -> Family:
    """Tiles and a thumbnail: a pixel belongs to two tokens."""
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(
            **{**VISION, "image_size": [112, 112], "patch_size": [14, 14]}
        ),
        text_config=hf.Qwen2Config(**TEXT), image_token_id=IMAGE, image_seq_length=16,
    )  # fmt: skip
    processor = hf.GotOcr2ImageProcessorPil(
        size=SIDE, crop_to_patches=True, min_patches=1, max_patches=6
    )

    def process(*, images: list[Any], return_tensors: str) -> dict[str, Any]:
        made = dict(processor(images=images, return_tensors=return_tensors))
        return {"pixel_values": made["pixel_values"]}

    return _reading(hf.InternVLForConditionalGeneration(config), process, 28)


def _idefics3() -> Family:
    config = hf.Idefics3Config(
        vision_config=VISION, text_config=hf.LlamaConfig(**TEXT), scale_factor=2,
        image_token_id=IMAGE,
    )  # fmt: skip
    processor = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": 336}, max_image_size={"longest_edge": 112}
    )
    model = hf.Idefics3ForConditionalGeneration(config)
    return _reading(model, processor, 28)


def _pixtral() -> Family:
    vision = hf.PixtralVisionConfig(**VISION | {"image_size": 448})
    config = hf.LlavaConfig(
        vision_config=vision, text_config=hf.MistralConfig(**TEXT), image_token_id=IMAGE,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    processor = hf.PixtralImageProcessorPil(size={"longest_edge": 224}, patch_size=14)
    return _reading(hf.LlavaForConditionalGeneration(config), processor, 14)


def idefics2() -> Family:
    """A resampler: learned queries read the whole image."""
    config = hf.Idefics2Config(
        vision_config=VISION,
        perceiver_config={
            "resampler_n_latents": 8, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 8, "num_key_value_heads": 2, "hidden_size": 32,
        },
        text_config=hf.MistralConfig(**TEXT), image_token_id=IMAGE,
    )  # fmt: skip
    processor = hf.Idefics2ImageProcessorPil(
        size={"shortest_edge": 56, "longest_edge": 112}, do_image_splitting=False
    )
    return _reading(hf.Idefics2ForConditionalGeneration(config), processor, 14)


def _gemma3() -> Family:
    processor = hf.Gemma3ImageProcessorPil(size=SIDE)
    text = hf.Gemma3TextConfig(**TEXT, head_dim=8)
    model = hf.Gemma3ForConditionalGeneration

    def process(*, images: list[Any], return_tensors: str) -> dict[str, Any]:
        made = processor(images=images, return_tensors=return_tensors)
        return {"pixel_values": made["pixel_values"]}

    return _siglip_and(hf.Gemma3Config, model, text, process, mm_tokens_per_image=16)


FAMILIES: Mapping[str, Callable[[], Family]] = {
    "LLaVA": _llava,
    "Qwen2.5-VL": partial(_qwen, "2.5"),
    "DINOv2 with registers": lambda: _encoder(
        hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**VISION)),
        hf.BitImageProcessorPil(size={"shortest_edge": 128}, crop_size=SIDE),
    ),
    "LLaVA-NeXT": _llava_next,
    "LLaVA-OneVision": _one_vision,
    "Qwen2-VL": partial(_qwen, "2"),
    "Qwen3-VL": partial(_qwen, "3"),
    "Qwen3.5": partial(_qwen, "3.5"),
    "PaliGemma": lambda: _siglip_and(
        hf.PaliGemmaConfig, hf.PaliGemmaForConditionalGeneration,
        hf.GemmaConfig(**TEXT, head_dim=8), hf.SiglipImageProcessorPil(size=SIDE),
        projection_dim=32,
    ),
    "Gemma 3": _gemma3,
    "InternVL": _internvl,
    "Idefics3": _idefics3,
    "Pixtral": _pixtral,
    "GLM-4V": _glm,
    "ViT": lambda: _encoder(
        hf.ViTModel(hf.ViTConfig(**VISION)), hf.ViTImageProcessorPil(size=SIDE)
    ),
    "CLIP": lambda: _encoder(
        hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)),
        hf.CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size=112),
    ),
    "DINOv3": lambda: _encoder(
        hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**VISION, num_register_tokens=4)),
        hf.ViTImageProcessorPil(size=SIDE),
    ),
    "SigLIP": lambda: _encoder(
        hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)),
        hf.SiglipImageProcessorPil(size=SIDE),
    ),
    "SigLIP 2 NaFlex": lambda: _encoder(
        hf.Siglip2VisionModel(
            hf.Siglip2VisionConfig(
                **{k: v for k, v in VISION.items() if k != "image_size"}, num_patches=64
            )
        ),
        hf.Siglip2ImageProcessorPil(patch_size=14, max_num_patches=64),
    ),
}  # fmt: skip
