"""Trains a Mini-GPT on the grammar: seeded, reproducible and resumable."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwise._checkpoint import TrainingCheckpoint
from headwise.corpora import PAD, Grammar
from headwise.errors import ArgumentError
from headwise.files import as_path, check_writable, make_folder, write_json
from headwise.lab._checkpoint import save
from headwise.lab._evaluate import Evaluation, evaluate, next_token_loss
from headwise.lab._model import MiniGPT, MiniGPTConfig, draw_batch, make_tokenizer, number_of

if TYPE_CHECKING:
    import tokenizers

_STATE, _FACTS = "training.safetensors", "training.json"
# A model of more weights does not fit into the memory of the machines that this lab is for.
_LARGEST = 10**9
_MOST = dict.fromkeys(("steps", "warmup", "context", "d_model", "n_heads", "mlp_ratio"), _LARGEST)
_MOST |= {"batch_size": 10**5, "n_layers": 10**4}


@dataclass(frozen=True)
class TrainSettings:
    """The settings of a training run, which determine its result.

    Attributes:
        seed: The seed of the weights, the lines and the held-out pairs.
        learning_rate: The peak, reached after `warmup` steps. It then decays to a tenth along a
            cosine.
        repeat_share: The share of lines that repeat a random sequence.
        adverb_share: The share of clauses with an adverb.

    The defaults are chosen for a short run on a CPU: small batches, many steps and dropout help
    held-out accuracy most. It still varies from seed to seed.

    Raises:
        ArgumentError: a number is out of range or not whole, the context is shorter than a line,
            or the model would have more than a billion weights.
    """

    seed: int = 0
    steps: int = 2000
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: int = 50
    repeat_share: float = 0.5
    adverb_share: float = 0.5
    context: int = 40
    d_model: int = 128
    n_heads: int = 4
    n_kv_heads: int | None = None
    n_layers: int = 3
    mlp_ratio: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        longest = Grammar.longest + 2  # with <bos> and <eos>
        least = {"steps": 1, "batch_size": 1, "context": longest}
        least |= dict.fromkeys(("seed", "warmup", "weight_decay"), 0)
        for name, most in _MOST.items():
            number = getattr(self, name)
            if type(number) is not int or number > most:
                raise ArgumentError(
                    f"TrainSettings: {name} is {number!r}. Give a whole number up to {most:,}."
                )
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ArgumentError(
                    f"TrainSettings: {name} is {getattr(self, name)}. Give {bound} or more."
                )
        if not self.learning_rate > 0:
            raise ArgumentError(
                f"TrainSettings: learning_rate is {self.learning_rate}. Give a positive number."
            )

        weights = self.n_layers * (4 + 2 * self.mlp_ratio) * self.d_model**2
        weights += self.context * self.d_model
        if weights > _LARGEST:
            raise ArgumentError(
                f"TrainSettings: d_model={self.d_model}, n_layers={self.n_layers}, mlp_ratio="
                f"{self.mlp_ratio}, context={self.context} give {weights:,} weights. Give smaller "
                f"sizes: a Mini-GPT has at most {_LARGEST:,}."
            )

    def grammar(self) -> Grammar:
        """The grammar these settings train on."""
        return Grammar(self.seed, self.repeat_share, self.adverb_share)

    def config(self, vocab_size: int) -> MiniGPTConfig:
        """The sizes of the model these settings train."""
        shared = {field.name for field in fields(MiniGPTConfig)} & asdict(self).keys()
        return MiniGPTConfig(vocab_size, **{name: getattr(self, name) for name in shared})

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


class TrainingRun:
    """The state of training: everything that changes from step to step, and its file.

    Args:
        path: The checkpoint. None keeps none.
    """

    def __init__(self, settings: TrainSettings, path: Path | None = None) -> None:
        self.settings = settings
        self.grammar = settings.grammar()
        self.tokenizer = make_tokenizer(self.grammar.vocabulary)
        self.padding = number_of(self.tokenizer, PAD)
        with _seeded(settings.seed):
            self.model = MiniGPT(settings.config(len(self.grammar.vocabulary)))
        weights, decay = [*self.model.parameters()], settings.weight_decay
        betas = 0.9, 0.99
        self.optimizer = torch.optim.AdamW(weights, betas=betas, weight_decay=decay, fused=True)
        # With other settings the schedule, the lines or the sizes would change midway.
        about = {"headwise_training": "2", **{n: str(x) for n, x in asdict(settings).items()}}
        words = "train", "training", "folder"
        self.checkpoint = TrainingCheckpoint(path, about, weights, self.optimizer, *words)

    @property
    def step(self) -> int:
        """The number of steps that are done."""
        return len(self.checkpoint.losses)

    def advance(self) -> float:
        """Do one training step and return its loss."""
        started = time.perf_counter()
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(self.step)
        seed = (settings.seed, 0, self.step)
        ids = draw_batch(self.grammar, self.tokenizer, settings.batch_size, seed=seed)
        # Each step has a seed of its own, so a resumed run draws the same numbers.
        with _seeded(settings.seed + 1 + self.step):
            logits = self.model.train()(ids[:, :-1])
        loss = next_token_loss(logits, ids[:, 1:], self.padding)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.checkpoint.losses.append(loss.item())
        self.checkpoint.seconds += time.perf_counter() - started
        return self.checkpoint.losses[-1]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block, and restore the caller's random state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


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
        lines_judged: The number of lines of each kind to evaluate the trained model on.
    Raises:
        ArgumentError: an argument is out of range.
        InputError: the checkpoint in the folder is damaged, or of a run with other settings.
        OutputError: the folder cannot be created or written.
    """
    if lines_judged < 1:
        raise ArgumentError(f"train: lines_judged is {lines_judged}. Give 1 or more.")
    folder = as_path("train", folder)
    run = TrainingRun(settings, folder / _STATE)  # impossible settings leave no folder behind
    check_writable(make_folder(folder, "train") / _STATE)
    run.checkpoint.resume(settings.steps)
    if on_start is not None:
        on_start(run.model, run.step)
    while run.step < settings.steps:
        loss = run.advance()
        run.checkpoint.save_if_due(settings.steps)
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
