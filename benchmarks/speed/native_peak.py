"""The native kernel's share of the peak arithmetic throughput of one core.

    python -m benchmarks.speed.native_peak --into benchmarks/results/native-peak.svg

The peak is the throughput of multiplications and additions in registers alone, measured in the same
rounds as the kernel, by the CPU time of the thread: for vectors of float32, and for pairs of
bfloat16. For bfloat16 both kernels are shown as a share of its own peak, if the processor supports
pairs. Work besides the two matrix products (exponentials, statistics) is not counted.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from headwise._library import Library, library
from headwise.kernels import RowRequest, make_rule, row_statistics

TOKENS = (128, 256, 512, 1024, 2048, 4096)
HEADS, WIDTH, ROUNDS = 4, 64, 200_000
COLORS = {"float32": "#0b6e99", "bfloat16": "#d9730d"}
LEFT, RIGHT, TOP, FLOOR = 56, 520, 20, 320
Shares = dict[str, dict[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per length")
    parser.add_argument("--into", type=Path, help="an SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    shares: Shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        for T in TOKENS if multiplications(library(), dtype)() else ():
            for who, share in _shares(dtype, T, options.seconds).items():
                name = f"{str(dtype).removeprefix('torch.')}, {who}"
                shares.setdefault(name, {})[T] = share
                print(f"{name}, {T} tokens: {share:.0%} of the peak", flush=True)
    if options.into:
        options.into.write_text(_draw(shares), "utf-8")


def multiplications(build: Library, dtype: torch.dtype, rounds: int = ROUNDS) -> Callable[[], int]:
    """Multiplications and additions in registers alone; returns how many, 0 if it has none."""
    count = build.functions.headwise_peak
    count.argtypes, count.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return partial(count, rounds, int(dtype == torch.bfloat16))


def _shares(dtype: torch.dtype, T: int, seconds: float) -> dict[str, float]:
    """Each kernel's share of the peak: the median over rounds."""
    B = max(1, 2048 // T)  # makes a call long enough to time
    q, k, v = (torch.randn(B, T, HEADS, WIDTH).to(dtype).transpose(1, 2) for _ in "qkv")
    rule, request = make_rule(head_dim=WIDTH), RowRequest(heads=True)
    works = {
        "native, with statistics": partial(row_statistics, q, k, v, rule, request),
        "torch, without": partial(F.scaled_dot_product_attention, q, k, v),
    }
    operations = 4 * B * HEADS * T * T * WIDTH
    samples: dict[str, list[float]] = {who: [] for who in works}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples["torch, without"]) < 7:
        multiply = multiplications(library(), dtype)
        peak = multiply() / _took(multiply)
        for who, work in works.items():
            samples[who].append(operations / _took(work) / peak)
    return {who: statistics.median(values) for who, values in samples.items()}


def _took(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _draw(shares: Shares) -> str:
    """Plot the shares against tokens on a logarithmic axis."""

    def x(T: int) -> float:
        return LEFT + TOKENS.index(T) / (len(TOKENS) - 1) * (RIGHT - LEFT)

    def y(share: float) -> float:
        return FLOOR - share * (FLOOR - TOP)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(share):.1f} H{RIGHT}" stroke="#d8d8d8"/>')
        parts.append(_text(LEFT - 8, y(share) + 4, "end", f"{share:.0%}"))
    parts += [_text(x(T), FLOOR + 18, "middle", str(T)) for T in TOKENS]
    parts.append(_text((LEFT + RIGHT) / 2, FLOOR + 40, "middle", "tokens"))
    for name, line in shares.items():
        path = " L".join(f"{x(T):.1f} {y(share):.1f}" for T, share in line.items())
        dashes = ' stroke-dasharray="6 3"' if "torch" in name else ""
        color = COLORS[name.split(",")[0]]
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        parts.append(_text(RIGHT + 8, y(line[TOKENS[-1]]) + 4, "start", name, color))
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 372" font-family="sans-serif" '
        'font-size="12" role="img">\n<title>Share of the peak of one core</title>\n'
        f'<rect width="760" height="372" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, anchor: str, label: str, color: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{label}</text>'


if __name__ == "__main__":
    main()
