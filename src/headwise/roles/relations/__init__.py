"""Relations: the (query, key) pairs of each role, from tokens, annotations and random probes."""

from headwise.roles.relations._gold import dependencies_in, dependency_roles, gold_roles
from headwise.roles.relations._probe import (
    PREFIX_MATCHING,
    PROBED,
    before_text,
    draw_probe,
    probe,
    words_in,
)
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
    roles_of_frequency,
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
    "SHAPES",
    "SINKS",
    "Grid",
    "Item",
    "Pairs",
    "Role",
    "TokenText",
    "Tokenized",
    "as_item",
    "before_text",
    "dependencies_in",
    "dependency_roles",
    "draw_probe",
    "gold_roles",
    "probe",
    "roles_of_frequency",
    "texts_of",
    "token_roles",
    "tokenize",
    "words_in",
]
