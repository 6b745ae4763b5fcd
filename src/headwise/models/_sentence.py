"""Models of sentence-transformers: the transformer inside, and the same model around another one.

Nothing of sentence-transformers is imported unless the caller has imported it already, or a folder
written for it is checked.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models._check import check_model, is_sentence_transformer, place_of
from headwise.models.checkpoints import SENTENCES
from headwise.models.ownership import in_evaluation


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


def write_around(model: nn.Module, folder: Path) -> None:
    """Write all of a `SentenceTransformer` but the weights of the transformer in it.

    Raises:
        UnsupportedError: one of its modules can only be written as a pickle.
    """
    inner: Any = check_model("save", model)
    own: Any = around(model, _Unwritten(inner.config))
    own.save(str(folder), create_model_card=False)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
            raise UnsupportedError(
                f"save: a module of this SentenceTransformer writes {path.relative_to(folder)}, a "
                f"pickle, which can run code. Save the transformer inside it."
            )


class _Unwritten(nn.Module):
    """Stands for a transformer whose weights are written by others."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        return


@torch.no_grad()
def encode_sentences(model: nn.Module) -> Float[Tensor, "B d"]:
    """The vectors that a `SentenceTransformer` gives for a few sentences."""
    own: Any = model
    with in_evaluation(model):
        vectors = own.encode([*SENTENCES], convert_to_tensor=True, show_progress_bar=False)
    return vectors.cpu()


def open_around(folder: Path, inner: nn.Module) -> nn.Module | None:
    """The `SentenceTransformer` of a folder around another transformer.

    Returns:
        None where sentence-transformers is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    device = str(next(inner.parameters()).device)
    whole = SentenceTransformer(str(folder), device=device, local_files_only=True)
    whole.set_submodule(place_of(whole, "save"), inner)
    return whole
