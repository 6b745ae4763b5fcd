"""The cost of QK-clip: training steps alone, with a monitor, and with the monitor and a clip.

    python -m benchmarks.speed.clip --threads 1

All variants train copies of one model, interleaved. Ratios are medians of ratios of the same
round, with a 95 % interval. "No head over the bar" is the usual step; "all heads" scales the
weights of every head at each step, the most that a clip can cost.

Models can be measured one at a time, with --models and --json, and written to a page together:

    python -m benchmarks.speed.clip --read small.json large.json --into benchmarks/results/clip.md
"""

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from benchmarks._report import Row, machine, parser_of, print_rows, publish, rows_of
from benchmarks._timing import Work, timed_for
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.monitor import HeadMonitor, QKClip

# Layers, heads, width, texts and tokens.
MODELS = {
    "decoder, 4 layers of 256, 8 x 128": (4, 4, 256, 8, 128),
    "decoder, 4 layers of 512, 1 x 512": (4, 8, 512, 1, 512),
}
NEVER, ALWAYS = 1e9, 1e-9
ALONE = "unwatched"


class Training:
    """A model with its optimizer, a monitor of every n-th step and a clip, each if it is named."""

    def __init__(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        every: int | None = None,
        bar: float | None = None,
    ) -> None:
        self._model, self._ids, self._open = copy.deepcopy(model), ids, ExitStack()
        # At a rate of 0 the work of every step is the same.
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0)
        self._monitor = self._clip = None
        if every is not None:
            watched = HeadMonitor(self._model, every, statistics=["max_logit"])
            self._monitor = self._open.enter_context(watched)
        if bar is not None:
            self._clip = QKClip(self._monitor, bar)

    def step(self) -> None:
        self._optimizer.zero_grad()
        logits = self._model(self._ids)
        nn.functional.cross_entropy(logits[:, :-1].mT, self._ids[:, 1:]).backward()
        self._optimizer.step()
        if self._monitor is not None:
            self._monitor.step()
        if self._clip is not None:
            self._clip.step()

    def close(self) -> None:
        self._open.close()


def steps(options: argparse.Namespace) -> Iterator[Row]:
    for name in options.models:
        n_layers, n_heads, width, B, T = MODELS[name]
        torch.manual_seed(0)
        config = MiniGPTConfig(1000, T, width, n_heads, n_layers=n_layers, mlp_ratio=4)
        model, ids = MiniGPT(config), torch.randint(0, 1000, (B, T))
        trainings = {
            ALONE: Training(model, ids),
            "monitor, every step": Training(model, ids, 1),
            "clip, no head over the bar": Training(model, ids, 1, NEVER),
            "clip, all heads": Training(model, ids, 1, ALWAYS),
            "clip, every 10th step": Training(model, ids, 10, NEVER),
        }
        works: dict[str, Work] = {who: training.step for who, training in trainings.items()}
        times = timed_for(works, options.seconds, options.clock)
        case = {"table": "A training step", "model": name}
        yield from rows_of(case, times, ALONE)
        ratio = times.ratio("clip, no head over the bar", "monitor, every step")
        took = f"{times.median('monitor, every step'):.2f} ms"
        rounds = len(times.seconds[ALONE])
        yield case | {"who": "clip / monitor", "took": took, "ratio": str(ratio), "rounds": rounds}
        for training in trainings.values():
            training.close()


def main() -> None:
    parser = parser_of(__doc__, threads=1, seconds=60.0, clock="wall", json=None)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--read", nargs="+", help="files of rows, in place of measuring")
    options = parser.parse_args()
    options.device = "cpu"
    torch.set_num_threads(options.threads)
    if options.read:
        files = [json.loads(Path(path).read_text("utf-8")) for path in options.read]
        rows = [row for file in files for row in file["rows"]]
        where = "; ".join(dict.fromkeys(file["machine"] for file in files))
    else:
        rows, where = print_rows(steps(options)), machine(options)
    publish(rows, where, options.into, file=options.json)


if __name__ == "__main__":
    main()
