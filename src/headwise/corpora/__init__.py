"""Texts, and what is known about them: plain files, and a grammar with its gold relations."""

from headwise.corpora._grammar import Grammar, Line
from headwise.corpora._plain import read_texts
from headwise.corpora._relations import BOS, EOS, PAD, RELATIONS, SPECIALS, UNK, relations

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "RELATIONS",
    "SPECIALS",
    "UNK",
    "Grammar",
    "Line",
    "read_texts",
    "relations",
]
