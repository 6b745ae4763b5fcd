"""Watch the heads of a model while it runs; the answer stays equal to the last bit."""

from headwise.watch._maps import Layer, TopKeys
from headwise.watch._request import DEFAULT, Relation, Request
from headwise.watch._watch import Watch, check_asked, observe

__all__ = ["DEFAULT", "Layer", "Relation", "Request", "TopKeys", "Watch", "check_asked", "observe"]
