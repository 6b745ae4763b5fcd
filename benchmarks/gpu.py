"""The Triton kernel compared with FlashAttention-2: output alone, and with statistics.

    python benchmarks/gpu.py --into docs/triton.md

All numbers of a table come from one run with interleaved variants, by wall clock after the GPU has
finished. Ratios compare with torch's flash kernel on the same tensors, which computes the output
alone; they are medians of ratios of the same round, with a 95 % interval. The target is 1.10.

Without a GPU, the script can be tried in Triton's interpreter:

    TRITON_INTERPRET=1 python benchmarks/gpu.py --device cpu --sizes 1,1,32,16 --seconds 0
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from _report import Row, machine, print_rows, publish, rows_of
from _timing import Work, interleaved, rounds_for
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.kernels import RowRequest, attend, make_rule, row_statistics

# Texts, heads, tokens, width.
SIZES = (
    (32, 16, 512, 64),
    (8, 16, 2048, 64),
    (1, 16, 16384, 64),
    (8, 32, 2048, 128),
    (1, 32, 16384, 128),
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> None:
    options = _arguments()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rows = print_rows(forward(options))
    publish(rows, machine(options), options.into)


def forward(options: argparse.Namespace) -> Iterator[Row]:
    """The output, with more and more statistics from the same pass."""
    for size in options.sizes:
        for causal in (False, True):
            case = {
                "table": options.dtype,
                "texts, heads, tokens, width": " x ".join(map(str, size)),
            }
            works = _works(size, causal, options)
            times = interleaved(works, rounds_for(works, options.seconds, least=7), options.clock)
            yield from rows_of(case | {"mask": "causal" if causal else "none"}, times, "flash")


def _works(size: tuple[int, ...], causal: bool, options: argparse.Namespace) -> dict[str, Work]:
    B, H, T, D = size
    kind = {"device": options.device, "dtype": DTYPES[options.dtype]}
    q, k, v = (torch.randn(B, T, H, D, **kind).transpose(1, 2) for _ in "qkv")
    rule = make_rule(head_dim=D, is_causal=causal).simplify(T, T)
    classes = torch.eye(8)[torch.randint(8, (B, T))].to(options.device)
    keys = _neighbors(B, T).to(options.device)
    requests = {
        "with lse, entropy, maxima": RowRequest(heads=True),
        "and argmax": RowRequest(heads=True, argmax=True),
        "and 8 classes": RowRequest(heads=True, argmax=True, classes=classes),
        "a watch": RowRequest(heads=True, distance=True, keys=keys),
        "a watch, no heads": RowRequest(distance=True, keys=keys),
    }
    works: dict[str, Work] = {
        "flash": partial(_flash, q, k, v, causal),
        "heads alone": partial(attend, q, k, v, causal=causal, backend="triton"),
        "a watch by rows": partial(
            row_statistics, q, k, v, rule, requests["a watch"], backend="rows"
        ),
    }
    return works | {
        name: partial(row_statistics, q, k, v, rule, request, backend="triton")
        for name, request in requests.items()
    }


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    # FlashAttention-2 does not support float32; torch's memory-efficient kernel replaces it there.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _neighbors(B: int, T: int) -> Tensor:
    """The first token, the query's own, the one before and the one after."""
    positions = torch.arange(T)
    after = torch.where(positions < T - 1, positions + 1, -1)
    return torch.stack(
        [torch.zeros_like(positions), positions, positions - 1, after], dim=-1
    ).expand(B, T, 4)


def _arguments() -> argparse.Namespace:
    def size(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=size, nargs="*", default=SIZES, help="B,H,T,D")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per group of variants")
    parser.add_argument("--into", help="a page whose tables are replaced")
    parser.set_defaults(clock="wall", threads=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
