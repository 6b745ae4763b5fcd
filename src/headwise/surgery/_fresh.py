"""Load a saved model in a process of its own: `python -m headwise.surgery._fresh FOLDER FILE`.

The file holds what the model was given and what it answered, as safetensors.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwise.errors import OutputError
from headwise.models import load
from headwise.surgery._answer import answer_of, difference

_GIVEN, _ANSWER = "given.", "answer."


def check_fresh(folder: Path, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Load a folder in a fresh process and compare what it answers with what the model does.

    Raises:
        OutputError: it cannot be loaded there, or answers something else.
    """
    tensors = {f"{_GIVEN}{name}": x for name, x in batch.items()}
    tensors |= {f"{_ANSWER}{at:03}": x for at, x in enumerate(answer_of(model, batch))}
    told = folder / ".answer.safetensors"
    try:
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, told)
        command = [sys.executable, "-m", "headwise.surgery._fresh", str(folder), str(told)]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        told.unlink(missing_ok=True)
    if done.returncode:
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["nothing"]
        raise OutputError(
            f"save: {type(model).__name__} was written, but a fresh process says: {lines[-1]} "
            f"Nothing was left there; please report it."
        )


def _main(folder: Path, told: Path) -> str:
    tensors = load_file(told)
    given = {name.removeprefix(_GIVEN): x for name, x in tensors.items() if _GIVEN in name}
    wanted = [tensors[name] for name in sorted(tensors) if _ANSWER in name]
    return difference(answer_of(load(folder), given), wanted)


if __name__ == "__main__":
    apart = _main(*map(Path, sys.argv[1:]))
    print(apart)
    sys.exit(1 if apart else 0)
