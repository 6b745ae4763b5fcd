"""`headwise cache`: which tokens each kv head of a model keeps, as a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from headwise.cli._options import Model, Output, Shared, check_folder, opt
from headwise.cli._print import print_note, print_table, progress_bar
from headwise.errors import ArgumentError

_LENGTHS = (1024, 8192)  # tokens of the texts whose cache is printed
_KEEP = 0.5  # the share of kv heads that keep all tokens, where no goal is set
_TEXTS, _TOKENS = 16, 1024  # of generated texts


@dataclass(frozen=True)
class CacheTexts(Shared):
    """The shared options, where there may be no file of texts."""

    max_texts: Annotated[
        int | None,
        opt(
            "Use this many texts, drawn at random; without --text, generate this many.",
            shown="all; without --text 16",
            min=1,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        opt(
            "Split longer texts into pieces of at most this many tokens; without --text, the "
            "tokens of each generated text.",
            shown="the model's context, 2048 at most; without --text 1024 at most",
            min=2,
        ),
    ] = None


@dataclass(frozen=True)
class PlanOutput(Output):
    """Where the plan goes: its file is always JSON."""

    endings = (".json",)
    out: Annotated[Path | None, opt("The plan to write: .json.", "--out", "-o")] = None


def cache(
    model: Model,
    text: Annotated[
        Path | None,
        opt(
            "Long texts: a UTF-8 file with one text per line, or - for standard input.",
            shown="texts of random tokens in which a span occurs twice",
        ),
    ] = None,
    duo_attention: Annotated[
        Path | None, opt("Also write the plan to this folder, in the format of DuoAttention.")
    ] = None,
    keep: Annotated[
        float | None, opt("The largest share of kv heads that keep all tokens.", shown="0.5")
    ] = None,
    bytes: Annotated[
        int | None, opt("The largest size of the cache of one text, in bytes.")
    ] = None,
    loss: Annotated[float | None, opt("The largest increase of the mean loss.")] = None,
    sinks: Annotated[int, opt("How many first tokens the other heads keep.", min=0)] = 4,
    window: Annotated[
        int, opt("How many last tokens the other heads keep, fewer than the texts have.", min=1)
    ] = 256,
    *,
    output: PlanOutput,
    shared: CacheTexts,
) -> None:
    """Plan a smaller cache: which tokens each kv head keeps.

    Prints the plan and the loss that it costs. With -o, writes it; with --json, prints it as JSON.
    """
    output.check()
    check_folder(duo_attention, force=output.force)
    goal = {"keep": keep, "bytes": bytes, "loss": loss}
    named = [f"--{name}" for name, value in goal.items() if value is not None]
    if len(named) > 1:
        raise ArgumentError(f"cache: {' and '.join(named[:2])} are both given. Give one of them.")
    from headwise.caching import cache_plan, retrieval_batches, save_duo_attention
    from headwise.cli._inputs import note_split_texts, open_model, read_drawn_texts
    from headwise.models.texts import context_of

    texts: Any = None if text is None else read_drawn_texts(text, shared)
    opened, tokenizer = open_model(model, shared)
    if text is None:
        n_tokens = shared.max_tokens or min(_TOKENS, context_of(opened, tokenizer))
        n_texts, seed = shared.max_texts or _TEXTS, shared.seed or 0
        texts = retrieval_batches(opened, n_texts, n_tokens, seed=seed)
    else:
        note_split_texts(texts, opened, tokenizer, shared)
    with progress_bar(f"Scoring the kv heads of {model}") as on_progress:
        plan = cache_plan(
            opened,
            texts,
            keep=keep if named else _KEEP,
            bytes=bytes,
            loss=loss,
            sinks=sinks,
            window=window,
            tokenizer=tokenizer,
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
        )
    print_note(str(plan))
    for name, value in plan.measured.items():
        print_note(f"{name}: {value:.4g}")
    for n_tokens in _LENGTHS:
        kept, share = plan.nbytes(n_tokens), plan.share(n_tokens)
        print_note(
            f"cache of {n_tokens:,} tokens: {kept / share:,.0f} bytes before, {kept:,} after "
            f"({share - 1:+.1%})"
        )
    output.save("The plan", plan.save)
    if duo_attention is not None:
        print_note(f"The pattern: {save_duo_attention(plan, duo_attention)}")
    output.show(plan.frame(), lambda rows: print_table(rows[["name", "window", "loss"]]))
