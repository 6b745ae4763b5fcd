"""Watch the heads of a model while it runs; the answer stays equal to the last bit."""

from headwise.watch._looks import TopKeys
from headwise.watch._request import Relation, Request
from headwise.watch._watch import Watch, observe

__all__ = ["Relation", "Request", "TopKeys", "Watch", "observe"]
