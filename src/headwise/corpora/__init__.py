"""Texts and their annotations: readers, and a grammar with gold relations."""

from headwise.corpora._conllu import read_conllu
from headwise.corpora._coreference import read_gap
from headwise.corpora._gold import Choice, annotate, choices
from headwise.corpora._grammar import Grammar, Line
from headwise.corpora._jsonl import read_examples, read_jsonl
from headwise.corpora._listing import (
    Corpus,
    Several,
    Texts,
    list_corpus,
    list_items,
    list_pairs,
    list_texts,
    one_text,
    refuse_path,
)
from headwise.corpora._names import name_texts
from headwise.corpora._plain import (
    SentencePair,
    read_pairs,
    read_parallel,
    read_texts,
)
from headwise.corpora._relations import BOS, EOS, PAD, RELATIONS, SPECIALS, UNK, relations
from headwise.corpora._text import AnnotatedText, Arc, Example, Mention, Pair, Span

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "RELATIONS",
    "SPECIALS",
    "UNK",
    "AnnotatedText",
    "Arc",
    "Choice",
    "Corpus",
    "Example",
    "Grammar",
    "Line",
    "Mention",
    "Pair",
    "SentencePair",
    "Several",
    "Span",
    "Texts",
    "annotate",
    "choices",
    "list_corpus",
    "list_items",
    "list_pairs",
    "list_texts",
    "name_texts",
    "one_text",
    "read_conllu",
    "read_examples",
    "read_gap",
    "read_jsonl",
    "read_pairs",
    "read_parallel",
    "read_texts",
    "refuse_path",
    "relations",
]
