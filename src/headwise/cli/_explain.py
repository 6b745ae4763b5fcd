"""`headwise explain`: a worked example of two heads, step by step, or as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headwise.cli._options import Json, opt
from headwise.cli._print import escaped

if TYPE_CHECKING:  # `headwise --help` imports neither
    import numpy
    import rich.console

    import headwise.example

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MAX_MATRIX_WIDTH = 16  # the largest d_model whose mixing matrix is printed


def explain(
    weights: Annotated[
        Path | None, opt("A JSON file with tokens, the query and the weights of each head.")
    ] = None,
    values: Annotated[Path | None, opt("A JSON file with the values of the tokens.")] = None,
    as_json: Json = False,
) -> None:
    """Show a worked example of two heads, step by step."""
    from rich.console import Console

    from headwise.example import load_example

    example = load_example(weights, values)
    if not as_json:
        render(example, Console())
        return
    lines = (f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in figures(example).items())
    print("{\n" + ",\n".join(lines) + "\n}")


def figures(example: "headwise.example.WorkedExample") -> dict[str, Any]:
    """Every figure of the example as plain lists, to the 15 digits that float64 always holds."""
    arrays = ("weights", "values", "heads", "concat", "out", "W_mix", "out_mixed")
    words = {"tokens": list(example.tokens), "query": example.tokens[example.query]}
    return words | {name: _tidy(getattr(example, name)) for name in arrays}


def render(example: "headwise.example.WorkedExample", console: "rich.console.Console") -> None:
    """Print each step with its shapes: weights, sums, concatenation, and two choices of `W_O`."""
    page = _Page(console)
    n_heads, head_dim = example.heads.shape
    d_model = example.concat.size
    query = page.safe(example.tokens[example.query])
    page.title(
        f"What '{query}' attends to", f"heads {n_heads} x width {head_dim} = d_model {d_model}"
    )
    page.show(page.sentence(example))
    page.title("1. Weights: how much, in each head", f"weights {_shape(example.weights)}")
    for h in range(n_heads):
        page.show(Text(f"Head {h + 1}", "bold"), page.score_card(example, h))
    page.title("2. Heads: values times weights, added up", f"heads {_shape(example.heads)}")
    for h in range(n_heads):
        page.show(Text(f"Head {h + 1}", "bold"), page.weighted_sum(example, h))
    page.title("3. Concatenation: side by side", f"concat {_shape(example.concat)}")
    page.show(_answer(example.concat))
    page.title("4. W_O = identity: the heads stay apart", f"W_O {_shape(example.W_mix)}")
    page.show(_answer(example.out))
    page.title("5. W_O that mixes: each feature reads every head", f"W_O {_shape(example.W_mix)}")
    page.show(Text(_mixing(n_heads, head_dim)))
    if d_model <= _MAX_MATRIX_WIDTH:
        page.show(_matrix(example.W_mix))
    page.show(_answer(example.out_mixed))


@dataclass(frozen=True)
class _Page:
    """A console that prints the example as well as its encoding allows."""

    console: "rich.console.Console"

    def title(self, words: str, shapes: str) -> None:
        self.console.print()
        self.console.print(Text.assemble((words, "bold cyan"), "   ", (shapes, "dim")))

    def show(self, *pictures: "rich.console.RenderableType") -> None:
        for picture in pictures:
            self.console.print(Padding(picture, (0, 0, 0, 2), expand=False))

    def sentence(self, example: "headwise.example.WorkedExample") -> Text:
        parts = [Text(self.safe(token)) for token in example.tokens]
        parts[example.query].stylize("bold reverse")
        return Text(" ").join(parts)

    def score_card(self, example: "headwise.example.WorkedExample", h: int) -> Table:
        """A row per token: its bar, its weight and its value."""
        card = Table.grid(padding=(0, 2))
        for min_width in (None, self.full_bar, None, None):
            card.add_column(min_width=min_width)
        for token, weight, value in zip(
            example.tokens, example.weights[h], example.values[h], strict=True
        ):
            vector = _vector(value) if weight or value.any() else ""
            cells = (self.safe(token), self.bar(weight), _number(weight), vector)
            card.add_row(*(Text(cell) for cell in cells), style="" if weight else "dim")
        return card

    def weighted_sum(self, example: "headwise.example.WorkedExample", h: int) -> Table:
        times = "·" if self.can_encode("·") else "*"
        total = Table.grid(padding=(0, 1))
        for s in example.weights[h].nonzero()[0]:
            sign = "+" if total.rows else ""
            weight, value = _number(example.weights[h, s]), _vector(example.values[h, s])
            cells = (sign, weight, times, value, self.safe(example.tokens[s]))
            total.add_row(*(Text(cell) for cell in cells))
        total.add_row("=", "", "", _answer(example.heads[h]))
        return total

    @property
    def full_bar(self) -> int:
        """The width of a bar that shows all of the attention."""
        return max(4, min(20, self.console.width - 36))

    def bar(self, weight: float) -> str:
        full, eighths = divmod(round(weight * self.full_bar * 8), 8)
        blocks = (_EIGHTHS[8] * full + _EIGHTHS[eighths]).rstrip()
        return blocks if self.can_encode(blocks) else "#" * round(weight * self.full_bar)

    def can_encode(self, characters: str) -> bool:
        try:
            characters.encode(self.console.encoding)
        except UnicodeEncodeError:
            return False
        return True

    def safe(self, text: str) -> str:
        """The user's text, with characters escaped that the terminal would interpret or lacks."""
        return escaped(text, self.console.encoding)


def _matrix(W: "numpy.ndarray") -> Table:
    grid = Table.grid(padding=(0, 1))
    for _ in W:
        grid.add_column(justify="right")
    for row in W:
        grid.add_row(*(Text(_number(x), "" if x else "dim") for x in row))
    return grid


def _mixing(n_heads: int, head_dim: int) -> str:
    if n_heads == 1:
        return "With one head there is nothing to mix."
    first = f"The first {head_dim} features are the sum of the heads"
    if n_heads == 2:
        return f"{first}, the others head 1 minus head 2."
    return f"{first}; each further block of {head_dim} is that sum with one head subtracted."


def _answer(row: "numpy.ndarray") -> Text:
    return Text(_vector(row), "bold green")


def _vector(row: "numpy.ndarray") -> str:
    return "[" + " ".join(_number(x) for x in row) + "]"


def _shape(array: "numpy.ndarray") -> str:
    return str(list(array.shape))


def _number(x: float) -> str:
    """Six digits, without the zero before the point: .05, -1.5, 0."""
    digits = f"{x + 0.0:.6g}"  # + 0.0 turns -0.0 into 0.0
    return digits.replace("0.", ".", 1) if abs(x) < 1 else digits


def _tidy(array: "numpy.ndarray") -> Any:
    """Numbers rounded as people write them: 0.1 + 0.2 becomes 0.3."""
    return [_tidy(part) for part in array] if array.ndim else float(f"{array:.15g}")
