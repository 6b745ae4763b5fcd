"""Compare the outputs of a model with those of its checkpoint in a fresh process."""

from pathlib import Path

from torch import Tensor, nn

from headwise.errors import OutputError
from headwise.models.checkpoints._fresh_process import Reader, answer_in_fresh_process
from headwise.models.checkpoints._sentence_transformers import encode_sentences
from headwise.models.ownership import example_input, float_outputs, output_difference


def check_fresh(reader: Reader, folder: Path, model: nn.Module) -> None:
    """Open a folder in a fresh process, and compare its outputs with those of the model.

    Raises:
        OutputError: the folder cannot be opened there, or its outputs differ.
    """
    batch = example_input(model)
    _compare(model, answer_in_fresh_process(reader, folder, batch), float_outputs(model, batch))


def check_encoding(folder: Path, model: nn.Module) -> None:
    """Open a folder with sentence-transformers in a fresh process, and compare its vectors.

    Raises:
        OutputError: the folder cannot be opened there, or its vectors differ.
    """
    vectors = answer_in_fresh_process("sentence-transformers", folder)
    _compare(model, vectors, [encode_sentences(model)])


def _compare(model: nn.Module, actual: list[Tensor] | str, expected: list[Tensor]) -> None:
    problem = actual
    if not isinstance(actual, str):
        problem = output_difference(actual, [x.cpu() for x in expected])
    if problem:
        raise OutputError(
            f"save: {type(model).__name__} was written, but a fresh process says: {problem} "
            f"Nothing was left there; please report it."
        )
