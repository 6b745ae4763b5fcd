"""Try models of timm and diffusers: observe, importance, prune. Writes a table of the docs.

`make zoo` runs it, with both libraries in a folder of their own:

    PYTHONPATH=tests/models:build/zoo python -m benchmarks.real_models.other_libraries \\
        --into benchmarks/results/models.md
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from architectures.cases import ArchitectureCase, Inputs
from torch import nn

from benchmarks._report import parser_of, show
from benchmarks.real_models._trials import Trials

STEPS = ("observe", "importance", "prune")
# timm imports torchvision, and its operators may be of another build of torch. No model calls them.
VISION = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    VISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

SMALL = {"num_classes": 7, "pretrained": False}
PLAIN = SMALL | {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
STAGES = SMALL | {"img_size": 64, "embed_dim": 32, "depths": (1, 1), "num_heads": (2, 4)}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_tiny_patch16_224", PLAIN),
    "DeiT": ("deit_tiny_distilled_patch16_224", PLAIN),
    "DINOv2": ("vit_small_patch14_dinov2", PLAIN),
    "BEiT": ("beit_base_patch16_224", PLAIN),
    "EVA": ("eva02_tiny_patch14_224", PLAIN),
    "CaiT": ("cait_xxs24_224", PLAIN),
    "XCiT": ("xcit_nano_12_p8_224", PLAIN),
    "Swin": ("swin_tiny_patch4_window7_224", STAGES | {"window_size": 4}),
    "Swin v2": ("swinv2_tiny_window8_256", STAGES | {"window_size": 4}),
    "MaxViT": ("maxvit_nano_rw_256", SMALL | {"img_size": 64}),
    "MaxViT, tf": ("maxvit_tiny_tf_224", SMALL | {"img_size": 64}),
    "MobileViT": ("mobilevit_xxs", SMALL),
    "PVT v2": ("pvt_v2_b0", SMALL),
    "Hiera": ("hiera_tiny_224", SMALL | {"img_size": 224}),
}


def vision_cases() -> Iterator[tuple[str, ArchitectureCase]]:
    import timm

    for name, (model, sizes) in TIMM.items():
        inputs = partial(images, sizes.get("img_size", 64))
        yield name, ArchitectureCase(partial(timm.create_model, model, **sizes), inputs)


def images(side: int) -> Inputs:
    return {"x": torch.randn(2, 3, side, side)}


def diffusion_cases() -> Iterator[tuple[str, ArchitectureCase]]:
    import diffusers
    from diffusers.models import attention_processor

    heads = {"num_attention_heads": 2, "attention_head_dim": 16}
    states = {"hidden_states": torch.randn(2, 12, 32)}
    for processor in ("AttnProcessor", "AttnProcessor2_0"):
        kind = getattr(attention_processor, processor)
        build = partial(attention, attention_processor.Attention, kind)
        yield f"Attention, {processor}", ArchitectureCase(build, lambda: dict(states))
    image = {"hidden_states": torch.randn(2, 4, 8, 8)}
    step = {"timestep": torch.tensor([3, 7])}
    sizes = {"num_layers": 2, "sample_size": 8, "patch_size": 2, "in_channels": 4}
    dit = partial(diffusers.DiTTransformer2DModel, **heads, **sizes, num_embeds_ada_norm=10)
    labels = {"class_labels": torch.tensor([1, 2])}
    yield "DiTTransformer2DModel", ArchitectureCase(dit, lambda: image | step | labels)
    pixart = partial(
        diffusers.PixArtTransformer2DModel, **heads, **sizes, cross_attention_dim=32,
        caption_channels=20, out_channels=8, use_additional_conditions=False,
    )  # fmt: skip
    text = {"encoder_hidden_states": torch.randn(2, 5, 20)}
    known = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    yield "PixArtTransformer2DModel", ArchitectureCase(pixart, lambda: image | step | text | known)
    blocks = {"block_out_channels": (32, 32), "norm_num_groups": 8, "layers_per_block": 1}
    unet = partial(
        diffusers.UNet2DConditionModel, **blocks, sample_size=8, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=20,
    )  # fmt: skip
    sample = {"sample": torch.randn(2, 4, 8, 8)}
    yield "UNet2DConditionModel", ArchitectureCase(unet, lambda: sample | step | text)
    autoencoder = partial(diffusers.AutoencoderKL, block_out_channels=(32,), norm_num_groups=8)
    pixels = {"sample": torch.randn(2, 3, 8, 8)}
    yield "AutoencoderKL", ArchitectureCase(autoencoder, lambda: pixels)
    sd3 = partial(
        diffusers.SD3Transformer2DModel, **heads, **sizes, joint_attention_dim=20,
        caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8,
    )  # fmt: skip
    pooled = {"pooled_projections": torch.randn(2, 16)}
    yield "SD3Transformer2DModel", ArchitectureCase(sd3, lambda: image | step | text | pooled)


def attention(kind: Callable[..., nn.Module], processor: Callable[[], object]) -> nn.Module:
    return kind(query_dim=32, heads=4, dim_head=8, processor=processor())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="the models to try")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trials = Trials(STEPS, "why-some-are-refused")
    parts = [
        f"{library} {version(library)}:\n\n{trials.table('model', cases, options.only)}"
        for library, cases in (("timm", vision_cases()), ("diffusers", diffusion_cases()))
    ]
    text = "\n\n".join([*parts, f"### Why some are refused\n\n{trials.notes()}"])
    show(text, options.into, "other libraries")
    sys.exit("\n".join(trials.broken))


if __name__ == "__main__":
    main()
