"""Watch the heads of a model while it runs; the answer stays equal to the last bit."""

from headwise.observe._request import Relation, Request
from headwise.observe._watch import Watch, observe

__all__ = ["Relation", "Request", "Watch", "observe"]
