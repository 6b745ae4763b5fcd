"""What a job measures on the texts of a shard: statistics of every head, or scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from operator import add
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._evaluation import in_evaluation
from headwise._memory import halving
from headwise.corpora.streams import windows
from headwise.errors import ArgumentError, HeadError
from headwise.models import device_of
from headwise.models.texts import (
    check_reads_text,
    inputs_of,
    iter_pieces,
    reads_two_texts,
    text_alone,
)
from headwise.scoring import Loss, importance
from headwise.tables import HeadTable, Scores
from headwise.watch import Request, observe

_BATCH_SIZE = 16  # texts in one batch; halved while memory does not suffice for them
# Parts of a request that describe the latest batch, or that are passed for each batch.
_NOT_OF_SHARDS = ("pairs", "spans", "received", "per_query", "maps")
# Methods that score each text by itself. Mean ablation, gates and further rounds need all texts.
_METHODS = ("half-gate", "gradient", "curvature", "zero-ablation")


@dataclass(frozen=True)
class ImportanceRequest:
    """A corpus job that scores heads, in place of computing statistics.

    Attributes:
        method: A method of `importance` that scores each text by itself: half-gate, gradient,
            curvature or zero-ablation.
        loss: The loss, as `importance` takes it; None is that of the model's class.
    Raises:
        ArgumentError: the method is another one.
    """

    method: str = "half-gate"
    loss: Loss | str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ArgumentError(
                f"ImportanceRequest: method={self.method!r} needs all texts, and a shard has only "
                f"its own. Choose from {', '.join(_METHODS)}."
            )


def describe(request: Request | ImportanceRequest) -> dict[str, Any]:
    """A request as JSON; functions by name, classes of tokens with a hash of their ids.

    Raises:
        ArgumentError: it is not a request, or needs more than the texts of a shard.
    """
    if isinstance(request, ImportanceRequest):
        loss = request.loss.of if isinstance(request.loss, Loss) else request.loss
        name = _name_of(loss) if callable(loss) else loss or ""
        return {"kind": "importance", "method": request.method, "loss": name}
    if not isinstance(request, Request):
        raise ArgumentError(
            f"corpus: request={request!r:.60}. Give a Request(...) or an ImportanceRequest(...)."
        )
    for part in _NOT_OF_SHARDS:
        if value := getattr(request, part):
            raise ArgumentError(
                f"corpus: the request has {part}={value!r}, which is passed or read batch by "
                f"batch. Use relations, or watch the model with headwise.observe."
            )
    classes = {
        name: blake2b(repr(sorted(set(ids))).encode(), digest_size=8).hexdigest()
        for name, ids in request.classes.items()
    }
    return {
        "kind": "statistics",
        "names": list(request.names),
        "classes": classes,
        "relations": {name: _name_of(pairs) for name, pairs in request.relations.items()},
        "queries": request.queries,
        "per_text": request.per_text,
    }


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function with a hash of its code, but not of what it closes over."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    digest = blake2b(_code_of(getattr(function, "__code__", None)), digest_size=8).hexdigest()
    return f"{kind.__module__}.{kind.__qualname__} {digest}"


def _code_of(code: Any) -> bytes:
    """Instructions, names and constants of a function and of those inside it."""
    if not isinstance(code, CodeType):
        return repr(code).encode()
    return b"".join([code.co_code, repr(code.co_names).encode(), *map(_code_of, code.co_consts)])


def measure(
    request: Request | ImportanceRequest,
    model: nn.Module,
    tokenizer: Any,
    read: Callable[[], Iterator[str]],
    max_tokens: int | None,
) -> HeadTable | Scores | None:
    """The result on some texts, in memory that does not grow with their number of tokens.

    Args:
        read: Gives the texts; called again if memory runs out.
    Returns:
        None if the texts have no token.
    Raises:
        UnsupportedError: the model cannot be watched or gated exactly, or reads more than text.
    """
    if isinstance(request, ImportanceRequest):
        settings: Any = {"loss": request.loss, "tokenizer": tokenizer, "max_tokens": max_tokens}
        parts = [
            importance(model, window, request.method, **settings)
            for window in windows(read())
            if any(iter_pieces(tokenizer, [(text, None) for text in window], model))
        ]
        return add_up(parts) if parts else None
    check_reads_text("corpus", model)
    own_target, device = reads_two_texts(model), device_of(model)

    def watched(size: int) -> HeadTable | None:
        any_batch = False
        with in_evaluation(model), torch.no_grad(), observe(model, request) as watch:
            for window in windows(read()):
                pairs = [(text, text if own_target else None) for text in window]
                pieces = [*iter_pieces(tokenizer, pairs, model, max_tokens)]
                for batch in inputs_of(pieces, size, device):
                    with text_alone("corpus", model):
                        model(**batch)
                    any_batch = True
            return watch.table() if any_batch else None

    return halving("corpus", watched, _BATCH_SIZE)


def add_up(parts: Sequence[Any]) -> Any:
    """The result on the texts of all parts, in their order.

    Raises:
        HeadError: the parts have different heads.
    """
    first = parts[0]
    if isinstance(first, HeadTable):
        return reduce(add, parts)
    for part in parts:
        if part.heads != first.heads:
            raise HeadError(
                f"corpus: shards have {len(first.heads)} and {len(part.heads)} heads. Run "
                f"them with one model."
            )
    return replace(first, per_text=np.concatenate([part.per_text for part in parts]))
