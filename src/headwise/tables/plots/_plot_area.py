"""Where values lie on a picture, for curves as lines of an SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class PlotArea:
    """A rectangle of a picture with an x axis from 0 and a y axis that grows upwards.

    Attributes:
        left: Its left edge, in units of the picture.
        bottom: Its lower edge, from the top of the picture.
        width: Its width.
        height: Its height.
        largest_x: The value at its right edge; 0 stands for 1.
        y_range: The values at its lower and its upper edge; equal ones lie at the lower edge.
    """

    left: float
    bottom: float
    width: float
    height: float
    largest_x: float
    y_range: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The point of a pair of values, to a tenth."""
        low, high = self.y_range
        right = self.left + self.width * x / (self.largest_x or 1.0)
        return round(right, 1), round(
            self.bottom - self.height * (y - low) / ((high - low) or 1), 1
        )

    def points(self, x: Sequence[float], y: Sequence[float]) -> str:
        """The points of a line as SVG has them, without those that are not finite."""
        pairs = [pair for pair in zip(x, y, strict=True) if isfinite(pair[1])]
        return " ".join("{},{}".format(*self.place(*pair)) for pair in pairs)
