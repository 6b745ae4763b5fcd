"""Which block sizes of the Triton kernel are the fastest on this GPU.

    python -m benchmarks.speed.gpu_tiles

Prints, for each width, mask and request, the tiles (queries, keys, warps, stages) in order of their
time, as ratios to torch's flash kernel. `triton/_launch.py` holds the choice.
"""

import argparse
from collections.abc import Iterator
from itertools import product

import torch
from triton.testing import do_bench

from benchmarks.speed.gpu import DTYPES, _flash, _neighbors
from headwise.kernels import RowRequest, make_rule, row_statistics
from headwise.kernels.triton import _launch

SIZES = ((8, 16, 2048, 64), (4, 16, 2048, 128))
TILES = tuple(
    _launch.Tiles(*tile)
    for tile in product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    if tile[:3] != (64, 128, 8)
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    dtype = DTYPES[parser.parse_args().dtype]
    torch.set_grad_enabled(False)
    for size, causal in product(SIZES, (False, True)):
        for name, ratios in measured(size, causal, dtype):
            ranked = ", ".join(f"{ratio:.2f} {tuple(tile)}" for ratio, tile in sorted(ratios))
            print(size, "causal" if causal else "full", name, ranked, sep="; ", flush=True)


def measured(
    size: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> Iterator[tuple[str, list[tuple[float, _launch.Tiles]]]]:
    """For each request, the ratio of each tile that this GPU can hold."""
    B, H, T, D = size
    q, k, v = (torch.randn(B, T, H, D, device="cuda", dtype=dtype).transpose(1, 2) for _ in "qkv")
    rule, keys = make_rule(head_dim=D, is_causal=causal).simplify(T, T), _neighbors(B, T).cuda()
    requests = {
        "statistics": RowRequest(heads=True),
        "a watch": RowRequest(heads=True, distance=True, keys=keys),
        "a watch, no heads": RowRequest(distance=True, keys=keys),
    }
    base = do_bench(lambda: _flash(q, k, v, causal), return_mode="median")
    for name, request in requests.items():
        ratios = []
        for tile in TILES:
            _launch.tiles_for = lambda *_, tile=tile: tile
            try:
                took = do_bench(
                    lambda request=request: row_statistics(
                        q, k, v, rule, request, backend="triton"
                    ),
                    return_mode="median",
                )
            except RuntimeError as error:  # it needs more shared memory than there is
                print(f"{tuple(tile)} left out: {str(error).splitlines()[0]}")
                continue
            ratios.append((took / base, tile))
        yield name, ratios


if __name__ == "__main__":
    main()
