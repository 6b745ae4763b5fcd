"""`headwise cache`: which tokens each kv head of a model keeps, as a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_note, print_table, progress_bar
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    import pandas as pd

_LENGTHS = (1024, 8192)  # tokens of the texts whose cache is printed
_SINKS, _WINDOW = 4, 256  # tokens that the other heads keep
_KEEP = 0.5  # the share of kv heads that keep all tokens, where no goal is set
_TEXTS, _TOKENS = 16, 1024  # of generated texts


def cache(
    model: _options.Model,
    text: Annotated[
        Path | None,
        opt(
            "Long texts: a UTF-8 file with one text per line, or - for standard input.",
            shown="16 texts, or --max-texts, of random tokens in which a span occurs twice; of "
            "1024 tokens, or --max-tokens, or the model's context",
        ),
    ] = None,
    keep: Annotated[
        float | None, opt("The largest share of kv heads that keep all tokens.", shown="0.5")
    ] = None,
    bytes: Annotated[
        int | None, opt("The largest size of the cache of one text, in bytes.")
    ] = None,
    loss: Annotated[float | None, opt("The largest increase of the mean loss.")] = None,
    sinks: Annotated[int, opt("How many first tokens the other heads keep.", min=0)] = _SINKS,
    window: Annotated[
        int, opt("How many last tokens the other heads keep, fewer than the texts have.", min=1)
    ] = _WINDOW,
    plan: Annotated[
        Path | None,
        opt("Make no plan: run this one, a .json file written by -o, on the text of --prompt."),
    ] = None,
    prompt_file: Annotated[
        Path | None, opt("With --plan: a UTF-8 file, read as one text.", "--prompt")
    ] = None,
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
    """Plan a smaller cache: which tokens each kv head keeps. Or run a plan, with --plan.

    Prints the plan and the loss that it costs. With -o, writes it; with --json, prints it as JSON.
    With --plan, prints loss, bytes and tokens per second of the plan's cache beside the full one.
    """
    _options.check_output(out, ".json", force=force)
    goal: dict[str, Any] = {"keep": keep, "bytes": bytes, "loss": loss}
    named = [f"--{name}" for name, value in goal.items() if value is not None]
    if plan is not None or prompt_file is not None:
        ours: dict[str, Any] = {"--text": text, "--out": out}
        ours |= {"--sinks": sinks - _SINKS or None, "--window": window - _WINDOW or None}
        ours |= {"--seed": seed, "--max-texts": max_texts}
        named += [name for name, value in ours.items() if value is not None]
        if plan is None or prompt_file is None or named:
            given = f" and {named[0]}" if named else ""
            raise ArgumentError(
                f"cache: --plan {plan}, --prompt {prompt_file}{given}. To run a plan, give both "
                f"--plan and --prompt; to make one, give neither."
            )
        rows = _run_plan(model, plan, prompt_file, device, dtype, attention, max_tokens)
        _options.show_rows(rows, as_json, out)
        return
    if len(named) > 1:
        raise ArgumentError(f"cache: {' and '.join(named[:2])} are both given. Give one of them.")
    from headwise.caching import cache_plan, retrieval_batches
    from headwise.cli._inputs import note_split_texts, open_model, read_drawn_texts
    from headwise.models.texts import context_of

    texts: Any = None if text is None else read_drawn_texts(text, seed, max_texts, paragraphs)
    opened, tokenizer = open_model(model, device, dtype, attention)
    if text is None:
        n_tokens = max_tokens or min(_TOKENS, context_of(opened, tokenizer))
        texts = retrieval_batches(opened, max_texts or _TEXTS, n_tokens, seed=seed or 0)
    else:
        note_split_texts(texts, opened, tokenizer, max_tokens)
    with progress_bar(f"Scoring the kv heads of {model}") as on_progress:
        planned = cache_plan(
            opened,
            texts,
            **(goal if named else {"keep": _KEEP}),
            sinks=sinks,
            window=window,
            tokenizer=tokenizer,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
    print_note(str(planned))
    for name, value in planned.measured.items():
        of_what = " (rank correlation of the scores of kv heads)" if "agreement" in name else ""
        print_note(f"{name}{of_what}: {value:.4g}")
    for n_tokens in _LENGTHS:
        kept, share = planned.nbytes(n_tokens), planned.share(n_tokens)
        print_note(
            f"cache of {n_tokens:,} tokens: {kept / share:,.0f} bytes before, {kept:,} after "
            f"({share - 1:+.1%})"
        )
    _options.write_output("The plan", planned.save, out, force)
    _options.show_rows(
        planned.frame(), as_json, out, lambda rows: print_table(rows[["name", "window", "loss"]])
    )


def _run_plan(
    model: str,
    plan: Path,
    prompt: Path,
    device: str | None,
    dtype: str | None,
    attention: str | None,
    max_tokens: int | None,
) -> "pd.DataFrame":
    """What a plan's cache costs and saves on a prompt, beside the full cache."""
    from headwise.caching import CachePlan, compare_caches
    from headwise.cli._inputs import open_model, plain_texts

    planned = CachePlan.load(plan)
    text = "\n\n".join(plain_texts(prompt, paragraphs=True))
    opened, tokenizer = open_model(model, device, dtype, attention)
    rows = compare_caches(opened, planned, text, tokenizer=tokenizer, max_tokens=max_tokens)
    print_note(str(planned))
    print_note(
        "loss: of each token in the second half of the prompt, from the true tokens before it; "
        "bytes: after the prompt; tokens_per_second: decoded greedily after the prompt"
    )
    return rows
