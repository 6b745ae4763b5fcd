"""Watch a training loop, or decoding, for many minutes: memory stays flat and totals stay right.

Run as `python tests/soak/steady.py training|decoding MINUTES RESULTS.json`. The totals of one long
watch are compared with a second accumulation: in training, the sum of what a `HeadMonitor` reports
of each step; in decoding, the sum of the tables of many short watches of a copy of the model.
"""

import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.tables import HeadTable

TEXTS, TOKENS = 4, 24
STATISTICS = ("entropy", "max_logit", "first")
# The allocator and caches settle in the first part of a run.
WARM_UP = 0.1


class Clock:
    """Says when the time is over, and notes the memory of the process at every hundredth of it."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds
        self.samples: list[tuple[float, float]] = []

    def runs(self) -> bool:
        passed = time.monotonic() - self._start
        if passed >= len(self.samples) * self._seconds / 100:
            gc.collect()
            self.samples.append((passed, _memory()))
        return passed < self._seconds

    def memory(self) -> dict[str, float]:
        """Megabytes after the warm-up, at the end, and the most in between."""
        used = [megabytes for _, megabytes in self.samples[int(WARM_UP * len(self.samples)) :]]
        return {"megabytes_first": used[0], "megabytes_last": used[-1], "megabytes_most": max(used)}


def watch_training(clock: Clock) -> dict[str, Any]:
    """Train a Mini-GPT inside one watch, and monitor every step of the same training."""
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(50, TOKENS, 24, 4, 2, n_layers=2, mlp_ratio=2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(1)
    steps, sums, highest = 0, dict.fromkeys(STATISTICS, 0.0), -np.inf
    with (
        hw.observe(model, hw.Request(statistics=STATISTICS)) as watch,
        hw.HeadMonitor(model, every=1, statistics=STATISTICS) as monitor,
    ):
        while clock.runs():
            ids = torch.randint(0, 50, (TEXTS, TOKENS), generator=rng)
            logits = model(ids)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step()
            steps += 1
            assert monitor.latest is not None
            values = monitor.latest.values
            sums = {name: sums[name] + values[name] for name in STATISTICS}
            highest = np.fmax(highest, values["max_logit"])
        table = watch.table()
    # The first query sees a single key, so its entropy and mass are known beforehand.
    n_rows = {"entropy": TOKENS - 1, "first": TOKENS - 1, "max_logit": TOKENS}
    expected = {name: [steps * TEXTS * n] for name, n in n_rows.items()}
    means = {name: sums[name] / steps for name in ("entropy", "first")}
    return {
        "passes": steps,
        "counts_equal": all(np.unique(table.count(n)).tolist() == expected[n] for n in expected),
        "difference": max(_difference(table.mean(name), means[name]) for name in means),
        "maximum_equal": bool((table.totals["max_logit"].maximum == highest).all()),
    }


def watch_decoding(clock: Clock) -> dict[str, Any]:
    """Generate inside one watch; generate the same with a copy, in a watch of each text."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    twin = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(1)
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    passes, total = 0, None
    with hw.observe(model, hw.Request(statistics=STATISTICS)) as watch:
        while clock.runs():
            ids = torch.randint(1, 50, (TEXTS, 5), generator=rng)
            mask = torch.ones_like(ids)
            tokens = model.generate(ids, attention_mask=mask, **options)
            with hw.observe(twin, hw.Request(statistics=STATISTICS)) as short:
                again = twin.generate(ids, attention_mask=mask, **options)
            assert torch.equal(tokens, again)
            table: HeadTable = short.table()
            total = table if total is None else total + table
            passes += options["max_new_tokens"]
        table = watch.table()
    assert total is not None
    counts = [np.array_equal(table.count(name), total.count(name)) for name in STATISTICS]
    maxima = table.totals["max_logit"].maximum, total.totals["max_logit"].maximum
    return {
        "passes": passes,
        "counts_equal": all(counts),
        "difference": max(_difference(table.mean(n), total.mean(n)) for n in STATISTICS),
        "maximum_equal": bool(np.array_equal(*maxima)),
    }


WORK: dict[str, Callable[[Clock], dict[str, Any]]] = {
    "training": watch_training,
    "decoding": watch_decoding,
}


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first / second - 1).max())


def _memory() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main(work: str, minutes: float, results: Path) -> None:
    torch.set_num_threads(1)
    clock = Clock(60 * minutes)
    outcome = WORK[work](clock)
    outcome = {"minutes": minutes} | outcome | clock.memory() | {"samples": clock.samples}
    results.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
