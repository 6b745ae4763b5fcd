"""Before and after: what a smaller model loses and gains, on the way that docs/shrink describes.

    python -m benchmarks.evidence.shrink --encoder MODEL --pairs stsb-en-dev.csv \\
        --decoder MODEL --text stories.txt --clock cpu --into benchmarks/results/shrink.md

Heads are scored by half-gate on texts of their own and removed with their mean folded in; the
smaller model is trained towards the full one on further texts, and judged on others. As many random
heads, removed in the same way, stand beside it. The encoder's quality is Spearman's correlation
with the similarity of sentence pairs, the decoder's the loss of the next token; `drift` is
1 − cosine between the embeddings of the two encoders. Time is that of a forward pass, measured in
turn with the full model.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software, table
from benchmarks._timing import CLOCKS
from benchmarks.evidence._pruning_material import Material, material_from_pairs, material_from_text
from headwise.corpora import SentencePair, read_pairs
from headwise.surgery import time_passes
from headwise.tables import random_orders

BATCH, STEPS, DRAWS = 16, 20, 2000
SHARES = {"encoder": (0.15, 0.3), "decoder": (0.25, 0.5)}
RATES = {"encoder": 3e-5, "decoder": 3e-4}
TITLES = ["model", "heads removed", "parameters", "quality", "drift", "time of a pass"]
Version = tuple[str, int, nn.Module]
Quality = Callable[[nn.Module], list[str]]


def embed(model: nn.Module, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The mean over tokens of each text, of length 1."""
    rows = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], padding=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        rows.append(nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(rows)


def quality_of_encoder(model: nn.Module, tokenizer: Any, pairs: list[SentencePair]) -> Quality:
    """Spearman's correlation, its change, and 1 − cosine to the full model's embeddings.

    Correlation and change have 95 % intervals over pairs; the full model's and the smaller one's
    are resampled together, since they share what the pairs have in common.
    """
    texts = [pair.one for pair in pairs] + [pair.two for pair in pairs]
    given = np.array([pair.similarity for pair in pairs])
    draws = np.random.default_rng(0).integers(len(pairs), size=(DRAWS, len(pairs)))
    everything = np.vstack([np.arange(len(pairs)), draws])
    full = embed(model, tokenizer, texts)

    def ranks(vectors: Tensor) -> np.ndarray:
        one, two = vectors.chunk(2)
        cosines = (one * two).sum(-1).numpy()
        return np.array([spearmanr(cosines[draw], given[draw]).statistic for draw in everything])

    of_full = ranks(full)

    def quality(small: nn.Module) -> list[str]:
        vectors = embed(small.eval(), tokenizer, texts)
        of_small = ranks(vectors)
        drift = 1 - (vectors * full).sum(-1).mean()
        change = "" if small is model else f", {with_interval(of_small - of_full, '+.3f')}"
        return [f"Spearman {with_interval(of_small, '.2f')}{change}", f"{float(drift):.4f}"]

    return quality


def with_interval(values: np.ndarray, form: str) -> str:
    """The first value, and the central 95 % of the others."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return f"{values[0]:{form}} [{low:{form}}, {high:{form}}]"


def quality_of_decoder(batches: list[Any]) -> Quality:
    """The mean loss of the next token, in nats."""

    def quality(small: nn.Module) -> list[str]:
        total, count = 0.0, 0
        for batch in batches:
            with torch.no_grad():
                logits = small.eval()(**batch).logits[:, :-1]
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:].bool()
            losses = nn.functional.cross_entropy(
                logits[mask], batch["input_ids"][:, 1:][mask], reduction="sum"
            )
            total, count = total + float(losses), count + int(mask.sum())
        return [f"{total / count:.3f} nats", ""]

    return quality


def shuffled(scores: hw.Scores) -> hw.Scores:
    """The same scores, given to other heads at random."""
    (order,) = random_orders(scores.heads, 1)
    rank = {head: index for index, head in enumerate(order)}
    return replace(scores, per_text=scores.per_text[:, [rank[head] for head in scores.heads]])


def versions(
    model: nn.Module, material: Material, kind: str
) -> Iterator[tuple[str, int, nn.Module]]:
    """The name, the number of heads removed and the model of each line of the table."""
    scores = hw.importance(model, material.score)
    yield "full", 0, model
    for share in SHARES[kind]:
        plan, random = (hw.plan(of, remove=share) for of in (scores, shuffled(scores)))
        count = len(plan.removed)
        for name, chosen in (("random heads", random), ("least important", plan)):
            yield name, count, hw.prune(model, chosen, fold="mean", reference=material.score)
        small = hw.prune(model, plan, fold="mean", reference=material.score)
        hw.recover(small, model, material.recover_on, steps=STEPS, rate=RATES[kind])
        yield f"least important, {STEPS} steps of recovery", count, small


def rows(
    title: str, found: Iterator[Version], quality: Quality, options: Any
) -> Iterator[list[str]]:
    """A line for each version of a model, with its time next to that of the full one."""
    lines = [(name, count, small.eval()) for name, count, small in found]
    models = [small for _, _, small in lines]
    ids = torch.randint(5, 100, (2, options.tokens))
    times = time_passes(models, {"input_ids": ids}, options.passes, CLOCKS[options.clock])
    for (name, count, small), time in zip(lines, times, strict=True):
        size = sum(weight.numel() for weight in small.parameters())
        share = f"{time.whole / times[0].whole:.2f} of the full"
        if small is models[0]:
            share = f"{1000 * time.whole:.0f} ms"
        yield [f"{title}, {name}", str(count), f"{size:,}", *quality(small), share]


def main() -> None:
    parser = parser_of(__doc__, clock="wall")
    parser.add_argument("--encoder", required=True, help="a sentence encoder")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--decoder", required=True, help="a causal language model")
    parser.add_argument("--text", type=Path, required=True, help="texts between <|endoftext|>")
    parser.add_argument("--texts", type=int, default=64, help="to score heads on")
    parser.add_argument("--own", type=int, default=320, help="generated texts to recover on")
    parser.add_argument("--judging", type=int, default=100, help="pairs to judge on")
    parser.add_argument("--tokens", type=int, default=128, help="of each timed text")
    parser.add_argument("--passes", type=int, default=15)
    options = parser.parse_args()
    cells = [*of_encoder(options), *of_decoder(options)]
    about = (
        f"Spearman's correlation is that of {options.judging} pairs. Medians of {options.passes} "
        f"passes over 2 texts of {options.tokens} tokens, float32, "
        f"{cpu_name()}, {torch.get_num_threads()} threads, {options.clock} clock, "
        f"{software()}."
    )
    text = f"{about}\n\n{table(TITLES, cells, 1)}"
    show(text, options.into)


def of_encoder(options: argparse.Namespace) -> Iterator[list[str]]:
    model, tokenizer = hw.load(options.encoder), hw.load_tokenizer(options.encoder)
    material = material_from_pairs(model, tokenizer, options)
    pairs = read_pairs(options.pairs)
    judged = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[: options.judging]]
    found = versions(model, material, "encoder")
    yield from rows("encoder", found, quality_of_encoder(model, tokenizer, judged), options)


def of_decoder(options: argparse.Namespace) -> Iterator[list[str]]:
    model, tokenizer = hw.load(options.decoder), hw.load_tokenizer(options.decoder)
    material = material_from_text(model, tokenizer, options)
    found = versions(model, material, "decoder")
    yield from rows("decoder", found, quality_of_decoder(material.evaluate), options)


if __name__ == "__main__":
    main()
