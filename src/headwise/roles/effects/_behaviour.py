"""What a model does, as one number for each of some texts: the less, the better it does."""

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
class Question:
    """Some texts as a model reads them at once.

    Attributes:
        inputs: The model's keyword arguments.
        loss: From what the model gives to a number for each text: the less, the better.
    """

    inputs: Inputs
    loss: Callable[[Any], Float[Tensor, " B"]]


@dataclass(frozen=True)
class Behaviour:
    """Something that a model does, and the roles that may be what it takes.

    `agreement`, `translation`, `repetition` and `behaviour` make one.

    Attributes:
        name: What tables call it.
        says: What the number of a text is, with its unit.
        questions: What the model reads, and how it is judged.
        roles: The roles beside which its effects stand.
    Raises:
        ArgumentError: it has no question.
    """

    name: str
    says: str
    questions: Sequence[Question]
    roles: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.questions:
            raise ArgumentError(
                f"Behaviour: {self.name!r} asks nothing of any text. Give texts that show it."
            )


def behaviour(
    name: str,
    batches: Several[Inputs],
    loss: Callable[[Any, Inputs], Tensor],
    *,
    roles: Sequence[str] = (),
    says: str = "a loss of your own",
) -> Behaviour:
    """A behaviour of your own: from the model's output and the batch to one number for each text.

    Args:
        batches: The model's inputs by name, as for `headwise.importance`.
        loss: The less, the better the model does.
        roles: The roles that it may depend on.
    Raises:
        ArgumentError: there is no batch, or one is a text.
    """

    def judged(batch: Inputs) -> Callable[[Any], Tensor]:
        return lambda output: loss(output, batch)

    listed = batches_of(batches, "behaviour", "batches")
    questions = [Question(batch, judged(batch)) for batch in listed]
    return Behaviour(name, says, questions, tuple(roles))


def logits_of(output: Any, model: nn.Module) -> Float[Tensor, "B T V"]:
    """What a language model says of the next token.

    Raises:
        UnsupportedError: there is nothing of that kind.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None or logits.ndim != 3:
        raise UnsupportedError(
            f"behaviour: {type(model).__name__} gives no logits for each token. Open a language "
            f"model with its head, or make a behaviour of your own."
        )
    return logits


@torch.no_grad()
def check_predicts(model: nn.Module, ids: Sequence[int]) -> None:
    """Refuse a model that sees what it should predict.

    Raises:
        UnsupportedError: another last token changes what is said before it, or there are no
            logits.
    """
    device = next(model.parameters()).device
    other = next(one for one in (*ids, 0, 1) if one != ids[-1])
    both = torch.tensor([[*ids], [*ids[:-1], other]], device=device)
    logits = logits_of(model(input_ids=both, attention_mask=torch.ones_like(both)), model)
    before = logits[:, :-1].float()
    if not torch.allclose(before[0], before[1], rtol=1e-3, atol=1e-3):
        raise UnsupportedError(
            f"behaviour: {type(model).__name__} looks ahead, so it sees the very token that it "
            f"should predict. Give a causal model, or make a behaviour of your own."
        )
