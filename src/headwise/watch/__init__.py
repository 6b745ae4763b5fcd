"""Watch the heads of a model while it runs; its output is unchanged to the last bit."""

from headwise.watch._attentions import attentions
from headwise.watch._links import Word, links, links_of, word_tokens
from headwise.watch._maps import Layer, TopKeys
from headwise.watch._observe import check_arguments, observe
from headwise.watch._recorder import Recorder
from headwise.watch._request import DEFAULT, Relation, Request
from headwise.watch._spans import Stretch, read_stretches, stretch_tokens
from headwise.watch._watch import Watch

__all__ = [
    "DEFAULT",
    "Layer",
    "Recorder",
    "Relation",
    "Request",
    "Stretch",
    "TopKeys",
    "Watch",
    "Word",
    "attentions",
    "check_arguments",
    "links",
    "links_of",
    "observe",
    "read_stretches",
    "stretch_tokens",
    "word_tokens",
]
