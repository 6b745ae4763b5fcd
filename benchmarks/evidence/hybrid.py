"""A hybrid, trained for a few minutes: its roles, its elbow, and its cache.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence.hybrid --into benchmarks/results/hybrid.md

Two short convolutions to one layer with attention, as in LFM2, on the lines of the Mini-GPT.
"""

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import headwise as hw
from benchmarks._report import machine, parser_of, show, table, titled
from benchmarks._whole_way import batch_of_lines, whole_way
from headwise.corpora import BOS, EOS, PAD, Grammar, annotate
from headwise.lab import make_tokenizer

# Small batches, so that there are many steps: heads that copy need these.
STEPS, BATCH, RATE, WARMUP = 4000, 16, 3e-3, 50
WIDTH, HEADS = 64, 4


def hybrid(vocabulary: int) -> nn.Module:
    """Six layers: two short convolutions and attention, twice.

    Weights begin as large for their width as those of LFM2 for its own: with its .02, the three
    factors of a gated convolution would be near 0 here, and so would all of their gradients.
    """
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=6,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention"] * 2, initializer_range=WIDTH**-0.5,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.3)  # as in the Mini-GPT
    whole: nn.Module = model
    return whole


def lines_of(grammar: Grammar, seed: list[int], size: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"{grammar.line(rng)} {EOS}" for _ in range(size)]


def share_of_rate(step: int) -> float:
    """A warm-up, then a cosine down to a tenth."""
    return min(1, (step + 1) / WARMUP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))


def trained(model: nn.Module, tokenizer: Any, grammar: Grammar) -> float:
    """Train a model, and return the processor's seconds."""
    began, weights = time.process_time(), [*model.parameters()]
    optimizer = torch.optim.AdamW(weights, RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
    for step in range(STEPS):
        lines = lines_of(grammar, [0, step], BATCH)
        loss = model.train()(**batch_of_lines(tokenizer, lines), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 3), flush=True)
    model.eval()
    return time.process_time() - began


def measured(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Tables, each below its title."""
    grammar = Grammar()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(grammar.vocabulary),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
    )
    model = hybrid(len(grammar.vocabulary))
    seconds = trained(model, tokenizer, grammar)
    scoring, held_out = (
        batch_of_lines(tokenizer, lines_of(grammar, [seed, 0], 64)) for seed in (1, 2)
    )

    rng = np.random.default_rng(3)
    texts = [annotate(grammar.sentence(rng)) for _ in range(256)]
    roles = hw.find_roles(model, texts, tokenizer=tokenizer).frame()
    tested = roles[roles["p_adj"].notna()]
    best = tested.sort_values("effect", ascending=False).drop_duplicates("role")
    numbers = {"score": "effect", "null": "baseline", "lift": "lift", "planted head": "control"}
    found = roles[roles["found"]]
    n = found["name"].nunique()
    rows = [
        [row["role"], row["name"], *(f"{row[x]:.2f}" for x in numbers.values()),
         f"{row['p_adj']:.3f}", str((found["role"] == row["role"]).sum())]
        for _, row in best.iterrows()
    ]  # fmt: skip
    yield (
        f"The best head of each role that was tested; heads that have one: {n} of {2 * HEADS}",
        table(["role", "head", *numbers, "p", "heads that have it"], rows, 2),
    )

    way = [
        ["seconds of training, on one core", f"{seconds:.0f}"],
        *whole_way(model, scoring, held_out),
    ]
    yield "What was trained, cut and saved", table(["", "value"], way)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    show(f"{machine(options)}.\n\n{titled(measured(options))}", options.into)


if __name__ == "__main__":
    main()
