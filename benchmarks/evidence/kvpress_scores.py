"""The order of kv heads by kvpress's on-the-fly DuoAttention scores, for `cache_plans.py`.

It runs in an environment of its own with kvpress 0.5, which needs another version of transformers.
Its texts are a data set from the network; here they are texts of the retrieval task.

    python -m benchmarks.evidence.kvpress_scores --model RETRIEVAL --into DIR/kvpress.json
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kvpress.presses import duo_attention_press
from transformers import AutoModelForCausalLM, BatchEncoding

from benchmarks.evidence._retrieval import question_texts

N_TEXTS, LENGTH = 50, 500


class _Ids:
    """Reads a text of numbers, in place of a tokenizer."""

    def __call__(self, text: str, return_tensors: str) -> BatchEncoding:
        return BatchEncoding({"input_ids": torch.tensor([[int(word) for word in text.split()]])})


class _Table:
    """A data set with one column of texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def to_pandas(self) -> "_Table":
        return self

    def sample(self, n: int, random_state: int) -> dict[str, Any]:
        return {"chapter": SimpleNamespace(tolist=lambda: self._texts[:n])}


def main() -> None:
    """Score the kv heads and write their order, the least streaming head first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    rows = question_texts(N_TEXTS, LENGTH, seed=500).ids.tolist()
    texts = [" ".join(map(str, row)) for row in rows]
    duo_attention_press.load_dataset = lambda *_, **__: _Table(texts)
    duo_attention_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_: _Ids())
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    scores = torch.as_tensor(duo_attention_press.duo_attention_on_the_fly(model))
    order = torch.argsort(-scores.flatten(), stable=True).tolist()
    heads = [[index // scores.shape[1], index % scores.shape[1]] for index in order]
    args.into.write_text(json.dumps({"order": heads, "scores": scores.tolist()}))


if __name__ == "__main__":
    main()
