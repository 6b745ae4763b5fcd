"""The methods of `importance` and the formats of `save`: commands list them without torch."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

# By name, whether a method scores each text by itself, so that batches of them can be scored apart.
# `scoring.methods` computes them.
METHODS: Mapping[str, bool] = {
    "half-gate": True,
    "gradient": True,
    "curvature": True,
    "ablation": False,  # by the mean over all texts
    "zero-ablation": True,
    "gates": False,
}


class Format(NamedTuple):
    """How a format is written, and what opens it.

    Attributes:
        opened_by: What opens it, for the help of commands.
        prepare: The function that prepares it, as `file:name` in `checkpoints/`. It takes the model
            with its changes, a batch and a tokenizer, refuses what the format cannot hold, and
            returns the function that writes into a folder.
        reader: What opens it in a fresh process, where its outputs are compared; None: nothing.
        marker: A file by which a folder is known to be a model's, so that it may be replaced.
        trust: Whether Transformers opens it with `trust_remote_code=True` alone.
    """

    opened_by: str
    prepare: str
    reader: Literal["headwise", "transformers", "onnxruntime"] | None = "transformers"
    marker: str = "config.json"
    trust: bool = False


FORMATS: Mapping[str, Format] = {
    "headwise": Format("this library", "_formats:as_it_is", "headwise", "headwise.json"),
    "stock": Format("plain Transformers", "_formats:as_stock"),
    "padded": Format(
        "plain Transformers, at the original size, with zeros for removed heads",
        "_formats:as_padded",
    ),
    "remote-code": Format("Transformers with trust_remote_code", "_formats:with_code", trust=True),
    "gguf": Format("llama.cpp", "_gguf:as_gguf", None, "model.gguf"),
    "onnx": Format("ONNX runtimes, which run encoders", "_onnx:as_onnx", "onnxruntime"),
}
# A folder that holds one of these is a model's; the last one is of a SentenceTransformer.
MODEL_FILES = (*dict.fromkeys(format.marker for format in FORMATS.values()), "modules.json")
