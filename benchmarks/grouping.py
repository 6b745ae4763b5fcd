"""What a language model loses when its heads share keys and values, by each way to share.

    python benchmarks/grouping.py MODEL --text stories.txt --kv-heads 2 1 --recover 100 -o out.csv

The texts are parted by `<|endoftext|>`. Every second one is what "fit" is given where it is given
texts, and what a model recovers on; the loss, in nats a token, is of the others.
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
from headwise.models import batches, encode


@dataclass(frozen=True)
class Texts:
    """What heads are fitted to, what the loss is of, and how long a model recovers on the first."""

    reference: list[Any]
    read: list[Any]
    steps: int


@torch.no_grad()
def loss_of(model: nn.Module, read: list[Any]) -> float:
    """The mean loss of a token."""
    lost = tokens = 0.0
    for batch in read:
        logits, wanted = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
        real = batch["attention_mask"][:, 1:].bool()
        lost += F.cross_entropy(logits[real], wanted[real], reduction="sum").item()
        tokens += int(real.sum())
    return lost / tokens


def given_of(model: nn.Module, tokenizer: Any, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    pieces = [ids for ids in encode(tokenizer, texts, model, None) if len(ids) > 3]
    return [vars(batch) for batch in batches(pieces, 16)]


def study(model: nn.Module, n: int, how: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    layers: list[Any] = []
    started = time.process_time()
    small = hw.group_heads(model, n, on_layer=layers.append, **how)
    told = {"seconds": time.process_time() - started, "loss": loss_of(small, texts.read)}
    for layer in layers:
        print(layer, flush=True)
    lost = [(layer.keys_lost, layer.values_lost) for layer in layers]
    told["keys lost"], told["values lost"] = (
        sum(part) / len(lost) for part in zip(*lost, strict=True)
    )
    if texts.steps:
        hw.recover(small, model, texts.reference, steps=texts.steps)
        told["loss, recovered"] = loss_of(small, texts.read)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--kv-heads", type=int, nargs="+", required=True)
    parser.add_argument("--recover", type=int, default=0, help="steps of training after it")
    parser.add_argument("--out", "-o", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = hw.load(asked.model), hw.load_tokenizer(asked.model)
    stories = [text.strip() for text in asked.text.read_text("utf-8").split("<|endoftext|>")]
    texts = Texts(*(given_of(model, tokenizer, stories[at::2]) for at in (0, 1)), asked.recover)
    ways = {"mean": {"method": "mean"}, "fit": {}, "fit to texts": {"reference": texts.reference}}
    rows: list[dict[str, Any]] = [{"kv heads": "as it is", "loss": loss_of(model, texts.read)}]
    for n in asked.kv_heads:
        for name, how in ways.items():
            print(f"{n} kv heads, {name}", flush=True)
            rows.append({"kv heads": n, "how": name, **study(model, n, how, texts)})
    frame = pd.DataFrame(rows)
    frame.to_csv(asked.out, index=False)
    print(frame.to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
