"""Write and open a SentenceTransformer around its transformer.

sentence-transformers is imported only to check a folder that was written for it.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.errors import UnsupportedError
from headwise.models._model import around, check_model, device_of, transformer_name
from headwise.models.checkpoints._fresh_process import SENTENCES


def write_around(model: nn.Module, folder: Path) -> None:
    """Write a `SentenceTransformer` without the weights of the transformer in it.

    Raises:
        UnsupportedError: a module can only be written as a pickle.
    """
    inner: Any = check_model("save", model)
    outer: Any = around(model, _Unwritten(inner.config))
    outer.save(str(folder), create_model_card=False)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
            raise UnsupportedError(
                f"save: a module of this SentenceTransformer writes {path.relative_to(folder)}, a "
                f"pickle, which can run code. Save the transformer inside it."
            )


class _Unwritten(nn.Module):
    """A placeholder for the transformer, whose weights are written elsewhere."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        return


@torch.no_grad()
def encode_sentences(model: nn.Module) -> Float[Tensor, "B d"]:
    """The vectors of a `SentenceTransformer` for `SENTENCES`."""
    encoder: Any = model
    with in_evaluation(model):
        vectors = encoder.encode([*SENTENCES], convert_to_tensor=True, show_progress_bar=False)
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
    device = str(device_of(inner))
    outer = SentenceTransformer(str(folder), device=device, local_files_only=True)
    outer.set_submodule(transformer_name(outer, "save"), inner)
    return outer
