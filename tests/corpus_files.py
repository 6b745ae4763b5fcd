"""A tiny model, and the same texts as files of every kind."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from folders import write_llama

WORDS = ("[PAD]", "<s>", "</s>", *(f"w{number}" for number in range(40)))


def write_model(folder: Path, heads: int = 3) -> Path:
    """A Llama of two layers, with grouped heads."""
    write_llama(
        folder, WORDS, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=1
    )
    return folder


def random_texts(n: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Texts of known words, of various lengths."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS[3:], rng.integers(2, longest))) for _ in range(n)]


def write_parquet(path: Path, texts: Sequence[str | None], rows: int = 7) -> Path:
    """A column of texts in row groups of this many rows, beside another column."""
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_jsonl(path: Path, texts: Sequence[str | None]) -> Path:
    """An object in each line, with another key."""
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)]
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def write_texts(path: Path, texts: Sequence[str], between: str = "\n") -> Path:
    """Texts with a line break or a blank line between them."""
    path.write_text(between.join(texts), "utf-8", newline="")
    return path
