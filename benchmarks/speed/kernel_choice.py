"""What the thresholds of the choice of a kernel rest on, measured on this machine, as Markdown.

    python -m benchmarks.speed.kernel_choice --into benchmarks/results/kernel-choice.md

Each line compares two ways to compute the same heads, interleaved in one run. A ratio is the median
of ratios of the same round, with a 95 % interval; below 1 the first way is faster.
"""

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks._report import Row, machine, parser_of, print_rows, publish
from benchmarks._timing import Work, timed_for
from headwise.kernels import _attend, _fused, attend
from headwise.kernels.native import _kernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    rows = chain.from_iterable(PARTS[name](options) for name in options.parts)
    publish(print_rows(rows), machine(options), options.into)


def native(options: argparse.Namespace) -> Iterator[Row]:
    """Around `LEAST_PRODUCTS`: from which size the native kernel is faster than torch's."""
    for H, T in ((2, 64), (2, 128), (12, 16), (12, 32), (12, 64), (12, 128)):
        for dtype in options.dtypes:
            for trained in (False, True):
                q, k, v = _inputs((1, H, H, T, T, 64), dtype, trained)
                works = {
                    name: partial(_run, q, k, v, trained, backend=name)
                    for name in ("native", "fused")
                }
                case = {"heads, tokens": f"{H}, {T}", "dtype": dtype, "trained": trained}
                chosen = _kernel.is_faster(q, k)
                yield _row("Native kernel over torch's", case, works, options, chosen)


def long_texts(options: argparse.Namespace) -> Iterator[Row]:
    """Keys with other heads between them, as a module lays them out: there the kernel copies them.

    Measured for the rule that has no upper end: no text is too long for the native kernel.
    """
    for H, T, D in (
        (12, 512, 64),
        (12, 2048, 64),
        (32, 256, 128),
        (32, 1024, 128),
        (12, 2048, 128),
    ):
        for dtype, causal in product(options.dtypes, (False, True)):
            q, k, v = (x.transpose(1, 2) for x in _inputs((1, T, T, H, H, D), dtype))
            works = {
                name: partial(_run, q, k, v, False, causal=causal, backend=name)
                for name in ("native", "fused")
            }
            mask = "causal" if causal else "none"
            case = {"heads, tokens, width": f"{H}, {T}, {D}", "dtype": dtype, "mask": mask}
            chosen = _kernel.is_faster(q, k)
            yield _row("Native kernel over torch's, long texts", case, works, options, chosen)


def decoding(options: argparse.Namespace) -> Iterator[Row]:
    """Few queries of each head, packed: the native kernel is chosen for any number of keys.

    But for bfloat16 with AMX, whose tiles multiply many queries of a kv head as fast as one.
    """
    for H, Hkv, T, S, D in (
        (32, 8, 1, 16, 128),
        (32, 8, 1, 64, 128),
        (12, 12, 1, 128, 64),
        (12, 12, 1, 512, 64),
        (12, 12, 8, 512, 64),
        (32, 8, 2, 1024, 128),
        (32, 8, 4, 1024, 128),
    ):
        for dtype in options.dtypes:
            q, k, v = _inputs((1, H, Hkv, T, S, D), dtype)
            works = {
                name: partial(_run, q, k, v, False, backend=name) for name in ("native", "fused")
            }
            case = {"heads, of keys, queries, keys": f"{H}, {Hkv}, {T}, {S}", "dtype": dtype}
            chosen = _kernel.is_faster(q, k)
            yield _row("Native kernel over torch's, few queries", case, works, options, chosen)


def packed(options: argparse.Namespace) -> Iterator[Row]:
    """Around `MOST_PACKED`: packed heads of a group over `enable_gqa`."""
    for T in (1, 16, 32, 64):
        for dtype in options.dtypes:
            q, k, v = _inputs((1, 32, 8, T, 1024, 128), dtype)
            run = partial(_run, q, k, v, False, backend="fused")
            works = {"packed": _in(_most("MOST_PACKED", 1 << 20), run)}
            works["enable_gqa"] = _in(_most("MOST_PACKED", 0), run)
            case = {"queries": T, "dtype": dtype}
            yield _row(
                "Packed heads over enable_gqa", case, works, options, T <= _fused.MOST_PACKED
            )


def wide(options: argparse.Namespace) -> Iterator[Row]:
    """Around `MOST_WIDE`: bfloat16 in training, computed in float32 and as it is."""
    for T in (32, 64, 128, 192, 256):
        q, k, v = _inputs((1, 12, 12, T, T, 64), "bfloat16", trained=True)
        run = partial(_run, q, k, v, True, backend="fused")
        works = {"float32": _in(_most("MOST_WIDE", 1 << 20), run)}
        works["bfloat16"] = _in(_most("MOST_WIDE", 0), run)
        chosen = T <= _fused.MOST_WIDE
        yield _row(
            "bfloat16 in training, in float32 over as it is", {"tokens": T}, works, options, chosen
        )


def _inputs(sizes: tuple[int, ...], dtype: str, trained: bool = False) -> tuple[Tensor, ...]:
    B, H, Hkv, T, S, D = sizes
    shapes = (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)
    return tuple(torch.randn(x, dtype=DTYPES[dtype], requires_grad=trained) for x in shapes)


def _run(q: Tensor, k: Tensor, v: Tensor, trained: bool, **arguments: Any) -> None:
    heads = attend(q, k, v, **arguments)
    if trained:
        torch.autograd.grad(heads, (q, k, v), heads.detach())


def _in(context: partial[AbstractContextManager[None]], work: Work) -> Work:
    """The work under other thresholds, with a memory of its own of how a call is computed."""
    prepared: dict[Any, Any] = {}

    def run() -> None:
        with context(), patch.object(_attend, "_PREPARED", prepared):
            work()

    return run


def _most(name: str, value: int) -> partial[AbstractContextManager[None]]:
    return partial(_set, **{name: value})


@contextmanager
def _set(**values: int) -> Iterator[None]:
    before = {name: getattr(_fused, name) for name in values}
    try:
        for name, value in values.items():
            setattr(_fused, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(_fused, name, value)


def _row(
    table: str, case: Row, works: dict[str, Work], options: argparse.Namespace, chosen: bool
) -> Row:
    """A line: the ratio of the first work to the second, and whether the first is chosen."""
    first, second = works
    times = timed_for(works, options.seconds, options.clock)
    shown = {name: "yes" if x is True else "no" if x is False else x for name, x in case.items()}
    took = f"{times.median(second):.3f} ms"
    ratio = f"{times.ratio(first, second)}, {'chosen' if chosen else 'not chosen'}"
    compared, rounds = f"{first} / {second}", len(times.seconds[first])
    return (
        {"table": table}
        | shown
        | {second: took, "who": compared, "took": took, "ratio": ratio, "rounds": rounds}
    )


PARTS = {
    "native": native,
    "long": long_texts,
    "decoding": decoding,
    "packed": packed,
    "wide": wide,
}


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=1, device="cpu", clock="cpu", seconds=0.5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
