"""Models of images and video."""

from collections.abc import Callable
from functools import partial
from typing import Any

from architectures.cases import HEADS, IMAGE, WIDTH, ArchitectureCase, Inputs, case, image, video

_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 4]}
_SWIN |= {"window_size": 4, "mlp_ratio": 2.0}
_DETR = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32}
_DETR |= {"decoder_ffn_dim": 32, "encoder_attention_heads": HEADS, "num_queries": 5}
_DETR |= {"decoder_attention_heads": HEADS, "use_pretrained_backbone": False}
_DETR |= {"use_timm_backbone": False, "backbone": None}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
_RESNET |= {"layer_type": "basic", "out_features": ["stage2"], "num_channels": 3}
_SAM = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_SAM |= {"image_size": 32, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1]}
_SAM |= {"output_channels": 16, "mlp_dim": 32}
_STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [12, 24]}
_PYRAMID = {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4]}

_CASES: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "ASTModel": ({**IMAGE, "num_mel_bins": 8, "max_length": 16, "frequency_stride": 4}
                 | {"time_stride": 4}, lambda: {"input_values": _spectrum()}),
    "BeitModel": (IMAGE, image),
    "ConditionalDetrForObjectDetection": (_DETR | {"backbone_config": _RESNET}, partial(image, 32)),
    "CvtModel": ({"embed_dim": [12, 24], "num_heads": [2, 4], "depth": [1, 2]}
                 | {"patch_sizes": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1]}
                 | {"mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0]}
                 | {"drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0]}
                 | {"qkv_bias": [True, True], "cls_token": [False, True]}
                 | {"qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3]}
                 | {"padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1]}
                 | {"stride_q": [1, 1]}, partial(image, 16)),
    "DPTForDepthEstimation": (IMAGE | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
                              | {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
                              | {"is_hybrid": False, "image_size": 32}, partial(image, 32)),
    "Data2VecVisionModel": (IMAGE, image),
    "DeiTModel": (IMAGE, image),
    "DetrForObjectDetection": (_DETR | {"backbone_config": _RESNET}, partial(image, 32)),
    "Dinov2Model": (IMAGE, image),
    "Dinov2WithRegistersModel": (IMAGE, image),
    "DINOv3ViTModel": (IMAGE | {"hidden_size": 32}, image),
    "DonutSwinModel": (_SWIN, partial(image, 16)),
    "GLPNModel": (_STAGES | _PYRAMID | {"sr_ratios": [2, 1], "mlp_ratios": [2, 2]},
                  partial(image, 16)),
    "HieraModel": ({"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4], "image_size": [16, 16]}
                   | {"patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1]}
                   | {"masked_unit_size": [4, 4], "query_stride": [2, 2], "num_query_pool": 1},
                   partial(image, 16)),
    "IJepaModel": (IMAGE, image),
    "LevitModel": ({"image_size": 32, "hidden_sizes": [16, 24], "num_attention_heads": [2, 4]}
                   | {"depths": [1, 1], "key_dim": [8, 8], "attention_ratio": [2, 2]}
                   | {"mlp_ratio": [2, 2], "down_ops": [["Subsample", 8, 2, 4, 2, 2]]},
                   partial(image, 32)),
    "MobileViTModel": ({"image_size": 128, "hidden_sizes": [16, 16, 16]}
                       | {"num_attention_heads": HEADS}
                       | {"neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]},
                       partial(image, 128)),
    "PvtModel": (_STAGES | _PYRAMID | {"patch_sizes": [4, 2], "strides": [4, 2]}
                 | {"sequence_reduction_ratios": [2, 1], "mlp_ratios": [2, 2]}
                 | {"image_size": 16}, partial(image, 16)),
    "SamVisionModel": (_SAM, partial(image, 32)),
    "SegformerModel": (_STAGES | _PYRAMID | {"sr_ratios": [2, 1], "mlp_ratios": [2, 2]},
                       partial(image, 16)),
    "Siglip2VisionModel": (IMAGE | {"num_patches": 4}, lambda: _patches()),
    "SiglipVisionModel": (IMAGE, image),
    "SwinModel": (_SWIN, partial(image, 16)),
    "Swinv2Model": (_SWIN, partial(image, 16)),
    "TableTransformerForObjectDetection": (_DETR | {"backbone_config": _RESNET},
                                           partial(image, 32)),
    "TimesformerModel": (IMAGE | {"num_frames": 2}, video),
    "ViTMAEForPreTraining": (IMAGE | {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 1}
                             | {"decoder_num_attention_heads": HEADS}
                             | {"decoder_intermediate_size": 32}, image),
    "ViTMSNModel": (IMAGE, image),
    "ViTModel": (IMAGE, image),
    "VideoMAEModel": (IMAGE | {"num_frames": 4, "tubelet_size": 2}, partial(video, 4)),
    "VitDetModel": (IMAGE | {"window_size": 2, "window_block_indices": [0]}
                    | {"image_size": 16, "pretrain_image_size": 16}, partial(image, 16)),
    "VivitModel": (IMAGE | {"num_frames": 4, "tubelet_size": [2, 4, 4]}, partial(video, 4)),
    "YolosModel": (IMAGE | {"image_size": [8, 8], "num_detection_tokens": 3}, image),
}  # fmt: skip


def _spectrum() -> Any:
    import torch

    return torch.randn(2, 16, 8)


def _patches() -> Inputs:
    import torch

    return {
        "pixel_values": torch.randn(2, 4, 48),
        "pixel_attention_mask": torch.ones(2, 4, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[2, 2], [2, 2]]),
    }


IMAGES: dict[str, ArchitectureCase] = {
    name: case(name, config, inputs) for name, (config, inputs) in _CASES.items()
}
