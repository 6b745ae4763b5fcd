"""`headwise train`: train a Mini-GPT, evaluate it, and continue a prompt with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import Json, Seed
from headwise.cli._print import print_json, print_result

_Count = int | None
_Number = float | None


def _setting(name: str, default: object, description: str) -> typer.models.OptionInfo:
    # The default is shown but not set: None means that the option was not set.
    return typer.Option(name, show_default=str(default), help=description)


def train(
    out: Annotated[Path, typer.Option(help="The folder to train in.")] = Path("mini-gpt"),
    prompt: Annotated[str | None, typer.Option(help="A text that the model continues.")] = None,
    as_json: Json = False,
    seed: Seed = None,
    steps: Annotated[_Count, _setting("--steps", 2000, "Training steps, a batch each.")] = None,
    batch_size: Annotated[_Count, _setting("--batch", 32, "Lines per batch.")] = None,
    learning_rate: Annotated[_Number, _setting("--lr", 0.002, "The peak learning rate.")] = None,
    warmup: Annotated[_Count, _setting("--warmup", 50, "Steps of warmup to the peak rate.")] = None,
    weight_decay: Annotated[
        _Number, _setting("--weight-decay", 0.01, "The weight decay of AdamW.")
    ] = None,
    n_layers: Annotated[_Count, _setting("--layers", 3, "The number of layers.")] = None,
    n_heads: Annotated[_Count, _setting("--heads", 4, "Query heads per layer.")] = None,
    n_kv_heads: Annotated[
        _Count, _setting("--kv-heads", "heads", "Key/value heads per layer.")
    ] = None,
    d_model: Annotated[_Count, _setting("--d-model", 128, "The width of the model.")] = None,
    mlp_ratio: Annotated[
        _Count, _setting("--mlp-ratio", 2, "The width of an MLP divided by d_model.")
    ] = None,
    context: Annotated[_Count, _setting("--context", 40, "The longest input, in tokens.")] = None,
    dropout: Annotated[_Number, _setting("--dropout", 0.1, "The dropout rate in training.")] = None,
    repeat_share: Annotated[
        _Number, _setting("--repeat-share", 0.5, "The share of lines that repeat a sequence.")
    ] = None,
    adverb_share: Annotated[
        _Number, _setting("--adverb-share", 0.5, "The share of clauses with an adverb.")
    ] = None,
) -> None:
    """Train a Mini-GPT on a generated grammar and evaluate it.

    The grammar has English and Spanish verbs; some verbs of each person are held out.
    An interrupted run resumes from its last checkpoint. A finished run is not repeated, so you
    can use --prompt as often as you like.
    """
    values = dict(locals())  # all parameters; most have the name of a setting
    from headwise.cli import tasks
    from headwise.lab import sample

    settings = {name: values[name] for name in tasks.SETTINGS if values[name] is not None}
    trained = tasks.train_mini_gpt(out, settings, prompt)
    sampled = None if prompt is None else sample(trained.model, trained.tokenizer, prompt)
    if as_json:
        print_json({"folder": str(out), **trained.facts(), "sample": sampled})
    elif sampled is not None:
        print_result(sampled)
    else:
        _print_facts(trained.facts())


def _print_facts(facts: Mapping[str, str | int | float]) -> None:
    for name, fact in facts.items():
        number = f"{fact:.3f}" if isinstance(fact, float) else f"{fact}"
        print_result(f"{name:<40} {number}")
