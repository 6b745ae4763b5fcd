"""`save`: a model in a folder, so that it can be loaded again, by headwise or by others."""

from pathlib import Path
from typing import Any, get_args

from tokenizers import Tokenizer
from torch import nn

from headwise.errors import ArgumentError
from headwise.files import folder_beside
from headwise.models import check_model, open_around, write_around
from headwise.surgery.saving._beside import copy_beside, folder_of
from headwise.surgery.saving._check import check_encoding, check_fresh
from headwise.surgery.saving._forms import Format, write_as


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    format: Format = "headwise",
    tokenizer: Any = None,
    source: str | Path | None = None,
    force: bool = False,
) -> Path:
    """Write a model of Hugging Face or of this library, cut or not, into a folder.

    What was written is opened in a fresh process, by its reader alone, and its answer to a short
    text compared before it takes its place. That takes the time to start Python and to open the
    model, and its memory once more. Until then what stood there stays as it was, also if the
    writing is interrupted.

    A model that its configuration describes is written as it is, in whatever format.

    A `SentenceTransformer` is written with all of its modules, and so that `headwise.load` opens
    the transformer in it. Where stock Transformers can open that, or its own code, what
    `SentenceTransformer(folder).encode` gives in a fresh process is compared too, also if the
    modules came from `source` and sentence-transformers is installed.

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
        source: The folder or hub name that the model was opened from. The files beside its
            weights that removing heads does not change are copied: the tokenizer's, those of a
            SentenceTransformer (its modules with their weights, settings and prompts), licences.
            Weights in other formats, pickles, code and README files are not.
        force: Whether what stands at `folder` may be replaced; an empty folder always may.
    Returns:
        The folder.
    Raises:
        ArgumentError: the format is none of these, or `source` is given for a
            `SentenceTransformer`, which brings its own files.
        InputError: `source` cannot be read, or holds a pickle, a link that leads out of it or a
            module with code of its own where a SentenceTransformer needs it.
        UnsupportedError: the class of the model is neither one of transformers nor ours, or the
            model has no such form: it is said why, and what to do.
        OutputError: something stands there and `force` is not given, it cannot be written, or
            what was written does not answer what the model answers.
    """
    if format not in get_args(Format):
        raise ArgumentError(
            f"save: format={format!r}. Choose one of {', '.join(get_args(Format))}."
        )
    inner = check_model("save", model)
    if source is not None and inner is not model:
        raise ArgumentError(
            f"save: source={str(source)!r} for a SentenceTransformer, which brings its own files. "
            f"Leave it out."
        )
    with folder_beside(Path(folder).absolute(), force) as beside:
        if inner is not model:
            write_around(model, beside)
        write_as(format, inner, beside)
        if tokenizer is not None:
            _write_tokenizer(tokenizer, beside)
        if source is not None:
            copy_beside(source, beside)
        check_fresh("headwise" if format == "headwise" else "transformers", beside, inner)
        _check_wrapped(format, beside, model, source)
    return Path(folder)


def _check_wrapped(
    format: Format, folder: Path, model: nn.Module, source: str | Path | None
) -> None:
    """Compare what a SentenceTransformer encodes, where sentence-transformers can open it."""
    ours = format == "headwise" and (folder / "headwise.json").is_file()
    if ours or not (folder / "modules.json").is_file():
        return
    whole = model if source is None else open_around(folder_of(source), model)
    if whole is not None:
        check_encoding(folder, whole)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if isinstance(tokenizer, Tokenizer):  # that of a Mini-GPT
        tokenizer.save(str(folder / "tokenizer.json"))
    else:
        tokenizer.save_pretrained(folder)
