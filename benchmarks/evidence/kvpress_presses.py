"""Accuracy of kvpress's head-wise presses on the retrieval task, by the share of the cache kept.

It runs in an environment of its own with kvpress 0.5, which needs another version of transformers.
A press sees the text without its question, as our plans do; the question and its answer follow
token by token.

    python -m benchmarks.evidence.kvpress_presses --model RETRIEVAL --length 1024 \\
        --into DIR/presses.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kvpress import AdaKVPress, CriticalAdaKVPress, ExpectedAttentionPress, SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.evidence._retrieval import IGNORED, PASS, question_texts

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
PRESSES: dict[str, Callable[[float], Any]] = {
    "SnapKV, the same share in every head": lambda ratio: SnapKVPress(compression_ratio=ratio),
    "AdaKV with SnapKV": lambda ratio: AdaKVPress(SnapKVPress(compression_ratio=ratio)),
    "AdaKV with expected attention": lambda ratio: AdaKVPress(
        ExpectedAttentionPress(compression_ratio=ratio, epsilon=1e-2)
    ),
    "CriticalAdaKV with expected attention": lambda ratio: CriticalAdaKVPress(
        ExpectedAttentionPress(compression_ratio=ratio, use_vnorm=False)
    ),
}


@torch.no_grad()
def is_right(model: Any, ids: torch.Tensor, labels: torch.Tensor, press: Any) -> bool:
    """Whether every token of the answer is predicted after the press has seen the text."""
    answer = int((labels[0] != IGNORED).int().argmax())
    question = answer - (1 if ids[0, answer - 1] == PASS else 2)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(input_ids=ids[:, :question], cache=cache)
    for place in range(question, ids.shape[1] - 1):
        positions = torch.tensor([[place]])  # places in the text, not in the smaller cache
        logits = model(
            input_ids=ids[:, place : place + 1],
            cache=cache,
            position_ids=positions,
            cache_position=positions[0],
        ).logits
        if place + 1 >= answer and int(logits[0, -1].argmax()) != int(ids[0, place + 1]):
            return False
    return True


def main() -> None:
    """Measure every press at every share and write the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--questions", type=int, default=20, help="of each kind")
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="sdpa").eval()
    kinds = [question_texts(args.questions, args.length, 100, kind) for kind in ("pairs", "pass")]
    texts = [(t.ids[i : i + 1], t.labels[i : i + 1]) for t in kinds for i in range(len(t))]
    result: dict[str, dict[float, float]] = {}
    for name, make in {"nothing pressed": PRESSES["AdaKV with SnapKV"], **PRESSES}.items():
        shares = SHARES if name in PRESSES else (1.0,)
        result[name] = {
            share: sum(is_right(model, *text, make(1 - share)) for text in texts) / len(texts)
            for share in shares
        }
        print(name, result[name], flush=True)
    args.into.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
