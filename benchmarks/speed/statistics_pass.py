"""A pass of the native kernel for statistics alone, over the products of queries and keys.

    python -m benchmarks.speed.statistics_pass --into benchmarks/results/native.md

The peak is the throughput of multiplications and additions in registers alone: so many of them as
the product of queries and keys has. No pass can be faster. Each column requests one thing more. One
thread, by the CPU time of the process, without Python; ratios are medians of ratios of the same
round, with a 95 % interval. The second table is of a statistic that the kernel would lack, here
what keys receive: blocks of rows compute it alone, or else everything.
"""

import argparse
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._report import Row, machine, parser_of, print_rows, publish, rows_of
from benchmarks._timing import Work, timed_for
from benchmarks.speed.short_calls import kernel_alone
from headwise._native_library import Library, library
from headwise.kernels import AttentionProblem, RowRequest, make_rule
from headwise.kernels.native import NATIVE
from headwise.kernels.native._problem import problem_of_rows
from headwise.kernels.rows import ROWS

# Texts, heads, tokens, width, whether causal, and the dtype.
CASES = (
    ((2, 12, 512, 32), False, torch.float32),
    ((1, 12, 2048, 32), False, torch.float32),
    ((1, 12, 2048, 64), False, torch.float32),
    ((1, 12, 2048, 64), True, torch.float32),
    ((1, 12, 2048, 64), False, torch.bfloat16),
)
ROUNDS = 200_000
PEAK = "queries and keys, at the peak"


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        cases = [case for case in CASES if multiplications(library(), case[2])()]
        rows = print_rows(row for case in cases for row in _rows(*case, options.seconds))
    publish(
        rows,
        f"Native kernel: {library().name}. {machine(options)}",
        options.into,
        part="statistics",
    )
    with torch.no_grad():
        rows = print_rows(row for T in (512, 2048) for row in _lacking(T, options.seconds))
    publish(rows, f"{library().name}. {machine(options)}", options.into, part="lacking")


def _lacking(T: int, seconds: float) -> Iterator[Row]:
    q, k, v = (torch.randn(1, 12, T, 64) for _ in "qkv")
    problem = AttentionProblem(q, k, v, make_rule(head_dim=64, is_causal=True).simplify(T, T))
    whole = replace(_requests(T)["a watch"], received=torch.ones(1, T).bool())
    own, rest = whole.split(["received"])

    def split() -> None:
        others = ROWS.statistics(problem, rest)
        NATIVE.statistics(problem, own).completed(others, "both")

    everything = "all from the rows"
    works: dict[str, Work] = {
        everything: partial(ROWS.statistics, problem, whole),
        "one from the rows": split,
        "none": partial(NATIVE.statistics, problem, whole),
    }
    sizes = f"1 x 12 x {T} x 64"
    case = {"table": "A statistic that a kernel lacks", "texts, heads, tokens, width": sizes}
    yield from rows_of(case, timed_for(works, seconds, "cpu"), everything)


def multiplications(build: Library, dtype: torch.dtype, rounds: int = ROUNDS) -> Callable[[], int]:
    """Multiplications and additions in registers alone; returns how many, 0 if it has none."""
    count = build.functions.headwise_peak
    count.argtypes, count.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return partial(count, rounds, int(dtype == torch.bfloat16))


def _rows(
    sizes: tuple[int, int, int, int], causal: bool, dtype: torch.dtype, seconds: float
) -> Iterator[Row]:
    B, H, T, D = sizes
    q, k, v = (torch.randn(B, T, H, D).to(dtype).transpose(1, 2) for _ in "qkv")
    pairs = T * (T + 1) // 2 if causal else T * T
    works: dict[str, Work] = {PEAK: _at_peak(2 * B * H * pairs * D, dtype)}
    rule = make_rule(head_dim=D, is_causal=causal).simplify(T, T)
    for name, request in _requests(T).items():
        works[name] = kernel_alone(problem_of_rows(q, k, v, rule, request))
    works["torch's kernel"] = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    times = timed_for(works, seconds, "cpu")
    case = {
        "table": "Statistics alone",
        "texts, heads, tokens, width": f"{B} x {H} x {T} x {D}",
        "mask": "causal" if causal else "none",
        "dtype": str(dtype).removeprefix("torch."),
    }
    yield from rows_of(case, times, PEAK)


def _at_peak(operations: int, dtype: torch.dtype) -> Work:
    """So many multiplications and additions in registers alone, or in pairs of bfloat16."""
    rounds = ROUNDS * operations // multiplications(library(), dtype)()
    return multiplications(library(), dtype, rounds)


def _requests(T: int) -> dict[str, RowRequest]:
    """What is requested; the last is what a watch requests by default."""
    token: Tensor = torch.arange(T)
    keys = torch.stack([token, token - 1, torch.zeros_like(token), token + 1], -1)[None]
    return {
        "lse, maxima": RowRequest(entropy=False),
        "and entropy": RowRequest(),
        "and distance": RowRequest(distance=True),
        "a watch": RowRequest(distance=True, keys=keys),
    }


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seconds=6.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
