"""Which pixels each image token is made of, measured, without a list of model families.

Pictures of coordinates go through the user's own processor, so that every number of its output says
which pixel of which image it was made of: resizing, cropping, tiling, padding and the order of
patches are undone by the code that did them. `_feeds.py` finds which token each number feeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor, nn

from headwise._evaluation import differentiable_evaluation
from headwise._progress import Progress, shows_progress
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_model, device_of
from headwise.regions._feeds import BY_HAND, Feeds, Inputs, pixels_of, tokens_of_numbers

Process = Callable[[Any], Inputs]
Picture = Shaped[np.ndarray, "_ _ 3"]

# Ramps that a side of an image is divided into: pixels have 256 levels, so 6 ramps have 1,536.
_RAMPS = 6
# Edges of neighbors that are closer than this, in pixels, are one edge.
_SAME_EDGE = 0.75
# How far, as a share of black to white and in the mean, the pixels of an image may be from what
# pictures without its content foretell. Rounding to 256 levels leaves .004.
_MOST_OFF = 0.02
# The regions of each model, by what the processor makes of coordinates. Found here they take a
# quarter of the time, or a tenth for 1,200 tokens: a study of heads has hundreds of images.
_KNOWN: WeakKeyDictionary[nn.Module, dict[Any, "ImageRegions"]] = WeakKeyDictionary()


COLUMNS = ("text", "position", "image", "left", "top", "right", "bottom", "frame")


@dataclass(frozen=True, eq=False)
class ImageRegions:
    """The rectangle of pixels that each image token is made of; made by `image_regions`.

    A token says nothing of where a vision tower's attention has looked: after it, a token also
    knows of other pixels than its own.

    Attributes:
        rows: A row for each token and image (a token of two frames of a video has two), with the
            columns `text` (the row of the batch), `position` (in that text, padding not counted),
            `image`, `left`, `top`, `right`, `bottom` (in pixels of the original image) and
            `frame` (of a video; 0 in a picture).
        sizes: The width and height of each image.
        n_texts: The number of texts.
        stack: The stack of attention whose positions these are, as in the names of heads.
    Raises:
        ArgumentError: `rows` lacks a column.
    """

    rows: pd.DataFrame
    sizes: tuple[tuple[int, int], ...]
    n_texts: int = 1
    stack: str = ""

    def __post_init__(self) -> None:
        lacking = [name for name in COLUMNS if name not in self.rows]
        if lacking:
            raise ArgumentError(
                f"ImageRegions: rows lack {', '.join(lacking)}. Give the columns "
                f"{', '.join(COLUMNS)}."
            )

    def frame(self) -> pd.DataFrame:
        """A row for each token and image, as a table of its own."""
        return self.rows.copy()

    def inside(
        self, box: Sequence[float | int], *, image: int = 0, frame: int = 0, share: float = 0.5
    ) -> list[list[tuple[int, int]]]:
        """The tokens inside a rectangle, as spans `(start, end)` of each text.

        Args:
            box: Left, top, right and bottom, in pixels of the original image.
            share: How much of a token's own region must lie inside, above 0.
        Returns:
            For each text its spans, as `Watch.spans` and, of one text, `Example` take them.
        Raises:
            ArgumentError: the image does not exist, the box lies outside it, or no token is inside.
        """
        if not 0 <= image < len(self.sizes):
            raise ArgumentError(
                f"ImageRegions.inside: image={image} of {len(self.sizes)} images. Give its index."
            )
        left, top, right, bottom = box if len(box) == 4 else (np.nan,) * 4
        width, height = self.sizes[image]
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise ArgumentError(
                f"ImageRegions.inside: box={box!r:.60} in an image of {width} × {height}. "
                f"Give four numbers, left < right and top < bottom, within it."
            )
        rows = self.rows[(self.rows["image"] == image) & (self.rows["frame"] == frame)]
        across = np.minimum(rows["right"], right) - np.maximum(rows["left"], left)
        down = np.minimum(rows["bottom"], bottom) - np.maximum(rows["top"], top)
        area = (rows["right"] - rows["left"]) * (rows["bottom"] - rows["top"])
        is_inside = across.clip(0) * down.clip(0) >= max(share, 1e-6) * area
        rows = rows[is_inside].sort_values("position")
        if rows.empty:
            raise ArgumentError(
                f"ImageRegions.inside: no token has {share:.0%} of its region in {tuple(box)} of "
                f"image {image}, frame {frame}. Give a larger box or a smaller share=."
            )
        spans: list[list[tuple[int, int]]] = [[] for _ in range(self.n_texts)]
        for text, position in zip(rows["text"], rows["position"], strict=True):
            start, end = spans[text].pop() if spans[text] else (position, position)
            if end < position:
                spans[text].append((start, end))
                start = position
            spans[text].append((int(start), int(position) + 1))
        return spans


@shows_progress("Measuring the regions of image tokens")
def image_regions(
    model: nn.Module,
    process: Process,
    images: Any,
    *,
    on_progress: Progress | None = None,
) -> ImageRegions:
    """Measure which rectangle of pixels each image token of a model is made of.

    The result depends on the sizes of the images and the layout of the texts alone, and is kept
    for the next images of these sizes.

    Args:
        model: A model of images and text, such as LLaVA or Qwen-VL, or an encoder of images.
        process: Makes the model's inputs of images, such as
            `lambda images: processor(images=images, text=prompt, return_tensors="pt")`. It is
            called some twenty times, with pictures of the same sizes.
        images: PIL images. A list of them among them is a video: its frames.
        on_progress: Called with the number of backward passes done and of all.
    Returns:
        A row for each token that has pixels. Newlines between rows of tiles, class tokens and
        registers have none.
    Raises:
        ArgumentError: the images are no list of PIL images, or `process` gives no tensor of pixels.
        UnsupportedError: no token is made of pixels of its own (a resampler, cross-attention to
            the image), or the processor looks at the content of images.
    """
    model = check_model("image_regions", model)
    frames, pictures = _pictures(images)
    see = partial(_processed, process, images, device_of(model))
    guides = [_guide(number, picture) for number, picture in enumerate(pictures)]
    inputs, guided = see(pictures), see(guides)
    black, white = (_numbers(see([np.full_like(x, y) for x in pictures])) for y in (0, 255))
    mixed = see([x // 4 + guide + 64 for x, guide in zip(pictures, guides, strict=True)])
    _check_blind(black, white, *map(_numbers, (inputs, guided, mixed)))
    known, key = _KNOWN.setdefault(model, {}), (tuple(frames), _fingerprint(guided))
    if key not in known:
        with differentiable_evaluation(model, weights=False):
            feeds = tokens_of_numbers(model, inputs, on_progress)
        span = torch.where(white == black, torch.nan, white - black)
        image = torch.zeros(len(span), dtype=torch.int64)
        for bit in range((len(pictures) - 1).bit_length()):
            lit = [np.full_like(x, 255 * (n >> bit & 1)) for n, x in enumerate(pictures)]
            image |= (_numbers(see(lit)) != black).long() << bit
        places = []  # x and y of each number; NaN where it is of no image
        for axis in (0, 1):
            ramps = [see([_ramp(x, axis, k) for x in pictures]) for k in range(_RAMPS)]
            total = sum((_numbers(ramp) - black for ramp in ramps), torch.zeros_like(black))
            extent = torch.tensor([x.shape[1 - axis] / _RAMPS for x in pictures])
            places.append(total / span * extent[image])
        known[key] = _regions(feeds, image, places, frames, pictures, inputs.get("attention_mask"))
    return known[key]


def _pictures(images: Any) -> tuple[list[tuple[int, int]], list[Picture]]:
    """The image and the frame of each picture, and its pixels."""
    listed = images if isinstance(images, list | tuple) else []
    videos = [image if isinstance(image, list | tuple) else [image] for image in listed]
    frames = [(number, frame) for number, video in enumerate(videos) for frame in range(len(video))]
    flat = [picture for video in videos for picture in video]
    if not flat or not all(hasattr(picture, "convert") for picture in flat):
        raise ArgumentError(
            f"image_regions: images={images!r:.80}. Give a list of PIL images, as Image.open and "
            f"Image.fromarray make them, or of lists of them for videos."
        )
    return frames, [np.asarray(picture.convert("RGB")) for picture in flat]


def _processed(
    process: Process, images: Sequence[Any], device: torch.device, pictures: Sequence[Picture]
) -> Inputs:
    """What the user's function makes of pictures that stand in the places of the images."""
    from PIL import Image  # the images are of this package

    left = iter(map(Image.fromarray, pictures))
    is_video = [isinstance(image, list | tuple) for image in images]
    nested = [
        [next(left) for _ in image] if video else next(left)
        for image, video in zip(images, is_video, strict=True)
    ]
    result = process(nested)
    given = dict(result) if isinstance(result, Mapping) else {}
    if not pixels_of(given):
        raise ArgumentError(
            f"image_regions: process returns {type(result).__name__} of {[*given]}, without a "
            f"tensor of pixels. Give a function such as lambda images: processor(images=images, "
            f'text=prompt, return_tensors="pt").'
        )
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def _numbers(inputs: Inputs) -> Float64[Tensor, " n"]:
    """All numbers that pixels may have become, one after the other."""
    return torch.cat([x.detach().double().cpu().flatten() for x in pixels_of(inputs).values()])


def _guide(number: int, like: Picture) -> Picture:
    """A picture of the coordinates and the number of an image, no brighter than 127."""
    guide = np.full_like(like, number * 37 % 128)
    guide[..., 0] = np.linspace(0, 127, like.shape[1])
    guide[..., 1] = np.linspace(0, 127, like.shape[0])[:, None]
    return guide


def _ramp(like: Picture, axis: int, k: int) -> Picture:
    """The k-th of the ramps that add up to the coordinates along an axis."""
    size = like.shape[1 - axis]
    line = (np.arange(size) + 0.5) * (255 * _RAMPS / size) - 255 * k
    line = np.clip(line, 0, 255).round().astype(like.dtype)
    return np.ascontiguousarray(
        np.broadcast_to(line[:, None] if axis == 0 else line[:, None, None], like.shape)
    )


def _fingerprint(inputs: Inputs) -> str:
    digest = sha256()
    for name, x in sorted(inputs.items()):
        if isinstance(x, Tensor):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            digest.update(x.detach().double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _check_blind(
    black: Tensor, white: Tensor, image: Tensor, guided: Tensor, mixed: Tensor
) -> None:
    """Refuse a processor that treats pictures of the same sizes differently.

    `mixed` is a quarter of the image, the guide and a gray of 64: it must become the same mixture.
    """
    counts = sorted({len(x) for x in (black, white, image, guided, mixed)})
    what = f"gives {' or '.join(map(str, counts))} numbers for pictures of the same sizes"
    if len(counts) == 1:
        span = white - black
        foretold = guided + span * (64 / 255) + (image - black) / 4
        off = float((mixed - foretold).abs().sum() / span.abs().sum().clamp(min=1e-12))
        if off <= _MOST_OFF:
            return
        what = f"moves or changes pictures by their content ({off:.1%} off)"
    raise UnsupportedError(
        f"image_regions: process {what}, so that pictures of coordinates do not show what it does "
        f"to the images. Turn augmentation and cropping to content off. {BY_HAND}"
    )


def _regions(
    feeds: Feeds,
    image: Tensor,
    places: Sequence[Tensor],
    frames: Sequence[tuple[int, int]],
    pictures: Sequence[Picture],
    mask: Any,
) -> ImageRegions:
    """The rectangle of each token: the extent of the pixels that it is made of."""
    (element, token, shape, stack), n = feeds, len(pictures)
    keep = places[0][element].isfinite()
    element, token = element[keep], token[keep]
    groups, member = torch.unique(token * n + image[element], return_inverse=True)
    token, of = groups // n, groups % n
    count = torch.bincount(member).double()
    # Of p × p pixels at equal steps the width is the root of 12 variances p² / (p² − 1).
    pixels = (count / 3).clamp(min=2)
    edges = []
    for axis, place in enumerate(places):
        mean = torch.bincount(member, place[element]) / count
        variance = torch.bincount(member, (place[element] - mean[member]) ** 2) / count
        # Levels are rounded in the picture and again by the processor.
        level = torch.tensor([x.shape[1 - axis] / (255 * _RAMPS) for x in pictures])[of]
        squared = 12 * variance * pixels / (pixels - 1) - 2 * level**2
        half = squared.clamp(min=0.25).sqrt() / 2
        ends = torch.stack([mean - half, mean + half], 1)
        for number, picture in enumerate(pictures):
            ends[of == number] = _snapped(ends[of == number], picture.shape[1 - axis])
        edges.append(ends)
    text, position = token // shape[1], token % shape[1]
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
        position = (mask.cpu().long().cumsum(1) - 1)[text, position]
    video, frame = np.array(frames)[of.numpy()].T
    box = (edges[axis][:, end] for end in (0, 1) for axis in (0, 1))
    columns = zip(COLUMNS, (text, position, video, *box, frame), strict=True)
    rows = pd.DataFrame({name: np.asarray(column) for name, column in columns})
    sizes = {number: x.shape[1::-1] for (number, _), x in zip(frames, pictures, strict=True)}
    return ImageRegions(rows, tuple(sizes.values()), shape[0], stack)


def _snapped(edges: Float64[Tensor, "n 2"], size: int) -> Float64[Tensor, "n 2"]:
    """Edges within the image, those of neighbors made one: pictures would show seams."""
    if not len(edges):
        return edges
    within = min(_SAME_EDGE, float(edges.diff(dim=1).median()) / 4)
    values, order = edges.flatten().clamp(0, size).sort()
    group = torch.cat([torch.zeros(1), (values.diff() > within).double().cumsum(0)]).long()
    mean = torch.bincount(group, values) / torch.bincount(group)
    mean[mean < within], mean[mean > size - within] = 0, size
    return torch.empty_like(values).scatter_(0, order, mean[group]).reshape(edges.shape)
