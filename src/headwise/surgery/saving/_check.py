"""Compare what a model answers with what a fresh process makes of what was written of it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwise.errors import OutputError
from headwise.surgery._answer import answer_of, difference
from headwise.surgery.saving import _fresh
from headwise.surgery.saving._fresh import ANSWER, GIVEN, How

__all__ = ["How", "check_fresh"]


def check_fresh(how: How, folder: Path, model: nn.Module, batch: Any) -> None:
    """Open a folder in a fresh process, and compare what it answers with what the model does.

    Raises:
        OutputError: it cannot be opened there, or answers something else.
    """
    wanted = [x.cpu() for x in answer_of(model, batch)]
    try:
        save_file(_named(batch), folder / GIVEN)
        told = _run(how, folder) or difference(_found(folder), wanted)
    finally:
        for name in (GIVEN, ANSWER):
            (folder / name).unlink(missing_ok=True)
    if told:
        raise OutputError(
            f"save: {type(model).__name__} was written, but a fresh process says: {told} "
            f"Nothing was left there; please report it."
        )


def _named(batch: Any) -> dict[str, Tensor]:
    """What a model is given, by names; what has none is called by its place."""
    if not isinstance(batch, Mapping):
        batch = {str(at): x for at, x in enumerate(batch if isinstance(batch, tuple) else [batch])}
    return {name: x.cpu().contiguous() for name, x in batch.items()}


def _run(how: How, folder: Path) -> str:
    """Let a process answer; what it says if it cannot."""
    command = [sys.executable, _fresh.__file__, how, str(folder)]
    # Transformers copies the code that it runs from a checkpoint: not to the user's own place.
    with tempfile.TemporaryDirectory() as copies:
        known = os.pathsep.join(path for path in sys.path if path)
        own = {"PYTHONPATH": known, "HF_MODULES_CACHE": copies, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own)
    lines = done.stderr.strip().splitlines() or ["nothing"]
    return lines[-1] if done.returncode else ""


def _found(folder: Path) -> list[Tensor]:
    tensors = load_file(folder / ANSWER)
    return [tensors[name] for name in sorted(tensors)]
