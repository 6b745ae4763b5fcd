"""The native kernel compared with torch's: output alone, and output with row statistics.

    python -m benchmarks.speed.native --into benchmarks/results/native.md
    python -m benchmarks.speed.native --cores --into benchmarks/results/native-cores.md

All numbers of a table come from one run with interleaved variants: on one thread by the CPU time of
the process, with `--cores` on all cores by wall clock. Ratios compare with torch's kernel on the
same tensors, which computes the output alone; they are medians of ratios of the same round, with a
95 % interval.
"""

import argparse
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._report import Row, machine, numbers, parser_of, print_rows, publish, rows_of
from benchmarks._timing import Times, Work, interleaved, timed_for
from headwise._native_library import library
from headwise.kernels import (
    AttentionRule,
    RowRequest,
    attend,
    make_rule,
    row_statistics,
)
from headwise.kernels._rule import lower
from headwise.kernels.native._autograd import attention
from headwise.kernels.native._problem import NativeProblem, compute_heads, problem_of_heads

# Texts, heads, tokens, width.
FORWARD = (
    (8, 12, 128, 64),
    (1, 12, 512, 64),
    (1, 12, 2048, 64),
    (1, 12, 8192, 64),
    (1, 32, 1024, 128),
)
# Texts of more tokens are measured with the first statistics alone.
MOST, FIRST = 2048, "with lse, entropy, maxima"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH, READING = "torch, enable_gqa", "reading keys and values"
# Texts, heads, kv heads, cached keys, width.
DECODING = ((1, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (4, 32, 8, 4096, 128))
DECODING += tuple((1, 12, 12, S, 64) for S in (64, 128, 512, 1024, 4096))
DECODING += ((4, 12, 12, 4096, 64),)
# Bytes read before the same cache is used again: several times the size of a processor's cache.
BETWEEN = 1 << 28
# Sizes around which the native kernel becomes faster.
SMALL = ((1, 2, 64, 64), (1, 12, 64, 64), (1, 12, 128, 64), (2, 12, 128, 64), (1, 12, 256, 64))

# Short calls are timed in groups of this size.
CALLS = 50


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = print_rows(measured(options))
    publish(rows, f"Native kernel: {library().name}. {machine(options)}", options.into)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    with torch.no_grad():
        yield from chain(forward(options), decoding(options))
        if not options.cores:
            yield from chain(rules(options), small(options), calls(options))
    yield from training(options)


def forward(options: argparse.Namespace) -> Iterator[Row]:
    """The output, with more and more statistics from the same pass."""
    for dtype, size in product(DTYPES, options.sizes):
        for causal in (False, True):
            case = {"table": f"Forward, {dtype}", "texts, heads, tokens, width": label(size)}
            times = time_works(forward_works(size, causal, DTYPES[dtype]), options)
            yield from rows_of(case | {"mask": "causal" if causal else "none"}, times, "torch")


def forward_works(size: tuple[int, ...], causal: bool, dtype: torch.dtype) -> dict[str, Work]:
    B, _, T, D = size
    q, k, v = (x.to(dtype) for x in inputs(*size))
    rule = make_rule(head_dim=D, is_causal=causal).simplify(T, T)
    classes = torch.eye(8)[torch.randint(8, (B, T))]
    requests = {
        FIRST: RowRequest(heads=True),
        "and argmax": RowRequest(heads=True, argmax=True),
        "and 8 classes": RowRequest(heads=True, argmax=True, classes=classes),
        "a watch": RowRequest(heads=True, distance=True, keys=_neighbors(B, T)),
        "and what keys receive": RowRequest(heads=True, received=torch.ones(B, T).bool()),
    }
    works: dict[str, Work] = {
        "torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal),
        "heads alone": partial(attend, q, k, v, causal=causal, backend="native"),
    }
    names = [name for name in requests if T <= MOST or name == FIRST]
    return works | {name: _described(q, k, v, rule, requests[name]) for name in names}


def rules(options: argparse.Namespace) -> Iterator[Row]:
    """Masks and biases, compared with torch's kernel."""
    B, H, T, D = 1, 12, 1024, 64
    q, k, v = inputs(B, H, T, D)
    positions = torch.arange(T)
    offsets = positions[:, None] - positions
    near = ((offsets >= 0) & (offsets <= 255))[None, None]
    bias = torch.randn(1, H, T, T)
    cases: dict[str, tuple[Tensor, dict[str, object]]] = {
        "window of 256": (near, {"near": (255, 0)}),
        "a mask of booleans, random": (torch.rand(1, 1, T, T) < 0.5, {"mask": None}),
        "a mask of booleans, causal": (torch.ones(1, 1, T, T).tril().bool(), {"mask": None}),
        "a bias": (bias, {"bias": bias}),
    }
    for name, (mask, arguments) in cases.items():
        rule = make_rule(head_dim=D, **{n: mask if x is None else x for n, x in arguments.items()})
        works: dict[str, Work] = {
            "torch": partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask),
            "native, with lse, entropy, maxima": _described(q, k, v, rule, RowRequest(heads=True)),
        }
        case = {"table": f"Rules, {label((B, H, T, D))}", "rule": name}
        yield from rows_of(case, time_works(works, options), "torch")


def decoding(options: argparse.Namespace) -> Iterator[Row]:
    """One query on cached keys and values, compared with the time to read these from memory."""
    for size in options.decoding:
        for dtype in DTYPES:
            times = time_works(_decoding_works(size, dtype), options)
            case = {"texts, heads, heads of keys, keys, width": label(size), "dtype": dtype}
            for base in (TORCH, READING):
                yield from rows_of({"table": f"Decoding, over {base}"} | case, times, base)


def _decoding_works(size: tuple[int, ...], dtype: str) -> dict[str, Work]:
    """Each call uses another cache, as layers do, so that the processor has not cached it."""
    B, H, Hkv, S, D = size
    q = torch.randn(B, H, 1, D).to(DTYPES[dtype])
    pair = [torch.randn(B, Hkv, S, D).to(DTYPES[dtype]) for _ in "kv"]
    layers = max(2, BETWEEN // sum(x.nbytes for x in pair))
    caches = [[x.clone() for x in pair] for _ in range(layers)]
    rule = make_rule(head_dim=D)
    filled = {k: _filled(q, k, v, rule, packed=True) for k, v in caches}
    request = RowRequest(heads=True, distance=True, keys=_neighbors(B, S)[:, -1:])
    kernels: dict[str, Callable[[Tensor, Tensor], object]] = {
        TORCH: partial(F.scaled_dot_product_attention, q, enable_gqa=Hkv != H),
        # Viewed as float32, since summing half precision takes longer.
        READING: lambda k, v: [x.view(torch.float32).sum() for x in (k, v)],
        "the native kernel alone": lambda k, _: filled[k].solve(),
        "attend, torch's kernel": partial(attend, q, backend="fused"),
        "attend, native": partial(attend, q, backend="native"),
        "native, a watch": lambda k, v: row_statistics(q, k, v, rule, request, backend="native"),
    }
    next_cache = cycle(caches)
    return {
        name: lambda kernel=kernel: kernel(*next(next_cache)) for name, kernel in kernels.items()
    }


def _filled(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, packed: bool = False
) -> NativeProblem:
    """What `attend` fills in and checks at a call unlike earlier ones."""
    return problem_of_heads(q, k, v, lower(rule, q.shape[2], k.shape[2]), ("lse",), packed)


def small(options: argparse.Namespace) -> Iterator[Row]:
    """Short calls of `attend` with either kernel."""
    for size in SMALL:
        q, k, v = inputs(*size)
        works: dict[str, Work] = {
            name: partial(attend, q, k, v, backend=name) for name in ("fused", "native")
        }
        case = {"table": "Short calls of attend", "texts, heads, tokens, width": label(size)}
        yield from rows_of(case, time_works(works, options), "fused")


def calls(options: argparse.Namespace) -> Iterator[Row]:
    """The overhead of a call: two queries and two keys of four heads."""
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in "qkv")
    rule = make_rule(head_dim=8)
    request = RowRequest(heads=True, distance=True, keys=_neighbors(1, 2))
    filled = _filled(q, k, v, rule)
    problem = ctypes.byref(filled.fields)
    filled.solve()
    works: dict[str, Work] = {
        "torch's kernel": partial(F.scaled_dot_product_attention, q, k, v),
        "the native kernel in C": partial(library().functions.headwise_forward, problem),
        "the same, checked and filled in": partial(compute_heads, q, k, v, lower(rule, 2, 2)),
        "the same as an operator": partial(attention, q, k, v, False, *lower(rule, 2, 2)),
        "attend, native": partial(attend, q, k, v, backend="native"),
        "attend, native and causal": partial(attend, q, k, v, causal=True, backend="native"),
        "attend, fused": partial(attend, q, k, v, backend="fused"),
        "row_statistics, as a watch asks": _described(q, k, v, rule, request),
    }
    times = interleaved({name: partial(_often, work) for name, work in works.items()}, 100, "cpu")
    for name in works:
        micro = f"{1000 * times.median(name) / CALLS:.0f} µs"
        case = {"table": "Call overhead", "call": name}
        yield case | {"who": "time", "took": micro, "ratio": "1", "rounds": 100}


def _often(work: Work) -> None:
    for _ in range(CALLS):
        work()


def training(options: argparse.Namespace) -> Iterator[Row]:
    """Forward and backward, with gradients of the output alone and of entropies too."""
    sizes = (*SMALL, *(size for size in options.sizes if size[2] <= MOST))
    for dtype, size, causal in product(DTYPES, sizes, (False, True)):
        table = f"Forward and backward, {dtype}"
        case = {"table": table, "texts, heads, tokens, width": label(size)}
        times = time_works(_trained(size, causal, DTYPES[dtype]), options)
        yield from rows_of(case | {"mask": "causal" if causal else "none"}, times, "torch")


def _trained(size: tuple[int, ...], causal: bool, dtype: torch.dtype) -> dict[str, Work]:
    B, H, T, D = size
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs(*size))
    grad, grad_entropy = torch.randn(B, T, H, D, dtype=dtype).transpose(1, 2), torch.randn(B, H, T)

    def plain() -> None:
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.autograd.grad(heads, (q, k, v), grad)

    def native() -> None:
        heads = attend(q, k, v, causal=causal, backend="native")
        torch.autograd.grad(heads, (q, k, v), grad)

    def entropy() -> None:
        result = attend(q, k, v, causal=causal, need_entropy=True, backend="native")
        torch.autograd.grad((result.heads, result.entropy), (q, k, v), (grad, grad_entropy))

    return {"torch": plain, "native": native, "native, with entropies": entropy}


def inputs(B: int, H: int, T: int, D: int) -> list[Tensor]:
    """Laid out as a module makes them: the heads of a token are adjacent."""
    return [torch.randn(B, T, H, D).transpose(1, 2) for _ in "qkv"]


def _neighbors(B: int, T: int) -> Tensor:
    """The first token, the query's own, the one before and the one after."""
    positions = torch.arange(T)
    after = torch.where(positions < T - 1, positions + 1, -1)
    return torch.stack(
        [torch.zeros_like(positions), positions, positions - 1, after], dim=-1
    ).expand(B, T, 4)


def _described(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest) -> Work:
    return partial(row_statistics, q, k, v, rule, request, backend="native")


def label(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def time_works(works: dict[str, Work], options: argparse.Namespace) -> Times:
    return timed_for(works, options.seconds, options.clock)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seconds=10.0)
    parser.add_argument("--sizes", type=numbers, nargs="*", default=FORWARD, help="B,H,T,D")
    parser.add_argument("--decoding", type=numbers, nargs="*", default=DECODING, help="B,H,Hkv,S,D")
    parser.add_argument("--cores", action="store_true", help="use all cores and wall clock")
    options = parser.parse_args()
    if options.cores:
        options.clock, options.threads = "wall", torch.get_num_threads()
    return options


if __name__ == "__main__":
    main()
