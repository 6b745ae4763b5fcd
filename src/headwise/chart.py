"""Curves as a picture: SVG that opens anywhere and needs nothing."""

from html import escape
from math import floor, log10

import numpy as np
from jaxtyping import Float64

from headwise.curves import Curves

__all__ = ["draw_curves"]

_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 200.0, 24.0, 48.0
# Told apart without red and green, and in print.
_COLORS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#64473a")
_BAND = "#8a8a8a"


def draw_curves(curves: Curves, title: str = "") -> str:
    """Draw the mean loss against the heads removed; several orders of a name as a band.

    Returns:
        An SVG document. Names are escaped.
    """
    lines = {name: curves.mean(name).mean(0) for name in curves.per_text}
    most = max(curves.interval(name)[1].max() for name in lines)
    plane = _Plane(int(curves.removed[-1]), _round_up(float(most)))
    colors = iter(_COLORS * (1 + len(lines) // len(_COLORS)))
    ends = _apart([plane.y(line[-1]) for line in lines.values()])
    parts = [plane.frame(curves.n_heads, f"loss: {curves.loss}")]
    for (name, line), end in zip(lines.items(), ends, strict=True):
        several = len(curves.per_text[name]) > 1
        color = _BAND if several else next(colors)
        if several:
            parts.append(plane.band(curves.removed, *curves.interval(name)))
        path = plane.path(curves.removed, line)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        label = f'<text x="{_WIDTH - _RIGHT + 8:g}" y="{end + 4:.1f}" fill="{color}">'
        parts.append(f"{label}{escape(name)}</text>")
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


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
