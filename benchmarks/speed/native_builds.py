"""The builds of the native kernel compared with each other, each over torch's kernel.

    python -m benchmarks.speed.native_builds --into benchmarks/results/native.md

A processor takes the fastest build that it runs (`headwise._library`). Every build that runs on
this one is timed on the same tensors in the same rounds, on one thread, by the CPU time of the
process. Ratios are medians of ratios of the same round, with a 95 % interval. How fast each build
multiplies in registers alone shows why the builds differ.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._report import Row, machine, parser_of, print_rows, publish, rows_of
from benchmarks._timing import Work, interleaved, timed_for
from benchmarks.speed.native_peak import multiplications
from headwise._library import BUILT, SETS, Library, library, open_library
from headwise.kernels import _attend, attend
from headwise.kernels.native import _problem

# Texts, heads, tokens, width; whether causal, and whether gradients are computed too.
CASES = (
    ((8, 12, 128, 64), False, False),
    ((2, 12, 512, 64), False, False),
    ((2, 12, 512, 64), True, False),
    ((1, 12, 2048, 64), True, False),
    ((2, 12, 512, 64), False, True),
    ((2, 12, 512, 64), True, True),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH = "torch"
# What was prepared for the calls of each build, since it keeps the functions of its build.
PREPARED: dict[str, dict[Any, Any]] = {}


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    builds = {name: open_library(BUILT / f"{name}.so") for name in SETS}
    runs = {name: build for name, build in builds.items() if build}
    rows = print_rows([*throughput(runs), *whole_calls(runs, options)])
    where = f"Taken here: {library().name}. {machine(options)}"
    publish(rows, where, options.into, part="builds")


def throughput(builds: dict[str, Library]) -> Iterator[Row]:
    """Multiplications and additions in registers alone, of each build and dtype."""
    for name, build in builds.items():
        for name_of_dtype, dtype in DTYPES.items():
            work = multiplications(build, dtype)
            operations = work()
            times = interleaved({"time": work}, 15, "cpu")
            speed = f"{operations / times.median('time') / 1e6:.0f}" if operations else ""
            case = {"table": "Billions of operations a second in registers", "build": name}
            yield case | {"who": name_of_dtype, "took": speed, "ratio": "1", "rounds": 15}


def whole_calls(builds: dict[str, Library], options: argparse.Namespace) -> Iterator[Row]:
    for dtype in DTYPES:
        for (B, H, T, D), causal, trained in CASES:
            shape = (B, T, H, D)
            q, k, v = (torch.randn(shape, dtype=DTYPES[dtype]).transpose(1, 2) for _ in "qkv")
            tensors = [x.requires_grad_(trained) for x in (q, k, v)]
            works: dict[str, Work] = {TORCH: partial(_run, tensors, causal, None)}
            works |= {name: partial(_run, tensors, causal, x) for name, x in builds.items()}
            times = timed_for(works, options.seconds, "cpu")
            case = {
                "table": f"Builds over torch's kernel, {dtype}",
                "texts, heads, tokens, width": f"{B} x {H} x {T} x {D}",
                "mask": "causal" if causal else "none",
                "pass": "forward and backward" if trained else "forward",
            }
            yield from rows_of(case, times, TORCH)


def _run(tensors: list[Tensor], causal: bool, build: Library | None) -> None:
    """One call by a build of the native kernel, or by torch's kernel."""
    prepared = PREPARED.setdefault(build.name if build else TORCH, {})
    with (
        patch.object(_problem, "library", lambda: build),
        patch.object(_attend, "_PREPARED", prepared),
    ):
        if build:
            heads = attend(*tensors, causal=causal, backend="native")
        else:
            heads = F.scaled_dot_product_attention(*tensors, is_causal=causal)
        if heads.requires_grad:
            torch.autograd.grad(heads, tensors, heads.detach())


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seconds=6.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
