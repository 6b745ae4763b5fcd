"""Writing smaller models down, in the form that their readers want, and proving it."""

from headwise.surgery.saving._forms import Format
from headwise.surgery.saving._save import save

__all__ = ["Format", "save"]
