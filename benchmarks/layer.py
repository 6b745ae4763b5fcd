"""The layer beside those that people use: times, decoding and memory, as Markdown and JSON.

    python benchmarks/layer.py --threads 1 --json layer.json
    python benchmarks/layer.py --read layer.json --into docs/speed.md

Every number of one table comes from one run, its works interleaved. Ratios are medians of ratios
of the same round, with a 95 % interval for that median; the best peer of a line is that of the
least median. `x-transformers` takes part where it is installed (`pip install x-transformers`).
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

import torch
import torch.nn.functional as F
from _peers import Peer, peers
from _telling import Row, aloud, best_of, machine, peak_of, publish, rows_of
from _timing import Times, Work, interleaved, rounds_for

from headwise.kernels import attend

warnings.filterwarnings("ignore", category=DeprecationWarning)  # of a peer, at its import

SIZES = ((8, 128, 768, 12), (1, 2048, 768, 12), (1, 512, 768, 12))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHED = (4096, 16384)
OURS, PLAIN = "headwise", "plain fused layer"


def main() -> None:
    how = _arguments()
    torch.set_num_threads(how.threads)
    if how.memory_of:
        print(json.dumps(step_memory(how.memory_of, how)))
        return
    if how.read:
        told = json.loads(Path(how.read).read_text())
        rows, where = told["rows"], told["machine"]
    else:
        rows, where = aloud(chain(layers(how), decoding(how), memory(how))), machine(how)
    publish(sorted(rows, key=itemgetter("table")), where, how.into, file=how.json)


def layers(how: argparse.Namespace) -> Iterator[Row]:
    """Forward, and forward and backward, of every peer at every size."""
    for B, T, d_model, n_heads in how.sizes:
        for causal in (False, True):
            for dtype in how.dtypes:
                found = peers(d_model, n_heads, causal, T)
                x = torch.randn(B, T, d_model, device=how.device, dtype=DTYPES[dtype])
                for module, _ in found.values():
                    module.to(x)
                rule = "causal" if causal else "every key visible"
                for step, works in (("Forward", _forward(found, x)), ("Training", _step(found, x))):
                    case = {"table": f"{step}, {rule}", "batch, tokens": f"{B}, {T}"}
                    case |= {"dtype": dtype}
                    times = _time(works, how)
                    yield from rows_of(case, times, PLAIN)
                    yield best_of(case, times, OURS)


def _forward(found: Mapping[str, Peer], x: torch.Tensor) -> dict[str, Work]:
    def run(peer: Peer) -> None:
        peer[0].eval()
        with torch.inference_mode():
            peer[1](x)

    return {name: partial(run, peer) for name, peer in found.items()}


def _step(found: Mapping[str, Peer], x: torch.Tensor) -> dict[str, Work]:
    def run(peer: Peer) -> None:
        peer[0].train()
        peer[0].zero_grad()
        peer[1](x.detach().requires_grad_()).sum().backward()

    return {name: partial(run, peer) for name, peer in found.items()}


def decoding(how: argparse.Namespace) -> Iterator[Row]:
    """One query of 32 heads on the cached keys and values of 8, and a mere reading of those."""
    for S in how.cached:
        for dtype in how.dtypes:
            kind = {"dtype": DTYPES[dtype], "device": how.device}
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
                times = _time(works, how)
            case = {"table": "Decoding", "cached": f"{S}", "dtype": dtype}
            yield from rows_of(case, times, "torch, enable_gqa")


def memory(how: argparse.Namespace) -> Iterator[Row]:
    """What a training step holds at its peak, each peer in a process of its own."""
    B, T, d_model, n_heads = max(how.sizes, key=lambda size: size[1])
    names = list(peers(d_model, n_heads, True, T))
    taken = {name: _in_process(name, how) for name in names}
    for name, peak in taken.items():
        case = {"table": "Memory of a training step, causal", "batch, tokens": f"{B}, {T}"}
        ratio = "1" if name == PLAIN else f"{peak / max(1, taken[PLAIN]):.2f}"
        yield case | {"who": name, "took": f"{peak / 2**20:.1f} MiB", "ratio": ratio}


def _in_process(name: str, how: argparse.Namespace) -> int:
    command = [sys.executable, "-W", "ignore", __file__, "--memory-of", name]
    command += ["--threads", str(how.threads), "--device", how.device]
    command += ["--sizes", *(",".join(map(str, size)) for size in how.sizes)]
    # Memory that is freed goes back at once, so that the peak is that of what is held.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def step_memory(name: str, how: argparse.Namespace) -> int:
    """Bytes that a training step of a peer takes on top of what was there before."""
    B, T, d_model, n_heads = max(how.sizes, key=lambda size: size[1])
    found = peers(d_model, n_heads, True, T)
    x = torch.randn(B, T, d_model, device=how.device)
    found[name][0].to(x)
    step = _step({name: found[name]}, x)[name]
    step()  # gradients and workspaces are there from now on
    if how.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    return peak_of(step)


def _time(works: Mapping[str, Work], how: argparse.Namespace) -> Times:
    return interleaved(works, rounds_for(works, how.seconds), how.clock)


def _arguments() -> argparse.Namespace:
    def size(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES, help="B,T,d_model,heads")
    parser.add_argument("--cached", type=int, nargs="*", default=CACHED)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=20.0, help="for each table")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", help="where to write the rows too")
    parser.add_argument("--read", help="print the tables of such a file; nothing is timed")
    parser.add_argument("--into", help="a page whose tables are replaced by these")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
