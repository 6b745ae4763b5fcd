"""`importance`: the front door of the methods."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from headwise._evaluation import in_evaluation, without_weight_gradients
from headwise.errors import ArgumentError
from headwise.models import check_model, find_attentions, fingerprint, tokenizer_of
from headwise.scoring._batches import BatchesLike, read_batches
from headwise.scoring._checkpoint import ScoringCheckpoint, digest_of
from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import Loss, find_loss
from headwise.scoring._task_score import Inputs
from headwise.scoring.methods import METHODS, RESUMABLE, Gates, Method
from headwise.tables import Scores

Tell = Callable[[int, int], None]


def importance(
    model: nn.Module,
    batches: BatchesLike,
    method: str | Gates = "half-gate",
    *,
    loss: Loss | str | Callable[[Any, Inputs], Tensor] | None = None,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    rounds: int = 1,
    resume: str | Path | None = None,
    on_progress: Tell | None = None,
) -> Scores:
    """How much each head matters to what a model should keep doing.

    Every head has a gate on its output: 1 leaves it, 0 takes it out. The methods:

    - `half-gate`: |∂loss/∂gate| with all gates at ½; works where the gradient at the full model
      is zero, and counts what heads do together. One backward pass for all heads.
    - `gradient`: the same with all gates at 1.
    - `curvature`: ½‖∂u/∂gate‖² of the embedding `u` of each text, by random directions.
    - `ablation`: what the loss grows by without the head, exactly; its output is replaced by its
      mean over the texts. One forward pass for each head. `zero-ablation`: by zeros.
    - `gates`: the chance that a learned gate stays open although that is penalised; `Gates` has
      the settings. Hundreds of backward passes, and intervals over seeds.

    The model computes in evaluation mode, and has its weights, gradients and flags as they were
    when this returns or raises.

    Args:
        model: Any model whose output projections can be found, or a `SentenceTransformer`
            around one.
        batches: Texts, or batches: mappings of the model's inputs by name.
        method: One of those above, or `Gates(...)`.
        loss: `lm`, `masked-lm`, `label`, `embedding`, or a function of the model's output and
            the batch that gives the loss of each text. None takes the one that goes with the
            class: `lm` for causal models, `masked-lm`, `label` where batches have labels,
            `embedding` for models without a head. The embedding of a `SentenceTransformer` is
            its own; a function is given the output of the transformer in it.
        tokenizer: That of the model, for texts; a `SentenceTransformer` brings its own. A
            text that is too long becomes several.
        max_tokens: The most tokens in one text. None is what the model can read.
        rounds: How often to score. With several, the least important heads go after each, and
            the others are scored anew, since heads back each other up.
        resume: A file in which an ablation keeps what it found. One that was interrupted goes on
            from there, and the file goes when all is found.
        on_step: Told after each step how many are done, of how many in this round.
    Returns:
        The scores, in units of the loss, never below 0 but for the ablations.
    Raises:
        ArgumentError: a method, loss or number of rounds that does not exist or does not fit, or
            `resume` with another method than the ablations.
        InputError: the file to resume is of another model, other texts or another method.
        UnsupportedError: the heads of the model cannot be gated exactly.
    """
    outer, model = model, check_model("importance", model)
    name, how = _method(method)
    if resume is not None and name not in RESUMABLE:
        raise ArgumentError(
            f"importance: resume={str(resume)!r} with method={name!r}, which keeps nothing on its "
            f"way. Give it with {' or '.join(RESUMABLE)}."
        )
    read = read_batches(batches, model, tokenizer_of(outer, tokenizer), max_tokens)
    found = find_loss(loss, outer, read[0])
    mark = fingerprint(model)
    about = {
        "model": mark,
        "texts": digest_of(read),
        "method": name,
        "loss": found.name + _code_of(loss),
    }
    with _held_still(outer):
        attentions = find_attentions(model, read[0])
        kept = ScoringCheckpoint(
            None if resume is None else Path(resume), about | {"rounds": str(rounds)}
        )
        run = GatedModel(model, attentions, found, read, kept=kept)
        values, numbers = _in_rounds(run, how, rounds, on_progress or (lambda done, total: None))
    kept.finish()
    return Scores(
        heads=run.heads,
        kv_heads=run.kv_heads,
        per_text=values,
        rounds=None if rounds == 1 else numbers,
        method=name,
        loss=found.name,
        over="seeds" if isinstance(how, Gates) else "texts",
        model=mark,
        versions={part: version(part) for part in ("headwise", "torch")},
    )


@contextmanager
def _held_still(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, with gradients of gates and none of weights."""
    modes = in_evaluation(model), without_weight_gradients(model)
    with modes[0], modes[1], torch.inference_mode(False), torch.enable_grad():
        yield


def _code_of(loss: Any) -> str:
    """What tells a loss from another one of its name: two lambdas have the same."""
    code = getattr(loss.of if isinstance(loss, Loss) else loss, "__code__", None)
    if code is None:
        return ""
    return f" {blake2b(code.co_code + repr(code.co_consts).encode(), digest_size=4).hexdigest()}"


def _method(method: str | Gates) -> tuple[str, Method]:
    if isinstance(method, Gates):
        return "gates", method
    if method not in METHODS:
        raise ArgumentError(
            f"importance: method={method!r} is none of {', '.join(METHODS)}. Give one of them."
        )
    return method, METHODS[method]


def _in_rounds(
    run: GatedModel, method: Method, rounds: int, tell: Tell
) -> tuple[Float[np.ndarray, "M N"], Int64[np.ndarray, " N"]]:
    """The importance of each head in its round, and the number of its round."""
    heads = len(run.heads)
    if not 1 <= rounds <= heads:
        raise ArgumentError(f"importance: rounds={rounds} for {heads} heads. Give 1 to {heads}.")
    device = next(run.model.parameters()).device
    number = np.full(heads, rounds - 1)  # until a head goes, it stays to the last
    values: Float[np.ndarray, "M N"] = np.zeros((0, heads))
    for now in range(rounds):
        gone = number < now
        scored = method(run, torch.from_numpy(gone).to(device), tell)
        fresh = _finite(scored.double().cpu().numpy())
        values = np.where(gone, values, fresh) if now else fresh
        left = np.flatnonzero(~gone)
        going = ceil(len(left) / (rounds - now))
        number[left[np.argsort(values[:, left].mean(0), kind="stable")[:going]]] = now
    return values, number


def _finite(values: Float[np.ndarray, "M N"]) -> Float[np.ndarray, "M N"]:
    bad = ~np.isfinite(values).all(1)
    if bad.any():
        raise ArgumentError(
            f"importance: scores are not finite in {bad.sum()} of {len(bad)} texts. "
            f"Leave them out, or compute in another dtype."
        )
    return values
