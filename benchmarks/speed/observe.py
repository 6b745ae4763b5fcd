"""The cost of observing: the kernel, whole models, eager attention, memory.

    python -m benchmarks.speed.observe --threads 1 --into benchmarks/results/observing.md

All numbers of a table come from one run with interleaved variants. Ratios are medians of ratios of
the same round, with a 95 % interval. `--long` adds texts of 64k tokens.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._report import (
    Row,
    in_process,
    machine,
    parser_of,
    peak_of,
    print_rows,
    publish,
    rows_of,
)
from benchmarks._timing import Work, interleaved, rounds_for, timed_for
from headwise._native_library import library
from headwise.kernels import RowRequest, make_rule, row_statistics
from headwise.watch import observe

KERNEL = (128, 512, 1024, 4096)
# Layers, heads, width, texts and tokens of whole models.
MODELS = {
    "encoder, 6 layers of 384, 8 x 128": ("Bert", 6, 384, 8, 128),
    "encoder, 6 layers of 384, 2 x 512": ("Bert", 6, 384, 2, 512),
    "decoder, 1 layer of 768, 1 x 2048": ("GPT2", 1, 768, 1, 2048),
}
LENGTHS = (4096, 16384)
EVERY = 4


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    if options.memory_of:
        print(memory_of(*options.memory_of))
        return
    rows = print_rows(chain(kernel(options), models(options), memory(options)))
    publish(rows, machine(options), options.into, file=options.json)


def kernel(options: argparse.Namespace) -> Iterator[Row]:
    """Output and statistics in one pass, compared with torch's kernel: the output alone."""
    for T in options.kernel:
        B = 8 if T <= 128 else 1
        q, k, v = (torch.randn(B, T, 12, 64).transpose(1, 2) for _ in "qkv")
        first = torch.zeros(B, T, 1, dtype=torch.int64)
        classes = (torch.rand(B, T, 8) < 0.1).float()
        requests = {
            "default": RowRequest(heads=True),
            "with top": RowRequest(heads=True, keys=first, top=True),
            "with 8 classes": RowRequest(heads=True, classes=classes),
        }
        for causal in (False, True):
            rule = make_rule(head_dim=64, is_causal=causal)
            works: dict[str, Work] = {
                "torch": partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
            }
            for backend, (name, request) in product(_backends(), requests.items()):
                described = partial(row_statistics, q, k, v, rule, request, backend=backend)
                works[f"{backend}, {name}"] = described
            works["weights written out"] = partial(_attend_written_out, q, k, v, causal)
            times = timed_for(works, options.seconds, options.clock)
            what = f"{B} x {T}, {'causal' if causal else 'full'}"
            case = {"table": "Kernel, 12 heads of 64", "texts": what}
            yield from rows_of(case, times, "torch")


def _backends() -> tuple[str, ...]:
    return ("rows", "native") if library() else ("rows",)


def models(options: argparse.Namespace) -> Iterator[Row]:
    """Whole models: unobserved, observed in several ways, and with eager attention."""
    for name in options.models:
        kind, layers, width, B, T = MODELS[name]
        model = _model(kind, layers, width, T)
        written = _model(kind, layers, width, T, written=True)
        written.load_state_dict(model.state_dict())
        batch = torch.randint(0, 1000, (B, T))
        watch = partial(observe, model)
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "observed": watch,
            "observed, exact=False": partial(watch, exact=False),
            "observed, one layer": partial(watch, layers=[layers - 1]),
        }
        works: dict[str, Work] = {"unobserved": partial(model, batch)}
        works |= {way: partial(model, batch) for way in ways}
        works["observed, the first pass alone"] = partial(_first, watch, model, batch)
        works["weights written out"] = partial(_written_out, written, batch)
        rounds = rounds_for(works, options.seconds)
        times = interleaved(works, rounds, options.clock, ways, is_warm=True)
        yield from rows_of({"table": "Whole models", "model": name}, times, "unobserved")
        if name == options.models[0]:  # the effect of every= does not depend on the model
            yield from _every(options, name, model, batch)


def _every(
    options: argparse.Namespace, name: str, model: nn.Module, batch: Tensor
) -> Iterator[Row]:
    def passes() -> None:
        for _ in range(EVERY):
            model(batch)

    title = f"observed, every={EVERY}"
    works: dict[str, Work] = {f"{EVERY} passes unobserved": passes, title: passes}
    ways = {title: partial(observe, model, every=EVERY)}
    rounds = rounds_for(works, options.seconds / 2)
    times = interleaved(works, rounds, options.clock, ways, is_warm=True)
    case = {"table": f"Whole models, {EVERY} passes", "model": name}
    yield from rows_of(case, times, f"{EVERY} passes unobserved")


def _first(watch: Callable[..., Any], model: nn.Module, batch: Tensor) -> None:
    with watch():
        model(batch)


def _model(kind: str, layers: int, width: int, T: int, written: bool = False) -> nn.Module:
    import transformers

    if kind == "Bert":
        config = transformers.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=12,
            intermediate_size=4 * width, max_position_embeddings=T,
        )  # fmt: skip
        make = transformers.BertModel
    else:
        config = transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=12, n_positions=T, vocab_size=1000
        )
        make = transformers.GPT2Model
    config.use_cache = False
    config._attn_implementation = "eager" if written else "sdpa"
    return make(config).eval()


def _attend_written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Textbook attention and the default statistics: three arrays of queries x keys."""
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        logits += torch.full(logits.shape[-2:], -torch.inf).triu(1)
    weights = logits.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    return weights @ v, logits.logsumexp(-1), logits.amax(-1), entropy


def _written_out(model: nn.Module, batch: Tensor) -> list[Mapping[str, Tensor]]:
    """Without headwise: keep all weights, then compute the same statistics from them."""
    maps = model(batch, output_attentions=True).attentions
    positions = torch.arange(batch.shape[1])
    distances = (positions[:, None] - positions).abs().float()
    return [
        {
            "entropy": torch.special.entr(weights).sum(-1).mean((0, 2)),
            "max_weight": weights.amax(-1).mean((0, 2)),
            "first": weights[..., 0].mean((0, 2)),
            "self": weights.diagonal(0, 2, 3).mean((0, 2)),
            "previous": weights.diagonal(-1, 2, 3).mean((0, 2)),
            "next": weights.diagonal(1, 2, 3).mean((0, 2)),
            "distance": (weights * distances).sum(-1).mean((0, 2)),
        }
        for weights in maps
    ]


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Peak memory of observing on top of the unobserved model, each in its own process."""
    for T in (*LENGTHS, 65536) if options.long else LENGTHS:
        plain = _peak("unobserved", T, options)
        observed = max(0, _peak("observed", T, options) - plain)
        # The weights, and at least one temporary of the same size.
        needed, available = 2 * 4 * 12 * T * T, _available_memory()
        case = {"table": "Memory on top of the unobserved model, a layer of 12 x 64", "tokens": T}
        yield case | {"who": "observed", "took": f"{observed / 2**20:.1f} MiB", "ratio": "1"}
        if needed > available:
            ratio = f"needs {needed / 2**30:.0f} GiB, {available / 2**30:.0f} are there"
        else:
            written = max(0, _peak("written out", T, options) - plain)
            ratio = f"{written / max(1, observed):.0f} times that"
        yield case | {"who": "weights written out", "ratio": ratio}


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable"))
    return 1024 * int(line.split()[1])


def _peak(who: str, T: int, options: argparse.Namespace) -> int:
    return in_process(__spec__.name, "--memory-of", who, T, "--threads", options.threads)


def memory_of(who: str, tokens: str) -> int:
    """Peak memory of a pass of one layer in bytes, on top of the memory in use before."""
    T = int(tokens)
    model = _model("GPT2", 1, 768, T, written=who == "written out")
    work: Mapping[str, Work] = {
        "unobserved": lambda: model(batch),
        "observed": lambda: _first(partial(observe, model), model, batch),
        "written out": lambda: _written_out(model, batch),
    }
    batch = torch.randint(0, 1000, (1, 64))
    work[who]()  # imports and one-time setup
    batch = torch.randint(0, 1000, (1, T))
    return peak_of(work[who])


def _arguments() -> argparse.Namespace:
    parser = parser_of(
        __doc__, threads=torch.get_num_threads(), seconds=15.0, clock="wall", json=None
    )
    parser.add_argument("--kernel", type=int, nargs="*", default=KERNEL, help="lengths of texts")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--long", action="store_true", help="add 64k tokens, which takes minutes more"
    )
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
