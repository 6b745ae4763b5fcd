"""Texts and sentence pairs from files, drawn as the options of a command ask for it."""

import json
import os
import random
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from headwise._display import counted
from headwise.cli._options import Shared
from headwise.cli._print import note_input
from headwise.corpora import SentencePair, read_pairs, read_parallel, read_texts
from headwise.errors import ArgumentError, InputError
from headwise.models.texts import encode

STANDARD_INPUT = Path("-")
# The first line of a saved CSV file, or the first key of a JSON file.
_TABLE_STARTS = ('# {"headwise', '{\n "headwise', '{\n  "format": "headwise')
Text = TypeVar("Text")
Texts = list[str] | list[SentencePair]


def draw_texts(texts: list[Text], shared: Shared) -> list[Text]:
    """All texts, or --max-texts of them, in the order of the file."""
    if shared.max_texts is None or shared.max_texts >= len(texts):
        return texts
    # Drawn at random: the beginning of a file is rarely like the rest of it.
    drawn = random.Random(shared.seed or 0).sample(range(len(texts)), shared.max_texts)
    return [texts[index] for index in sorted(drawn)]


class _StandardInput(BytesIO):
    """What standard input holds; messages call it by its name."""

    def __str__(self) -> str:
        return "standard input"


def read_text_file(path: Path, shared: Shared) -> list[str]:
    """The texts of a file, or of standard input for `-`; a note says what was taken for one.

    Raises:
        InputError: the file holds no texts, is a table that headwise saved, or holds JSON, a table
            or CoNLL-U, whose keys and columns are not text.
    """
    texts = _plain_texts(path, bool(shared.paragraphs))
    unit = "paragraph" if shared.paragraphs else "line"
    note_input(f"{_shown(path)}: {counted(len(texts), 'text')}, one per {unit}")
    return texts


def _plain_texts(path: Path, paragraphs: bool) -> list[str]:
    texts = read_texts(_opened(path), paragraphs=paragraphs)
    if texts[0].startswith(_TABLE_STARTS):
        raise InputError(
            f"read_texts: {path} is a table or a plan that headwise saved, not text. Name a text "
            f"file."
        )
    if kind := _KINDS.get(path.suffix.lower()) or _kind_of_markup(texts):
        raise InputError(
            f"read_texts: {_shown(path)} is {kind}, not plain text. {_TEXT_ADVICE[kind]}"
        )
    return texts


def _shown(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


_TEXT_ADVICE = {
    "JSON": "Write its texts to a file, one per line. headwise corpus --data reads the texts of "
    "JSON lines, and roles --spans annotated texts.",
    "a table": "Write its column of texts to a file, one per line. prune --pairs and importance "
    "--pairs read sentence,sentence,similarity, and headwise corpus --data a column of Parquet.",
    "CoNLL-U": "Name it with roles --conllu, or write its sentences to a file, one per line.",
}
_KINDS = {".csv": "a table", ".tsv": "a table", ".conllu": "CoNLL-U"}
_KINDS |= dict.fromkeys((".json", ".jsonl", ".ndjson"), "JSON")


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


def _opened(path: Path) -> Path | _StandardInput:
    return _StandardInput(sys.stdin.buffer.read()) if path == STANDARD_INPUT else path


def read_sentence(text: str) -> str:
    """The text of an argument, or of standard input for `-`.

    Raises:
        ArgumentError: the argument is the path of a file.
        InputError: standard input holds no text.
    """
    if text == str(STANDARD_INPUT):
        return "\n".join(_plain_texts(STANDARD_INPUT, paragraphs=False))
    if os.path.isfile(text):
        raise ArgumentError(
            f"look: {text} is a file, and TEXT is the sentence itself. Give its words in quotes, "
            f"or read it from standard input: headwise look MODEL - < {text}."
        )
    return text


def read_drawn_texts(path: Path, shared: Shared) -> list[str]:
    """The texts of a file, or --max-texts of them."""
    return draw_texts(read_text_file(path, shared), shared)


def read_texts_and_targets(
    text: Path, target: Path | None, shared: Shared
) -> tuple[list[str], list[str] | None]:
    """The texts of a file and, line by line, their targets in another file, if there is one."""
    if target is None:
        return read_drawn_texts(text, shared), None
    if shared.paragraphs:
        raise ArgumentError(
            f"report: --paragraphs with --target {target}, which has a target for each line. Leave "
            f"--paragraphs out."
        )
    pairs = draw_texts(read_parallel(_opened(text), _opened(target)), shared)
    return [text for text, _ in pairs], [target for _, target in pairs]


def read_texts_or_pairs(text: Path | None, pairs: Path | None, shared: Shared) -> Texts:
    """The texts of one file or the sentence pairs of another; none without a file."""
    if pairs is not None:
        return draw_texts(read_pairs(pairs), shared)
    return [] if text is None else read_drawn_texts(text, shared)


def sentences_of(texts: Texts) -> list[str]:
    """Texts as they are, and each distinct sentence of pairs once."""
    plain = [text for text in texts if isinstance(text, str)]
    pairs = [pair for pair in texts if isinstance(pair, SentencePair)]
    return plain + list(dict.fromkeys(text for pair in pairs for text in (pair.one, pair.two)))


def note_split_texts(texts: list[str], model: nn.Module, tokenizer: Any, shared: Shared) -> None:
    """Note that texts are too long for the model and are split into pieces, if any is."""
    pieces = encode(tokenizer, texts, model, shared.max_tokens)
    if len(pieces) > len(texts):
        longest = max(map(len, pieces))
        note_input(
            f"Long texts are split: {counted(len(texts), 'text')} into "
            f"{counted(len(pieces), 'piece')} of at most {longest} tokens"
        )
