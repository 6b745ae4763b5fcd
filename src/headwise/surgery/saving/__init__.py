"""Writing smaller models down, in the form that their readers want, and proving it."""

from headwise.surgery.saving._beside import files_beside
from headwise.surgery.saving._forms import Format, form_of
from headwise.surgery.saving._save import save

__all__ = ["Format", "files_beside", "form_of", "save"]
