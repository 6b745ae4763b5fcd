"""What Python takes around a kernel, and decoding with a kv head for each query head, as Markdown.

    python -m benchmarks.speed.short_calls --into benchmarks/results/short-calls.md

The variants of a line run interleaved. What Python takes is the difference of the least times; a
ratio is the median of ratios of the same round, with a 95 % interval.
"""

import argparse
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._report import Row, machine, parser_of, print_rows, publish, rows_of
from benchmarks._timing import Times, Work, timed_for
from headwise._native_library import library
from headwise.kernels import RowRequest, attend, make_rule, row_statistics
from headwise.kernels._rule import lower
from headwise.kernels.native._problem import NativeProblem, problem_of_heads, problem_of_rows

# Calls on the same keys are timed in groups of this size.
CALLS = 20
KEYS = (64, 128, 256, 512, 1024, 4096)
# Bytes read before the same keys are used again: several times the size of a processor's cache.
BETWEEN = 1 << 28
TORCH, READING = "torch's kernel", "reading keys and values"
HEADS, WIDTH = 12, 64


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = print_rows(chain(around(options), decoding(options)))
    where = f"Native kernel: {library().name}. {machine(options)}"
    publish(rows, where, options.into)


def around(options: argparse.Namespace) -> Iterator[Row]:
    """One text of 128 tokens: each call, the kernel in it, and what is left for Python."""
    for causal in (False, True):
        q, k, v = (torch.randn(1, HEADS, 128, WIDTH) for _ in "qkv")
        rule = make_rule(head_dim=WIDTH, is_causal=causal).simplify(128, 128)
        heads = problem_of_heads(q, k, v, lower(rule, 128, 128), (), packed=False)
        rows = problem_of_rows(q, k, v, rule, RowRequest())
        native, described = kernel_alone(heads), kernel_alone(rows)
        torch_alone: Work = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        call = partial(attend, q, k, v, causal=causal)
        pairs: dict[str, tuple[Work, Work]] = {
            "attend, over torch's kernel": (call, torch_alone),
            "attend, over the native kernel in it": (call, native),
            "attend by torch's kernel, over it": (partial(call, backend="fused"), torch_alone),
            "row_statistics, over the native kernel in it": (
                partial(row_statistics, q, k, v, rule, RowRequest()), described,
            ),
        }  # fmt: skip
        for name, (whole, kernel) in pairs.items():
            yield from _difference(name, causal, whole, kernel, options)


def _difference(
    name: str, causal: bool, whole: Work, kernel: Work, options: argparse.Namespace
) -> Iterator[Row]:
    works = {"call": whole, "kernel": kernel}
    times = timed_for(works, options.seconds, options.clock, most=2000)
    # What Python takes is the same in each round: whatever else runs only adds to it.
    call, alone = (1e6 * min(times.seconds[name]) for name in works)
    took = {"call": call, "kernel": alone, "call less kernel": call - alone}
    case = {
        "table": "Python around the kernel",
        "what": name,
        "mask": "causal" if causal else "none",
    }
    for who, micro in took.items():
        rounds = len(times.seconds["call"])
        yield case | {"who": who, "took": f"{micro:.0f} µs", "ratio": "1", "rounds": rounds}


def kernel_alone(problem: NativeProblem) -> Work:
    """The kernel in C on a problem that was filled in and solved before."""
    problem.solve()
    function, pointer = library().functions.headwise_forward, ctypes.byref(problem.fields)
    return lambda problem=problem: function(pointer)


def decoding(options: argparse.Namespace) -> Iterator[Row]:
    """One query on keys and values of its own head: others at each call, then the same ones."""
    for S in options.keys:
        for between, where in ((BETWEEN, "from memory"), (0, "again and again")):
            works = _decoding_works(S, between)
            times = timed_for(works, options.seconds, options.clock, most=400)
            calls = _calls(between)
            times = Times({n: [x / calls for x in each] for n, each in times.seconds.items()})
            case = {"keys": S, "read": where}
            for base in (TORCH, READING):
                yield from rows_of({"table": f"Decoding, over {base}"} | case, times, base)


def _decoding_works(S: int, between: int) -> dict[str, Work]:
    q = torch.randn(1, HEADS, 1, WIDTH)
    size = 2 * 4 * HEADS * S * WIDTH
    caches = [torch.randn(2, 1, HEADS, S, WIDTH).unbind(0) for _ in range(max(1, between // size))]
    lowered = lower(make_rule(head_dim=WIDTH), 1, S)
    filled = {id(k): problem_of_heads(q, k, v, lowered, (), packed=True) for k, v in caches}
    alone = {name: kernel_alone(problem) for name, problem in filled.items()}
    kernels: dict[str, Callable[[Tensor, Tensor], object]] = {
        TORCH: partial(F.scaled_dot_product_attention, q),
        READING: lambda k, v: (k.sum(), v.sum()),
        "the native kernel alone": lambda k, _: alone[id(k)](),
        "attend": partial(attend, q),
    }
    following, calls = cycle(caches), _calls(between)

    def run(kernel: Callable[[Tensor, Tensor], object]) -> None:
        for _ in range(calls):
            kernel(*next(following))

    return {name: partial(run, kernel) for name, kernel in kernels.items()}


def _calls(between: int) -> int:
    """How many calls are timed as one."""
    return 1 if between else CALLS


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seconds=5.0, threads=1, clock="cpu")
    parser.add_argument("--keys", type=int, nargs="*", default=KEYS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
