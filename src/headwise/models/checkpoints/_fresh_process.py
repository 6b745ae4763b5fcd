"""Open what was written in a process of its own, and let it answer: `python _fresh.py HOW FOLDER`.

HOW is `headwise`, or `transformers` or `sentence-transformers` for those who have not got
headwise: nothing of it is imported then, not even by this file. The folder's `.given.safetensors`
holds what the model is given, `.answer.safetensors` what it answers. A SentenceTransformer encodes
`SENTENCES`.
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

Reader = Literal["headwise", "transformers", "sentence-transformers"]
SENTENCES = ("A man plays a guitar.", "The cat sleeps on the warm roof all day long.")
_GIVEN, _ANSWER = ".given.safetensors", ".answer.safetensors"


def answer_in_fresh_process(reader: Reader, folder: Path, batch: Any = ()) -> list[Tensor] | str:
    """What a fresh process answers that opens a folder; its last words where it cannot.

    Args:
        batch: What the model is given; a SentenceTransformer encodes `SENTENCES` instead.
    """
    command = [sys.executable, __file__, reader, str(folder)]
    # Transformers copies code of a checkpoint before it runs it: not to the user's own place.
    with tempfile.TemporaryDirectory() as copies:
        known = os.pathsep.join(path for path in sys.path if path)
        own = {"PYTHONPATH": known, "HF_MODULES_CACHE": copies, "HF_HUB_OFFLINE": "1"}
        try:
            # Not imported by the fresh process, which may have to do without headwise.
            from headwise._tensors import write_tensors

            write_tensors(_named(batch), folder / _GIVEN)
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["nothing"])[-1]
            tensors = load_file(folder / _ANSWER)
        finally:
            for name in (_GIVEN, _ANSWER):
                (folder / name).unlink(missing_ok=True)
    return [tensors[name] for name in sorted(tensors)]


def _named(batch: Any) -> dict[str, Tensor]:
    """What a model is given, by names; what has none is called by its place."""
    if not isinstance(batch, Mapping):
        batch = {str(at): x for at, x in enumerate(batch if isinstance(batch, tuple) else [batch])}
    return {name: x.cpu().contiguous() for name, x in batch.items()}


def _answer(reader: str, folder: Path) -> None:
    if reader == "sentence-transformers":
        save_file({"000": _encoded(folder)}, folder / _ANSWER)
        return
    model = (_open_ours if reader == "headwise" else _open_theirs)(folder)
    given = load_file(folder / _GIVEN)
    places = [given.pop(name) for name in sorted(given) if name.isdigit()]
    with torch.no_grad():
        output = model(*places, **given)
    values = output.values() if isinstance(output, Mapping) else output
    found = [values] if isinstance(values, Tensor) else list(values)
    numbers = [x for x in found if isinstance(x, Tensor) and x.is_floating_point()]
    save_file({f"{at:03}": x.contiguous() for at, x in enumerate(numbers)}, folder / _ANSWER)


def _open_ours(folder: Path) -> nn.Module:
    from headwise.models import load

    return load(folder)


def _open_theirs(folder: Path) -> nn.Module:
    _forget_ours()
    import transformers

    config = json.loads((folder / "config.json").read_text("utf-8"))
    by_code = _classes_by_code(config)
    name = (by_code or config["architectures"])[0]
    cls = getattr(transformers, name)
    return cls.from_pretrained(folder, trust_remote_code=bool(by_code)).eval()


def _encoded(folder: Path) -> Tensor:
    _forget_ours()
    from sentence_transformers import SentenceTransformer

    config = json.loads((folder / "config.json").read_text("utf-8"))
    by_code = bool(_classes_by_code(config))
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=by_code)
    vectors = model.encode([*SENTENCES], convert_to_tensor=True, show_progress_bar=False)
    return vectors.contiguous()


def _forget_ours() -> None:
    modules: dict[str, Any] = sys.modules
    modules["headwise"] = None  # whatever asks for it fails


def _classes_by_code(config: Mapping[str, Any]) -> list[str]:
    return [name for name in config.get("auto_map", ()) if name != "AutoConfig"]


if __name__ == "__main__":
    _answer(sys.argv[1], Path(sys.argv[2]))
