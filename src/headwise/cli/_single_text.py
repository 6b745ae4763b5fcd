"""`headwise look`: the attention of every head on one sentence, as a page."""

import os
import re
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise._display import counted
from headwise.cli._options import Attention, Device, Dtype, Force, Model, check_output, opt
from headwise.cli._print import print_heads, print_note, print_result
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.report import Look
    from headwise.watch import Word

# The strongest links that are printed: a screen.
_LINKS = 10
# Words that a note shows of a vocabulary; a larger one is not of whole words.
_WORDS, _FEW_WORDS = 20, 500


def look(
    model: Model,
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="The sentence, in quotes, or - for standard input."),
    ],
    out: Annotated[
        Path | None, opt("The page to write.", "--out", "-o", shown="one in a temporary folder")
    ] = None,
    target: Annotated[
        str | None,
        opt("For an encoder-decoder: what its decoder reads.", shown="what the model generates"),
    ] = None,
    source: Annotated[
        str | None,
        opt(
            "With --to: the word that attends, or its characters, such as 24,26. Prints the heads "
            "that link the two.",
            "--from",
            shown=False,
        ),
    ] = None,
    to: Annotated[
        str | None, opt("With --from: the word that is attended to.", shown=False)
    ] = None,
    image: Annotated[
        list[Path] | None,
        opt("An image that TEXT is about; several by several --image.", "--image", shown=False),
    ] = None,
    force: Force = False,
    device: Device = None,
    dtype: Dtype = None,
    attention: Attention = None,
) -> None:
    """Show the attention of every head of a model on one sentence.

    Writes a page and opens it in a browser, if there is one. With --from and --to it prints the
    heads that link two words, and writes a page, which opens on them, only with --out.
    """
    check_output(out, ".html", force=force)
    if (source is None) != (to is None):
        raise ArgumentError("look: one of --from and --to. Give both words, or neither.")
    if to is not None and target is not None:
        raise ArgumentError(
            "look: --target is for an encoder-decoder, and --from and --to are for other models. "
            "Leave one out."
        )
    if os.path.isfile(text):
        raise ArgumentError(
            f"look: {text} is a file, and TEXT is the sentence itself. Give its words in quotes, "
            f"or read it from standard input: headwise look MODEL - < {text}."
        )
    from headwise import report, watch
    from headwise.checkpoints import load
    from headwise.cli._inputs import (
        STANDARD_INPUT,
        loading,
        open_model,
        plain_texts,
        title_of,
        with_images,
    )

    if text == str(STANDARD_INPUT):
        text = "\n".join(plain_texts(STANDARD_INPUT, paragraphs=False))
    if image:
        if not (source is None and to is None and target is None):
            raise ArgumentError(
                f"look: --image {image[0]} with --from, --to or --target. Leave those out."
            )
        opened = load(model, **loading(device, dtype, attention))
        result = report.look(opened, title=title_of(model), **with_images(model, text, image))
        _write(result, out)
        return
    opened, tokenizer = open_model(model, device, dtype, attention, text_for="look")
    _note_unknown_words(tokenizer, text)
    word: Word | None = None
    other: Word | None = target
    if source is not None and to is not None:
        word, other = _word(source, text), _word(to, text)
        links = watch.links(opened, text, word, other, tokenizer=tokenizer)
        print_heads(links.head(_LINKS))
        if out is None:
            print_note("Add --out look.html for a page.")
            return
    result = report.look(
        opened, text, tokenizer=tokenizer, source=word, target=other, title=title_of(model)
    )
    _write(result, out)


def _word(given: str, text: str) -> "Word":
    """A word of a text, or its characters: `24,26`, or `(24, 26)` as messages write them."""
    numbers = re.fullmatch(r"\(?(\d+), *(\d+)\)?", given)
    return given if numbers is None or given in text else (int(numbers[1]), int(numbers[2]))


def _write(result: "Look", out: Path | None) -> None:
    """Write the page and open it in a browser, if there is one."""
    out = out or Path(mkdtemp(prefix="headwise-")) / "look.html"
    in_browser = result.open(out)
    print_note(result.summary())
    print_result(f"The page is {out.resolve()}")
    if not in_browser:
        print_note("Open this file in a browser.")


def _note_unknown_words(tokenizer: Any, text: str) -> None:
    """Name the words that a tokenizer does not know, and some that it knows if it knows few."""
    from headwise._extras import is_tokenizer_of_rust
    from headwise.corpora import UNK
    from headwise.models.texts import token_offsets

    is_rust = is_tokenizer_of_rust(tokenizer)
    number = tokenizer.token_to_id(UNK) if is_rust else getattr(tokenizer, "unk_token_id", None)
    if number is None or not (is_rust or getattr(tokenizer, "is_fast", False)):
        return
    [tokens] = token_offsets(tokenizer, [text])
    unknown = {
        text[start:end]: None
        for token, (start, end) in zip(tokens.ids, tokens.spans, strict=True)
        if token == number and start < end
    }
    if unknown:
        words = sorted(word for word in tokenizer.get_vocab() if word[:1].isalpha())
        few = len(words) <= _FEW_WORDS
        some = " ".join(words[:: -(-len(words) // _WORDS) or 1])
        known = f" It knows {counted(len(words), 'word')}, such as {some}" if few else ""
        print_note(f"The model does not know {', '.join(map(repr, unknown))}.{known}")
