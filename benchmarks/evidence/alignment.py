"""Alignment by cross-attention on models trained on the spot, and what `hw.align` costs.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.alignment \\
        --into benchmarks/results/head-files.md

A tiny Whisper on words of synthetic tones and a tiny T5 that transliterates, both with known
borders (`_tones.py`). Errors are mean distances in source positions of both borders of a word, on
held-out examples; a set that is not found is reported as such, beside the errors of every head
alone. Costs are those of a Whisper of the size of `base` with untrained weights: `hw.align` under
the fused kernel against a pass of eager attention that returns all weights, with the same
alignment.
"""

import argparse
import copy
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import headwise as hw
from benchmarks._report import Row, machine, parser_of, print_rows, show, table
from benchmarks._timing import interleaved, rounds_for
from benchmarks.evidence._tones import (
    batches,
    speech,
    speech_model,
    train,
    transliteration,
    transliteration_model,
)
from headwise.roles import AlignmentHeads
from headwise.roles._align import aligned

TASKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tone words, Whisper": (speech_model, speech),
    "transliteration, T5": (transliteration_model, transliteration),
}
TITLES = ("task", "seed", "loss", "outcome", "p", "set", "error", "all heads of the last half")
TITLES += ("gain", "straight line", "alone, median (worst) head")
COSTS = ("outputs", "hw.align", "eager weights", "ratio", "rounds")
HEADS = [(4, 1), (5, 0), (5, 3)]


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    errors = _kept(options, "errors", _errors) if options.steps else []
    costs = _kept(options, "costs", _costs) if options.seconds else []
    parts = [
        table(titles, [list(row.values()) for row in rows])
        for titles, rows in ((TITLES, errors), (COSTS, costs))
        if rows
    ]
    text = "\n\n".join([f"{machine(options)}.", *parts])
    show(text, options.into, "alignment")


def _kept(
    options: argparse.Namespace, name: str, measure: Callable[[Any], Iterator[Row]]
) -> list[Row]:
    """The rows of a part, from the folder if they are there."""
    path = options.keep / f"{name}.json" if options.keep else None
    if path and path.exists():
        return json.loads(path.read_text("utf-8"))
    rows = print_rows(measure(options))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows), "utf-8")
    return rows


def _errors(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each task and seed; several are trained at a time, since nothing here is timed."""
    cases = product(TASKS, options.seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context) as pool:
        yield from pool.map(partial(_errors_of, options.steps, options.examples), cases)


def _errors_of(steps: int, examples: int, case: tuple[str, int]) -> Row:
    torch.set_num_threads(1)
    name, seed = case
    make, task = TASKS[name]
    model = make(seed)
    loss = train(model, task, steps)
    found = hw.find_alignment_heads(model, list(batches(task, examples)))
    if found.outcome == "found":
        found.write_to(model)
    return {"task": name, "seed": seed, "loss": f"{loss:.3f}", **_row(found)}


def _row(found: AlignmentHeads) -> Row:
    low, high = found.gain_over_last_half
    alone = found.rows["error"]
    return {
        "outcome": found.outcome,
        "p": f"{found.p_adj:.1g}",
        "set": ", ".join(f"L{head.layer}.H{head.head}" for head in found.heads),
        "error": f"{found.error:.2f} [{found.ci_low:.2f}, {found.ci_high:.2f}]",
        "last half": f"{found.last_half:.2f}",
        "gain": f"[{low:.2f}, {high:.2f}]",
        "straight line": f"{found.straight_line:.2f}",
        "alone": f"{alone.median():.2f} ({alone.max():.2f})",
    }


def _costs(options: argparse.Namespace) -> Iterator[Row]:
    config = transformers.WhisperConfig(
        vocab_size=1000, d_model=512, encoder_layers=6, decoder_layers=6,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048,
        decoder_ffn_dim=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    fused = transformers.WhisperForConditionalGeneration(config).eval()
    slow = copy.deepcopy(config)
    slow._attn_implementation = "eager"
    eager = transformers.WhisperForConditionalGeneration(slow).eval()
    eager.load_state_dict(fused.state_dict())
    features = {"input_features": torch.randn(1, 80, 3000)}
    for length in (32, 128):
        outputs = [torch.randint(3, 1000, (length,)).tolist()]
        works = {
            "align": lambda outputs=outputs: hw.align(fused, features, outputs, heads=HEADS),
            "eager": lambda outputs=outputs: _by_eager_weights(eager, features, outputs),
        }
        known, ours = works["eager"](), works["align"]()[0]
        assert (known.spans == ours.spans).mean() > 0.99
        rounds = rounds_for(works, options.seconds)
        times = interleaved(works, rounds, options.clock, is_warm=True)
        yield {
            "outputs": length, "hw.align": f"{times.median('align'):.0f} ms",
            "eager": f"{times.median('eager'):.0f} ms", "ratio": str(times.ratio("align", "eager")),
            "rounds": rounds,
        }  # fmt: skip


@torch.no_grad()
def _by_eager_weights(model: Any, inputs: dict[str, Any], outputs: list[list[int]]) -> Any:
    shifted = torch.tensor([[1, *outputs[0][:-1]]])
    maps = model(**inputs, decoder_input_ids=shifted, output_attentions=True).cross_attentions
    mean = torch.stack([maps[layer][0, head].double() for layer, head in HEADS]).mean(0)
    return aligned(np.asarray(mean))


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seconds=60.0, clock="cpu")
    parser.add_argument("--steps", type=int, default=1500, help="of training; 0 leaves it out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the weights")
    parser.add_argument("--examples", type=int, default=200, help="half of them held out")
    parser.add_argument("--keep", type=Path, help="a folder for the rows; kept ones are reused")
    return parser.parse_args()


if __name__ == "__main__":
    main()
