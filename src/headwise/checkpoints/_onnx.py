"""Write a model as ONNX, whose runtimes need neither torch nor Transformers."""

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise._packages import require
from headwise.errors import OutputError


def onnx_inputs(model: Any, batch: Any) -> dict[str, Tensor]:
    """A batch by name, with what a tokenizer gives beside ids, if the model takes it."""
    names = inspect.signature(model.forward).parameters
    if not isinstance(batch, Mapping):
        batch = dict(zip(names, batch if isinstance(batch, tuple) else (batch,), strict=False))
    inputs = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    ids = inputs.get("input_ids")
    if ids is not None:
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        if getattr(model.config, "type_vocab_size", 0) > 1:
            inputs.setdefault("token_type_ids", torch.zeros_like(ids))
    return {name: x for name, x in inputs.items() if name in names}


def write_onnx(model: Any, batch: Any, folder: Path) -> None:
    """Write the graph of a model, its weights and its configuration.

    Batches may have any size and length, whatever those of `batch`.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx", "save")
    # A size of one would be taken for a constant, and a single length for the only one.
    example = {
        name: torch.cat([x, x])[:, :-1] if x.ndim == 2 and x.shape[1] > 2 else torch.cat([x, x])
        for name, x in onnx_inputs(model, batch).items()
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {name: dict.fromkeys(range(min(x.ndim, 2)), dynamic) for name, x in example.items()}
    graph = _Tensors(model)
    try:
        with in_evaluation(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own names
            program: Any = torch.onnx.export(
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
    # Where transformers.js, optimum and sentence-transformers look for it.
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    program.save(path)
    model.config.save_pretrained(folder)


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
