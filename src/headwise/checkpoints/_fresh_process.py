"""Open a checkpoint in a process of its own and write its outputs: `python FILE READER FOLDER`.

READER is `headwise`, or what users without headwise have: `transformers`, `sentence-transformers`
or `onnxruntime`. Then nothing of headwise is imported, not even by this file. The folder's
`.inputs.safetensors` holds the inputs of the model, `.outputs.safetensors` its outputs. A
SentenceTransformer encodes `SENTENCES`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Reader = Literal["headwise", "transformers", "sentence-transformers", "onnxruntime"]
SENTENCES = ("A man plays a guitar.", "The cat sleeps on the warm roof all day long.")
_INPUTS, _OUTPUTS = ".inputs.safetensors", ".outputs.safetensors"


def answer_in_fresh_process(reader: Reader, folder: Path, batch: Any = ()) -> list[Tensor] | str:
    """The outputs of a checkpoint in a fresh process, or the last line of its error.

    Args:
        batch: The inputs of the model; one of sentence-transformers reads `SENTENCES` instead.
    """
    command = [sys.executable, __file__, reader, str(folder)]
    # Transformers copies code of a checkpoint before it runs it: keep it out of the user's cache.
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        settings = {"PYTHONPATH": path, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1"}
        try:
            # Imported here because the fresh process may have to do without headwise.
            from headwise._tensors import write_tensors

            write_tensors(_by_name(batch), folder / _INPUTS)
            environment = os.environ | settings
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
            if result.returncode:
                return (result.stderr.strip().splitlines() or ["nothing"])[-1]
            tensors = load_file(folder / _OUTPUTS)
        finally:
            for name in (_INPUTS, _OUTPUTS):
                (folder / name).unlink(missing_ok=True)
    return [tensors[name] for name in sorted(tensors)]


def _by_name(batch: Any) -> dict[str, Tensor]:
    """The inputs of a model by name; positional arguments are named by their index."""
    from headwise.errors import ArgumentError

    if not isinstance(batch, Mapping):
        arguments = batch if isinstance(batch, tuple) else [batch]
        batch = {str(index): x for index, x in enumerate(arguments)}
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"save: the input {name} is a {type(x).__name__}. Give a reference of tensors "
                f"alone."
            )
    return {name: x.detach().cpu().contiguous() for name, x in batch.items()}


def _write_outputs(reader: str, folder: Path) -> None:
    inputs = load_file(folder / _INPUTS)
    output: Any
    if reader == "sentence-transformers":
        output = _open_with_sentence_transformers(folder)
    elif reader == "onnxruntime":
        import onnxruntime

        path, on_cpu = folder / "onnx" / "model.onnx", ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(path, providers=on_cpu)
        values = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        output = [torch.tensor(x) for x in values]
    else:
        model = (_open_with_headwise if reader == "headwise" else _open_with_transformers)(folder)
        arguments = [inputs.pop(name) for name in sorted(inputs) if name.isdigit()]
        torch.manual_seed(0)  # as in `call_model`
        with torch.no_grad():
            output = model(*arguments, **inputs)
    values = output.values() if isinstance(output, Mapping) else output
    outputs = [values] if isinstance(values, Tensor) else list(values)
    floats = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
    named = {f"{index:03}": x.contiguous() for index, x in enumerate(floats)}
    save_file(named, folder / _OUTPUTS)


def _open_with_headwise(folder: Path) -> nn.Module:
    from headwise.checkpoints import load

    return load(folder)


def _open_with_transformers(folder: Path) -> nn.Module:
    _block_headwise()
    import transformers

    config = json.loads((folder / "config.json").read_text("utf-8"))
    remote = _remote_classes(config)
    name = (remote or config["architectures"])[0]
    cls = getattr(transformers, name)
    return cls.from_pretrained(folder, trust_remote_code=bool(remote)).eval()


def _open_with_sentence_transformers(folder: Path) -> Tensor:
    _block_headwise()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    remote = bool(_remote_classes(config))
    return encode_sentences(
        sentence_class(folder)(str(folder), device="cpu", trust_remote_code=remote)
    )


def sentence_class(folder: Path) -> Any:
    """The class of sentence-transformers that a folder was written by.

    Raises:
        ImportError: the package is not installed.
    """
    import sentence_transformers

    path = folder / "config_sentence_transformers.json"
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return getattr(sentence_transformers, config.get("model_type", "SentenceTransformer"))


def encode_sentences(model: Any) -> Tensor:
    """What a model of sentence-transformers makes of `SENTENCES`: their vectors, or the score of
    the pair."""
    if hasattr(model, "predict"):
        return model.predict([SENTENCES], convert_to_tensor=True, show_progress_bar=False)
    vectors = model.encode([*SENTENCES], convert_to_tensor=True, show_progress_bar=False)
    return torch.cat(vectors) if isinstance(vectors, list) else vectors.to_dense()


def _block_headwise() -> None:
    modules: dict[str, Any] = sys.modules
    modules["headwise"] = None  # every import of it fails


def _remote_classes(config: Mapping[str, Any]) -> list[str]:
    return [name for name in config.get("auto_map", ()) if name != "AutoConfig"]


if __name__ == "__main__":
    _write_outputs(sys.argv[1], Path(sys.argv[2]))
