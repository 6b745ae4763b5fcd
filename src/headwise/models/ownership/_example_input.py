"""A short input for a model, when its heads must be found and nobody gave one."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.errors import ArgumentError
from headwise.layer import MultiHeadAttention
from headwise.models._check import model_inputs

_TOKENS = 5


@torch.no_grad()
def run(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch in evaluation mode, and put every module back into its own mode."""
    with in_evaluation(model):
        return call_model(model, batch)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with its keyword arguments, a tuple of arguments, or the only one.

    Raises:
        ArgumentError: the batch is a text, or holds one.
    """
    texts = [batch] if isinstance(batch, str) else batch if isinstance(batch, list | tuple) else ()
    for text in texts:
        if isinstance(text, str):
            raise ArgumentError(
                f"batch: it is the text {text[:40]!r}. Give what a tokenizer makes of it."
            )
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def batches_of(reference: Any, who: str, name: str = "reference") -> list[Any]:
    """Batches as a list, also where a single one is given; none for None.

    Args:
        name: The argument that holds them.
    Raises:
        ArgumentError: one is a text.
    """
    if isinstance(reference, Mapping | str | Tensor):
        reference = [reference]
    whole = [model_inputs(batch) for batch in reference or ()]
    for one in whole:
        if isinstance(one, str):
            raise ArgumentError(
                f"{who}: {name} holds the text {one[:40]!r}. Give batches, such as a tokenizer "
                f"makes of texts."
            )
    return whole


def example_input(model: nn.Module) -> Any:
    """A short batch of the kind that a model reads.

    Raises:
        ArgumentError: what it reads cannot be guessed.
    """
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ArgumentError(f"heads: {type(model).__name__} has no weights. Give a model.")
    known = _of_layer(model, parameter)
    if known is not None:
        return known
    names = inspect.signature(model.forward).parameters
    found = {name: _argument(name, model, parameter) for name in names}
    batch = {name: value for name, value in found.items() if value is not None}
    if not batch:
        raise ArgumentError(
            f"heads: what {type(model).__name__} reads cannot be guessed from "
            f"({', '.join(names)}). Give reference=[batch], so that it can be run once."
        )
    return batch


def _of_layer(model: nn.Module, like: Tensor) -> tuple[Tensor, ...] | None:
    """What a bare layer reads: vectors."""

    def vectors(width: int) -> Tensor:
        return torch.randn(2, _TOKENS, width, dtype=like.dtype, generator=_seed()).to(like.device)

    if isinstance(model, MultiHeadAttention):
        given = vectors(model.d_model), vectors(model.kdim), vectors(model.vdim)
        # Another text is given only where the layer cannot read its own.
        return given if {model.kdim, model.vdim} != {model.d_model} else given[:1]
    # Torch's layer, or what is called as it is.
    widths: list[Any] = [getattr(model, name, None) for name in ("embed_dim", "kdim", "vdim")]
    if all(isinstance(width, int) for width in widths):
        return tuple(vectors(width) for width in widths)
    norms = [m.normalized_shape[0] for m in model.modules() if isinstance(m, nn.LayerNorm)]
    if isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return (vectors(norms[0]),)
    if isinstance(model, nn.Transformer | nn.TransformerDecoder | nn.TransformerDecoderLayer):
        return vectors(norms[0]), vectors(norms[0])
    return None


def _argument(name: str, model: nn.Module, like: Tensor) -> Tensor | None:
    """A value for an argument, by its name; None where it can be left out, or guessed by nobody."""
    config = getattr(model, "config", None)
    two_stacks = getattr(config, "is_encoder_decoder", False)
    if name == "input_ids" or (name == "decoder_input_ids" and two_stacks):
        return _ids(model).to(like.device)
    shape: tuple[int | None, ...] = (None,)
    if name == "pixel_values":
        config = getattr(config, "vision_config", config)
        side = getattr(config, "image_size", None)
        shape = getattr(config, "num_channels", None), side, side
    elif name == "input_features":  # two convolutions, the second of stride 2
        frames = getattr(config, "max_source_positions", None)
        shape = getattr(config, "num_mel_bins", None), frames and 2 * frames
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) < len(shape):
        return None
    return torch.randn(2, *sizes, dtype=like.dtype, generator=_seed()).to(like.device)


def _ids(model: nn.Module) -> Int[Tensor, "B T"]:
    """Tokens from the upper half of the vocabulary: the lower end holds padding and the like."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    of_input: Any = getattr(model, "get_input_embeddings", None)
    if of_input is not None:
        with suppress(NotImplementedError):  # models of two towers do not say which
            embeddings = [of_input(), *embeddings]
    size = next((one.num_embeddings for one in embeddings if hasattr(one, "num_embeddings")), 2)
    return torch.randint(size // 2, size, (2, _TOKENS), generator=_seed())


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)
