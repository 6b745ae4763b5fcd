"""`headwise train`: train a Mini-GPT, judge it, let it go on from a prompt."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import Json, Seed
from headwise.cli._print import say, say_json

_Whole = int | None
_Share = float | None


def _flag(name: str, default: object, says: str) -> typer.models.OptionInfo:
    # Shown, but not set: None says that the flag was not given.
    return typer.Option(name, show_default=str(default), help=says)


def train(
    out: Annotated[Path, typer.Option(help="The folder to train in.")] = Path("mini-gpt"),
    prompt: Annotated[str | None, typer.Option(help="Words for it to go on from.")] = None,
    as_json: Json = False,
    seed: Seed = None,
    steps: Annotated[_Whole, _flag("--steps", 2000, "Batches to train on.")] = None,
    batch_size: Annotated[_Whole, _flag("--batch", 32, "Lines in a batch.")] = None,
    learning_rate: Annotated[_Share, _flag("--lr", 0.002, "The learning rate.")] = None,
    warmup: Annotated[_Whole, _flag("--warmup", 50, "Steps up to that rate.")] = None,
    weight_decay: Annotated[_Share, _flag("--weight-decay", 0.01, "Of AdamW.")] = None,
    n_layers: Annotated[_Whole, _flag("--layers", 3, "Layers.")] = None,
    n_heads: Annotated[_Whole, _flag("--heads", 4, "Query heads a layer.")] = None,
    n_kv_heads: Annotated[_Whole, _flag("--kv-heads", "heads", "Key/value heads.")] = None,
    d_model: Annotated[_Whole, _flag("--d-model", 128, "Width of the model.")] = None,
    mlp_ratio: Annotated[_Whole, _flag("--mlp-ratio", 2, "Width of an MLP, in d_model.")] = None,
    context: Annotated[_Whole, _flag("--context", 40, "Tokens it can read.")] = None,
    dropout: Annotated[_Share, _flag("--dropout", 0.1, "OwnershipMap dropped in training.")] = None,
    repeat_share: Annotated[_Share, _flag("--repeat-share", 0.5, "Lines that repeat.")] = None,
    adverb_share: Annotated[_Share, _flag("--adverb-share", 0.5, "Clauses with adverbs.")] = None,
) -> None:
    """Train a Mini-GPT on a generated grammar, and judge it.

    The grammar is of English and Spanish verbs, with verbs held out for each person.
    A run that was interrupted goes on from its last checkpoint; one that has ended is not run
    again, so --prompt can be used as often as you like.
    """
    flags = dict(locals())  # all parameters; most are named like a setting
    from headwise.cli import _progress

    given = {n: v for n, v in flags.items() if n in _progress.SETTINGS and v is not None}
    trained = _progress.trained_in(out, given)
    sampled = None if prompt is None else _progress.sample(trained.model, trained.tokenizer, prompt)
    if as_json:
        say_json({"folder": str(out), **trained.facts(), "sample": sampled})
    elif sampled is not None:
        say(sampled)
    else:
        for name, fact in trained.facts().items():
            say(f"{name:<40} {fact:.3f}" if isinstance(fact, float) else f"{name:<40} {fact}")
