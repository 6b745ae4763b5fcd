"""A run of `transformers.Trainer` with a monitor, reported to TensorBoard and W&B, and read back.

    pip install tensorboard wandb
    python examples/watch_training.py --out watched

W&B runs offline: it needs no account, and `wandb sync` uploads the run later.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import headwise as hw

SHOWN = ("attn/entropy/mean", "attn/max_logit/max", "attn/L1.H3/max_logit", "loss", "eval_loss")


def train(out: Path, report_to: Sequence[str], steps: int = 40) -> Trainer:
    """Train a tiny model with micro-batches, bfloat16 and evaluation, and watch each tenth step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (64, 32))]
    args = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        bf16=True,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        report_to=list(report_to),
        use_cpu=True,
    )
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:4])
    # Every head; without `log`, the monitor reports layers and the model by itself.
    monitor = hw.HeadMonitor(model, every=10, log=lambda scalars, _: trainer.log(scalars))
    trainer.add_callback(monitor)
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch a training run, and read its logs back.")
    parser.add_argument("--out", type=Path, default=Path("watched"), help="a new folder")
    out = parser.parse_args().out
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(out)}
    out.mkdir()

    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = train(out, ["tensorboard", "wandb"]).state.log_history
    wandb.finish()
    (events,) = out.rglob("events.out.tfevents.*")
    (offline,) = out.rglob("*.wandb")
    board = EventAccumulator(str(events)).Reload()
    print(f"\n{len(board.Tags()['scalars'])} scalars in TensorBoard")
    print("| scalar | step: value in TensorBoard | steps in W&B |\n| :-- | :-- | --: |")
    for name in SHOWN:
        tag = name.replace("eval_", "eval/") if name.startswith("eval_") else f"train/{name}"
        written = {event.step: event.value for event in board.Scalars(tag)}
        trained = {row["step"]: row[name] for row in history if name in row}
        assert torch.allclose(*(torch.tensor([*x.values()]) for x in (written, trained)))
        assert [*written] == [*trained]
        at = ", ".join(f"{step}: {value:.3f}" for step, value in written.items())
        # The file of W&B is binary, and names a scalar twice per step: in history and summary.
        times = offline.read_bytes().count(tag.encode()) / 2
        assert times == len(written)
        print(f"| `{tag}` | {at} | {times:.0f} |")


if __name__ == "__main__":
    main()
