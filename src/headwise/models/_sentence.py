"""Models of sentence-transformers: the transformer inside, and the same model around another one.

Nothing of sentence-transformers is imported unless the caller has imported it already.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models._check import check_model, is_sentence_transformer


def around(model: nn.Module, inner: nn.Module) -> nn.Module:
    """A copy of a `SentenceTransformer` around another transformer, which is not copied."""
    return deepcopy(model, {id(check_model("around", model)): inner})


def tokenizer_of(model: nn.Module, tokenizer: Any, needed_by: str = "") -> Any:
    """The tokenizer that was given, or that of a `SentenceTransformer`; None if there is neither.

    Args:
        needed_by: The function that cannot do without one, if it cannot.
    Raises:
        ArgumentError: one is needed, and there is none.
    """
    own: Any = model
    if tokenizer is None and is_sentence_transformer(model):
        return own.tokenizer
    if tokenizer is None and needed_by:
        raise ArgumentError(
            f"{needed_by}: tokenizer=None, and {type(model).__name__} brings none. Give tokenizer=."
        )
    return tokenizer


def sentence_embedding(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> Tensor:
    """What a `SentenceTransformer` makes of the output of its transformer.

    Raises:
        UnsupportedError: it is made of something else than the last layer.
    """
    first, *others = model.children()
    how = getattr(first, "modality_config", {}).get("text", {})
    name = how.get("method_output_name", "last_hidden_state")
    if how.get("method", "forward") != "forward" or name not in (
        "last_hidden_state",
        ["last_hidden_state"],
        ("last_hidden_state",),
    ):
        raise UnsupportedError(
            f"loss: this SentenceTransformer embeds {name!r} of its transformer, and not the last "
            f"layer. Give loss=, a function of the transformer's output and the batch."
        )
    features: Any = {**batch, "token_embeddings": output.last_hidden_state}
    for module in others:
        features = module(features)
    return features["sentence_embedding"]
