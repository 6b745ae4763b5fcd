"""Curves as a picture: SVG that opens anywhere and needs nothing."""

from html import escape
from math import floor, isfinite, log10

import numpy as np
from jaxtyping import Float64

from headwise.curves import Curves, Elbow

__all__ = ["draw_curves"]

_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 200.0, 24.0, 48.0
# Told apart without red and green, and in print.
_COLORS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#64473a")
_BAND = "#8a8a8a"
_DASHED = 'stroke-dasharray="4 3"'


def draw_curves(*curves: Curves, title: str = "", allowed: float | None = None) -> str:
    """Draw the mean loss against the heads removed; several orders of a name as a band.

    Args:
        curves: Curves of one model and loss, of different orders.
        allowed: How much the loss may grow: a dashed line, and on each curve its elbow, a dot
            with the interval as whiskers.
    Returns:
        An SVG document. Names are escaped.
    """
    lines = [_Line(one, name) for one in curves for name in one.per_text]
    removed = max(int(one.removed[-1]) for one in curves)
    bar = 0.0 if allowed is None else float(lines[0].mean[0]) + allowed
    plane = _Plane(removed, _round_up(max(bar, *(line.high.max() for line in lines))))
    colors = iter(_COLORS * (1 + len(lines) // len(_COLORS)))
    ends = _apart([plane.y(line.mean[-1]) for line in lines])
    parts = [plane.frame(curves[0].n_heads, f"loss: {curves[0].loss}")]
    if allowed is not None:
        parts.append(plane.bar(bar))
    for line, end in zip(lines, ends, strict=True):
        color = _BAND if line.several else next(colors)
        if line.several:
            parts.append(plane.band(line.removed, line.low, line.high))
        elif allowed is not None:
            parts.append(plane.elbow(*line.elbow(allowed), color))
        path = plane.path(line.removed, line.mean)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        label = f'<text x="{_WIDTH - _RIGHT + 8:g}" y="{end + 4:.1f}" fill="{color}">'
        parts.append(f"{label}{escape(line.name)}</text>")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


class _Line:
    """One name of some curves: its mean over orders, and the interval about it."""

    def __init__(self, curves: Curves, name: str) -> None:
        self._curves, self.name, self.removed = curves, name, curves.removed
        self.mean = curves.mean(name).mean(0)
        self.low, self.high = curves.interval(name)
        self.several = len(curves.per_text[name]) > 1

    def elbow(self, allowed: float) -> tuple[Elbow, float]:
        """The elbow, and the loss there."""
        found = self._curves.elbow(self.name, allowed)
        return found, float(self.mean[self.removed == found.heads][0])


class _Plane:
    """Where a number of heads and a loss lie in the picture."""

    def __init__(self, heads: int, loss: float) -> None:
        self._heads, self._loss = max(heads, 1), loss

    def x(self, heads: float) -> float:
        return _LEFT + heads / self._heads * (_WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        return _HEIGHT - _BOTTOM - loss / self._loss * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, heads: np.ndarray, losses: np.ndarray) -> str:
        pairs = zip(heads.astype(float).tolist(), losses.tolist(), strict=True)
        return " L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in pairs)

    def band(
        self, heads: np.ndarray, low: Float64[np.ndarray, " K"], high: Float64[np.ndarray, " K"]
    ) -> str:
        there, back = self.path(heads, high), self.path(heads[::-1], low[::-1])
        return f'<path d="M{there} L{back} Z" fill="{_BAND}" opacity="0.25"/>'

    def bar(self, loss: float) -> str:
        y = self.y(loss)
        return f'<path d="M{_LEFT:g} {y:.1f} H{_WIDTH - _RIGHT:g}" stroke="#888888" {_DASHED}/>'

    def elbow(self, elbow: Elbow, loss: float, color: str) -> str:
        """A dot at so many heads, with whiskers to the ends of its interval."""
        y, ends = self.y(loss), (elbow.low, elbow.high)
        dot = f'<circle cx="{self.x(float(elbow.heads)):.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
        if not all(map(isfinite, ends)):
            return dot
        low, high = map(self.x, ends)
        marks = f"M{low:.1f} {y - 4:.1f} v8 m0 -4 H{high:.1f} m0 -4 v8"
        return f'<path d="{marks}" fill="none" stroke="{color}"/>{dot}'

    def frame(self, n_heads: int, loss: str) -> str:
        """Axes with a handful of marks each, and what they are."""
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for at in range(5):
            loss_at, heads_at = self._loss * at / 4, self._heads * at / 4
            y, x = self.y(loss_at), self.x(heads_at)
            parts.append(f'<path d="M{_LEFT:g} {y:.1f} H{right:g}" stroke="#dddddd"/>')
            parts.append(_mark(_LEFT - 8, y + 4, "end", f"{loss_at:.3g}"))
            parts.append(_mark(x, bottom + 18, "middle", f"{heads_at:.3g}"))
        told = f"heads removed, of {n_heads}"
        parts.append(_mark((_LEFT + right) / 2, bottom + 38, "middle", told))
        parts.append(_mark(_LEFT, _TOP - 8, "start", loss))
        return "\n".join(parts)


def _mark(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_up(most: float) -> float:
    """The next number that four marks divide well."""
    if not most > 0:
        return 1.0
    unit = 10.0 ** floor(log10(most))
    return next(
        step * unit for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * unit >= most
    )


def _apart(places: list[float], least: float = 15.0) -> list[float]:
    """Places of labels, moved so that none covers another; the lowest stays lowest."""
    found = list(places)
    last = float("inf")
    for at in sorted(range(len(places)), key=lambda at: -places[at]):
        last = found[at] = min(places[at], last - least)
    return found
