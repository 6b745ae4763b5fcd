"""Trains a Mini-GPT on the grammar: seeded, reproducible and resumable."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from headwise.errors import ArgumentError
from headwise.files import as_path, check_writable, make_folder, write_json
from headwise.lab._checkpoint import save
from headwise.lab._evaluate import Evaluation, evaluate
from headwise.lab._model import MiniGPT
from headwise.lab._run import TrainingRun, TrainSettings

if TYPE_CHECKING:
    import tokenizers

_STATE, _FACTS = "training.safetensors", "training.json"


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        seconds: The time spent on all steps, including those before an interruption.
    """

    model: MiniGPT
    tokenizer: "tokenizers.Tokenizer"
    settings: TrainSettings
    evaluation: Evaluation
    seconds: float

    def facts(self) -> dict[str, str | int | float]:
        """The facts of the run, in the order to print them, without those that do not apply."""
        held_out, seen = asdict(self.evaluation.held_out), asdict(self.evaluation.seen)
        facts: dict[str, str | int | float] = {
            "steps": self.settings.steps,
            "seconds": round(self.seconds, 1),
            "lines judged": self.evaluation.lines,
        }
        for name, score in held_out.items():
            words = name.replace("_", " ")
            facts |= {f"held-out {words}": score, f"seen {words}": seen[name]}
        facts["copying"] = self.evaluation.copying
        return {name: fact for name, fact in facts.items() if fact == fact}  # NaN is unlike itself


def train(
    settings: TrainSettings,
    folder: str | os.PathLike[str],
    *,
    on_start: Callable[[MiniGPT, int], object] | None = None,
    on_progress: Callable[[int, int, float], None] | None = None,
    checkpoint_every: int = 100,
    lines_judged: int = 512,
) -> Trained:
    """Train a Mini-GPT, evaluate it, and save it into a folder.

    The same settings give the same weights, bit for bit on one machine and number of threads.
    An interrupted run continues from its last checkpoint and ends with the same weights. In
    addition to the files of `save`, the folder gets `training.safetensors` (the checkpoint) and
    `training.json` (settings and facts).

    Args:
        on_start: Called once before the first step, with the model and the number of steps done
            by an earlier run: the place to attach a `headwise.HeadMonitor`.
        on_progress: Called after each step with the number of steps done, the number of steps in
            all, and the loss.
        checkpoint_every: The number of steps between checkpoints. The last step writes one too.
        lines_judged: The number of lines of each kind to evaluate the trained model on.
    Raises:
        ArgumentError: an argument is out of range.
        InputError: the checkpoint in the folder is damaged, or of a run with other settings.
        OutputError: the folder cannot be created or written.
    """
    for name, number in (("checkpoint_every", checkpoint_every), ("lines_judged", lines_judged)):
        if number < 1:
            raise ArgumentError(f"train: {name} is {number}. Give 1 or more.")
    folder = as_path("train", folder)
    run = TrainingRun(settings, folder / _STATE)  # impossible settings leave no folder behind
    check_writable(make_folder(folder, "train") / _STATE)
    run.checkpoint.resume(settings.steps)
    if on_start is not None:
        on_start(run.model, run.step)
    while run.step < settings.steps:
        loss = run.advance()
        if run.step % checkpoint_every == 0 or run.step == settings.steps:
            run.checkpoint.save()
        if on_progress is not None:
            on_progress(run.step, settings.steps, loss)
    model = run.model.eval()
    judged = evaluate(
        model, run.grammar, tokenizer=run.tokenizer, lines=lines_judged, seed=settings.seed
    )
    trained = Trained(model, run.tokenizer, settings, judged, run.checkpoint.seconds)
    save(model, folder, tokenizer=run.tokenizer)
    write_json({"settings": asdict(settings), "facts": trained.facts()}, folder / _FACTS)
    return trained
