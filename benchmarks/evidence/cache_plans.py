r"""Accuracy and loss against the share of the cache.

    OMP_NUM_THREADS=1 python -m benchmarks.evidence._retrieval --into RETRIEVAL    # 40 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.evidence.cache_plans retrieval --model RETRIEVAL \\
        --into DIR
    OMP_NUM_THREADS=1 python -m benchmarks.evidence.cache_plans perplexity --language FOLDER \
        --text FILE --into DIR
    python -m benchmarks.evidence.cache_plans picture --into DIR    # draws what `retrieval` wrote

Each part prints its figures and writes them as JSON into --into.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import headwise as hw
from benchmarks.evidence._retrieval import accuracy, question_texts
from headwise.caching import CachePlan, LayerCachePlan
from headwise.caching._scores import CacheScores, ScoringTexts, agreement
from headwise.tables import save_figure

SINKS, WINDOW = 4, 64
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
KINDS = ("pairs", "pass")
Plan = Mapping[tuple[int, int], int | None]


class Questions:
    """Held-out texts with one question each, and how a model with a plan answers them."""

    def __init__(self, model: nn.Module, length: int, n: int, seed: int) -> None:
        self._model = model
        self._texts = {kind: question_texts(n, length, seed, kind) for kind in KINDS}

    @torch.no_grad()
    def accuracy(self, plan: CachePlan | None) -> float:
        """The share of questions of both kinds that are answered right in every token."""
        right: list[float] = []
        for texts in self._texts.values():
            for row in range(len(texts)):
                ids, labels = texts.ids[row : row + 1], texts.labels[row : row + 1]
                right.append(accuracy(self._logits(ids, plan), labels))
        return float(np.mean(right))

    def _logits(self, ids: torch.Tensor, plan: CachePlan | None) -> torch.Tensor:
        if plan is None:
            return self._model(input_ids=ids).logits
        with plan.cache(self._model) as cache:
            return self._model(input_ids=ids, cache=cache).logits


def plan_of(choice: Plan, sinks: int = SINKS) -> CachePlan:
    """A plan from the window of each kv head."""
    layers = sorted({layer for layer, _ in choice})
    return CachePlan(
        tuple(
            LayerCachePlan(
                layer, tuple(choice[head] for head in sorted(choice) if head[0] == layer)
            )
            for layer in layers
        ),
        sinks,
    )


def by_order(order: Sequence[tuple[int, int]], share: float, window: int = WINDOW) -> CachePlan:
    """The first heads keep all tokens."""
    n_full = round(share * len(order))
    return plan_of({head: None if i < n_full else window for i, head in enumerate(order)})


def open_retrieval(folder: Path) -> nn.Module:
    """The trained model on our kernels."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def scoring_batches(length: int, n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Texts of both kinds, a batch each; labels are the answers."""
    texts = [question_texts(n, length, seed + i, kind) for i, kind in enumerate(KINDS)]
    rows = [(t, row) for t in texts for row in range(len(t))]
    return [{"input_ids": t.ids[i : i + 1], "labels": t.labels[i : i + 1]} for t, i in rows]


def scores_of(model: nn.Module, texts: Any, tokenizer: Any, window: int) -> CacheScores:
    """What each kv head loses when it streams."""
    return ScoringTexts.read(model, texts, tokenizer, None).score(SINKS, window)


def ordered(scores: CacheScores) -> list[tuple[int, int]]:
    """The kv heads from the one that loses most."""
    return sorted(scores, key=lambda head: -scores[head].mean())


def retrieval(args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy of plans by each score, random plans and uniform windows."""
    model = open_retrieval(args.model)
    questions = Questions(model, args.length, args.questions, seed=100)
    batches = scoring_batches(args.scoring_length, args.texts, seed=500)
    scores = {"half-gate": scores_of(model, batches, None, WINDOW)}
    full = questions.accuracy(None)
    result: dict[str, Any] = {"length": args.length, "full": full, "curves": {}, "random": {}}
    print(f"full cache: {full:.3f}", flush=True)
    orders = {method: ordered(score) for method, score in scores.items()}
    for method, order in orders.items():
        curve = {share: questions.accuracy(by_order(order, share)) for share in SHARES[:-1]}
        result["curves"][method] = curve
        print(method, {k: round(v, 3) for k, v in curve.items()}, flush=True)
    result["full_heads"] = {m: ordered(score)[: len(score) // 2] for m, score in scores.items()}
    result["uniform"] = uniform(questions, [*scores["half-gate"]], args.length)
    result["random"] = random_plans(questions, list(scores["half-gate"]), args.random)
    result["stability"] = {method: agreement(score) for method, score in scores.items()}
    result["kv_heads"] = len([head for head in scores["half-gate"] if head[0] == 0])
    result["losses"] = {
        method: [float(x.mean()) for x in score.values()] for method, score in scores.items()
    }
    return result


def uniform(
    questions: Questions, heads: Sequence[tuple[int, int]], length: int
) -> dict[float, float]:
    """The accuracy when all heads keep the same share of the tokens."""
    curve = {}
    for share in SHARES[1:-1]:
        plan = plan_of(dict.fromkeys(heads, max(1, round(share * length) - SINKS)))
        curve[share] = questions.accuracy(plan)
    print("uniform windows", {k: round(v, 3) for k, v in curve.items()}, flush=True)
    return curve


def random_plans(
    questions: Questions, heads: list[tuple[int, int]], n: int
) -> dict[float, list[float]]:
    """The accuracies of random plans with a quarter, half and three quarters of the heads full."""
    rng, band = np.random.default_rng(0), {}
    for share in (0.25, 0.5, 0.75):
        plans = [by_order([heads[i] for i in rng.permutation(len(heads))], share) for _ in range(n)]
        band[share] = [questions.accuracy(plan) for plan in plans]
        low, high = np.quantile(band[share], [0.05, 0.95])
        print(f"random at {share}: 5 % {low:.3f}, 95 % {high:.3f}", flush=True)
    return band


def paragraphs(path: Path, n: int) -> list[str]:
    """Passages of a text, evenly spaced."""
    text = path.read_text("utf-8")
    step = max(1, len(text) // n)
    return [text[i : i + 250] for i in range(0, len(text) - 250, step)][:n]


def perplexity(args: argparse.Namespace) -> dict[str, Any]:
    """The loss of a language model with plans by each score, random plans, uniform windows."""
    model, tokenizer = hw.load(args.language).eval(), hw.load_tokenizer(args.language)
    texts = paragraphs(args.text, 2 * args.texts)
    chosen, held_out = texts[::2], texts[1::2]
    result: dict[str, Any] = {}
    for window in (16, 32, 64):
        half_gate = scores_of(model, chosen, tokenizer, window)
        scores = {"half-gate": half_gate}
        evaluate = loss_on(model, held_out, tokenizer)
        curves = {
            method: {share: evaluate(by_order(ordered(score), share, window)) for share in SHARES}
            for method, score in scores.items()
        }
        heads, rng = list(scores["half-gate"]), np.random.default_rng(0)
        orders = [[heads[i] for i in rng.permutation(len(heads))] for _ in range(args.random)]
        random = [evaluate(by_order(order, 0.5, window)) for order in orders]
        result[str(window)] = {"curves": curves, "random": random}
        print(window, {m: {k: round(v, 4) for k, v in c.items()} for m, c in curves.items()})
        print("random at 0.5", np.quantile(random, [0.05, 0.5, 0.95]).round(4), flush=True)
    return result


def loss_on(model: nn.Module, texts: list[str], tokenizer: Any) -> Callable[[CachePlan], float]:
    """Measures the mean loss of texts with the cache of a plan."""
    return ScoringTexts.read(model, texts, tokenizer, None).loss_of


def picture(args: argparse.Namespace) -> dict[str, Any]:
    """Draw the losses of kv heads by half-gate and the curves of accuracy, as cache-plans.svg."""
    import matplotlib.pyplot as plt  # the other parts need none

    result = json.loads((args.into / "retrieval.json").read_text("utf-8"))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=(1, 2), layout="constrained"
    )
    losses = np.array(result["losses"]["half-gate"]).reshape(-1, result["kv_heads"])
    image = left.imshow(losses, cmap="Greys")
    for layer, head in result["full_heads"]["half-gate"]:
        left.text(head, layer, "full", ha="center", va="center", color="tab:orange")
    figure.colorbar(image, ax=left, label="loss when it streams, half-gate")
    left.set(xlabel="kv head", ylabel="layer", title="half keep all tokens")
    left.set_yticks(range(len(losses)))
    for name, curve in {**result["curves"], "uniform windows": result["uniform"]}.items():
        right.plot([float(share) for share in curve], list(curve.values()), "o-", label=name)
    for share, values in result["random"].items():
        right.vlines(
            float(share), *np.quantile(values, [0.05, 0.95]), color="grey", lw=6, alpha=0.5
        )
    right.axhline(result["full"], color="black", lw=0.5)
    right.set(xlabel="share of kv heads with all tokens (uniform: of tokens)", ylabel="accuracy",
              title=f"{result['length']:,} tokens; grey: 5 to 95 % of random plans")  # fmt: skip
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save_figure(right, args.into / "cache-plans.svg")
    return {"drawn": sorted(result["curves"])}


PARTS = {"retrieval": retrieval, "perplexity": perplexity, "picture": picture}


def main() -> None:
    """Run one part and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", type=Path, help="the trained retrieval model")
    parser.add_argument("--language", type=Path, help="a folder of a language model")
    parser.add_argument("--text", type=Path, help="a text for the language model")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--scoring-length", type=int, default=1024)
    parser.add_argument("--questions", type=int, default=20, help="of each kind")
    parser.add_argument("--texts", type=int, default=8, help="texts that heads are scored on")
    parser.add_argument("--random", type=int, default=20, help="random plans of each size")
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    result = PARTS[args.part](args)
    (args.into / f"{args.part}.json").write_text(json.dumps(result, indent=1, default=float))


if __name__ == "__main__":
    main()
