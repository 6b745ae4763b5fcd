"""Watch the heads of a model while it runs; the answer stays equal to the last bit."""

from headwise.watch._looks import TopKeys
from headwise.watch._request import DEFAULT, Relation, Request
from headwise.watch._watch import Watch, observe

__all__ = ["DEFAULT", "Relation", "Request", "TopKeys", "Watch", "observe"]
