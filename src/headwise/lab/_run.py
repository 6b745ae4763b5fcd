"""A training run: its settings, one training step, and saving and resuming it."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from headwise._checkpoint import kind_of_tensor
from headwise._tensors import read_with_metadata, write_tensors
from headwise.corpora import PAD, Grammar
from headwise.errors import ArgumentError, InputError
from headwise.files import write_beside
from headwise.lab._data import draw_batch, make_tokenizer, number_of
from headwise.lab._evaluate import next_token_loss
from headwise.lab._model import MiniGPT, MiniGPTConfig

# A model of more weights does not fit into the memory of the machines that this lab is for.
_LARGEST = 10**9
_MOST = dict.fromkeys(("steps", "warmup", "context", "d_model", "n_heads", "mlp_ratio"), _LARGEST)
_MOST |= {"batch_size": 10**5, "n_layers": 10**4}
# The optimizer state of AdamW for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_FACTS = ("settings", "step", "seconds")
_WAY_OUT = "Train into another folder, or delete the file to start again."


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
    """The state of training: everything that changes from step to step."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.grammar = settings.grammar()
        self.tokenizer = make_tokenizer(self.grammar.vocabulary)
        self.padding = number_of(self.tokenizer, PAD)
        with _seeded(settings.seed):
            self.model = MiniGPT(settings.config(len(self.grammar.vocabulary)))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=(0.9, 0.99),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.step = 0
        self.seconds = 0.0

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
        self.step += 1
        self.seconds += time.perf_counter() - started
        return loss.item()

    def checkpoint(self, path: Path) -> None:
        """Write the state for `resume`, as a single file, so that the write is atomic."""
        tensors = {f"model.{name}": w for name, w in self.model.state_dict().items()}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": w for name, w in moments.items()}
        about = {
            "settings": json.dumps(asdict(self.settings)),
            "step": str(self.step),
            "seconds": str(self.seconds),
        }
        with write_beside(path) as beside:
            write_tensors(tensors, beside, about)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. A damaged checkpoint changes nothing.

        Raises:
            ArgumentError: the checkpoint is of a run with other settings.
            InputError: the checkpoint is damaged.
        """
        tensors, settings, step, seconds = _read(path)
        self._check_same(settings, path)
        if not 1 <= step <= self.settings.steps:
            last = self.settings.steps
            raise InputError(f"train: {path} is of step {step}, not 1 to {last}. {_WAY_OUT}")
        _check_state(tensors, self.model, step, path)
        self.step, self.seconds = step, seconds
        self.model.load_state_dict(
            {name: tensors[f"model.{name}"] for name in self.model.state_dict()}
        )
        moments = {
            number: {moment: tensors[f"optimizer.{number}.{moment}"] for moment in _MOMENTS}
            for number, _ in enumerate(self.model.parameters())
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _check_same(self, earlier: dict[str, object], path: Path) -> None:
        """Refuse other settings: the schedule, the lines or the sizes would change midway."""
        settings = asdict(self.settings)
        for name in settings | earlier:
            if settings.get(name) != earlier.get(name):
                raise ArgumentError(
                    f"train: {path.parent} holds a run with {name}={earlier.get(name)}, but "
                    f"{name}={settings.get(name)} is requested. Train into another folder, or use "
                    f"the settings of that run."
                )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch inside the block, and restore the caller's random state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, object], int, float]:
    """The tensors, the settings, the number of steps and the seconds of a run.

    Raises:
        InputError: the file is not a checkpoint of a training run.
    """
    tensors, about = read_with_metadata(path)
    if not about.keys() >= {*_FACTS}:
        raise InputError(
            f"train: {path} is not a checkpoint of a training run (its metadata has "
            f"{sorted(about)}). Train into another folder."
        )
    try:
        settings = json.loads(about["settings"])
        step, seconds = int(about["step"]), float(about["seconds"])
    except (ValueError, RecursionError) as error:
        raise InputError(f"train: {path} cannot be read ({error}). {_WAY_OUT}") from error
    if not isinstance(settings, dict):
        raise InputError(f"train: {path} has settings {settings!r}, not an object. {_WAY_OUT}")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InputError(f"train: {path} has {seconds=}. {_WAY_OUT}")
    return tensors, settings, step, seconds


def _check_state(tensors: Mapping[str, Tensor], model: MiniGPT, step: int, path: Path) -> None:
    """Refuse weights and moments that no run of this model has after so many steps.

    The optimizer's fused kernel does not check the shape and dtype of its state; this does.

    Raises:
        InputError: a tensor is missing, unexpected, not finite, or has a wrong shape or dtype,
            second moments are negative, or the optimizer is at another step.
    """
    expected = {f"model.{name}": (x, name) for name, x in model.state_dict().items()}
    scalar = torch.zeros((), dtype=torch.float32)
    for number, (name, weight) in enumerate(model.named_parameters()):
        for moment in _MOMENTS:
            like = scalar if moment == "step" else weight.detach()
            expected[f"optimizer.{number}.{moment}"] = (like, f"{moment} of {name}")
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise InputError(f"train: {path} lacks {name} ({expected[name][1]}). {_WAY_OUT}")
        if name not in expected:
            raise InputError(f"train: {path} holds {name}, which the run does not have. {_WAY_OUT}")
        tensor, (like, description) = tensors[name], expected[name]
        has, needs = kind_of_tensor(tensor), kind_of_tensor(like)
        problem = ""
        if has != needs:
            problem = f"is {has}, not {needs}"
        elif not tensor.isfinite().all():
            problem = "is not finite"
        elif name.endswith(".exp_avg_sq") and tensor.min() < 0:
            problem = f"holds {tensor.min().item()}, but squares are not negative"
        elif name.endswith(".step") and tensor.item() != step:
            problem = f"is {tensor.item():g}, but the run is at step {step}"
        if problem:
            raise InputError(f"train: {name} ({description}) in {path} {problem}. {_WAY_OUT}")
