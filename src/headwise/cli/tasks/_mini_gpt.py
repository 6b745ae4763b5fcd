"""The Mini-GPT of a folder: trained, resumed or taken as it is, and studied."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headwise.cli._print import print_note, progress_bar
from headwise.errors import ArgumentError
from headwise.files import build_from, read_object
from headwise.lab import Trained, TrainSettings, encode_prompt, make_tokenizer, train
from headwise.report import Study, study_lab

SETTINGS = {field.name for field in fields(TrainSettings)}

# What `train` leaves in its folder: the checkpoint while it runs, the facts when it has ended.
_CHECKPOINT, _FACTS = "training.safetensors", "training.json"


def study_mini_gpt(folder: Path, settings: Mapping[str, Any], *, per_text: bool = False) -> Study:
    """Study the Mini-GPT of a folder; train it first if the folder has none."""
    _check_ours(folder)
    if not (folder / _FACTS).exists():
        print_note(
            f"No MODEL is named: a small language model is trained in the folder {folder}, which "
            f"takes a few minutes, and studied. For your own: headwise report MODEL --text FILE"
        )
    trained = train_mini_gpt(folder, settings)
    with progress_bar("Studying the Mini-GPT") as on_progress:
        return study_lab(trained, per_text=per_text, on_progress=on_progress)


def train_mini_gpt(folder: Path, settings: Mapping[str, Any], prompt: str | None = None) -> Trained:
    """Train the Mini-GPT of a folder, resume an interrupted run, or load a finished one.

    Args:
        settings: Settings by name. All others are those of the finished run in the folder, or
            the defaults.
        prompt: A text for the model to continue. It is checked here, before the training.
    Raises:
        ArgumentError: the folder holds a model that this command did not train.
        InputError: the model would not know a word of the prompt, or have no room for it.
    """
    train_settings = replace(_settings_in(folder) or TrainSettings(), **settings)
    _check_ours(folder)
    if prompt is not None:
        vocabulary = train_settings.grammar().vocabulary
        encode_prompt(make_tokenizer(vocabulary), prompt, train_settings.context)
    finished = (folder / _FACTS).exists()
    resumed = (folder / _CHECKPOINT).exists()
    label = f"{'Resuming the training of the' if resumed else 'Training a'} Mini-GPT in {folder}"
    try:
        with progress_bar(label) as on_progress:
            trained = train(
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


def _check_ours(folder: Path) -> None:
    """Refuse to train over a model that this command did not train."""
    # Partial files of a killed process are hidden; the next write removes them.
    weights = [path for path in folder.glob("*.safetensors") if not path.name.startswith(".")]
    model_files = [*weights, *folder.glob("config.json")]
    if model_files and not (folder / _CHECKPOINT).exists():
        raise ArgumentError(
            f"train: {folder} holds {model_files[0].name}, which would be overwritten, and this "
            f"command did not write it. Train into another folder."
        )


def _settings_in(folder: Path) -> TrainSettings | None:
    """The settings of the finished run in a folder."""
    path = folder / _FACTS
    if not path.exists():
        return None
    advice = "Train into another folder."
    facts = read_object(path, "train", advice)
    problem = f"train: the settings in {path} cannot be read"
    return build_from(lambda: TrainSettings(**facts["settings"]), problem, advice)
