"""Whether bounds that need no forward pass foresee the logits of the next batch.

    python benchmarks/clip_bounds.py

Trains a model of `examples/entropy_collapse.py` at the rate that is too high, with a clip after
every step, and compares the largest logit of each head with two bounds of it. The one of a batch is
the largest norm of its queries times that of its keys, each scaled like a logit. The one of weights
holds for all batches: behind a layer norm, inputs are no longer than the norm's gain allows.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _report import machine
from torch import Tensor, nn
from torch.nn import functional

from headwise.corpora import PAD
from headwise.lab import MiniGPT
from headwise.monitor import HeadMonitor, QKClip

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from entropy_collapse import TOO_HIGH, batches, settings_of

BAR, STEPS, FIRST, LAST = 100.0, 1000, 400, 800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu", clock="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits, of_batch, of_weights = (
        np.array(rows) for rows in zip(*steps(options.seed), strict=True)
    )
    near, passed = logits > BAR / 2, logits[1:] > 1.2 * BAR
    print(f"{machine(options)}.")
    print("bound of weights over logit:", spread((of_weights / logits)[near]))
    print("bound of the same batch over logit:", spread((of_batch / logits)[near]))
    print(f"{passed.sum()} logits above 1.2 times the bar; bound of the batch before over logit:",
          spread((of_batch[:-1] / logits[1:])[passed]))  # fmt: skip
    share = (of_batch[:-1][near[1:]] > 1.2 * BAR).mean()
    print(f"of all logits above half of the bar, {share:.0%} have such a bound above 1.2 times it")


def steps(seed: int) -> Iterator[tuple[np.ndarray, list[float], list[float]]]:
    """The largest logit of each head in a step, and its bounds by the batch and by the weights."""
    settings = settings_of(seed, TOO_HIGH, STEPS)
    torch.manual_seed(seed)
    grammar = settings.grammar()
    model = MiniGPT(settings.config(len(grammar.vocabulary)))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True)
    padding = grammar.vocabulary.index(PAD)
    normed: list[Tensor] = []
    for block in model.blocks:
        block.norm_1.register_forward_hook(lambda *call: normed.append(call[-1].detach()))
    with HeadMonitor(model, every=1, statistics=["max_logit"]) as monitor:
        clip = QKClip(monitor, BAR)
        for ids in batches(settings, grammar):
            if monitor.steps == LAST:
                return
            optimizer.param_groups[0]["lr"] = settings.learning_rate_at(monitor.steps)
            normed.clear()
            loss = functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], ignore_index=padding)
            bounds = (
                [*zip(*bounds_of(model, normed), strict=True)] if monitor.steps >= FIRST else []
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.step()
            if bounds:
                yield monitor.latest.values["max_logit"].copy(), *bounds
            clip.step()


@torch.no_grad()
def bounds_of(model: MiniGPT, inputs: list[Tensor]) -> Iterator[tuple[float, float]]:
    """The bounds of each head, by the batch and by the weights."""
    for block, x in zip(model.blocks, inputs, strict=True):
        layer, norm = block.attention, block.norm_1
        gain, bias, width = norm.weight.double(), norm.bias.double(), len(norm.weight)
        heads = (p.weight.unflatten(0, (layer.n_heads, -1)) for p in (layer.q_proj, layer.k_proj))
        for q, k in zip(*heads, strict=True):
            scale = len(q) ** -0.5
            longest = [(x @ rows.T).norm(dim=-1).max() for rows in (q, k)]
            both = q.double().T @ k.double()
            # x = gain · z + bias, and the norm of z is at most √width.
            bound = torch.linalg.matrix_norm(gain[:, None] * both * gain, 2) * width
            bound += sum((gain * (m @ bias)).norm() for m in (both, both.T)) * width**0.5
            bound += (bias @ both @ bias).abs()
            yield float(longest[0] * longest[1] * scale), float(bound * scale)


def spread(values: np.ndarray) -> str:
    return f"{values.min():.2f} to {values.max():.2f}, median {np.median(values):.2f}"


if __name__ == "__main__":
    main()
