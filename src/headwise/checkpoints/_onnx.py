"""Write an encoder as ONNX, whose runtimes need neither torch nor Transformers."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise._extras import require
from headwise.errors import OutputError, UnsupportedError
from headwise.ownership import example_input

# Their CPU kernels compute in these.
_DTYPES = (torch.float32, torch.float16)


def named_arguments(model: Any, batch: Any) -> Mapping[str, Any]:
    """The arguments of a model by name: they may be keywords, a tuple, or a single one."""
    if isinstance(batch, Mapping):
        return batch
    arguments = batch if isinstance(batch, tuple) else (batch,)
    return dict(zip(inspect.signature(model.forward).parameters, arguments, strict=False))


def onnx_inputs(model: Any, batch: Any) -> dict[str, Tensor]:
    """A batch by name, with what a tokenizer gives beside ids, if the model takes it."""
    names = inspect.signature(model.forward).parameters
    given = named_arguments(model, batch)
    inputs = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    ids = inputs.get("input_ids")
    if ids is not None:
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs.setdefault("token_type_ids", torch.zeros_like(ids))
    return {name: x for name, x in inputs.items() if name in names}


def as_onnx(model: Any, _: Any, batch: Any, *__: Any) -> Callable[[Path], None]:
    """The graph of an encoder, its weights and its configuration.

    Batches may have any size, and texts and sounds any length, whatever those of `batch`.
    """
    name = type(model).__name__
    batch = example_input(model) if batch is None else batch
    inputs = onnx_inputs(model, batch)
    if model.can_generate() or "decoder_input_ids" in inputs:
        raise UnsupportedError(
            f"save: format='onnx' is for encoders, and this {name} writes texts: without a cache, "
            f"its graph would read the text again for each token. Choose the format 'gguf', or one "
            f"of Transformers, such as 'headwise' or 'padded'."
        )
    for key, weight in model.named_parameters():
        if weight.dtype not in _DTYPES:
            raise UnsupportedError(
                f"save: ONNX runtimes compute in float32 or float16, and {key} of this {name} is "
                f"{weight.dtype}. Save model.float(), or choose another format."
            )
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx", "save")

    def write(folder: Path) -> None:
        # Where transformers.js, optimum and sentence-transformers look for it.
        path = folder / "onnx" / "model.onnx"
        path.parent.mkdir(exist_ok=True)
        _export(model, inputs).save(path)
        model.config.save_pretrained(folder)

    return write


def _export(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    # A size of one would be taken for a constant, and a single length for the only one.
    example = {
        name: torch.cat([x, x])[:, : -1 if _has_length(x) else None].contiguous()
        for name, x in inputs.items()
    }
    graph, varies = _Tensors(model), torch.export.Dim
    shapes = {
        # How far an image or a spectrogram may vary is for the model to say.
        name: {0: varies.DYNAMIC}
        | dict.fromkeys(range(1, x.ndim), varies.DYNAMIC if x.ndim == 2 else varies.AUTO)
        for name, x in example.items()
    }
    try:
        with in_evaluation(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own names
            return torch.onnx.export(
                graph,
                kwargs={"inputs": example},
                dynamo=True,
                dynamic_shapes={"inputs": shapes},
                input_names=[*example],
                output_names=[*graph(example)],
                verbose=False,
            )
    except Exception as error:  # the exporter raises any exception
        why = error.__cause__ or error  # the exporter's own error says only at which step
        raise OutputError(
            f"save: torch cannot export this {type(model).__name__} as ONNX "
            f"({type(why).__name__}: {first_line(why, 200)}). Choose another format."
        ) from error


def _has_length(x: Tensor) -> bool:
    """Whether the axis after that of the batch is one of tokens or of a sound."""
    return x.ndim == 2 and x.shape[1] > 2


class _Tensors(nn.Module):
    """A model that returns its tensors alone: no cache, and nothing that a graph cannot hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        caches = "use_cache" in inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if caches else {}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = self.model(**inputs, **self.options)
        return {name: x for name, x in outputs.items() if isinstance(x, Tensor)}
