"""The Triton kernel on a GPU: beside FlashAttention-2, in short calls, and in whole models.

    python -m benchmarks.speed.gpu --into benchmarks/results/triton.md

All numbers of a table come from one run with interleaved variants, by wall clock after the GPU has
finished. Ratios compare with torch's flash kernel on the same tensors, which computes the output
alone; they are medians of ratios of the same round, with a 95 % interval. "torch" is the kernel
that torch itself takes, without a guard for masked NaN; "auto" is what `attend` takes. Whole models
are of random weights, in bfloat16, and their ratios are to the same model unobserved.

Without a GPU, the script can be tried in Triton's interpreter:

    TRITON_INTERPRET=1 python -m benchmarks.speed.gpu --device cpu --sizes 1,1,32,16 --seconds 0
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from benchmarks._report import Row, machine, numbers, parser_of, print_rows, publish, rows_of
from benchmarks._timing import Work, interleaved, rounds_for
from headwise.kernels import (
    AttentionProblem,
    RowReduction,
    RowRequest,
    attend,
    make_rule,
    row_statistics,
)
from headwise.kernels.triton import TRITON

# Texts, heads, tokens, width.
SIZES = (
    (32, 16, 512, 64),
    (8, 16, 2048, 64),
    (1, 16, 16384, 64),
    (8, 32, 2048, 128),
    (1, 32, 16384, 128),
)
# Texts and tokens that whole models read, and small calls.
TEXTS = ((32, 512), (8, 2048), (2, 8192), (1, 2048))  # the last ones wait, several layers together
SMALL = (1, 8, 128, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> None:
    options = _arguments()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    rows = print_rows(chain(forward(options), small(options), models(options)))
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
    real = torch.ones(B, T, dtype=torch.bool, device=q.device)
    requests = {
        "with lse, entropy, maxima": RowRequest(heads=True),
        "and argmax": RowRequest(heads=True, argmax=True),
        "and 8 classes": RowRequest(heads=True, argmax=True, classes=classes),
        "a watch": RowRequest(heads=True, distance=True, keys=keys),
        "a watch, no heads": RowRequest(distance=True, keys=keys),
        "what keys receive": RowRequest(received=real),
    }
    names = "entropy", "max_weight", "distance", "max_logit", "lse"
    numbers = {name: [n] for n, name in enumerate(names)} | {"key_mass": [5, 6, 7, 8]}
    reduction = RowReduction(numbers, 9, real, None, B, False)
    problem = AttentionProblem(q, k, v[..., :0], rule)
    works: dict[str, Work] = {
        "flash": partial(_flash, q, k, v, causal),
        "torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal),
        "heads alone": partial(attend, q, k, v, causal=causal, backend="triton"),
        "auto": partial(attend, q, k, v, causal=causal),
        "a watch, added up": partial(
            TRITON.row_sums, problem, requests["a watch, no heads"], reduction
        ),
    }
    return works | {
        name: partial(row_statistics, q, k, v, rule, request, backend="triton")
        for name, request in requests.items()
    }


def small(options: argparse.Namespace) -> Iterator[Row]:
    """What calls take from Python, where the GPU has next to nothing to do."""
    B, H, T, D = SMALL
    kind = {"device": options.device, "dtype": DTYPES[options.dtype]}
    q, k, v = (torch.randn(B, H, T, D, **kind) for _ in "qkv")
    rule = make_rule(head_dim=D, is_causal=True).simplify(T, T)
    request = RowRequest(heads=True, distance=True, keys=_neighbors(B, T).to(options.device))
    calls: dict[str, Work] = {
        "torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
        "heads alone": partial(attend, q, k, v, causal=True, backend="triton"),
        "fused, guarded": partial(attend, q, k, v, causal=True, backend="fused"),
        "a watch": partial(row_statistics, q, k, v, rule, request, backend="triton"),
        "a watch by rows": partial(row_statistics, q, k, v, rule, request, backend="rows"),
    }
    works = {name: partial(_hundred_times, call) for name, call in calls.items()}
    times = interleaved(works, rounds_for(works, options.seconds / 2, least=5), options.clock)
    case = {"table": "100 short calls", "texts, heads, tokens, width": " x ".join(map(str, SMALL))}
    yield from rows_of(case, times, "torch")


def _hundred_times(call: Work) -> None:
    for _ in range(100):
        call()


def models(options: argparse.Namespace) -> Iterator[Row]:
    """A Llama-type model of 8 layers, unobserved, observed, and on headwise's kernels."""
    hw.register_attention()
    model, ours = (_llama(options, name) for name in ("sdpa", "headwise"))
    ours.load_state_dict(model.state_dict())
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "observed": partial(hw.observe, model),
        "on headwise, observed": partial(hw.observe, ours),
        "observed, without Triton": partial(_without_triton, model),
    }
    for n, (texts, tokens) in enumerate(options.texts):
        ids = torch.randint(5, 1000, (texts, tokens), device=options.device)
        read, read_ours = (
            partial(m, input_ids=ids, logits_to_keep=1, use_cache=False) for m in (model, ours)
        )
        works: dict[str, Work] = {
            "unobserved": read, "observed": read, "on headwise": read_ours,
            "on headwise, observed": read_ours,
        }  # fmt: skip
        if n == 0:  # it takes seconds
            works["observed, without Triton"] = read
        times = interleaved(works, options.rounds, options.clock, ways)
        case = {"table": "Whole models", "texts x tokens": f"{texts} x {tokens:,}"}
        yield from rows_of(case, times, "unobserved")


@contextmanager
def _without_triton(model: nn.Module) -> Iterator[None]:
    os.environ["HEADWISE_TRITON"] = "0"
    try:
        with hw.observe(model):
            yield
    finally:
        del os.environ["HEADWISE_TRITON"]


def _llama(options: argparse.Namespace, implementation: str) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=2816, vocab_size=1000, max_position_embeddings=20000,
        attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    return model.to(options.device, DTYPES[options.dtype])


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
    parser = parser_of(__doc__, rounds=9, device="cuda", seconds=10.0)
    parser.add_argument("--sizes", type=numbers, nargs="*", default=SIZES, help="B,H,T,D")
    parser.add_argument("--texts", type=numbers, nargs="*", default=TEXTS, help="texts,tokens")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.set_defaults(clock="wall", threads=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
