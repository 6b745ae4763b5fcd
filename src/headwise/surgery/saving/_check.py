"""Compare what a model answers with what a fresh process makes of what was written of it."""

from pathlib import Path

from torch import Tensor, nn

from headwise.errors import OutputError
from headwise.models import Reader, answer_in_fresh_process, encode_sentences, example_input
from headwise.surgery._outputs import answer_of, difference


def check_fresh(reader: Reader, folder: Path, model: nn.Module) -> None:
    """Open a folder in a fresh process, and compare what it answers with what the model does.

    Raises:
        OutputError: it cannot be opened there, or answers something else.
    """
    batch = example_input(model)
    _compare(model, answer_in_fresh_process(reader, folder, batch), answer_of(model, batch))


def check_encoding(folder: Path, model: nn.Module) -> None:
    """Open a folder with sentence-transformers in a fresh process, and compare what it encodes.

    Raises:
        OutputError: it cannot be opened there, or gives other vectors than `model`.
    """
    _compare(
        model, answer_in_fresh_process("sentence-transformers", folder), [encode_sentences(model)]
    )


def _compare(model: nn.Module, found: list[Tensor] | str, answer: list[Tensor]) -> None:
    wanted = [x.cpu() for x in answer]
    told = found if isinstance(found, str) else difference(found, wanted)
    if told:
        raise OutputError(
            f"save: {type(model).__name__} was written, but a fresh process says: {told} "
            f"Nothing was left there; please report it."
        )
