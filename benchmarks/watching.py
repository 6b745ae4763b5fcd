"""What attention costs with each kernel, and what watching it adds: a line a length of text.

Times are the median of several runs, in milliseconds; a layer of 8 heads of width 64, causal.
"""

import statistics
import time
from collections.abc import Callable

import torch

from headwise.kernels import attend
from headwise.layer import MultiHeadAttention
from headwise.watch import observe

RUNS = 7


def main() -> None:
    print(f"{'tokens':>7} {'fused':>9} {'by rows':>9} {'layer':>9} {'watched':>9}")
    for T in (128, 512, 2048):
        print(f"{T:7}" + "".join(f" {each:9.1f}" for each in times(T)))


def times(T: int) -> tuple[float, ...]:
    q, k, v = torch.randn(3, 1, 8, T, 64)
    x = torch.randn(1, T, 512)
    layer = MultiHeadAttention(512, 8).eval()
    return (
        milliseconds(lambda: attend(q, k, v, causal=True, backend="fused")),
        milliseconds(lambda: attend(q, k, v, causal=True, backend="rows")),
        milliseconds(lambda: layer(x, causal=True)),
        milliseconds(lambda: watched(layer, x)),
    )


def watched(layer: MultiHeadAttention, x: torch.Tensor) -> None:
    with observe(layer):
        layer(x, causal=True)


@torch.no_grad()
def milliseconds(work: Callable[[], object]) -> float:
    work()  # the first run also sets things up
    taken = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return 1000 * statistics.median(taken)


if __name__ == "__main__":
    main()
