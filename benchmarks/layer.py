"""The layer beside those that people use: times, decoding and memory, as Markdown and JSON.

    python benchmarks/layer.py --threads 1 --json layer.json

Every number of one table comes from one run, its works interleaved. Ratios are medians of ratios
of the same round, with a 95 % interval for that median. `x-transformers` takes part where it is
installed (`pip install x-transformers`).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _peers import Peer, peers
from _timing import Times, Work, interleaved, kernels_of, rounds_for

from headwise.kernels import attend

warnings.filterwarnings("ignore", category=DeprecationWarning)  # of a peer, at its import

SIZES = ((8, 128, 768, 12), (1, 2048, 768, 12), (1, 512, 768, 12))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHED = (4096, 16384)
Row = dict[str, Any]


def main() -> None:
    how = _arguments()
    torch.set_num_threads(how.threads)
    if how.memory_of:
        print(json.dumps(step_memory(how.memory_of, how)))
        return
    if how.read:
        told = json.loads(Path(how.read).read_text())
        rows, machine = told["rows"], told["machine"]
    else:
        rows, machine = [*layers(how), *decoding(how), *memory(how)], _machine(how)
    print(machine)
    for title in dict.fromkeys(row["table"] for row in rows):
        print(f"\n### {title}\n\n{_markdown([row for row in rows if row['table'] == title])}")
    if how.json:
        Path(how.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


def layers(how: argparse.Namespace) -> Iterator[Row]:
    """Forward, and forward and backward, of every peer at every size."""
    for B, T, d_model, n_heads in how.sizes:
        for causal in (False, True):
            for dtype in how.dtypes:
                found = peers(d_model, n_heads, causal, T)
                x = torch.randn(B, T, d_model, device=how.device, dtype=DTYPES[dtype])
                for module, _ in found.values():
                    module.to(x)
                rule = "causal" if causal else "full"
                for step, works in (("forward", _forward(found, x)), ("training", _step(found, x))):
                    times = _time(works, how)
                    yield from _rows(
                        f"{step}, {rule}, {dtype}, {(B, T)}", times, "plain fused layer"
                    )


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
            yield from _rows(f"decoding, {S} cached, {dtype}", times, "torch, enable_gqa")


def memory(how: argparse.Namespace) -> Iterator[Row]:
    """What a training step holds at its peak, each peer in a process of its own."""
    B, T, d_model, n_heads = max(how.sizes, key=lambda size: size[1])
    names = list(peers(d_model, n_heads, True, T))
    taken = {name: _in_process(name, how) for name in names}
    for name, peak in taken.items():
        ratio = peak / max(1, taken["plain fused layer"])
        told = {"MiB": round(peak / 2**20, 1), "ratio": f"{ratio:.2f}"}
        yield {"table": f"peak of a training step, causal, float32, {(B, T)}", "who": name, **told}


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
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = _of_process("VmRSS")
    step()
    return _of_process("VmHWM") - before


def _of_process(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(what))
    return 1024 * int(line.split()[1])


def _time(works: Mapping[str, Work], how: argparse.Namespace) -> Times:
    return interleaved(works, rounds_for(works, how.seconds), how.clock)


def _rows(table: str, times: Times, base: str) -> Iterator[Row]:
    for name, seconds in times.seconds.items():
        ratio = times.ratio(name, base)
        told = {"ms": round(times.median(name), 2), "ratio": str(ratio), "rounds": len(seconds)}
        yield {"table": table, "who": name, **told}


def _markdown(rows: list[Row]) -> str:
    names = [name for name in rows[0] if name != "table"]
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(how: argparse.Namespace) -> str:
    q = torch.randn(1, 4, 256, 64, device=how.device)
    causal = partial(attend, q, q, q, causal=True)
    device = torch.cuda.get_device_name() if how.device == "cuda" else platform.processor()
    return (
        f"torch {torch.__version__}, {how.threads} threads, {device or platform.machine()} "
        f"({torch.backends.cpu.get_cpu_capability()}), {how.clock} clock; "
        f"torch's kernel: {kernels_of(causal)}"
    )


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
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
