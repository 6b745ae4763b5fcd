"""What watching adds to short calls: encoders, also compiled, `generate`, a monitor, and opening.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.short_watch --into benchmarks/results/observing.md

Every ratio is the median of ratios of neighboring runs, in alternating order, on one thread.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from benchmarks._report import Row, machine, parser_of, print_rows, show, table
from benchmarks._timing import CLOCKS, Times, Work
from benchmarks.speed.short_calls import kernel_alone
from headwise.kernels import RowRequest, make_rule
from headwise.kernels.native._problem import problem_of_rows
from headwise.watch import Watch, observe

LAYERS, HEADS, WIDTH = 6, 12, 384
# Texts and tokens of the encoder's batches.
BATCHES = {"1 x 32": (1, 32), "8 x 128": (8, 128), "2 x 512": (2, 512), "1 x 2048": (1, 2048)}
PROMPT, NEW, EVERY = 64, 32, 16
NARROW = 48
ROUNDS = 20  # of the kernel alone
REPEATS = 4  # of one watch, which takes long to open
TITLES = ("", "without", "watched", "more", "of a site: kernel, and above it", "ratio", "rounds")


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = {
        "encoder": encoders,
        "compiled": compiled,
        "narrow": narrow,
        "generate": generation,
        "monitor": monitored,
        "open": opened,
    }
    rows = print_rows(row for name in options.cases for row in cases[name](options))
    text = f"{machine(options)}.\n\n{table(TITLES, [list(row.values()) for row in rows])}"
    show(text, options.into, "short calls")


def encoder(width: int = WIDTH) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * width,
        max_position_embeddings=2048, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def decoder(width: int = 256) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=1024,
        vocab_size=1000, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def encoders(options: argparse.Namespace) -> Iterator[Row]:
    """Passes of an encoder with 12 heads of 32, the table included."""
    model = encoder()
    for name, (B, T) in BATCHES.items():
        batch = torch.randint(0, 1000, (B, T))
        passes = max(1, 320 // (B * T))

        def work(watch: Watch | None, batch: Tensor = batch, passes: int = passes) -> None:
            for _ in range(passes):
                model(batch)
            if watch:
                watch.table()

        times = alternating(work, partial(observe, model), options)
        kernel = kernel_time(B, T, passes, options.clock)
        yield row_of(f"encoder, {name}", times, passes, kernel)


@torch.no_grad()
def compiled(options: argparse.Namespace) -> Iterator[Row]:
    """Passes of compiled encoders, which stay compiled while they are watched."""
    for name, make, (B, T), width, exact in (
        ("encoder, 8 x 128", encoder, (8, 128), WIDTH, True),
        ("encoder, 1 x 2048", encoder, (1, 2048), WIDTH, True),
        ("encoder, 1 x 8, narrow", encoder, (1, 8), NARROW, True),
        ("encoder, 8 x 128, exact=False", encoder, (8, 128), WIDTH, False),
        ("encoder, 1 x 2048, exact=False", encoder, (1, 2048), WIDTH, False),
        ("decoder, 8 x 128, exact=False", decoder, (8, 128), 256, False),
        ("decoder, 1 x 2048, exact=False", decoder, (1, 2048), 256, False),
    ):
        model, batch = make(width), torch.randint(0, 1000, (B, T))
        run, passes = torch.compile(model, fullgraph=True), max(1, 320 // (B * T))
        watching = partial(observe, model, exact=exact)

        def work(
            watch: Watch | None, run: Any = run, batch: Tensor = batch, passes: int = passes
        ) -> None:
            for _ in range(passes):
                run(batch)
            if watch:
                watch.table()

        work(None)
        with watching():
            run(batch), run(batch)
        times = alternating(work, watching, options)
        kernel = kernel_time(B, T, passes, options.clock, width) if make is encoder else None
        yield row_of(f"compiled {name}", times, passes, kernel)


@torch.no_grad()
def narrow(options: argparse.Namespace) -> Iterator[Row]:
    """Passes of an encoder so narrow that its weights stay in the processor's cache."""
    batch = torch.randint(0, 1000, (1, 8))
    model = encoder(NARROW)

    def work(watch: Watch | None) -> None:
        for _ in range(50):
            model(batch)
        if watch:
            watch.table()

    times = alternating(work, partial(observe, model), options)
    yield row_of("narrow encoder, 1 x 8", times, 50, kernel_time(1, 8, 50, options.clock, NARROW))


def kernel_time(B: int, T: int, passes: int, clock: str, width: int = WIDTH) -> float:
    """The milliseconds that the default statistics of one layer take in C, without Python."""
    q, k, v = (torch.randn(B, T, HEADS, width // HEADS).transpose(1, 2) for _ in "qkv")
    rule = make_rule(head_dim=width // HEADS).simplify(T, T)
    query = torch.arange(T)  # its keys: first, self, previous and next
    keys = torch.stack([0 * query, query, query - 1, query + 1], dim=-1).expand(B, T, 4)
    request = RowRequest(distance=True, keys=keys)
    work = kernel_alone(problem_of_rows(q, k, v, rule, request))

    def calls() -> None:
        for _ in range(passes):
            work()

    return 1000 * statistics.median(timed(calls, clock) for _ in range(ROUNDS)) / passes


@torch.no_grad()
def generation(options: argparse.Namespace) -> Iterator[Row]:
    """32 tokens, one after the other, from a decoder with 4 heads of 64."""
    model = decoder()
    prompt = torch.randint(0, 1000, (1, PROMPT))

    def work(watch: Watch | None) -> None:
        model.generate(prompt, max_new_tokens=NEW, do_sample=False)
        if watch:
            watch.table()

    times = alternating(work, partial(observe, model), options)
    yield row_of(f"generate, {NEW} tokens on {PROMPT}", times)


def monitored(options: argparse.Namespace) -> Iterator[Row]:
    """Training steps with a monitor of every 16th."""
    model = encoder().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randint(0, 1000, (8, 32))

    def work(monitor: hw.HeadMonitor | None) -> None:
        for _ in range(EVERY):
            model(batch).last_hidden_state.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor:
                monitor.step()

    times = alternating(work, partial(hw.HeadMonitor, model, every=EVERY), options)
    yield row_of(f"HeadMonitor, every={EVERY}", times, EVERY)


@torch.no_grad()
def opened(options: argparse.Namespace) -> Iterator[Row]:
    """A watch that is opened for one pass, beside a pass of a watch that stays open."""
    model = encoder()
    batch = torch.randint(0, 1000, (1, 32))

    def once() -> None:
        with observe(model) as watch:
            model(batch)
            watch.table()

    def pass_of_steady(watch: Watch) -> None:
        model(batch)
        watch.table()

    once()
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < 5 or time.perf_counter() - started < options.seconds:
        with observe(model) as watch:
            pass_of_steady(watch)
            without = timed(partial(pass_of_steady, watch), options.clock)
        pairs.append((without, timed(once, options.clock)))
    columns = dict(zip(("without", "watched"), map(list, zip(*pairs, strict=True)), strict=True))
    yield row_of("opening, one pass, table, closing", Times(columns))


def alternating(
    work: Callable[[Any], None],
    watching: Callable[[], AbstractContextManager[Any]],
    options: argparse.Namespace,
) -> Times:
    """Times without and with a watch, which has understood the model before."""
    columns: dict[str, list[float]] = {"without": [], "watched": []}
    ways = {"without": nullcontext, "watched": watching}
    rng = random.Random(0)
    started = time.perf_counter()
    while len(columns["without"]) < 5 or time.perf_counter() - started < options.seconds:
        order = list(ways)
        rng.shuffle(order)
        for name in order:
            with ways[name]() as watch:
                work(watch)
                for _ in range(REPEATS):
                    columns[name].append(timed(partial(work, watch), options.clock))
    return Times(columns)


def timed(work: Work, clock: str) -> float:
    started = CLOCKS[clock]()
    work()
    return CLOCKS[clock]() - started


def row_of(case: str, times: Times, passes: int = 1, kernel: float | None = None) -> Row:
    """The medians of a pass, what watching adds to it, and their ratio.

    Args:
        kernel: The milliseconds of the kernel's own work at one of the layers.
    """
    without, watched = (times.median(name) / passes for name in ("without", "watched"))
    more = times.difference("watched", "without").median / passes
    of_site = "" if kernel is None else f"{kernel:.3f} + {more / LAYERS - kernel:.3f} ms"
    return {
        "case": case,
        "without": f"{without:.2f} ms",
        "watched": f"{watched:.2f} ms",
        "more": f"{more:.2f} ms",
        "of site": of_site,
        "ratio": str(times.ratio("watched", "without")),
        "rounds": str(len(times.seconds["without"])),
    }


def _arguments() -> argparse.Namespace:
    cases = ("encoder", "compiled", "narrow", "generate", "monitor", "open")
    parser = parser_of(__doc__, seconds=8.0, clock="wall")
    parser.add_argument("--cases", nargs="*", choices=cases, default=cases)
    return parser.parse_args()


if __name__ == "__main__":
    main()
