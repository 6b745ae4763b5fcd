"""What a language model loses when its heads share keys and values, for each method.

    python -m benchmarks.evidence.grouping MODEL --text stories.txt --kv-heads 2 1 --recover 100 \\
        -o out.csv

The texts are separated by `<|endoftext|>`. Every second text is used to fit ("fit to texts") and to
recover; the loss, in nats per token, is measured on the others.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

import headwise as hw
from headwise.models.texts import batches as make_batches
from headwise.models.texts import encode


@dataclass(frozen=True)
class Texts:
    """Batches to fit and recover on, batches to evaluate on, and the steps of recovery."""

    reference: list[Any]
    evaluate: list[Any]
    steps: int


@torch.no_grad()
def loss_of(model: nn.Module, batches: list[Any]) -> float:
    """The mean loss per token."""
    lost = tokens = 0.0
    for batch in batches:
        logits, targets = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
        real = batch["attention_mask"][:, 1:].bool()
        lost += F.cross_entropy(logits[real], targets[real], reduction="sum").item()
        tokens += int(real.sum())
    return lost / tokens


def batches_of(model: nn.Module, tokenizer: Any, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    pieces = [ids for ids in encode(tokenizer, texts, model, None) if len(ids) > 3]
    return [vars(batch) for batch in make_batches(pieces, 16)]


def study(model: nn.Module, n: int, method: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    layers: list[Any] = []
    started = time.process_time()
    small = hw.group_heads(model, n, on_layer=layers.append, **method)
    result = {"seconds": time.process_time() - started, "loss": loss_of(small, texts.evaluate)}
    for layer in layers:
        print(layer, flush=True)
    lost = [(layer.keys_lost, layer.values_lost) for layer in layers]
    result["keys lost"], result["values lost"] = (
        sum(shares) / len(lost) for shares in zip(*lost, strict=True)
    )
    if texts.steps:
        hw.recover(small, model, texts.reference, steps=texts.steps)
        result["loss, recovered"] = loss_of(small, texts.evaluate)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kv-heads", type=int, nargs="+", required=True)
    parser.add_argument("--recover", type=int, default=0, help="training steps afterwards")
    parser.add_argument("--out", "-o", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    stories = [text.strip() for text in options.text.read_text("utf-8").split("<|endoftext|>")]
    texts = Texts(
        *(batches_of(model, tokenizer, stories[start::2]) for start in (0, 1)), options.recover
    )
    methods = {"fit": {}, "fit to texts": {"reference": texts.reference}}
    rows: list[dict[str, Any]] = [{"kv heads": "as it is", "loss": loss_of(model, texts.evaluate)}]
    for n in options.kv_heads:
        for name, method in methods.items():
            print(f"{n} kv heads, {name}", flush=True)
            rows.append({"kv heads": n, "method": name, **study(model, n, method, texts)})
    frame = pd.DataFrame(rows)
    frame.to_csv(options.out, index=False)
    print(frame.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
