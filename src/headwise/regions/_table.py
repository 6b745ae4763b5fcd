"""The regions of image tokens as a table, and the tokens inside a rectangle."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from headwise.errors import ArgumentError

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
