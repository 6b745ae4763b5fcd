"""Readers of annotated texts; errors name the file and the line."""

from headwise.corpora.readers._conllu import blocks_of, parse_sentence, read_conllu
from headwise.corpora.readers._coreference import read_gap, read_winobias
from headwise.corpora.readers._file import fault_at, json_line
from headwise.corpora.readers._jsonl import read_examples, read_jsonl
from headwise.corpora.readers._plain import (
    SentencePair,
    read_aligned,
    read_pairs,
    read_parallel,
    read_texts,
)

__all__ = [
    "SentencePair",
    "blocks_of",
    "fault_at",
    "json_line",
    "parse_sentence",
    "read_aligned",
    "read_conllu",
    "read_examples",
    "read_gap",
    "read_jsonl",
    "read_pairs",
    "read_parallel",
    "read_texts",
    "read_winobias",
]
