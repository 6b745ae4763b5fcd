"""Draws pruning curves as a self-contained SVG."""

from collections.abc import Sequence
from html import escape
from itertools import cycle
from math import ceil, floor, isfinite, log10

import numpy as np
from jaxtyping import Float64

from headwise.tables.curves._curves import Curves, Elbow

__all__ = ["draw_curves"]

_WIDTH, _LEFT, _RIGHT = 760.0, 64.0, 520.0
_TOP, _FLOOR = 24.0, 372.0
# Below the axis: the top of the elbow rows and their spacing.
_ELBOWS, _ROW = 446.0, 18.0
# Distinguishable with red-green blindness, and in print.
_COLORS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#64473a")
_BAND = "#8a8a8a"
# Keeps text readable on top of lines.
_HALO = 'stroke="#ffffff" stroke-width="3" paint-order="stroke"'
_ROUNDING = 1e-3  # of a step
_DASHES, _DOTS = 'stroke-dasharray="6 3"', 'stroke-dasharray="2 3"'
_UNITS = {"lm": "nats per token", "masked-lm": "nats per token", "embedding": "1 − cosine"}


def draw_curves(*curves: Curves, title: str = "", allowed: float | None = None) -> str:
    """Draw the mean loss against the number of removed heads; several orders become a band.

    Curves after the first argument are dashed. If the name of one extends the name of an order of
    the first, such as `half-gate, recovered`, it has the same color.

    Args:
        curves: Curves of one model and loss, of different orders.
        allowed: The allowed growth of the loss. It is drawn as a dotted line, with each curve's
            elbow as a dot, and a row with the interval of each elbow below the axis.
    Returns:
        An SVG document. Names are escaped.
    """
    lines = _lines(curves)
    bar = None if allowed is None else float(lines[0].mean[0]) + allowed
    lowest = min(line.low.min() for line in lines)
    highest = max(bar or 0.0, *(line.high.max() for line in lines))
    plane = _Plane(max(int(line.removed[-1]) for line in lines), _ticks(lowest, highest))
    parts = [plane.frame(curves[0]), *(plane.band(line) for line in lines if line.several)]
    parts += [plane.line(line) for line in lines]
    parts += _labels(lines, [plane.y(line.mean[-1]) for line in lines])
    height = _FLOOR + 64
    if allowed is not None and bar is not None:
        parts += [plane.bar(bar, allowed), *(plane.dot(line, allowed) for line in lines)]
        parts += plane.elbows(lines, allowed)
        height = _ELBOWS + _ROW * (len(lines) + 1)
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


class _Line:
    """One line of the picture: the mean over orders of a name, their range, and the style."""

    def __init__(self, curves: Curves, name: str, color: str, *, dashed: bool) -> None:
        self._curves, self.name, self.removed = curves, name, curves.removed
        self.mean = curves.mean(name).mean(0)
        self.several = len(curves.per_text[name]) > 1
        band: tuple[np.ndarray, np.ndarray] = (self.mean, self.mean)
        self.low, self.high = curves.interval(name) if self.several else band
        self.color, self.dashes = color, _DASHES if dashed else ""

    @property
    def label(self) -> str:
        orders = len(self._curves.per_text[self.name])
        return escape(f"{self.name}, {orders} orders" if self.several else self.name)

    def elbow(self, allowed: float) -> Elbow:
        return self._curves.elbow(self.name, allowed)

    def svg_path(self, path: str) -> str:
        style = f'stroke="{self.color}" stroke-width="2" {self.dashes}'.rstrip()
        return f'<path d="M{path}" fill="none" {style}/>'


def _lines(curves: Sequence[Curves]) -> list[_Line]:
    """A line for each name, in a new color or in that of the name it extends."""
    colors: dict[str, str] = {}
    fresh = cycle(_COLORS)
    lines = []
    for number, curve in enumerate(curves):
        for name, orders in curve.per_text.items():
            known = max(
                (x for x in colors if number and name.startswith(f"{x}, ")), key=len, default=""
            )
            color = colors.get(known) or (_BAND if len(orders) > 1 else next(fresh))
            if not number:
                colors[name] = color
            lines.append(_Line(curve, name, color, dashed=number > 0))
    return lines


class _Plane:
    """The coordinate system: maps numbers of heads and losses to positions in the picture."""

    def __init__(self, heads: int, marks: list[float]) -> None:
        self._heads, self._ticks = max(heads, 1), marks

    def x(self, heads: float) -> float:
        return _LEFT + heads / self._heads * (_RIGHT - _LEFT)

    def y(self, loss: float) -> float:
        low, high = self._ticks[0], self._ticks[-1]
        return _FLOOR - (loss - low) / (high - low) * (_FLOOR - _TOP)

    def path(self, heads: np.ndarray, losses: Float64[np.ndarray, " K"]) -> str:
        pairs = zip(heads.astype(float).tolist(), losses.tolist(), strict=True)
        return " L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in pairs)

    def line(self, line: _Line) -> str:
        return line.svg_path(self.path(line.removed, line.mean))

    def band(self, line: _Line) -> str:
        upper = self.path(line.removed, line.high)
        lower = self.path(line.removed[::-1], line.low[::-1])
        return f'<path d="M{upper} L{lower} Z" fill="{line.color}" opacity="0.25"/>'

    def bar(self, loss: float, allowed: float) -> str:
        """The line of the allowed loss."""
        y = self.y(loss)
        label = _text(_RIGHT - 4, y - 4, "end", f"{allowed:.2g} more", _HALO)
        return f'<path d="M{_LEFT:g} {y:.1f} H{_RIGHT:g}" stroke="#333333" {_DOTS}/>{label}'

    def dot(self, line: _Line, allowed: float) -> str:
        """The elbow as a dot on its curve; nothing for several orders."""
        heads = line.elbow(allowed).heads
        if line.several:
            return ""
        return self._dot(
            float(heads), self.y(float(line.mean[line.removed == heads][0])), line.color
        )

    def elbows(self, lines: Sequence[_Line], allowed: float) -> list[str]:
        """A row for each line: its elbow and the interval."""
        title = (
            f"heads removed before the loss grows by {allowed:.2g}, with a 95 % interval over texts"
        )
        parts = [_text(_LEFT, _ELBOWS, "start", title)]
        for row, line in enumerate(lines, 1):
            elbow, y = line.elbow(allowed), _ELBOWS + _ROW * row
            if isfinite(elbow.low):
                low, high = self.x(elbow.low), self.x(elbow.high)
                ends = f"M{low:.1f} {y - 4:.1f} v8 m0 -4 H{high:.1f} m0 -4 v8"
                parts.append(f'<path d="{ends}" fill="none" stroke="{line.color}"/>')
            parts.append(self._dot(float(elbow.heads), y, line.color))
            label = f"{line.label}: {escape(str(elbow))}"
            parts.append(
                f'<text x="{_RIGHT + 8:g}" y="{y + 4:.1f}" fill="{line.color}">{label}</text>'
            )
        return parts

    def frame(self, curves: Curves) -> str:
        """The axes with their tick marks and labels."""
        parts = []
        for loss in self._ticks:
            y = self.y(loss)
            parts.append(f'<path d="M{_LEFT:g} {y:.1f} H{_RIGHT:g}" stroke="#dddddd"/>')
            parts.append(_text(_LEFT - 8, y + 4, "end", f"{loss:.6g}"))
        for heads in range(
            0, self._heads + 1, ceil(_step(float(self._heads), (1.0, 2.0, 5.0, 10.0)))
        ):
            x, share = self.x(float(heads)), f"{100 * heads / curves.n_heads:.0f} %"
            parts.append(_text(x, _FLOOR + 18, "middle", str(heads)))
            parts.append(_text(x, _FLOOR + 33, "middle", share))
        label = f"heads removed, of {curves.n_heads}"
        parts.append(_text((_LEFT + _RIGHT) / 2, _FLOOR + 50, "middle", label))
        unit = _UNITS.get(curves.loss.partition(" ")[0])
        label = f"mean loss: {curves.loss}" + (f", {unit}" if unit else "")
        parts.append(_text(_LEFT, _TOP - 8, "start", label))
        return "\n".join(parts)

    def _dot(self, heads: float, y: float, color: str) -> str:
        return f'<circle cx="{self.x(heads):.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'


def _text(x: float, y: float, anchor: str, text: str, style: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}'.rstrip()
    return f"<text {place}>{escape(text)}</text>"


def _ticks(low: float, high: float) -> list[float]:
    """Tick values: round numbers from at or below `low` to at or above `high`."""
    step = _step(high - low or abs(low) or 1.0, (1.0, 2.0, 2.5, 5.0, 10.0))
    # A rounding error of the loss must not add a tick.
    first = floor(low / step + _ROUNDING)
    last = max(ceil(high / step - _ROUNDING), first + 1)
    return [step * index for index in range(first, last + 1)]


def _step(span: float, sizes: Sequence[float]) -> float:
    """A tick distance, one of `sizes` times a power of ten, so that about five fill the span."""
    unit = 10.0 ** floor(log10(span / 5))
    return next(size * unit for size in sizes if 5 * size * unit >= 0.999 * span)


def _labels(lines: Sequence[_Line], ends: list[float]) -> list[str]:
    """The legend: names beside the ends of their lines, each after a sample of its line."""
    parts = []
    for line, y in zip(lines, _apart(ends), strict=True):
        parts.append(line.svg_path(f"{_RIGHT + 8:g} {y:.1f} h20"))
        label = f'<text x="{_RIGHT + 34:g}" y="{y + 4:.1f}" fill="{line.color}">{line.label}</text>'
        parts.append(label)
    return parts


def _apart(heights: list[float], least: float = 15.0) -> list[float]:
    """Heights of labels, moved so that none overlap; the lowest label stays in place."""
    moved = list(heights)
    last = float("inf")
    for index in sorted(range(len(heights)), key=lambda index: -heights[index]):
        last = moved[index] = min(heights[index], last - least)
    return moved
