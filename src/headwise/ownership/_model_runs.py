"""Run a model on a batch, or on a short example made for it, and compare its outputs."""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import PurePath
from reprlib import repr as shortened
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise.errors import ArgumentError, HeadwiseError
from headwise.layer import MultiHeadAttention
from headwise.models import check_weights, device_of, model_inputs, without_adapters

_TOKENS = 5
# How far outputs may differ by rounding in another order, relative to their size.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.no_grad()
def run(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch in evaluation mode, and restore the mode of every module."""
    with in_evaluation(model):
        return call_model(model, batch)


def call_model(model: nn.Module, batch: Any, caller: str = "batch") -> Any:
    """Call a model with keyword arguments, a tuple of arguments, or a single argument.

    A model that draws random numbers draws the same ones in each call; the random state of the
    caller is unchanged.

    Args:
        caller: What an error is about.
    """
    texts = [batch] if isinstance(batch, str) else batch if isinstance(batch, list | tuple) else ()
    for text in texts:
        if isinstance(text, str):
            raise ArgumentError(
                f"{caller}: {text[:40]!r} is a text. Give its token ids, as "
                f'tokenizer(text, return_tensors="pt") does.'
            )
    if not _is_input(batch):
        raise ArgumentError(
            f"{caller}: {shortened(batch)} holds no tensor. Give the model's inputs, as "
            f'tokenizer(text, return_tensors="pt") does.'
        )
    # The generators of the model's devices alone: others are not the model's to draw from.
    cuda = sorted({x.device.index for x in model.parameters() if x.is_cuda})
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(0)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(0)
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)


def _is_input(batch: Any) -> bool:
    """Whether a model may read a batch: what it is made of is not all texts, numbers and paths."""
    if isinstance(batch, Mapping | list | tuple):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return not parts or any(map(_is_input, parts))
    return not isinstance(batch, str | bytes | bytearray | float | int | PurePath | None)


def first_batch(model: nn.Module, reference: Any, caller: str) -> Any:
    """The first batch of a reference, or a made-up one if there is none.

    Raises:
        ArgumentError: the reference is empty or holds texts, or no batch can be made up.
    """
    batches = batches_of(reference, caller)
    return batches[0] if batches else example_input(model)


def batches_of(reference: Any, caller: str, name: str = "reference") -> list[Any]:
    """Batches as a list; a single batch becomes a list of one, None an empty list.

    Args:
        name: The name of the argument, for error messages.
    """
    if isinstance(reference, Mapping | str | bytes | Tensor) or not isinstance(
        reference, Iterable | None
    ):
        reference = [reference]
    batches = [model_inputs(batch) for batch in ([] if reference is None else reference)]
    if reference is not None and not batches:
        raise ArgumentError(f"{caller}: {name} holds no batch. Give one or more.")
    for batch in batches:
        if isinstance(batch, str):
            raise ArgumentError(
                f"{caller}: {name} holds the text {batch[:40]!r}. Give batches, such as a "
                f"tokenizer makes of texts."
            )
        if not _is_input(batch):
            raise ArgumentError(
                f"{caller}: {name} holds {shortened(batch)}. Give batches, such as a tokenizer "
                f"makes of texts."
            )
    return batches


def example_input(model: nn.Module) -> Any:
    """Generate a short batch that a model accepts."""
    check_weights("heads", model, offloaded=True)
    batch = _guess(model)
    try:
        run(model, batch)
    except HeadwiseError:
        raise
    except Exception as error:  # models raise any exception
        inputs = ", ".join(batch) if isinstance(batch, dict) else "vectors"
        raise ArgumentError(
            f"heads: {type(model).__name__} does not run on a made-up input of {inputs} "
            f"({type(error).__name__}: {first_line(error, 120)}). Give reference=[batch], so that "
            f"it can be run once."
        ) from error
    return batch


def _guess(model: nn.Module) -> Any:
    """A batch by the names of the arguments that a model takes."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ArgumentError(f"heads: {type(model).__name__} has no weights. Give a model.")
    vectors = _layer_input(model, parameter)
    if vectors is not None:
        return vectors
    # PEFT wraps a model, and hides the names of its arguments.
    names = inspect.signature(without_adapters(model).forward).parameters
    values = {name: _argument(name, model, parameter) for name in names}
    batch = {name: value for name, value in values.items() if value is not None}
    if not batch:
        raise ArgumentError(
            f"heads: the inputs of {type(model).__name__} cannot be guessed from "
            f"({', '.join(names)}). Give reference=[batch], so that it can be run once."
        )
    return batch


def _layer_input(model: nn.Module, like: Tensor) -> tuple[Tensor, ...] | None:
    """Random vectors for a bare attention or transformer layer; None for other models."""

    def vectors(width: int) -> Tensor:
        x = torch.randn(2, _TOKENS, width, dtype=like.dtype, generator=_seed())
        return x.to(device_of(model))

    if isinstance(model, MultiHeadAttention):
        inputs = vectors(model.d_model), vectors(model.kdim), vectors(model.vdim)
        # Separate keys and values only if the layer cannot attend to its own queries' text.
        return inputs if {model.kdim, model.vdim} != {model.d_model} else inputs[:1]
    # Torch's layer, or our replacement with the same arguments.
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
    """A value for an argument by its name; None if it is optional or cannot be guessed."""
    config: Any = getattr(model, "config", None)
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if name == "input_ids" or (name == "decoder_input_ids" and encoder_decoder):
        return _ids(model).to(device_of(model))
    shape: tuple[int | None, ...] = (None,)
    if name == "pixel_values":
        config = getattr(config, "vision_config", config)
        side = getattr(config, "image_size", None)
        shape = getattr(config, "num_channels", None), side, side
    elif name == "input_features":  # two convolutions, the second of stride 2
        frames = getattr(config, "max_source_positions", None)
        shape = getattr(config, "num_mel_bins", None), frames and 2 * frames
    elif name == "input_values" and hasattr(config, "conv_stride"):  # a sound
        shape = (4 * _TOKENS * prod(config.conv_stride),)
    elif name == "input_values":  # a spectrogram
        shape = getattr(config, "max_length", None), getattr(config, "num_mel_bins", None)
    sizes = [size for size in shape if isinstance(size, int)]
    if len(sizes) < len(shape):
        return None
    return torch.randn(2, *sizes, dtype=like.dtype, generator=_seed()).to(device_of(model))


def _ids(model: nn.Module) -> Int[Tensor, "B T"]:
    """Token ids from the upper half of the vocabulary, because special tokens are in the lower."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    get_embeddings: Any = getattr(model, "get_input_embeddings", None)
    if get_embeddings is not None:
        with suppress(NotImplementedError):  # models with two towers have no single one
            embeddings = [get_embeddings(), *embeddings]
    size = next((x.num_embeddings for x in embeddings if hasattr(x, "num_embeddings")), 2)
    return torch.randint(size // 2, size, (2, _TOKENS), generator=_seed())


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def float_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The floating-point tensors that a model returns in evaluation mode, without its caches."""
    return float_tensors(run(model, batch))


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors among what a module returned."""
    values = output.values() if isinstance(output, Mapping) else output
    outputs = [values] if isinstance(values, Tensor) else list(values)
    return [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]


def differs_from_itself(model: nn.Module, batch: Any) -> bool:
    """Whether outputs for the same batch differ although the model draws the same numbers."""
    return bool(output_difference(float_outputs(model, batch), float_outputs(model, batch)))


def output_difference(actual: list[Tensor], expected: list[Tensor]) -> str:
    """How far two lists of outputs differ, in words; empty if only by rounding."""
    for x, reference in zip(actual, expected, strict=True):
        gap = (x - reference).abs().max().item()
        size = reference.abs().max().item()
        if not gap <= _TOLERANCE.get(reference.dtype, 0.0) * max(size, 1e-6):
            return f"off by {gap:.2g} at a size of {size:.2g}"
    return ""


def random_like(x: Float[Tensor, "*_"]) -> Float[Tensor, "*_"]:
    """Normal random numbers of the same shape, the same in each call."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
