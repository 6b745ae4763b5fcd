"""What the options of a command name: texts and pairs, models, statistics.

This file imports what is heavy, so a command imports it when it runs.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from headwise._display import counted, first_line
from headwise._extras import require
from headwise.checkpoints import load, load_processor, load_tokenizer
from headwise.cli._print import note_input
from headwise.corpora import SentencePair, read_parallel, read_texts
from headwise.errors import ArgumentError, InputError
from headwise.models import check_device
from headwise.models.texts import TOKEN_CLASSES, check_reads_text, encode, token_classes
from headwise.tables import save_figure
from headwise.watch import DEFAULT, Request

STANDARD_INPUT = Path("-")
# The first line of a saved CSV file, or the first key of a JSON file.
_TABLE_STARTS = ('# {"headwise', '{\n "headwise', '{\n  "format": "headwise')
_TEXT_ADVICE = {
    "JSON": "Write its texts to a file, one per line. headwise observe --data reads the texts of "
    "JSON lines, and roles --spans annotated texts.",
    "a table": "Write its column of texts to a file, one per line. prune --pairs and importance "
    "--pairs read sentence,sentence,similarity, and headwise observe --data a column of Parquet.",
    "CoNLL-U": "Name it with roles --conllu, or write its sentences to a file, one per line.",
}
_KINDS = {".csv": "a table", ".tsv": "a table", ".conllu": "CoNLL-U"}
_KINDS |= dict.fromkeys((".json", ".jsonl", ".ndjson"), "JSON")
_COLUMNS, _PANEL = 3, (4.2, 3.0)  # of a figure; inches

Text = TypeVar("Text")
Texts = list[str] | list[SentencePair]


class _StandardInput(BytesIO):
    """What standard input holds; messages call it by its name."""

    def __str__(self) -> str:
        return "standard input"


def _opened(path: Path) -> Path | _StandardInput:
    return _StandardInput(sys.stdin.buffer.read()) if path == STANDARD_INPUT else path


def draw_texts(texts: list[Text], seed: int | None, max_texts: int | None) -> list[Text]:
    """All texts, or --max-texts of them, in the order of the file."""
    if max_texts is None or max_texts >= len(texts):
        return texts
    # Drawn at random: the beginning of a file is rarely like the rest of it.
    drawn = random.Random(seed or 0).sample(range(len(texts)), max_texts)
    return [texts[index] for index in sorted(drawn)]


def read_drawn_texts(
    path: Path, seed: int | None, max_texts: int | None, paragraphs: bool | None
) -> list[str]:
    """The texts of a file, or --max-texts of them."""
    return draw_texts(read_text_file(path, paragraphs), seed, max_texts)


def read_text_file(path: Path, paragraphs: bool | None) -> list[str]:
    """The texts of a file, or of standard input for `-`; a note says what was taken for one."""
    texts = plain_texts(path, paragraphs=bool(paragraphs))
    name = "standard input" if path == STANDARD_INPUT else path
    unit = "paragraph" if paragraphs else "line"
    note_input(f"{name}: {counted(len(texts), 'text')}, one per {unit}")
    return texts


def plain_texts(path: Path, *, paragraphs: bool) -> list[str]:
    """The texts of a file, or of standard input for `-`.

    Raises:
        InputError: the file holds no texts, is a table that headwise saved, or holds JSON, a table
            or CoNLL-U, whose keys and columns are not text.
    """
    source = _opened(path)
    texts = read_texts(source, paragraphs=paragraphs)
    if texts[0].startswith(_TABLE_STARTS):
        raise InputError(
            f"read_texts: {path} is a table or a plan that headwise saved, not text. Name a text "
            f"file."
        )
    if kind := _KINDS.get(path.suffix.lower()) or _kind_of_markup(texts):
        raise InputError(f"read_texts: {source} is {kind}, not plain text. {_TEXT_ADVICE[kind]}")
    return texts


def _kind_of_markup(texts: list[str]) -> str:
    """The format that a file is in by its first lines; empty for plain text."""
    lines = (line for text in texts for line in text.split("\n"))
    first = next((line for line in lines if not line.startswith("# ")), "")
    if len(first.split("\t")) == 10:
        return "CoNLL-U"
    if first.startswith(("{", "[")) and (_is_json(first) or _is_json("\n".join(texts))):
        return "JSON"
    return ""


def _is_json(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False


def read_texts_and_targets(
    text: Path,
    target: Path | None,
    seed: int | None,
    max_texts: int | None,
    paragraphs: bool | None,
) -> tuple[list[str], list[str] | None]:
    """The texts of a file and, line by line, their targets in another file, if there is one."""
    if target is None:
        return read_drawn_texts(text, seed, max_texts, paragraphs), None
    if paragraphs:
        raise ArgumentError(
            f"report: --paragraphs with --target {target}, which has a target for each line. Leave "
            f"--paragraphs out."
        )
    pairs = draw_texts(read_parallel(_opened(text), _opened(target)), seed, max_texts)
    return [text for text, _ in pairs], [target for _, target in pairs]


def sentences_of(texts: Texts) -> list[str]:
    """Texts as they are, and each distinct sentence of pairs once."""
    plain = [text for text in texts if isinstance(text, str)]
    pairs = [pair for pair in texts if isinstance(pair, SentencePair)]
    return plain + list(dict.fromkeys(text for pair in pairs for text in (pair.one, pair.two)))


def note_split_texts(
    texts: list[str], model: nn.Module, tokenizer: Any, max_tokens: int | None
) -> None:
    """Note that texts are too long for the model and are split into pieces, if any is."""
    pieces = encode(tokenizer, texts, model, max_tokens)
    if len(pieces) > len(texts):
        longest = max(map(len, pieces))
        note_input(
            f"Long texts are split: {counted(len(texts), 'text')} into "
            f"{counted(len(pieces), 'piece')} of at most {longest} tokens"
        )


def open_model(
    name: str,
    device: str | None,
    dtype: str | None,
    attention: str | None,
    text_for: str | None = None,
) -> tuple[nn.Module, Any]:
    """The model on the requested device, and its tokenizer.

    Args:
        text_for: The function for which the model must read text. Models that do not read text
            have no tokenizer, or only one for their labels.
    """
    model = load(name, **loading(device, dtype, attention))
    if text_for is not None:
        check_reads_text(text_for, model)
    return model, load_tokenizer(name)


def loading(device: str | None, dtype: str | None, attention: str | None) -> dict[str, Any]:
    """The arguments of `load` that the options give."""
    return {
        "device": check_device(device or "cpu", "--device"),
        "dtype": None if dtype is None else getattr(torch, dtype),
        "attn_implementation": attention,
    }


def with_images(model: str, text: str, files: list[Path]) -> dict[str, Any]:
    """The arguments of `look` for images and a text, as the model's chat template joins them."""
    pillow = require("PIL.Image", "hf", "look")
    processor, images = load_processor(model), []
    for file in files:
        try:
            images.append(pillow.open(file).convert("RGB"))
        except OSError as error:
            raise InputError(
                f"look: {file} cannot be read as an image ({first_line(error)}). Give a PNG or "
                f"JPEG file."
            ) from error
    token = getattr(processor, "image_token", None)
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
    elif token is not None and token not in text:
        text = f"{token * len(images)} {text}"
    reads_text = hasattr(processor, "tokenizer")
    return {"text": text if reads_text else None, "tokenizer": processor, "images": images}


def title_of(model: str) -> str:
    """A hub name as it is; for a folder its last two names, as many are called `hf` or `model`;
    for a file its name."""
    path = Path(model)
    if path.is_dir():
        return str(Path(*path.resolve().parts[-2:]))
    return path.name if path.is_file() else model


def count_parameters(full: nn.Module, small: nn.Module) -> tuple[float, float]:
    """The numbers of parameters of a model and of its smaller version."""
    before, after = (sum(weight.numel() for weight in m.parameters()) for m in (full, small))
    return float(before), float(after)


def size_of(model: nn.Module) -> float:
    """The weights of a model in MiB."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20


def _names_in(statistics: str) -> list[str]:
    return [name.strip() for name in statistics.split(",")]


def check_statistics(statistics: str | None) -> None:
    """Refuse names that no model has, before a model is opened."""
    if statistics is not None:
        Request.of(_names_in(statistics), classes=dict.fromkeys(TOKEN_CLASSES, ()))


def request_of(statistics: str | None, per_text: bool, tokenizer: Any) -> Request:
    """What --statistics and --per-text request, with the token classes of a vocabulary."""
    classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
    names = (*DEFAULT, *classes) if statistics is None else _names_in(statistics)
    return Request.of(names, per_text, classes)


def draw_figure(values: Mapping[str, np.ndarray], plot: Callable[..., Any], path: Path) -> Path:
    """Write a figure with a panel, drawn by `plot`, for each statistic that has finite values."""
    names = [name for name, numbers in values.items() if np.isfinite(numbers).any()]
    columns = min(_COLUMNS, len(names))
    rows = ceil(len(names) / columns)
    pyplot = require("matplotlib.pyplot", "plot", "--figure")
    size = _PANEL[0] * columns, _PANEL[1] * rows
    _, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for name, ax in zip(names, axes.flat, strict=False):
        plot(name, ax=ax)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    return save_figure(axes.flat[0], path)
