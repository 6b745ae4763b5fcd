"""A behaviour of a model: one loss per text, lower is better."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.corpora import Several
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import batches_of

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class BehaviourBatch:
    """A batch of texts and the loss that measures a behaviour on it.

    Attributes:
        inputs: The model's keyword arguments.
        loss: Maps the model's output to one loss per text.
    """

    inputs: Inputs
    loss: Callable[[Any], Float[Tensor, " B"]]


@dataclass(frozen=True)
class Behaviour:
    """Something that a model does, measured by a loss, and the roles that may contribute to it.

    `agreement`, `translation`, `repetition` and `behaviour` make one.

    Attributes:
        name: Its name in tables.
        says: What the loss of a text is, with its unit.
        batches: The inputs and the loss.
        roles: The roles whose rows show its effects.
    Raises:
        ArgumentError: there is no batch.
    """

    name: str
    says: str
    batches: Sequence[BehaviourBatch]
    roles: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.batches:
            raise ArgumentError(
                f"Behaviour: {self.name!r} has no batch of texts. Give texts that show it."
            )


def behaviour(
    name: str,
    batches: Several[Inputs],
    loss: Callable[[Any, Inputs], Tensor],
    *,
    roles: Sequence[str] = (),
    says: str = "a loss of your own",
) -> Behaviour:
    """A behaviour of your own: its loss maps the model's output and the batch to one loss per text.

    Args:
        batches: The model's inputs by name, as for `headwise.importance`.
        loss: Lower is better.
        roles: The roles that it may depend on.
    Raises:
        ArgumentError: there is no batch, or one is a text.
    """

    def loss_of(batch: Inputs) -> Callable[[Any], Tensor]:
        return lambda output: loss(output, batch)

    listed = batches_of(batches, "behaviour", "batches")
    scored = [BehaviourBatch(batch, loss_of(batch)) for batch in listed]
    return Behaviour(name, says, scored, tuple(roles))


def logits_of(output: Any, model: nn.Module) -> Float[Tensor, "B T V"]:
    """The next-token logits of a language model's output.

    Raises:
        UnsupportedError: the output has no logits per token.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None or logits.ndim != 3:
        raise UnsupportedError(
            f"behaviour: {type(model).__name__} gives no logits for each token. Open a language "
            f"model with its language-model head, or define a behaviour of your own."
        )
    return logits


@torch.no_grad()
def check_predicts(model: nn.Module, ids: Sequence[int]) -> None:
    """Refuse a model whose logits depend on later tokens, because they reveal the target.

    Raises:
        UnsupportedError: changing the last token changes earlier logits, or there are no
            logits.
    """
    device = next(model.parameters()).device
    changed = next(token for token in (*ids, 0, 1) if token != ids[-1])
    batch = torch.tensor([[*ids], [*ids[:-1], changed]], device=device)
    logits = logits_of(model(input_ids=batch, attention_mask=torch.ones_like(batch)), model)
    before = logits[:, :-1].float()
    if not torch.allclose(before[0], before[1], rtol=1e-3, atol=1e-3):
        raise UnsupportedError(
            f"behaviour: {type(model).__name__} looks ahead, so it sees the token that it "
            f"should predict. Give a causal model, or define a behaviour of your own."
        )
