"""What each head does, with evidence that would stand up."""

from headwise.roles._find import find_roles
from headwise.roles._table import Roles

__all__ = ["Roles", "find_roles"]
