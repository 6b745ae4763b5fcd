"""The kernel in Triton beside FlashAttention-2: heads alone, and with statistics.

    python benchmarks/gpu.py --into docs/triton.md

Every number of one table comes from one run, its works interleaved, by the wall clock and with the
GPU waited for. Ratios are medians of ratios of the same round to torch's flash kernel on the same
tensors, which gives the heads alone; with a 95 % interval for that median. The aim is 1.10.

Without a GPU, the script itself can be tried in Triton's interpreter:

    TRITON_INTERPRET=1 python benchmarks/gpu.py --device cpu --sizes 1,1,32,16 --seconds 0
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from _telling import Row, aloud, machine, publish, rows_of
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
    how = _arguments()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rows = aloud(forward(how))
    publish(rows, machine(how), how.into)


def forward(how: argparse.Namespace) -> Iterator[Row]:
    """Heads, and more and more statistics of the same pass."""
    for size in how.sizes:
        for causal in (False, True):
            told = " x ".join(map(str, size))
            case = {"table": how.dtype, "texts, heads, tokens, width": told}
            works = _works(size, causal, how)
            times = interleaved(works, rounds_for(works, how.seconds, least=7), how.clock)
            yield from rows_of(case | {"mask": "causal" if causal else "none"}, times, "flash")


def _works(size: tuple[int, ...], causal: bool, how: argparse.Namespace) -> dict[str, Work]:
    B, H, T, D = size
    like = {"device": how.device, "dtype": DTYPES[how.dtype]}
    q, k, v = (torch.randn(B, T, H, D, **like).transpose(1, 2) for _ in "qkv")
    rule = make_rule(head_dim=D, is_causal=causal).simplify(T, T)
    classes = torch.eye(8)[torch.randint(8, (B, T))].to(how.device)
    keys = _neighbors(B, T).to(how.device)
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
        name: partial(row_statistics, q, k, v, rule, one, backend="triton")
        for name, one in requests.items()
    }


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    # FlashAttention-2 has no float32: there, torch's kernel of little memory stands for it.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _neighbors(B: int, T: int) -> Tensor:
    """The first token, the query's own, the one before and the one after."""
    at = torch.arange(T)
    after = torch.where(at < T - 1, at + 1, -1)
    return torch.stack([torch.zeros_like(at), at, at - 1, after], dim=-1).expand(B, T, 4)


def _arguments() -> argparse.Namespace:
    def size(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=size, nargs="*", default=SIZES, help="B,H,T,D")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each group of works")
    parser.add_argument("--into", help="a page whose tables are replaced by these")
    parser.set_defaults(clock="wall", threads=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
