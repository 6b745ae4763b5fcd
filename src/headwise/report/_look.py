"""What a look shows: the attention of every head, as a page or in a notebook."""

import html
import os
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwise._display import counted, printable
from headwise.files import as_path
from headwise.report._samples import Sample
from headwise.report.page import render_look, write_html

_VIEW_HEIGHT = 900  # pixels, in a notebook


@dataclass(frozen=True)
class Look:
    """The attention of every head of a model on one text; made by `look`.

    A notebook shows it as a view that can run no script of the notebook and reach no network.

    Attributes:
        title: The name of the page.
        model: The model's class.
        sample: The tokens and the attention of every head.
        versions: The versions of the packages that computed it.
    """

    title: str
    model: str
    sample: Sample
    versions: Mapping[str, str]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one HTML file that needs no network.

        Raises:
            ArgumentError: the path does not end in .html.
            OutputError: the file cannot be written; no partial file is left behind.
        """
        return write_html("look", self._page(), as_path("Look.save", path))

    def open(self, path: str | os.PathLike[str]) -> bool:
        """Write the page and open it in a browser; false if there is none.

        Raises:
            ArgumentError: the path does not end in .html.
            OutputError: the file cannot be written; no partial file is left behind.
        """
        page = self.save(path).resolve()
        has_screen = os.name == "nt" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
        try:
            return (has_screen or os.uname().sysname == "Darwin") and webbrowser.open(page.as_uri())
        except webbrowser.Error:
            return False

    def summary(self) -> str:
        """The heads, the model and the tokens, in a line."""
        heads = list(self.sample.weights or self.sample.pairs)
        layers = len({(head.stack, head.layer) for head in heads})
        tokens = counted(len(self.sample.tokens), "token")
        if self.sample.targets:
            tokens += f" and {counted(len(self.sample.targets), 'target token')}"
        where = f"{counted(len(heads), 'head')} in {counted(layers, 'layer')} of {self.model}"
        return f"{where}, on {tokens}."

    def __repr__(self) -> str:
        tokens = " ".join(self.sample.tokens[:12])
        heads = counted(len(self.sample.weights or self.sample.pairs), "head")
        return printable(
            f"Look of {self.model}: {heads} on {tokens!r}; .save('look.html') writes a page"
        )

    def _repr_html_(self) -> str:
        # The frame has an origin of its own: the page cannot reach the notebook.
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self._page())}" width="100%" '
            f'height="{_VIEW_HEIGHT}" style="border:0" title="Attention on a text"></iframe>'
        )

    def _page(self) -> str:
        return render_look(self.title, self.summary(), self.sample, self.versions)
