"""The layer compared with other libraries: time, decoding and memory, as Markdown and JSON.

    python -m benchmarks.speed.layer --threads 1 --json layer.json
    python -m benchmarks.speed.layer --read layer.json --into benchmarks/results/layer.md

All numbers of a table come from one run with interleaved variants. Ratios are medians of ratios of
the same round, with a 95 % interval; the best peer of a line has the lowest median.
`x-transformers` is included if it is installed (`pip install x-transformers`).
"""

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks._report import (
    Row,
    best_of,
    in_process,
    machine,
    numbers,
    parser_of,
    peak_of,
    print_rows,
    publish,
    rows_of,
)
from benchmarks._timing import Times, Work, timed_for
from benchmarks.speed._peers import Peer, peers
from headwise.kernels import attend

warnings.filterwarnings("ignore", category=DeprecationWarning)  # raised by a peer on import

SIZES = ((8, 128, 768, 12), (1, 2048, 768, 12))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHED = (4096, 16384)
MOST_EAGER = 1024  # tokens; beyond it takes three times as long as the others
OURS, PLAIN = "headwise", "plain fused layer"


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(step_memory(options.memory_of, options)))
        return
    if options.read:
        saved = json.loads(Path(options.read).read_text())
        rows, where = saved["rows"], saved["machine"]
    else:
        works = chain(forward_and_training(options), decoding(options), memory(options))
        rows, where = print_rows(works), machine(options)
    publish(sorted(rows, key=itemgetter("table")), where, options.into, file=options.json)


def forward_and_training(options: argparse.Namespace) -> Iterator[Row]:
    """The forward pass, and forward with backward, of every peer at every size."""
    for B, T, d_model, n_heads in options.sizes:
        for causal in (False, True):
            for dtype in options.dtypes:
                layers = peers(d_model, n_heads, causal, T)
                if T > MOST_EAGER:
                    layers.pop("Hugging Face Llama, eager", None)
                x = torch.randn(B, T, d_model, device=options.device, dtype=DTYPES[dtype])
                for module, _ in layers.values():
                    module.to(x)
                rule = "causal" if causal else "every key visible"
                for step, works in (
                    ("Forward", _forward(layers, x)),
                    ("Training", _step(layers, x)),
                ):
                    case = {"table": f"{step}, {rule}", "batch, tokens": f"{B}, {T}"}
                    case |= {"dtype": dtype}
                    times = _time(works, options)
                    yield from rows_of(case, times, PLAIN)
                    yield best_of(case, times, OURS)


def _forward(layers: Mapping[str, Peer], x: torch.Tensor) -> dict[str, Work]:
    def run(peer: Peer) -> None:
        peer[0].eval()
        with torch.inference_mode():
            peer[1](x)

    return {name: partial(run, peer) for name, peer in layers.items()}


def _step(layers: Mapping[str, Peer], x: torch.Tensor) -> dict[str, Work]:
    def run(peer: Peer) -> None:
        peer[0].train()
        peer[0].zero_grad()
        peer[1](x.detach().requires_grad_()).sum().backward()

    return {name: partial(run, peer) for name, peer in layers.items()}


def decoding(options: argparse.Namespace) -> Iterator[Row]:
    """One query of 32 heads on cached keys and values of 8, compared with reading these alone."""
    for S in options.cached:
        for dtype in options.dtypes:
            kind = {"dtype": DTYPES[dtype], "device": options.device}
            q = torch.randn(1, 32, 1, 128, **kind)
            k, v = (torch.randn(1, 8, S, 128, **kind) for _ in "kv")
            bits = [x.view(torch.int32) for x in (k, v)]
            torch_ = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
            works: dict[str, Work] = {
                "torch, enable_gqa": torch_,
                "headwise": partial(attend, q, k, v, causal=True),
                "reading keys and values": lambda bits=bits: [x.amax() for x in bits],
            }
            with torch.inference_mode():
                times = _time(works, options)
            case = {"table": "Decoding", "cached": f"{S}", "dtype": dtype}
            yield from rows_of(case, times, "torch, enable_gqa")


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Peak memory of a training step, each peer in a process of its own."""
    B, T, d_model, n_heads = max(options.sizes, key=lambda size: size[1])
    names = list(peers(d_model, n_heads, True, T))
    taken = {name: _peak(name, options) for name in names}
    for name, peak in taken.items():
        case = {"table": "Memory of a training step, causal", "batch, tokens": f"{B}, {T}"}
        ratio = "1" if name == PLAIN else f"{peak / max(1, taken[PLAIN]):.2f}"
        yield case | {"who": name, "took": f"{peak / 2**20:.1f} MiB", "ratio": ratio}


def _peak(name: str, options: argparse.Namespace) -> int:
    sizes = (",".join(map(str, size)) for size in options.sizes)
    where = ("--threads", options.threads, "--device", options.device)
    return in_process(__spec__.name, "--memory-of", name, *where, "--sizes", *sizes)


def step_memory(name: str, options: argparse.Namespace) -> int:
    """Peak memory of a peer's training step in bytes, on top of the memory in use before."""
    B, T, d_model, n_heads = max(options.sizes, key=lambda size: size[1])
    layers = peers(d_model, n_heads, True, T)
    x = torch.randn(B, T, d_model, device=options.device)
    layers[name][0].to(x)
    step = _step({name: layers[name]}, x)[name]
    step()  # allocates gradients and workspaces
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    return peak_of(step)


def _time(works: Mapping[str, Work], options: argparse.Namespace) -> Times:
    return timed_for(works, options.seconds, options.clock)


def _arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        device="cpu",
        threads=torch.get_num_threads(),
        seconds=20.0,
        clock="wall",
        json=None,
    )
    parser.add_argument("--sizes", type=numbers, nargs="+", default=SIZES, help="B,T,d_model,heads")
    parser.add_argument("--cached", type=int, nargs="*", default=CACHED)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--read", help="print the tables of such a file without timing anything")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
