"""A behaviour of a model: one loss per text, lower is better."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.corpora import Several
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import device_of
from headwise.models.ownership import batches_of

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

    `agreement`, `translation`, `repetition`, `name_moving` and `behaviour` make one.

    Attributes:
        name: Its name in tables.
        says: What the loss of a text is, with its unit.
        batches: The inputs and the loss.
        roles: The roles whose rows show its effects.
        labels: By role, what a head with the role is called if the behaviour needs it.
        control: The same number of texts without the behaviour, on which a head that has it
            costs little.
    Raises:
        ArgumentError: there is no batch.
    """

    name: str
    says: str
    batches: Sequence[BehaviourBatch]
    roles: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    control: Sequence[BehaviourBatch] = ()

    def __post_init__(self) -> None:
        if not self.batches:
            raise ArgumentError(
                f"Behaviour: {self.name!r} has no batch of texts. Give texts that show it."
            )
        if self.labels and not self.control:
            raise ArgumentError(
                f"Behaviour: {self.name!r} has labels {dict(self.labels)} and no control. Give "
                f"texts without the behaviour as its control."
            )


def behaviour(
    name: str,
    batches: Several[Inputs],
    loss: Callable[[Any, Inputs], Tensor],
    *,
    roles: Sequence[str] = (),
    says: str = "a loss of your own",
    labels: Mapping[str, str] | None = None,
    control: Several[Inputs] = (),
) -> Behaviour:
    """A behaviour of your own: its loss maps the model's output and the batch to one loss per text.

    Args:
        batches: The model's inputs by name, as for `headwise.importance`.
        loss: Lower is better.
        roles: The roles that it may depend on.
        labels: By role, what a head with the role is called if the behaviour needs it and its
            control does not: `{"to the verb": "agreement"}`.
        control: As many texts without the behaviour, in the same order, with the same loss.
    Raises:
        ArgumentError: there is no batch, one is a text, or there are labels without a control.
    """

    def loss_of(batch: Inputs) -> Callable[[Any], Tensor]:
        return lambda output: loss(output, batch)

    scored, controls = (
        [BehaviourBatch(batch, loss_of(batch)) for batch in listed]
        for listed in (
            batches_of(batches, "behaviour", "batches"),
            batches_of(control, "behaviour", "control") if control else [],
        )
    )
    roles = tuple(dict.fromkeys([*roles, *(labels or {})]))
    return Behaviour(name, says, scored, roles, labels or {}, controls)


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
    device = device_of(model)
    changed = next(token for token in (*ids, 0, 1) if token != ids[-1])
    batch = torch.tensor([[*ids], [*ids[:-1], changed]], device=device)
    logits = logits_of(model(input_ids=batch, attention_mask=torch.ones_like(batch)), model)
    before = logits[:, :-1].float()
    if not torch.allclose(before[0], before[1], rtol=1e-3, atol=1e-3):
        raise UnsupportedError(
            f"behaviour: {type(model).__name__} looks ahead, so it sees the token that it "
            f"should predict. Give a causal model, or define a behaviour of your own."
        )
