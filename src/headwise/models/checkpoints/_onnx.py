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
from headwise.errors import ArgumentError, OutputError

# Where transformers.js, optimum and sentence-transformers look for it.
ONNX = Path("onnx", "model.onnx")


def onnx_inputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """A batch with the inputs that a tokenizer gives beside ids, if the model takes them."""
    if not isinstance(batch, Mapping):
        raise ArgumentError(
            "save: an ONNX file names its inputs, and reference holds a batch without names. "
            "Give each as a dict of the model's keyword arguments."
        )
    inputs = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
    ids = inputs.get("input_ids")
    if ids is not None:
        config: Any = model.config
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        if getattr(config, "type_vocab_size", 0) > 1:
            inputs.setdefault("token_type_ids", torch.zeros_like(ids))
    known = inspect.signature(model.forward).parameters
    return {name: x for name, x in inputs.items() if name in known}


def write_onnx(model: nn.Module, batch: Any, folder: Path) -> None:
    """Write the graph of a model, its weights and its configuration.

    Batches may have any size and length, whatever those of `batch`.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx", "save")
    inputs = onnx_inputs(model, batch)
    # A size of one would be taken for a constant, and a single length for the only one.
    example = {
        name: torch.cat([x, x])[:, :-1] if x.ndim == 2 and x.shape[1] > 2 else torch.cat([x, x])
        for name, x in inputs.items()
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple(dict.fromkeys(range(min(x.ndim, 2)), dynamic) for x in example.values())
    graph = _Outputs(model, [*example])
    try:
        with in_evaluation(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own names
            names = [*graph.outputs(example)]
            program: Any = torch.onnx.export(
                graph,
                (*example.values(),),
                dynamo=True,
                dynamic_shapes={"values": shapes},
                input_names=[*example],
                output_names=names,
                verbose=False,
            )
    except Exception as error:  # the exporter raises any exception
        why = error.__cause__ or error  # the exporter's own error says only at which step
        raise OutputError(
            f"save: torch cannot export this {type(model).__name__} as ONNX "
            f"({type(why).__name__}: {first_line(why, 200)}). Choose another format."
        ) from error
    path = folder / ONNX
    path.parent.mkdir(exist_ok=True)
    config: Any = model.config
    program.save(path)
    config.save_pretrained(folder)


class _Outputs(nn.Module):
    """A model that returns its tensors alone: no cache, and nothing that the graph cannot hold."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> list[Tensor]:
        return [*self.outputs(dict(zip(self.names, values, strict=True))).values()]

    def outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        caches = "use_cache" in inspect.signature(self.model.forward).parameters
        outputs = self.model(**inputs, **({"use_cache": False} if caches else {}))
        return {name: x for name, x in outputs.items() if isinstance(x, Tensor)}
