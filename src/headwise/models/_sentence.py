"""SentenceTransformer models: their tokenizer and embedding, and copies around a transformer.

sentence-transformers is not imported here; the caller has imported it already.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from headwise._packages import untruncated
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models._check import check_model, is_sentence_transformer
from headwise.models._tokens import check_tokenizer


def around(model: nn.Module, inner: nn.Module) -> nn.Module:
    """A copy of a `SentenceTransformer` around another transformer, which itself is not copied."""
    return deepcopy(model, {id(check_model("around", model)): inner})


def tokenizer_of(model: nn.Module, tokenizer: Any, needed_by: str = "") -> Any:
    """The tokenizer argument, or that of a `SentenceTransformer`; None if there is neither.

    It is without truncation and padding of its own.

    Args:
        needed_by: The name of the calling function if it requires a tokenizer.
    Raises:
        ArgumentError: a tokenizer is required, and there is none.
    """
    encoder: Any = model
    check_tokenizer(tokenizer, needed_by or "encode")
    if tokenizer is None and is_sentence_transformer(model):
        tokenizer = encoder.tokenizer
    if tokenizer is None and needed_by:
        raise ArgumentError(
            f"{needed_by}: tokenizer=None, and {type(model).__name__} has none. Give tokenizer=."
        )
    return None if tokenizer is None else untruncated(tokenizer)


def sentence_embedding(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> Tensor:
    """The embedding that a `SentenceTransformer` computes from the output of its transformer.

    Raises:
        UnsupportedError: it is not computed from the last layer.
    """
    first, *modules = model.children()
    settings = getattr(first, "modality_config", {}).get("text", {})
    name = settings.get("method_output_name", "last_hidden_state")
    if settings.get("method", "forward") != "forward" or name not in (
        "last_hidden_state",
        ["last_hidden_state"],
        ("last_hidden_state",),
    ):
        raise UnsupportedError(
            f"loss: this SentenceTransformer embeds {name!r} of its transformer, and not the last "
            f"layer. Give loss=, a function of the transformer's output and the batch."
        )
    features: Any = {**batch, "token_embeddings": output.last_hidden_state}
    for module in modules:
        features = module(features)
    return features["sentence_embedding"]
