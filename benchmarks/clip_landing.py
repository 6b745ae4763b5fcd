"""Whether a clip that scales heads to below its bar keeps collapsing runs nearer to it.

    python benchmarks/clip_landing.py --seeds 1

Trains the models of `examples/entropy_collapse.py` at the rate that is too high, with a clip after
every step. A head whose logits passed the bar is scaled to a share of it: 1 is what QK-clip does.
"""

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from _report import machine, table

from headwise.monitor import QKClip

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from entropy_collapse import TOO_HIGH, settings_of, train

BAR, STEPS, EVERY = 100.0, 1000, 10
TITLES = ("seed", "scaled to", "largest logit", "steps above 1.2 x the bar", "steps with a clip")
TITLES += ("lowest validation loss", "last")


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    rows = []
    for seed in options.seeds:
        for share in options.shares:
            rows.append(row_of(seed, share))
            print(*rows[-1], flush=True)
    print(f"{machine(options)}.\n\n{table(TITLES, rows)}")


def row_of(seed: int, share: float) -> list[str]:
    """A run whose clips scale to a share of the bar."""
    least = QKClip._margin

    def margin(clip: QKClip, rows: object) -> float:
        return max(1 - share, least(clip, rows))

    with patch.object(QKClip, "_margin", margin):
        run = train(settings_of(seed, TOO_HIGH, STEPS), EVERY, watch_every=1, bar=BAR)
    losses = [f"{run.validation.lowest:.2f}", f"{run.last:.2f}"]
    counts = [str(run.above), str(run.clipped_steps)]
    return [str(seed), f"{share:g}", f"{run.highest:.0f}", *counts, *losses]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.7, 0.5])
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu", clock="wall")
    return parser.parse_args()


if __name__ == "__main__":
    main()
