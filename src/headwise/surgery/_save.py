"""Write a model that heads were cut out of into a folder, so that it can be loaded again."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import OutputError
from headwise.models import describe_smaller, example_of
from headwise.surgery._fresh import check_fresh


def save(
    model: nn.Module, folder: str | Path, *, tokenizer: Any = None, force: bool = False
) -> Path:
    """Write a model of Hugging Face, cut or not, into a folder that `headwise.load` opens.

    The folder holds what stock transformers writes, and `headwise.json` with all that the
    configuration does not say: the shapes of the weights and the counts of heads of each layer.
    A model that its configuration describes gets no such file: stock transformers loads it.
    What was written is loaded in a fresh process and its answer compared before it takes its
    place; until then what stood there stays as it was, also if the writing is interrupted.

    Args:
        tokenizer: Is saved beside the model, so that both are found together.
        force: Whether what stands at `folder` may be replaced.
    Returns:
        The folder.
    Raises:
        UnsupportedError: the class of the model is not one of transformers.
        OutputError: something stands there and `force` is not given, it cannot be written, or
            what was written does not answer what the model answers.
    """
    about = describe_smaller(model)
    with _folder_beside(Path(folder), force) as beside:
        model.save_pretrained(beside)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        if about is not None:
            (beside / "headwise.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        check_fresh(beside, model, example_of(model))
    return Path(folder)


@contextmanager
def _folder_beside(target: Path, force: bool) -> Iterator[Path]:
    """A folder to write into, which takes the place of `target` when the block ends well.

    Raises:
        OutputError: something stands there and `force` is not given, or it cannot be written.
    """
    if target.exists() and not force:
        raise OutputError(f"save: {target} exists. Choose another folder, or say force=True.")
    if target.exists() and not target.is_dir():
        raise OutputError(f"save: {target} is a file. Name a folder.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    except OSError as error:
        raise OutputError(
            f"save: {target} cannot be written ({error.strerror}). Choose another place."
        ) from error
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            if old.exists():
                os.replace(old, target)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
