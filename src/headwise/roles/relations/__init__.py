"""Relations: the (query, key) pairs of each role, from tokens, annotations and random probes."""

from headwise.roles.relations._gold import gold_roles
from headwise.roles.relations._probe import PREFIX_MATCHING, PROBED, SAME, probe
from headwise.roles.relations._relations import (
    DIFFUSE,
    DIFFUSE_BESIDE_SINKS,
    EVEN,
    GRIDS,
    SHAPES,
    SINKS,
    Grid,
    Item,
    Pairs,
    Role,
    as_item,
    content,
    token_roles,
)
from headwise.roles.relations._tokens import Tokenized, TokenText, texts_of, tokenize

__all__ = [
    "DIFFUSE",
    "DIFFUSE_BESIDE_SINKS",
    "EVEN",
    "GRIDS",
    "PREFIX_MATCHING",
    "PROBED",
    "SAME",
    "SHAPES",
    "SINKS",
    "Grid",
    "Item",
    "Pairs",
    "Role",
    "TokenText",
    "Tokenized",
    "as_item",
    "content",
    "gold_roles",
    "probe",
    "texts_of",
    "token_roles",
    "tokenize",
]
