"""`save`: write a model into a folder that headwise or other libraries can load."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise._choices import FORMATS, MODEL_FILES
from headwise._display import type_of
from headwise._evaluation import in_evaluation
from headwise._extras import is_tokenizer_of_rust
from headwise.checkpoints._formats import prepare
from headwise.checkpoints._fresh_process import (
    Reader,
    answer_in_fresh_process,
    encode_sentences,
    sentence_class,
)
from headwise.checkpoints._onnx import named_arguments, onnx_inputs
from headwise.checkpoints._source_files import copy_source_files, source_files, source_folder
from headwise.errors import ArgumentError, OutputError, UnsupportedError
from headwise.files import as_path, folder_beside
from headwise.models import (
    around,
    check_model,
    check_weights,
    device_of,
    progress_bar_in_terminals_only,
    transformer_name,
    without_compiler,
)
from headwise.models.texts import check_tokenizer
from headwise.ownership import example_input, first_batch, float_outputs, output_difference


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    format: str | None = None,
    tokenizer: Any = None,
    source: str | Path | None = None,
    reference: Any = None,
    force: bool = False,
) -> Path:
    """Write a model of Hugging Face or of this library, pruned or not, into a folder.

    Before the new folder takes its place, a fresh process opens it with the intended library
    alone, and its outputs for a short text are compared with those of the model. That takes the
    time to start Python and to open the model, and the memory of a second copy. Until then an
    existing folder stays unchanged, also if the writing is interrupted.

    A model that its configuration describes is written unchanged in every format.

    A model of sentence-transformers is written with all of its modules; `headwise.load` opens the
    transformer in it. Where the folder opens without headwise, the vectors of
    `SentenceTransformer(folder).encode` in a fresh process are compared too, also if the modules
    come from `source` and sentence-transformers is installed.

    Args:
        format: What opens the folder, by a name that `headwise prune --help` lists and the page
            "Formats" compares. None is `"headwise"`, for `load`; for a model of
            sentence-transformers, which refuses that, `"stock"` if it fits, or `"remote-code"`.
        tokenizer: A tokenizer to save in the same folder.
        source: The folder or hub name that the model was loaded from. Files beside its weights
            that stay valid when heads are removed are copied: the tokenizer's, those of a
            SentenceTransformer (its modules with their weights, settings and prompts), licenses.
            Weights in other formats, pickles, code and README files are not.
        reference: Batches, each the model's keyword arguments, a tuple of arguments or a single
            argument: tensors alone. The outputs for the first one are compared. None compares
            those for a short made-up input.
        force: Whether a model's folder at `folder` may be replaced; an empty folder always may,
            and one with other files never.
    Returns:
        The folder.
    Raises:
        ArgumentError: the format is not one of these, `source` is given for a
            `SentenceTransformer`, which brings its own files, the reference is empty or holds
            something other than tensors, or there is none and no input can be made up.
        InputError: `source` cannot be read, or holds a pickle, a link that leads out of it or a
            module with code of its own where a SentenceTransformer needs it.
        UnsupportedError: the class of the model is neither one of transformers nor ours, or the
            model cannot be expressed in the format.
        OutputError: `folder` exists and `force` is False or it is not a model's, it cannot be
            written, or the outputs of the checkpoint differ from those of the model.
    """
    if format is None:
        format = choose_format(model, source)
    if format not in FORMATS:
        raise ArgumentError(f"save: format={format!r}. Choose one of {', '.join(FORMATS)}.")
    target = as_path("save", folder)
    inner = check_model("save", model)
    model = without_compiler(model)
    if source is not None and inner is not model:
        raise ArgumentError(
            f"save: source={str(source)!r} for a {type(model).__name__}, which brings its own "
            f"files. Leave it out."
        )
    _check_weights(inner)
    check_tokenizer(tokenizer, "save")
    batch = None if reference is None else first_batch(inner, reference, "save")
    with folder_beside(target.absolute(), force, MODEL_FILES) as beside:
        if inner is not model:
            _write_around(model, inner, beside)
        with progress_bar_in_terminals_only():
            prepare(format, inner, batch, tokenizer)(beside)
        if is_tokenizer_of_rust(tokenizer):  # the one of a Mini-GPT
            tokenizer.save(str(beside / "tokenizer.json"))
        elif tokenizer is not None:
            tokenizer.save_pretrained(beside)
        if source is not None:
            copy_source_files(source, beside)
        reader = FORMATS[format].reader
        if reader is not None:
            check_fresh(reader, beside, inner, batch)
        is_stock = reader == "headwise" and not (beside / "headwise.json").is_file()
        if (reader == "transformers" or is_stock) and (beside / "modules.json").is_file():
            whole = model if source is None else _open_around(source_folder(source), model)
            if whole is not None:
                check_encoding(beside, whole)
    return target


def choose_format(model: nn.Module, source: str | Path | None = None) -> str:
    """The format that `save` writes a model in where none is named."""
    inner = check_model("save", model)
    is_whole = inner is not without_compiler(model)
    if is_whole or (source is not None and "modules.json" in source_files(source)):
        for format in ("stock", "remote-code"):  # which sentence-transformers opens
            with suppress(UnsupportedError):
                prepare(format, inner)
                return format
    return "headwise"


def _check_weights(model: nn.Module) -> None:
    """Refuse weights that no folder of this library could hold."""
    for name, module in model.named_modules():
        # A tuner of PEFT may have been put into a model that is none of its own classes.
        if hasattr(module, "peft_config") or type(module).__module__.startswith("peft.tuners"):
            raise UnsupportedError(
                f"save: {name or type(model).__name__} holds adapters. Merge them first, as "
                f"merge_and_unload() of PEFT does, or save them with PEFT."
            )
    check_weights("save", model)
    quantizer = getattr(model, "hf_quantizer", None)
    # Transformers refuses to write what such a quantizer has opened, plain floats as well.
    if quantizer is not None and not quantizer.is_serializable():
        cls = type(model).__name__
        raise UnsupportedError(
            f"save: {cls} was opened by {type(quantizer).__name__}, which writes nothing back. If "
            f"it came from a GGUF file, open it with headwise.load, whose weights are floats."
        )
    for name, value in model.state_dict().items():
        if type(value) is not Tensor or value.is_quantized:
            raise UnsupportedError(
                f"save: {name} is {type_of(value)}, as weights that are quantized or "
                f"sharded are. Save the model before it is quantized, or gather its weights first."
            )


def check_fresh(reader: Reader, folder: Path, model: nn.Module, batch: Any = None) -> None:
    """Open a folder in a fresh process, and compare its outputs with those of the model.

    A process that has imported headwise, or holds the model, could open what no other one can.
    """
    batch = example_input(model) if batch is None else batch
    if reader == "onnxruntime":
        batch = onnx_inputs(model, batch)
    actual, expected = answer_in_fresh_process(reader, folder, batch), float_outputs(model, batch)
    if not isinstance(actual, str):
        actual = [_without_padding(x, model, batch) for x in actual]
    _compare(model, actual, [_without_padding(x, model, batch) for x in expected])


def _without_padding(output: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """An output with zeros at padding tokens, where implementations of attention differ."""
    named = named_arguments(model, batch)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and output.shape[:2] == mask.shape:
            real = mask.bool().to(output.device).reshape(*mask.shape, *[1] * (output.ndim - 2))
            output = output.where(real, 0)
    return output


def check_encoding(folder: Path, model: nn.Module) -> None:
    """Open a folder with sentence-transformers in a fresh process, and compare its vectors."""
    with torch.no_grad(), in_evaluation(model):
        expected = encode_sentences(model)
    _compare(model, answer_in_fresh_process("sentence-transformers", folder), [expected])


def _compare(model: nn.Module, actual: list[Tensor] | str, expected: list[Tensor]) -> None:
    problem = actual
    if not isinstance(actual, str):
        problem = output_difference(actual, [x.cpu() for x in expected])
    if problem:
        raise OutputError(
            f"save: {type(model).__name__} was written, but its files do not open right in a "
            f"fresh process ({problem}). They were removed; please report it."
        )


def _write_around(model: nn.Module, inner: nn.Module, folder: Path) -> None:
    """Write a model of sentence-transformers without the weights of the transformer in it."""
    unwritten: Any = nn.Module()  # in place of the transformer, whose weights `save` writes
    unwritten.config, unwritten.save_pretrained = inner.config, lambda *_, **__: None
    outer: Any = around(model, unwritten)
    outer.save(str(folder), create_model_card=False)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
            raise UnsupportedError(
                f"save: a module of this {type(model).__name__} writes "
                f"{path.relative_to(folder)}, a pickle, which can run code. Save the transformer "
                f"inside it."
            )


def _open_around(folder: Path, inner: nn.Module) -> nn.Module | None:
    """The model of a folder of sentence-transformers around another transformer; None where the
    package is not installed."""
    try:
        cls = sentence_class(folder)
    except ImportError:
        return None
    outer: nn.Module = cls(str(folder), device=str(device_of(inner)), local_files_only=True)
    outer.set_submodule(transformer_name(outer, "save"), inner)
    return outer
