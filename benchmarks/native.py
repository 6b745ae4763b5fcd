"""The native kernel beside torch's: heads alone, and heads with what is said about the weights.

    python benchmarks/native.py --into docs/native.md
    python benchmarks/native.py --cores --into docs/native-cores.md

Every number of one table comes from one run on one thread, its works interleaved, by the CPU time
of the process; with `--cores` on all cores, by the clock on the wall. Ratios are medians of ratios
of the same round to torch's kernel on the same tensors, which gives the heads alone; with a 95 %
interval for that median.
"""

import argparse
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, product

import torch
import torch.nn.functional as F
from _telling import Row, aloud, machine, publish, rows_of
from _timing import Times, Work, interleaved, rounds_for
from torch import Tensor

from headwise._library import library
from headwise.kernels import AttentionRule, RowRequest, attend, make_rule, row_statistics
from headwise.kernels.native import attend_native
from headwise.kernels.native._builder import ProblemBuilder
from headwise.kernels.native._operators import attention
from headwise.kernels.native._rule import add_rule
from headwise.kernels.spec import lower

# Texts, heads, tokens, width.
FORWARD = (
    (8, 12, 128, 64),
    (1, 12, 512, 64),
    (1, 12, 2048, 64),
    (1, 12, 8192, 64),
    (1, 32, 1024, 128),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCH, READING = "torch, enable_gqa", "reading keys and values"
# Texts, heads, those of keys and values, cached keys, width.
DECODING = ((1, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (4, 32, 8, 4096, 128))
DECODING += ((1, 12, 12, 512, 64), (1, 12, 12, 4096, 64), (4, 12, 12, 4096, 64))
# Bytes read before a cache comes again: several times what a processor keeps.
BETWEEN = 1 << 28
# Where the native kernel begins to win.
SMALL = ((1, 2, 64, 64), (1, 12, 64, 64), (1, 12, 128, 64), (2, 12, 128, 64), (1, 12, 256, 64))

# Calls that are timed together, where one is too short for a clock.
CALLS = 50


def main() -> None:
    how = _arguments()
    torch.set_num_threads(how.threads)
    torch.manual_seed(0)
    rows = aloud(measured(how))
    publish(rows, f"Native kernel: {library().name}. {machine(how)}", how.into)


def measured(how: argparse.Namespace) -> Iterator[Row]:
    with torch.no_grad():
        yield from chain(forward(how), decoding(how))
        if not how.cores:
            yield from chain(rules(how), small(how), calls(how))
    yield from training(how)


def forward(how: argparse.Namespace) -> Iterator[Row]:
    """Heads, and more and more statistics of the same pass."""
    for dtype, size in product(DTYPES, how.sizes):
        for causal in (False, True):
            case = {"table": f"Forward, {dtype}", "texts, heads, tokens, width": _told(size)}
            times = _time(_works(size, causal, DTYPES[dtype]), how)
            yield from rows_of(case | {"mask": "causal" if causal else "none"}, times, "torch")


def _works(size: tuple[int, ...], causal: bool, dtype: torch.dtype) -> dict[str, Work]:
    B, _, T, D = size
    q, k, v = (x.to(dtype) for x in _inputs(*size))
    rule = make_rule(head_dim=D, is_causal=causal).simplify(T, T)
    classes = torch.eye(8)[torch.randint(8, (B, T))]
    requests = {
        "with lse, entropy, maxima": RowRequest(heads=True),
        "and argmax": RowRequest(heads=True, argmax=True),
        "and 8 classes": RowRequest(heads=True, argmax=True, classes=classes),
        "a watch": RowRequest(heads=True, distance=True, keys=_neighbors(B, T)),
        "and what keys receive": RowRequest(heads=True, received=torch.ones(B, T).bool()),
    }
    works: dict[str, Work] = {
        "torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal),
        "heads alone": partial(attend, q, k, v, causal=causal, backend="native"),
    }
    return works | {name: _described(q, k, v, rule, one) for name, one in requests.items()}


def rules(how: argparse.Namespace) -> Iterator[Row]:
    """Masks and biases, and what torch's kernel takes for the same."""
    B, H, T, D = 1, 12, 1024, 64
    q, k, v = _inputs(B, H, T, D)
    at = torch.arange(T)
    near = ((at[:, None] - at >= 0) & (at[:, None] - at <= 255))[None, None]
    bias = torch.randn(1, H, T, T)
    given: dict[str, tuple[Tensor, dict[str, object]]] = {
        "window of 256": (near, {"near": (255, 0)}),
        "a mask of booleans, random": (torch.rand(1, 1, T, T) < 0.5, {"mask": None}),
        "a mask of booleans, causal": (torch.ones(1, 1, T, T).tril().bool(), {"mask": None}),
        "a bias": (bias, {"bias": bias}),
    }
    for name, (mask, said) in given.items():
        rule = make_rule(head_dim=D, **{n: mask if x is None else x for n, x in said.items()})
        works: dict[str, Work] = {
            "torch": partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask),
            "native, with lse, entropy, maxima": _described(q, k, v, rule, RowRequest(heads=True)),
        }
        case = {"table": f"Rules, {_told((B, H, T, D))}", "rule": name}
        yield from rows_of(case, _time(works, how), "torch")


def decoding(how: argparse.Namespace) -> Iterator[Row]:
    """One query on cached keys and values, and how long merely reading these from memory takes."""
    for size in how.decoding:
        for dtype in DTYPES:
            times = _time(_decoding_works(size, dtype), how)
            case = {"texts, heads, heads of keys, keys, width": _told(size), "dtype": dtype}
            for base in (TORCH, READING):
                yield from rows_of({"table": f"Decoding, over {base}"} | case, times, base)


def _decoding_works(size: tuple[int, ...], dtype: str) -> dict[str, Work]:
    """Each call meets another cache, as layers do: the last ones are no longer in the processor."""
    B, H, Hkv, S, D = size
    q = torch.randn(B, H, 1, D).to(DTYPES[dtype])
    one = [torch.randn(B, Hkv, S, D).to(DTYPES[dtype]) for _ in "kv"]
    layers = max(2, BETWEEN // sum(x.nbytes for x in one))
    caches = [[x.clone() for x in one] for _ in range(layers)]
    rule = make_rule(head_dim=D)
    filled = {k: _filled(q, k, v, rule, packed=True) for k, v in caches}
    request = RowRequest(heads=True, distance=True, keys=_neighbors(B, S)[:, -1:])
    kernels: dict[str, Callable[[Tensor, Tensor], object]] = {
        TORCH: partial(F.scaled_dot_product_attention, q, enable_gqa=Hkv != H),
        # Of half precision, sums would take longer.
        READING: lambda k, v: [x.view(torch.float32).sum() for x in (k, v)],
        "the native kernel alone": lambda k, _: filled[k].solve(),
        "attend, torch's kernel": partial(attend, q, backend="fused"),
        "attend, native": partial(attend, q, backend="native"),
        "native, a watch": lambda k, v: row_statistics(q, k, v, rule, request, backend="native"),
    }
    turns = cycle(caches)
    return {name: lambda kernel=kernel: kernel(*next(turns)) for name, kernel in kernels.items()}


def _filled(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, packed: bool = False
) -> ProblemBuilder:
    """What `attend` fills in and checks at every call."""
    builder = ProblemBuilder.of(q, k, v)
    builder.set("packed", packed)
    add_rule(builder, rule)
    builder.add_output("heads", (*q.shape[:3], v.shape[3]), q.dtype, strided_axes=3)
    builder.add_output("lse", q.shape[:3])
    return builder


def small(how: argparse.Namespace) -> Iterator[Row]:
    """`attend` by either kernel, where a call is short."""
    for size in SMALL:
        q, k, v = _inputs(*size)
        works: dict[str, Work] = {
            name: partial(attend, q, k, v, backend=name) for name in ("fused", "native")
        }
        case = {"table": "Short calls of attend", "texts, heads, tokens, width": _told(size)}
        yield from rows_of(case, _time(works, how), "fused")


def calls(how: argparse.Namespace) -> Iterator[Row]:
    """What a call takes besides its sums: two queries and two keys of four heads."""
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in "qkv")
    rule = make_rule(head_dim=8)
    asked = RowRequest(heads=True, distance=True, keys=_neighbors(1, 2))
    builder = _filled(q, k, v, rule)
    problem = ctypes.byref(builder.problem)
    builder.solve()
    works: dict[str, Work] = {
        "torch's kernel": partial(F.scaled_dot_product_attention, q, k, v),
        "the native kernel in C": partial(library().functions.headwise_forward, problem),
        "the same, checked and filled in": partial(attend_native, q, k, v, rule),
        "the same as an operator": partial(attention, q, k, v, False, *lower(rule, 2, 2)),
        "attend, native": partial(attend, q, k, v, backend="native"),
        "attend, native and causal": partial(attend, q, k, v, causal=True, backend="native"),
        "attend, fused": partial(attend, q, k, v, backend="fused"),
        "row_statistics, as a watch asks": _described(q, k, v, rule, asked),
    }
    times = interleaved({name: partial(_often, work) for name, work in works.items()}, 100, "cpu")
    for name in works:
        micro = f"{1000 * times.median(name) / CALLS:.0f} µs"
        case = {"table": "Call overhead", "call": name}
        yield case | {"who": "time", "took": micro, "ratio": "1", "rounds": 100}


def _often(work: Work) -> None:
    for _ in range(CALLS):
        work()


def training(how: argparse.Namespace) -> Iterator[Row]:
    """Forward and backward, with gradients of heads alone and of entropies too."""
    sizes = (*SMALL, *(size for size in how.sizes if size[2] <= 2048))
    for dtype, size, causal in product(DTYPES, sizes, (False, True)):
        table = f"Forward and backward, {dtype}"
        case = {"table": table, "texts, heads, tokens, width": _told(size)}
        times = _time(_trained(size, causal, DTYPES[dtype]), how)
        yield from rows_of(case | {"mask": "causal" if causal else "none"}, times, "torch")


def _trained(size: tuple[int, ...], causal: bool, dtype: torch.dtype) -> dict[str, Work]:
    B, H, T, D = size
    q, k, v = (x.to(dtype).requires_grad_() for x in _inputs(*size))
    back, back_entropy = torch.randn(B, T, H, D, dtype=dtype).transpose(1, 2), torch.randn(B, H, T)

    def plain() -> None:
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.autograd.grad(heads, (q, k, v), back)

    def native() -> None:
        heads = attend(q, k, v, causal=causal, backend="native")
        torch.autograd.grad(heads, (q, k, v), back)

    def entropy() -> None:
        found = attend(q, k, v, causal=causal, need_entropy=True, backend="native")
        torch.autograd.grad((found.heads, found.entropy), (q, k, v), (back, back_entropy))

    return {"torch": plain, "native": native, "native, with entropies": entropy}


def _inputs(B: int, H: int, T: int, D: int) -> list[Tensor]:
    """As a module makes them: heads side by side in each token."""
    return [torch.randn(B, T, H, D).transpose(1, 2) for _ in "qkv"]


def _neighbors(B: int, T: int) -> Tensor:
    """The first token, the query's own, the one before and the one after."""
    at = torch.arange(T)
    after = torch.where(at < T - 1, at + 1, -1)
    return torch.stack([torch.zeros_like(at), at, at - 1, after], dim=-1).expand(B, T, 4)


def _described(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest) -> Work:
    return partial(row_statistics, q, k, v, rule, request, backend="native")


def _told(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def _time(works: dict[str, Work], how: argparse.Namespace) -> Times:
    return interleaved(works, rounds_for(works, how.seconds, least=7), how.clock)


def _arguments() -> argparse.Namespace:
    def size(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=size, nargs="*", default=FORWARD, help="B,H,T,D")
    parser.add_argument("--decoding", type=size, nargs="*", default=DECODING, help="B,H,Hkv,S,D")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each group of works")
    parser.add_argument("--into", help="a page whose tables are replaced by these")
    parser.add_argument("--cores", action="store_true", help="the clock on the wall, all cores")
    parser.set_defaults(device="cpu", clock="cpu", threads=1)
    how = parser.parse_args()
    if how.cores:
        how.clock, how.threads = "wall", torch.get_num_threads()
    return how


if __name__ == "__main__":
    main()
