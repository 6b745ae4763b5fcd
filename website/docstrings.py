"""What mkdocstrings is told about docstrings: the section `Example:` is one of examples."""

from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Read `Example:` as `Examples:`, the only title that griffe takes for code at the prompt."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
