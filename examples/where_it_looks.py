"""A small vision-language model, trained to name the color of a shape, and where its heads look.

    python examples/where_it_looks.py --out look.html

The model is a LLaVA of transformers' own classes. A drawing has two to four shapes in different
colors, each in a square of 16 x 16 pixels at a random place: the answer needs a look at it.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwise as hw

PATCH, SIDE, WIDTH = 16, 4, 64  # pixels of a patch, patches of a side, width of the model
SHAPES = ("circle", "square", "triangle", "cross")
COLORS = {
    "red": (230, 30, 30), "green": (30, 160, 50), "blue": (40, 60, 230), "yellow": (250, 220, 30),
    "purple": (150, 40, 170), "orange": (250, 140, 20), "cyan": (40, 200, 220), "black": (9, 9, 9),
}  # fmt: skip
WORDS = ["<pad>", "<image>", "the", "color", "of", *SHAPES, *COLORS]
NAMES = WORDS.index("circle")  # where the names of shapes, then those of colors, begin
PROMPT = "<image> the color of the {}"


@dataclass(frozen=True)
class Drawings:
    """Drawings with a question each.

    Attributes:
        pixels: The drawings, red, green and blue from 0 to 255.
        patches: The patch of each of four objects, in rows from the left.
        shapes: Their shapes, as indices into `SHAPES`; each drawing has every shape once.
        colors: Their colors, as indices into `COLORS`.
        drawn: Whether an object is drawn.
        asked: The object that is asked for.
    """

    pixels: Tensor  # n y x 3
    patches: Tensor  # n 4
    shapes: Tensor  # n 4
    colors: Tensor  # n 4
    drawn: Tensor  # n 4
    asked: Tensor  # n

    def of_asked(self, values: Tensor) -> Tensor:
        """The patch, shape or color of the object that is asked for."""
        return values.gather(1, self.asked[:, None])[:, 0]

    def inputs(self) -> dict[str, Tensor]:
        """What the processor makes of the drawings and their questions."""
        before = [1] * SIDE**2 + [WORDS.index(word) for word in ("the", "color", "of", "the")]
        shape = NAMES + self.of_asked(self.shapes)[:, None]
        ids = torch.cat([torch.tensor(before).expand(len(shape), -1), shape], 1)
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": values(self.pixels)}

    def answers(self) -> Tensor:
        """The ids of the right colors."""
        return NAMES + len(SHAPES) + self.of_asked(self.colors)

    def box(self, number: int) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the patch of the object that is asked for."""
        row, column = divmod(int(self.of_asked(self.patches)[number]), SIDE)
        return column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH

    def image(self, number: int) -> Image.Image:
        """A drawing as an image."""
        return Image.fromarray(self.pixels[number].numpy())

    def question(self, number: int) -> str:
        """The question of a drawing."""
        return PROMPT.format(SHAPES[self.of_asked(self.shapes)[number]])


def values(pixels: Tensor) -> Tensor:
    """Pixels as the tower reads them."""
    return pixels.permute(0, 3, 1, 2) / 255


def drawings(n: int, seed: int) -> Drawings:
    """Drawings of two to four shapes of random sizes and colors, all made by a few operations."""
    generator = torch.Generator().manual_seed(seed)

    def choices(of: int) -> Tensor:
        return torch.rand(n, of, generator=generator).argsort(1)[:, :4]

    patches, shapes, colors = choices(SIDE**2), choices(len(SHAPES)), choices(len(COLORS))
    count = torch.randint(2, 5, (n, 1), generator=generator)
    asked = (torch.rand(n, generator=generator) * count[:, 0]).long()
    radius = 5 + 2 * torch.rand(n, 4, 1, 1, generator=generator)
    line = torch.arange(PATCH) - (PATCH - 1) / 2
    x, y = line.expand(n, 4, PATCH, -1), line[:, None].expand(n, 4, -1, PATCH)
    near, far = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    outlines = (
        x**2 + y**2 <= radius**2, far <= 0.85 * radius,
        (y <= 0.8 * radius) & (x.abs() <= (y + radius) / 1.8), (near <= 2) & (far <= radius),
    )  # fmt: skip
    row, drawn = torch.arange(n)[:, None], torch.arange(4) < count
    inside = torch.stack(outlines, 2)[row, torch.arange(4), shapes] & drawn[..., None, None]
    rgb = torch.tensor(list(COLORS.values()))[colors]  # n 4 3
    painted = torch.where(inside[..., None], rgb[:, :, None, None], 240)
    grid = torch.full((n, SIDE**2, PATCH, PATCH, 3), 240)
    grid[row, patches] = painted
    grid = grid.reshape(n, SIDE, SIDE, PATCH, PATCH, 3).transpose(2, 3)
    pixels = grid.reshape(n, SIDE * PATCH, SIDE * PATCH, 3).byte()
    return Drawings(pixels, patches, shapes, colors, drawn, asked)


def scrambled(seen: Drawings, seed: int = 0) -> Drawings:
    """The same drawings with their patches in random orders, while the boxes stay."""
    n = len(seen.pixels)
    order = torch.rand(n, SIDE**2, generator=torch.Generator().manual_seed(seed)).argsort(1)
    grid = seen.pixels.reshape(n, SIDE, PATCH, SIDE, PATCH, 3).transpose(2, 3)
    grid = grid.reshape(n, SIDE**2, PATCH, PATCH, 3)[torch.arange(n)[:, None], order]
    grid = grid.reshape(n, SIDE, SIDE, PATCH, PATCH, 3).transpose(2, 3)
    return replace(seen, pixels=grid.reshape(seen.pixels.shape))


def untrained(seed: int = 0) -> tuple[Any, Any]:
    """A LLaVA with random weights, and its processor: nothing is downloaded."""
    torch.manual_seed(seed)
    side = SIDE * PATCH
    vision = hf.CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=1,
        num_attention_heads=2, image_size=side, patch_size=PATCH,
    )  # fmt: skip
    # Weights of the usual .02 are too small for this width: attention would stay uniform for long.
    text = hf.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.12,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=1, vision_feature_layer=-1
    )
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(do_resize=False, do_center_crop=False, do_normalize=False),
        hf.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", additional_special_tokens=["<image>"]
        ),
        patch_size=PATCH, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config), processor


def train(model: Any, steps: int = 200, batch: int = 128) -> None:
    """First the tower learns to name what each patch shows, then the whole model to answer."""
    model.train()
    embedding = model.get_input_embeddings()
    parts = (model.model.vision_tower, model.model.multi_modal_projector, embedding)
    scale = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([*(p for part in parts for p in part.parameters()), scale], 2e-3)
    for step in range(80):
        seen = drawings(batch, 10**6 + step)
        features = torch.stack([*model.get_image_features(values(seen.pixels)).pooler_output])
        at = features.reshape(batch, SIDE**2, -1)[torch.arange(batch)[:, None], seen.patches]
        scores = (at @ embedding.weight[NAMES:].T * scale.exp())[seen.drawn]
        shape, color = scores[:, : len(SHAPES)], scores[:, len(SHAPES) :]
        loss = cross_entropy(shape, seen.shapes[seen.drawn])
        _step(optimizer, loss + cross_entropy(color, seen.colors[seen.drawn]))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.15)
    for step in range(steps):
        seen = drawings(batch, 2 * 10**6 + step)
        logits = model(**seen.inputs(), logits_to_keep=1).logits[:, -1]
        _step(optimizer, cross_entropy(logits, seen.answers()))
        schedule.step()
    model.eval()


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, seen: Drawings) -> float:
    """The share of right answers."""
    logits = model(**seen.inputs(), logits_to_keep=1).logits[:, -1]
    return float((logits.argmax(-1) == seen.answers()).double().mean())


def examples(model: nn.Module, processor: Any, seen: Drawings) -> list[hw.Example]:
    """Each drawing with its question: right is the patch that the last word names."""

    def process(images: Any) -> Mapping[str, Any]:
        inputs: Mapping[str, Any] = processor(
            images=images, text=seen.question(0), return_tensors="pt"
        )
        return inputs

    regions = hw.image_regions(model, process, [seen.image(0)])
    whole = (0, 0, SIDE * PATCH, SIDE * PATCH)
    patches = [(n, n + 1) for start, end in regions.inside(whole)[0] for n in range(start, end)]
    inputs, answers = seen.inputs(), seen.answers()
    return [
        hw.Example(
            text=inputs["input_ids"][n].tolist(),
            query=(SIDE**2 + 4, SIDE**2 + 5),
            right=(right := regions.inside(seen.box(n))[0]),
            wrong=[patch for patch in patches if patch not in right],
            answer=[int(answers[n])],
            inputs={"pixel_values": inputs["pixel_values"][[n]]},
        )
        for n in range(len(answers))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model that sees, and find its eyes.")
    parser.add_argument("--out", type=Path, default=Path("look.html"), help="the page")
    out = parser.parse_args().out
    model, processor = untrained()
    started = time.process_time()
    train(model)
    seen = drawings(200, 1)
    print(f"{time.process_time() - started:.0f} s, {accuracy(model, seen):.1%} right answers")
    for shown in (seen, scrambled(seen)):
        found = hw.find_heads(model, examples(model, processor, shown))
        columns = ["name", "outcome", "effect", "null.permuted", "null.random", "null.heads"]
        print(found, found.frame()[columns].round(2).to_string(index=False), sep="\n")
    page = hw.look(model, seen.question(0), tokenizer=processor, images=[seen.image(0)])
    page.save(out)


if __name__ == "__main__":
    main()
