"""A hybrid, trained for a few minutes: its roles, its elbow, and its cache.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.hybrid --into benchmarks/results/hybrid.md

Two short convolutions to one layer with attention, as in LFM2, on the lines of the Mini-GPT.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from benchmarks._report import machine, parser_of, show, table, titled
from headwise.corpora import BOS, EOS, PAD, Grammar, annotate
from headwise.lab import make_tokenizer
from headwise.surgery import costs, plan_curves

STEPS, BATCH, RATE, WARMUP = 2000, 32, 2e-3, 100
HEADS = 4


def hybrid(vocabulary: int) -> nn.Module:
    """Six layers: attention and two short convolutions, twice."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=vocabulary, hidden_size=96, intermediate_size=192, num_hidden_layers=6,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, block_auto_adjust_ff_dim=False,
        layer_types=["full_attention", "conv", "conv"] * 2,
    )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def batch_of(tokenizer: Any, grammar: Grammar, seed: list[int], size: int) -> dict[str, Tensor]:
    """Lines as batches, whose padding has no label."""
    rng = np.random.default_rng(seed)
    lines = [f"{grammar.line(rng)} {EOS}" for _ in range(size)]
    batch = tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)
    ids, real = batch["input_ids"], batch["attention_mask"]
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def trained(model: nn.Module, tokenizer: Any, grammar: Grammar) -> float:
    """Train a model, and return the processor's seconds."""
    began, optimizer = time.process_time(), torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=STEPS, pct_start=WARMUP / STEPS
    )
    for step in range(STEPS):
        loss = model.train()(**batch_of(tokenizer, grammar, [0, step], BATCH)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 3), flush=True)
    model.eval()
    return time.process_time() - began


@torch.no_grad()
def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    return float(model(**batch).loss)


def measured(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Tables, each below its title."""
    grammar = Grammar()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(grammar.vocabulary),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="right",
    )
    model = hybrid(len(grammar.vocabulary))
    seconds = trained(model, tokenizer, grammar)
    scoring, held_out = (batch_of(tokenizer, grammar, [seed, 0], 64) for seed in (1, 2))
    before = loss_of(model, held_out)

    rng = np.random.default_rng(3)
    texts = [annotate(grammar.sentence(rng)) for _ in range(256)]
    roles = hw.find_roles(model, texts, tokenizer=tokenizer).frame()
    tested = roles[roles["p_adj"].notna()]
    best = tested.sort_values("effect", ascending=False).drop_duplicates("role")
    rows = [
        [row["role"], row["name"], *(f"{row[x]:.2f}" for x in ("effect", "baseline", "control")),
         f"{row['p_adj']:.3f}"]
        for _, row in best.iterrows()
    ]  # fmt: skip
    names = sorted(roles.loc[roles["found"], "name"].unique())
    yield (
        f"The best head of each role that was tested; heads that pass every bar: {len(names)}",
        table(["role", "head", "score", "null", "planted head", "p"], rows, 2),
    )

    scores = hw.importance(model, [scoring])
    curves = plan_curves(model, [scoring], scores)
    plan = hw.plan(scores, within=0.05, curves=curves, costs=costs(model))
    small = hw.prune(model, plan)
    with torch.no_grad(), hw.ablate(model, plan.removed):
        ablated = model(held_out["input_ids"]).logits
    gap = float((small(held_out["input_ids"]).logits - ablated).abs().max())
    with tempfile.TemporaryDirectory() as folder:
        hw.save(small, Path(folder) / "small")
        loaded = hw.load(Path(folder) / "small")
        with torch.no_grad():
            pair = [each(held_out["input_ids"]).logits for each in (small, loaded)]
    cache = hw.cache_plan(model, [scoring], keep=0.5, sinks=1, window=6)
    n = sum(x.numel() for x in model.parameters())
    yield (
        "What was trained, cut and saved",
        table(
            ["", "value"],
            [
                ["weights", f"{n:,}"],
                ["seconds of training, on one core", f"{seconds:.0f}"],
                ["loss on held-out lines", f"{before:.3f}"],
                ["heads removed at the elbow (within 5 %)", ", ".join(map(str, plan.removed))],
                ["loss without them", f"{loss_of(small, held_out):.3f}"],
                ["weights without them", f"{sum(x.numel() for x in small.parameters()):,}"],
                ["largest difference from the ablated model", f"{gap:.0e}"],
                ["largest difference after opening it", f"{(pair[0] - pair[1]).abs().max():.0e}"],
                ["cache plan", str(cache).partition(" (")[0]],
                ["loss with the full cache", f"{cache.measured['loss of the full cache']:.3f}"],
                ["loss with the plan", f"{cache.measured['loss of this cache']:.3f}"],
            ],
        ),
    )


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    show(f"{machine(options)}.\n\n{titled(measured(options))}", options.into)


if __name__ == "__main__":
    main()
