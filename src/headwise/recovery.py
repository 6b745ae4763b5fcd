"""Recovery: train a pruned model for a few steps, with the full model as its teacher."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

from headwise._checkpoint import TrainingCheckpoint
from headwise._evaluation import differentiable_evaluation, in_evaluation
from headwise._progress import Progress, shows_progress
from headwise.capture import AttentionCall, capture_calls
from headwise.errors import ArgumentError, ShapeError
from headwise.lab import MiniGPT
from headwise.models import check_model, check_weights, fingerprint, without_compiler
from headwise.models.texts import tokenizer_of
from headwise.scoring import BatchesLike, Inputs, read_batches
from headwise.shapes import is_size
from headwise.surgery import prune
from headwise.tables import Head

__all__ = ["recover", "recovering"]

# The share of the steps in which the learning rate rises; then it falls to 0.
_WARMUP = 0.1
_CLIP = 1.0


@shows_progress("Recovering the smaller model")
def recover(
    model: nn.Module,
    teacher: nn.Module,
    texts: BatchesLike,
    *,
    steps: int = 100,
    rate: float = 1e-4,
    tokenizer: Any = None,
    seed: int = 0,
    resume: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Float64[np.ndarray, " steps"]:
    """Train a smaller model in place to reproduce the full model's outputs (distillation).

    No labels are needed. Where the models return logits, the loss is the Kullback–Leibler
    divergence of the smaller model's prediction from the full one's, or the squared difference
    where there is a single number; where they return a vector for each token, it is 1 − cosine.
    Each is a mean over tokens without padding.

    AdamW trains every weight that is not frozen; dropout is off in both models. Modes, flags and
    gradients are unchanged when this returns; when it raises, the weights are unchanged too.

    Args:
        model: The smaller model, as from `prune`. Of a `SentenceTransformer`, the transformer
            inside is trained.
        teacher: The full model, which is not changed.
        texts: Texts or batches, read in a new random order in each epoch.
        steps: The number of batches to train on.
        rate: The highest learning rate: it rises for a tenth of the steps, then falls to 0. With
            few steps a high rate is harmful, since each step moves every weight by about the rate.
        tokenizer: The models' tokenizer, for texts; a `SentenceTransformer` has its own.
        seed: Determines the order of the batches.
        resume: A file that keeps the state of the training, three times as large as the weights.
            An interrupted call resumes from it when it is made again with the same models, and
            ends with the same weights to the last bit. The file stays after the last step: delete
            it once the model is saved.
        on_progress: Called after each step with the steps done and the steps in all.
    Returns:
        The loss at each step, before its update: in nats for logits, 0 … 2 for vectors.
    Raises:
        ArgumentError: `steps` or `rate` is not above 0, the models share weights, all weights
            are frozen, the teacher has fewer heads, a loss is not finite, or the models' outputs
            cannot be compared.
        InputError: the file to resume from is damaged, or about other models, batches or
            settings.
        OutputError: the file cannot be written.
        ShapeError: the models' outputs have different shapes.
    """
    outer, tokenizer = without_compiler(model), tokenizer_of(model, tokenizer)
    model, teacher = (check_model("recover", module) for module in (model, teacher))
    _check(model, teacher, steps, rate)
    inputs = read_batches(texts, outer, tokenizer)
    _check_order(model, teacher, inputs[0])
    settings = {"steps": str(steps), "rate": str(rate), "seed": str(seed)}
    about = settings if resume is None else _about(model, teacher, inputs) | settings
    order = _order(len(inputs), steps, seed)
    with _training(model) as weights, in_evaluation(teacher):
        optimizer = torch.optim.AdamW(weights, lr=rate)
        path = None if resume is None else Path(resume)
        checkpoint = TrainingCheckpoint(
            path, about, weights, optimizer, "recover", "unfinished recovery"
        )
        checkpoint.resume(steps)
        losses = checkpoint.losses
        for step in range(len(losses), steps):
            batch = inputs[order[step]]
            with torch.no_grad():
                target = _output(teacher, batch)
            loss = _distance(_output(model, batch), target, batch.get("attention_mask"))
            losses.append(loss.item())
            _check_finite(losses[step], step, rate)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(weights, _CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate * _rate_share(step, steps)
            optimizer.step()
            checkpoint.save_if_due(steps)
            if on_progress is not None:
                on_progress(step + 1, steps)
    return np.array(losses)


def _about(model: nn.Module, teacher: nn.Module, inputs: Sequence[Inputs]) -> dict[str, str]:
    """What a resumed recovery has in common with the interrupted one."""
    models = {"model": fingerprint(model), "teacher": fingerprint(teacher)}
    settings = {"texts": _digest(inputs), "torch": version("torch")}
    return {"headwise_recovery": "2"} | models | settings


def _digest(batches: Sequence[Inputs]) -> str:
    """A hash of the batches, equal only for equal batches."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for name, value in sorted(batch.items()):
            is_tensor = isinstance(value, torch.Tensor)
            kind = f"{tuple(value.shape)}{value.dtype}" if is_tensor else repr(value)
            digest.update(f"{name}{kind}".encode())
            if is_tensor:
                flat = value.detach().cpu().contiguous().flatten()
                digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _order(batches: int, steps: int, seed: int) -> list[int]:
    """The batch of each step: all of them in each epoch, in a new random order."""
    rng = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while len(order) < steps:
        order += reversed(torch.randperm(batches, generator=rng).tolist())
    return order


def recovering(
    model: nn.Module,
    batches: Sequence[Inputs],
    *,
    reference: Sequence[Inputs] | None = None,
    **options: Any,
) -> Callable[[Sequence[Head]], nn.Module]:
    """Return a `cut` for `prune_curves` that prunes some heads and recovers the smaller model.

    The mean outputs of removed heads are folded into biases. Groups of query heads that become
    uneven are expanded.

    Args:
        batches: What the smaller model is trained on.
        reference: Batches over which the mean outputs are taken; None is `batches`.
        options: As for `recover`.
    """
    mean_batches = batches if reference is None else reference

    def cut(removed: Sequence[Head]) -> nn.Module:
        small = prune(model, list(removed), fold="mean", reference=mean_batches, expand=True)
        recover(small, model, batches, **options)
        return small

    return cut


def _check(model: nn.Module, teacher: nn.Module, steps: int, rate: float) -> None:
    if not is_size(steps) or not rate > 0:
        raise ArgumentError(
            f"recover: {steps=}, {rate=}. Give a whole number of steps and a rate above 0."
        )
    for each in (model, teacher):
        check_weights("recover", each, offloaded=each is teacher)
    teacher_weights = {weight.data_ptr() for weight in teacher.parameters()}
    for name, weight in model.named_parameters():
        if weight.data_ptr() in teacher_weights:
            raise ArgumentError(
                f"recover: {name} is a weight of both models, so training would change the full "
                f"one. Give a copy, as prune makes one."
            )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ArgumentError(
            f"recover: all weights of {type(model).__name__} are frozen. Call requires_grad_() on "
            f"those to be trained."
        )


def _check_order(model: nn.Module, teacher: nn.Module, batch: Inputs) -> None:
    """Refuse a teacher with fewer heads, or with fewer kv heads if it has as many heads."""
    student, full = (_count_heads(module, batch) for module in (model, teacher))
    if full < student:
        kind, which = ("heads", 0) if full[0] < student[0] else ("kv heads", 1)
        raise ArgumentError(
            f"recover: the model to train has {student[which]} {kind}, and its teacher "
            f"{full[which]}. Give the smaller model first: recover(small, full, texts)."
        )


@torch.no_grad()
def _count_heads(model: nn.Module, batch: Inputs) -> tuple[int, int]:
    """How many query and kv heads a model computes in one pass."""

    def record(call: AttentionCall) -> None:
        active.sites.of(call)

    with in_evaluation(model), capture_calls(model, record) as active:
        model(**batch)
    counts = [(site.n_heads, site.n_kv_heads) for site in active.sites.all]
    return sum(heads for heads, _ in counts), sum(kv_heads for _, kv_heads in counts)


def _check_finite(loss: float, step: int, rate: float) -> None:
    if not np.isfinite(loss):
        raise ArgumentError(
            f"recover: the loss of step {step} is {loss}. Give a lower rate than "
            f"{rate:g}, or compute in another dtype."
        )


@contextmanager
def _training(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The weights to train. Restores their gradients afterwards, and after an exception their
    values too."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    before = [(weight.detach().clone(), weight.grad) for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        with differentiable_evaluation(model, weights=True):
            yield weights
    except BaseException:  # KeyboardInterrupt included
        with torch.no_grad():
            for weight, (values, _) in zip(weights, before, strict=True):
                weight.copy_(values)
        raise
    finally:
        for weight, (_, grad) in zip(weights, before, strict=True):
            weight.grad = grad


def _rate_share(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest one."""
    warmup = max(1, round(_WARMUP * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup), 1.0)


def _distance(
    output: tuple[str, Tensor], target: tuple[str, Tensor], mask: Tensor | None
) -> Float[Tensor, ""]:
    """The distance of an output from the full model's, the mean over tokens without padding."""
    (kind, x), (_, y) = output, target
    if x.shape != y.shape:
        raise ShapeError(
            f"recover: the smaller model gives {kind} {tuple(x.shape)}, the full one "
            f"{tuple(y.shape)}. Give models of one vocabulary and size."
        )
    if mask is not None and mask.shape == x.shape[:-1]:
        x, y = x[mask.bool()], y[mask.bool()]
    x, y = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (x, y))
    if kind == "vectors":
        return 1 - F.cosine_similarity(x, y, dim=-1).mean()
    if x.shape[-1] == 1:
        return F.mse_loss(x, y)
    log_probabilities = x.log_softmax(-1), y.log_softmax(-1)
    return F.kl_div(*log_probabilities, reduction="none", log_target=True).sum(-1).mean()


def _output(model: nn.Module, batch: Any) -> tuple[str, Tensor]:
    """The kind of a model's output, "logits" or "vectors", and the output."""
    output = model(**batch)
    logits = output if isinstance(model, MiniGPT) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return "logits", logits
    states = getattr(output, "last_hidden_state", output)
    if not isinstance(states, Tensor):
        raise ArgumentError(
            f"recover: {type(output).__name__} has neither logits nor a vector for each token. "
            f"Load the model with another head."
        )
    return "vectors", states
