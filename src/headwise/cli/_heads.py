"""`headwise heads`: the heads that pick the right stretch of a text, as a file."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_note, print_table, progress_bar
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    import pandas as pd

    from headwise.corpora import Example

_EXAMPLES, _TOKENS = 120, 256  # that are generated: how many, and the most tokens of each
_NEAREST = 5  # heads that are printed where none was found


def heads(
    model: _options.Model,
    examples: Annotated[
        Path | None,
        opt(
            "JSON lines with text (or ids), query, right, wrong and optionally an answer; "
            "query, right and wrong are spans of characters (or tokens)."
        ),
    ] = None,
    task: Annotated[
        Literal["needle", "passage", "instruction"] | None,
        opt(
            "Instead of --examples, generate 120 (or --max-texts) of at most 256 tokens (or "
            "--max-tokens). needle: one of four facts in a text is asked for. passage: a sentence "
            "is traced to one of four passages. instruction: a real instruction, and one that is "
            "injected into a text. An encoder gives no answers: its heads are judged by where they "
            "look."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        opt(
            "With --task: what the examples are made of, a UTF-8 file or - for standard input.",
            shown="random words of the tokenizer",
        ),
    ] = None,
    save_examples: Annotated[
        Path | None, opt("With --task: write the examples to edit and use as --examples: .jsonl.")
    ] = None,
    vllm_hook: Annotated[
        Path | None, opt("Also write the set as a model configuration of vLLM-Hook: .json.")
    ] = None,
    qrhead: Annotated[
        Path | None, opt("Also write the set in the format of QRHead: .yaml.", "--qrhead")
    ] = None,
    beforehand: _options.Heads = None,
    nulls: _options.Nulls = None,
    out: _options.JsonOut = None,
    force: _options.Force = False,
    as_json: _options.Json = False,
    device: _options.Device = None,
    dtype: _options.Dtype = None,
    attention: _options.Attention = None,
    seed: _options.Seed = None,
    max_texts: _options.MaxTexts = None,
    max_tokens: _options.MaxTokens = None,
    paragraphs: _options.Paragraphs = None,
) -> None:
    """Find the heads that attend to the right span of a text.

    The texts are --examples of your own, or generated for a --task.
    Prints the heads that were found, with --json as JSON. With -o, also writes all heads with
    their evidence.
    """
    exports = [("vllm-hook", ".json", vllm_hook), ("qrhead", ".yaml", qrhead)]
    for _, ending, path in (("", ".json", out), *exports, ("", ".jsonl", save_examples)):
        _options.check_output(path, ending, force=force)
    if (examples is None) == (task is None):
        named = "neither --examples nor --task" if task is None else "--examples and --task"
        raise ArgumentError(f"heads: {named}. Give one of them.")
    made_of = {"--text": text, "--save-examples": save_examples}
    if task is None and (option := next((name for name in made_of if made_of[name]), None)):
        raise ArgumentError(f"heads: {option} with --examples. Give it with --task.")
    from headwise.cli import _inputs
    from headwise.corpora import read_examples
    from headwise.models.texts import context_of
    from headwise.roles import Evidence, find_heads, task_examples
    from headwise.scoring import find_loss

    evidence = Evidence(_options.names_of_nulls(nulls), seed=seed or 0)
    drawn: list[Example] = []
    if examples is not None:
        drawn = _inputs.draw_texts(read_examples(examples), seed, max_texts)
    texts = None if text is None else _inputs.read_text_file(text, paragraphs)
    opened, tokenizer = _inputs.open_model(model, device, dtype, attention)
    if task is not None:
        n_tokens = context_of(opened, tokenizer, max_tokens or _TOKENS)
        drawn = task_examples(
            task, texts, tokenizer=tokenizer, n=max_texts or _EXAMPLES, n_tokens=n_tokens,
            seed=evidence.seed,
        )  # fmt: skip
    write_examples = partial(_write_examples, drawn)
    _options.write_output("The examples", write_examples, save_examples, force)
    name = ""
    with suppress(ArgumentError):  # classes without a loss of their own
        name = find_loss(None, opened, {}).name
    if task is not None and name != "lm":  # what follows a text is no output of such a model
        drawn = [replace(example, answer=()) for example in drawn]
    with progress_bar(f"Finding the heads of {model}") as on_progress:
        found = find_heads(
            opened,
            drawn,
            tokenizer=tokenizer,
            heads=beforehand or None,
            evidence=evidence,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
    for line in str(found).split("\n"):
        print_note(line)
    _options.write_output("All heads with their evidence", found.save, out, force)

    def print_heads(rows: "pd.DataFrame") -> None:
        if rows.empty:
            print_note("The nearest heads, none of which was found:")
            rows = found.frame().nlargest(_NEAREST, "effect")
        print_table(rows[["name", "in_set", "effect", "baseline", "null", "lift", "p_adj"]])

    _options.show_rows(found.found(), as_json, None, print_heads)
    for form, _, path in exports:
        if path is not None and not found.set_row["found"]:
            raise ArgumentError(
                f"heads: --{form} {path} is for a set that was found, and this one was "
                f"{found.set_row['outcome']}. Give more or other examples, or write heads of your "
                f"own choice in Python: load_heads(FILE of -o).export({str(path)!r}, {form!r}, "
                f"heads=[...])."
            )
        export = partial(found.export, format=form, model_name=model)
        _options.write_output(form, export, path, force)


def _write_examples(examples: "list[Example]", path: Path) -> None:
    """Write generated examples as the JSON lines that --examples reads."""
    names = ("text", "query", "right", "wrong", "answer")
    lines = [json.dumps({name: getattr(example, name) for name in names}) for example in examples]
    path.write_text("\n".join(lines) + "\n", "utf-8")
