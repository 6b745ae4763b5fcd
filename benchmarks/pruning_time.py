"""How much faster attention is when heads are gone.

    python benchmarks/pruning_time.py --passes 15
    python benchmarks/pruning_time.py --device cuda --dtype bfloat16

A model of the sizes of BERT and one with the groups of Llama, their weights drawn at random, lose a
quarter, a half and three quarters of their heads, of the second whole groups. Printed is the time
of all attention blocks (projections, attention, the way back) beside that of the full model, and
the same of whole passes. The models take turns.
"""

import argparse

import torch
import transformers
from torch import nn

import headwise as hw
from headwise.surgery import time_passes

SHARES = (0.25, 0.5, 0.75)


def models() -> dict[str, nn.Module]:
    """Few layers: the time of an attention block does not depend on how many there are."""
    torch.manual_seed(0)
    bert = transformers.BertConfig(num_hidden_layers=4)
    llama = transformers.LlamaConfig(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=2816, vocab_size=8192,
    )  # fmt: skip
    return {"bert": transformers.BertModel(bert), "llama": transformers.LlamaModel(llama)}


def without(model: nn.Module, share: float) -> nn.Module:
    """The model without the last heads of every layer."""
    heads: int = model.config.num_attention_heads
    gone = range(round((1 - share) * heads), heads)
    return hw.prune(model, {layer: list(gone) for layer in range(model.config.num_hidden_layers)})


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--passes", type=int, default=15)
    reader.add_argument("--tokens", type=int, default=256)
    reader.add_argument("--texts", type=int, default=2)
    reader.add_argument("--device", default="cpu")
    reader.add_argument("--dtype", default="float32")
    asked = reader.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {asked.device}")
    for name, model in models().items():
        model.eval().to(asked.device, getattr(torch, asked.dtype))
        ids = torch.randint(1000, (asked.texts, asked.tokens), device=asked.device)
        some = [model, *(without(model, share) for share in SHARES)]
        times = time_passes(some, {"input_ids": ids, "use_cache": False}, asked.passes)
        for share, one in zip((0.0, *SHARES), times, strict=True):
            blocks = sum(one.blocks) / sum(times[0].blocks)
            whole = one.whole / times[0].whole
            attention, all_of_it = 1000 * sum(one.blocks), 1000 * one.whole
            print(
                f"{name}: {share:.0%} of heads gone: attention blocks {attention:.1f} ms "
                f"({blocks:.2f}), whole pass {all_of_it:.1f} ms ({whole:.2f})"
            )


if __name__ == "__main__":
    main()
