"""Time and memory of attention on images: 4,096 image tokens, and the geometry of 1,225.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.images --into benchmarks/results/images.md

A LLaVA with random weights: the mass that the last token gives each region, in every head, beside
the plain pass and `output_attentions` under `eager`. The tower of the geometry is as large as
ViT-B. Peak memory is that of a process of its own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import headwise as hw
from benchmarks._report import ONLY_LIVE, cpu_name, parser_of, peak_of, show, software, table
from benchmarks._timing import interleaved

PLAIN, MASS, EAGER, FIRST, AGAIN = "plain", "mass", "eager", "first", "again"
WAYS = {
    PLAIN: "model(**inputs)",
    MASS: "hw.attentions(model, inputs, queries=-1)",
    EAGER: 'model(**inputs, output_attentions=True), `"eager"`',
    FIRST: "hw.image_regions(model, process, [image])",
    AGAIN: "the same, for another image of this size",
}
PASSES = (PLAIN, MASS, EAGER)
PATCH, IMAGE = 14, 2


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", help="measure a way in this process")
    options = parser.parse_args()
    if options.one:
        print(*measure(options.one))
        return
    times = interleaved({way: pass_of(way) for way in PASSES}, options.rounds, "cpu")
    # Where freed memory is returned at once, new pages take time: time is measured without.
    peaks = {way: _measured(way, ONLY_LIVE)[0] for way in PASSES}
    passes = [
        (WAYS[way], f"{times.median(way) / 1000:.2f} s", str(times.ratio(way, PLAIN)),
         f"{peak / 2**20:,.0f} MiB", f"{peak / peaks[PLAIN]:.2f}")
        for way, peak in peaks.items()
    ]  # fmt: skip
    seconds = zip((FIRST, AGAIN), _measured(FIRST, {}), strict=True)
    geometry = [(WAYS[way], f"{taken:.1f} s") for way, taken in seconds]
    titles = ("way", "CPU time", "of plain", "peak memory beyond the model", "of plain")
    text = f"{software()}, {cpu_name()}, one thread, {options.rounds} rounds.\n\n"
    text += f"{table(titles, passes, 1)}\n\n{table(('1,225 tokens', 'CPU time'), geometry, 1)}"
    show(text, options.into, "images")


def _measured(way: str, environment: dict[str, str]) -> list[float]:
    command = [sys.executable, "-m", __spec__.name, "--one", way]
    printed = subprocess.check_output(command, text=True, env=os.environ | environment)
    return [*map(float, printed.split())]


def llava(side: int, vision: dict[str, int], implementation: str) -> Any:
    """A LLaVA that reads square images of `side` pixels."""
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            **vision, image_size=side, patch_size=PATCH, attn_implementation=implementation
        ),
        text_config=LlamaConfig(
            vocab_size=1000, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=8192,
        ),
        image_token_id=IMAGE, vision_feature_layer=-1, attn_implementation=implementation,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config).eval()


def inputs_of(images: list[Any]) -> dict[str, torch.Tensor]:
    """What a processor that resizes nothing makes of square images and four words."""
    numbers = [torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in images]
    side = images[0].width
    pixels = torch.stack(numbers).reshape(-1, side, side, 3).permute(0, 3, 1, 2) / 255
    ids = torch.tensor([[5, 6, *[IMAGE] * (len(images) * (side // PATCH) ** 2), 7, 8]])
    return {"input_ids": ids, "pixel_values": pixels}


def pass_of(way: str) -> Callable[[], object]:
    """One of the passes over 4,096 image tokens."""
    small = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
             "num_attention_heads": 4}  # fmt: skip
    model = llava(896, small, "eager" if way == EAGER else "sdpa")
    inputs = {**inputs_of([_image(896, 40)]), "use_cache": False}

    @torch.no_grad()
    def work() -> object:
        if way == MASS:
            return hw.attentions(model, inputs, queries=-1)
        return model(**inputs, logits_to_keep=1, output_attentions=way == EAGER)

    return work


def measure(way: str) -> tuple[float, ...]:
    """Peak bytes of a pass, or the seconds of CPU time of the geometry of two images."""
    if way in PASSES:
        return (float(peak_of(pass_of(way))),)
    base = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12}  # fmt: skip
    model, seconds = llava(490, base, "sdpa"), []
    for sigma in (40, 60):
        started = time.process_time()
        hw.image_regions(model, inputs_of, [_image(490, sigma)])
        seconds.append(time.process_time() - started)
    return tuple(seconds)


def _image(side: int, sigma: float) -> Any:
    return Image.effect_noise((side, side), sigma).convert("RGB")


if __name__ == "__main__":
    main()
