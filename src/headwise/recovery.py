"""Train a smaller model for a short while until it answers more like the full one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.errors import ArgumentError, ShapeError
from headwise.lab import MiniGPT
from headwise.models import check_model, in_evaluation, tokenizer_of
from headwise.scoring import BatchesLike, Inputs, read_batches
from headwise.surgery import prune
from headwise.tables import Head

__all__ = ["recover", "recovering"]

Tell = Callable[[int, int], None]

# The share of the steps in which the learning rate climbs; then it falls to 0.
_WARM = 0.1
_CLIP = 1.0


def recover(
    model: nn.Module,
    teacher: nn.Module,
    batches: BatchesLike,
    *,
    steps: int = 100,
    rate: float = 1e-4,
    tokenizer: Any = None,
    seed: int = 0,
    on_progress: Tell | None = None,
) -> Float64[np.ndarray, " steps"]:
    """Train a smaller model in place, so that it answers more like the full one.

    No labels are needed. Where the models give logits, the Kullback–Leibler divergence of the
    smaller model's prediction from the full one's is made small; of a single number the squared
    difference; where they give a vector for each token, 1 − cosine of the two. Each is a mean
    over tokens, padding aside.

    AdamW trains every weight that is not frozen; dropout is off in both models. Modes, flags and
    gradients are as they were when this returns, and when it raises the weights are too.

    Args:
        model: The smaller model, as from `prune`. Of a `SentenceTransformer`, the transformer in
            it is trained.
        teacher: The full model. It stays as it is.
        batches: Texts or batches, which are read in an order drawn anew in each round.
        steps: How many batches are read.
        rate: The highest learning rate: it climbs for a tenth of the steps, then falls to 0. Few
            steps at a high one do harm: each moves every weight by about as much.
        tokenizer: That of the models, for texts; a `SentenceTransformer` brings its own.
        seed: Decides the order of the batches.
        on_step: Told after each step how many are done, of how many.
    Returns:
        The loss of each step, before it: in nats for logits, 0 … 2 for vectors.
    Raises:
        ArgumentError: `steps` or `rate` is not above 0, the models share weights, all weights
            are frozen, a loss is not finite, or the models give nothing that can be compared.
        ShapeError: the models' answers have different shapes.
    """
    tokenizer = tokenizer_of(model, tokenizer)
    model, teacher = (check_model("recover", one) for one in (model, teacher))
    _check(model, teacher, steps, rate)
    read = read_batches(batches, model, tokenizer)
    rng = torch.Generator().manual_seed(seed)
    turns: list[int] = []
    losses = np.zeros(steps)
    with _learning(model) as weights, in_evaluation(teacher):
        optimizer = torch.optim.AdamW(weights, lr=rate)
        climb = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
        for step in range(steps):
            turns = turns or torch.randperm(len(read), generator=rng).tolist()
            batch = read[turns.pop()]
            with torch.no_grad():
                wanted = _answer(teacher, batch)
            loss = _distance(_answer(model, batch), wanted, batch.get("attention_mask"))
            losses[step] = loss.item()
            if not np.isfinite(losses[step]):
                raise ArgumentError(
                    f"recover: the loss of step {step} is {losses[step]}. Give a lower rate than "
                    f"{rate:g}, or compute in another dtype."
                )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(weights, _CLIP)
            optimizer.step()
            climb.step()
            if on_progress is not None:
                on_progress(step + 1, steps)
    return losses


def recovering(
    model: nn.Module,
    batches: Sequence[Inputs],
    *,
    reference: Sequence[Inputs] | None = None,
    **how: Any,
) -> Callable[[Sequence[Head]], nn.Module]:
    """What `prune_curves` takes as `cut`: prune some heads, then `recover` from the full model.

    The means of the heads are folded into biases. Uneven groups are evened by expanding them.

    Args:
        batches: What the smaller model recovers by.
        reference: Batches over which the means are taken; None is those.
        how: As for `recover`.
    """
    known = batches if reference is None else reference

    def cut(gone: Sequence[Head]) -> nn.Module:
        small = prune(model, list(gone), fold="mean", reference=known, expand=True)
        recover(small, model, batches, **how)
        return small

    return cut


def _check(model: nn.Module, teacher: nn.Module, steps: int, rate: float) -> None:
    if steps < 1 or not rate > 0:
        raise ArgumentError(f"recover: {steps=}, {rate=}. Give numbers above 0.")
    theirs = {weight.data_ptr() for weight in teacher.parameters()}
    for name, weight in model.named_parameters():
        if weight.data_ptr() in theirs:
            raise ArgumentError(
                f"recover: {name} is a weight of both models, so training would move the full one. "
                f"Give a copy, as prune makes one."
            )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ArgumentError(
            f"recover: all weights of {type(model).__name__} are frozen. Call requires_grad_() on "
            f"those that may change."
        )


@reversible
def _learning(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The weights that may change; what stood in their gradients comes back, and on an exception
    what stood in them too."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    before = [(weight.detach().clone(), weight.grad) for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        with in_evaluation(model), torch.inference_mode(False), torch.enable_grad():
            yield weights
    except BaseException:  # an interruption too
        with torch.no_grad():
            for weight, (values, _) in zip(weights, before, strict=True):
                weight.copy_(values)
        raise
    finally:
        for weight, (_, grad) in zip(weights, before, strict=True):
            weight.grad = grad


def _share(step: int, steps: int) -> float:
    """The share of the highest learning rate."""
    warm = max(1, round(_WARM * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm), 1.0)


def _distance(
    mine: tuple[str, Tensor], theirs: tuple[str, Tensor], mask: Tensor | None
) -> Float[Tensor, ""]:
    """How far an answer is from the full model's, the mean over real tokens."""
    (kind, one), (_, two) = mine, theirs
    if one.shape != two.shape:
        raise ShapeError(
            f"recover: the smaller model gives {kind} {tuple(one.shape)}, the full one "
            f"{tuple(two.shape)}. Give models of one vocabulary and size."
        )
    if mask is not None and mask.shape == one.shape[:-1]:
        one, two = one[mask.bool()], two[mask.bool()]
    one, two = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (one, two))
    if kind == "vectors":
        return 1 - F.cosine_similarity(one, two, dim=-1).mean()
    if one.shape[-1] == 1:
        return F.mse_loss(one, two)
    logs = one.log_softmax(-1), two.log_softmax(-1)
    return F.kl_div(*logs, reduction="none", log_target=True).sum(-1).mean()


def _answer(model: nn.Module, batch: Any) -> tuple[str, Tensor]:
    """The logits or vectors that a model gives, and which they are."""
    output = model(**batch)
    logits = output if isinstance(model, MiniGPT) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return "logits", logits
    states = getattr(output, "last_hidden_state", output)
    if not isinstance(states, Tensor):
        raise ArgumentError(
            f"recover: {type(output).__name__} has neither logits nor a vector for each token. "
            f"Open the model with another head."
        )
    return "vectors", states
