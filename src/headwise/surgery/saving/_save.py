"""`save`: a model in a folder, so that it can be loaded again, by headwise or by others."""

from pathlib import Path
from typing import Any, get_args

from tokenizers import Tokenizer
from torch import nn

from headwise.errors import ArgumentError
from headwise.surgery.saving._check import check_fresh
from headwise.surgery.saving._folder import folder_beside
from headwise.surgery.saving._forms import Format, write_as


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    format: Format = "headwise",
    tokenizer: Any = None,
    force: bool = False,
) -> Path:
    """Write a model of Hugging Face or of this library, cut or not, into a folder.

    What was written is opened in a fresh process, by its reader alone, and its answer to a short
    text compared before it takes its place. That takes the time to start Python and to open the
    model, and its memory once more. Until then what stood there stays as it was, also if the
    writing is interrupted.

    A model that its configuration describes is written as it is, in whatever format.

    Args:
        format: Who can open it.
            `"headwise"`: `headwise.load`. Stock weights and configuration, and `headwise.json` with
            what each layer has kept.
            `"stock"`: stock Transformers, and all that reads its models. Only where each layer has
            kept as many heads and a configuration of the class can say so; a Llama that takes
            no such number is written as the Mistral that computes the same.
            `"padded"`: the same. As large and slow as before: zeros stand for the heads that went.
            `"remote-code"`: Transformers under `trust_remote_code=True`, and `headwise.load`.
            The folder brings the code that opens it.
        tokenizer: Is saved beside the model, so that both are found together.
        force: Whether what stands at `folder` may be replaced; an empty folder always may.
    Returns:
        The folder.
    Raises:
        ArgumentError: the format is none of these.
        UnsupportedError: the class of the model is neither one of transformers nor ours, or the
            model has no such form: it is said why, and what to do.
        OutputError: something stands there and `force` is not given, it cannot be written, or
            what was written does not answer what the model answers.
    """
    if format not in get_args(Format):
        raise ArgumentError(
            f"save: format={format!r}. Choose one of {', '.join(get_args(Format))}."
        )
    with folder_beside(Path(folder).absolute(), force) as beside:
        write_as(format, model, beside)
        if tokenizer is not None:
            _write_tokenizer(tokenizer, beside)
        check_fresh("headwise" if format == "headwise" else "transformers", beside, model)
    return Path(folder)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if isinstance(tokenizer, Tokenizer):  # that of a Mini-GPT
        tokenizer.save(str(folder / "tokenizer.json"))
    else:
        tokenizer.save_pretrained(folder)
