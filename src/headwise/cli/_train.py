"""`headwise train`: train a Mini-GPT, evaluate it, and continue a prompt with it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli._options import Json, Seed, opt
from headwise.cli._print import print_json, print_note, print_result, progress_bar
from headwise.errors import ArgumentError
from headwise.files import build_from, read_object

if TYPE_CHECKING:
    from headwise.lab import Trained, TrainSettings

# What `train` leaves in its folder: the checkpoint while it runs, the facts when it has ended.
_CHECKPOINT, FACTS = "training.safetensors", "training.json"

_Count = int | None


def _setting(name: str, default: object, description: str) -> typer.models.OptionInfo:
    # The default is shown but not set: None means that the option was not set.
    return opt(description, name, shown=str(default))


def train(
    out: Annotated[Path, opt("The folder to train in.")] = Path("mini-gpt"),
    prompt: Annotated[str | None, opt("A text that the model continues.")] = None,
    as_json: Json = False,
    seed: Seed = None,
    steps: Annotated[_Count, _setting("--steps", 2000, "Training steps, a batch each.")] = None,
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
) -> None:
    """Train a Mini-GPT on a generated grammar and evaluate it.

    The grammar has English and Spanish verbs; some verbs of each person are held out.
    An interrupted run resumes from its last checkpoint. A finished run is not repeated, so you
    can use --prompt as often as you like.
    """
    values = dict(locals())  # all parameters; those of sizes have the name of a setting
    from headwise.lab import TrainSettings, sample

    names = [field.name for field in fields(TrainSettings)]
    settings = {name: values[name] for name in names if values.get(name) is not None}
    trained = train_mini_gpt(out, settings, prompt)
    sampled = None if prompt is None else sample(trained.model, prompt, tokenizer=trained.tokenizer)
    if as_json:
        print_json({"folder": str(out), **trained.facts(), "sample": sampled})
    elif sampled is not None:
        print_result(sampled)
    else:
        for name, fact in trained.facts().items():
            number = f"{fact:.3f}" if isinstance(fact, float) else f"{fact}"
            print_result(f"{name:<40} {number}")


def train_mini_gpt(
    folder: Path, settings: Mapping[str, Any], prompt: str | None = None
) -> "Trained":
    """Train the Mini-GPT of a folder, resume an interrupted run, or load a finished one.

    Args:
        settings: Settings by name. All others are those of the finished run in the folder, or
            the defaults.
        prompt: A text for the model to continue. It is checked here, before the training.
    Raises:
        ArgumentError: the folder holds a model that this command did not train.
        InputError: the model would not know a word of the prompt, or have no room for it.
    """
    from headwise import lab

    finished, resumed = (folder / FACTS).exists(), (folder / _CHECKPOINT).exists()
    stored = settings_in(folder) if finished else lab.TrainSettings()
    train_settings = replace(stored, **settings)
    check_mini_gpt(folder)
    if prompt is not None:
        vocabulary = train_settings.grammar().vocabulary
        lab.encode_prompt(lab.make_tokenizer(vocabulary), prompt, train_settings.context)
    label = f"{'Resuming the training of the' if resumed else 'Training a'} Mini-GPT in {folder}"
    try:
        with progress_bar(label) as on_progress:
            trained = lab.train(
                train_settings,
                folder,
                on_progress=lambda step, steps, loss: on_progress(step, steps, f"loss {loss:.2f}"),
            )
    except KeyboardInterrupt:
        print_note(f"Run the same command again to resume from the last checkpoint in {folder}.")
        raise
    if finished:
        print_note(f"The Mini-GPT in {folder} is already trained")
    return trained


def check_mini_gpt(folder: Path) -> None:
    """Refuse to train over a model that this command did not train."""
    # Partial files of a killed process are hidden; the next write removes them.
    weights = [path for path in folder.glob("*.safetensors") if not path.name.startswith(".")]
    model_files = [*weights, *folder.glob("config.json")]
    if model_files and not (folder / _CHECKPOINT).exists():
        raise ArgumentError(
            f"train: {folder} holds {model_files[0].name}, which would be overwritten, and this "
            f"command did not write it. Train into another folder."
        )


def settings_in(folder: Path) -> "TrainSettings":
    """The settings of the finished run in a folder."""
    from headwise.lab import TrainSettings

    path, advice = folder / FACTS, "Train into another folder."
    facts = read_object(path, "train", advice)
    problem = f"train: the settings in {path} cannot be read"
    return build_from(lambda: TrainSettings(**facts["settings"]), problem, advice)
