"""`headwise prune`: a smaller model, without the heads that matter least."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headwise._choices import FORMATS, MODEL_FILES
from headwise._display import counted
from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_json, print_note, print_result, progress_bar
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[*FORMATS]

_WHERE = "(on every second text; the others choose the heads, and fold and train the model)"
_BATCH_SIZE = 16
_TIMED = 5  # passes whose median is told


def prune(
    model: _options.Model,
    by: Annotated[Path, opt("The scores of MODEL, written by headwise importance.")],
    remove: Annotated[
        float | None, opt("The share of heads to remove, such as 0.3.", min=0)
    ] = None,
    within: Annotated[
        float | None,
        opt(
            "Instead of --remove: what may be lost, such as 0.01: a share of the loss, or, for the "
            "loss embedding, of 1. As many heads go as every second text allows; the others "
            "measure the result.",
            min=0,
        ),
    ] = None,
    measure: Annotated[
        Literal["loss", "score"],
        opt("With --within: the loss, or the score of a task, such as Spearman's correlation."),
    ] = "loss",
    text: Annotated[
        Path | None,
        opt(
            "A UTF-8 file, or - for standard input: removed heads are replaced by their mean "
            "output on it."
        ),
    ] = None,
    pairs: _options.PairsFile = None,
    uniform: Annotated[
        bool, opt("Remove the same number of heads from each layer.", "--uniform")
    ] = False,
    curve: Annotated[
        bool,
        opt("Write curves.csv and curves.svg: the loss as heads are removed.", "--curve"),
    ] = False,
    format: Annotated[
        FormatName | None,
        opt(
            "What can load it: headwise if none is named, or for a folder of sentence-transformers "
            "one that SentenceTransformer opens. "
            + " ".join(f"{name}: {format.opened_by}." for name, format in FORMATS.items()),
        ),
    ] = None,
    figure: _options.Figure = None,
    recover: Annotated[
        int, opt("Train the smaller model for this many steps to match the full one.", min=0)
    ] = 0,
    rate: Annotated[float, opt("With --recover: the peak learning rate.", min=0)] = 1e-4,
    *,
    out: Annotated[Path, opt("The folder to write.", "--out", "-o")],
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
    """Remove the least important heads from a model."""
    _options.check_folder(out, *MODEL_FILES, force=force)
    _options.check_figure(figure, force)
    if (remove is None) == (within is None):
        given = "neither --remove nor" if remove is None else "both --remove and"
        raise ArgumentError(f"prune: {given} --within. Give one of them.")
    if text is not None and pairs is not None:
        raise ArgumentError("prune: --text and --pairs are both given. Give one of them.")
    if text is None and pairs is None and (within is not None or curve or recover):
        raise ArgumentError(
            "prune: --within, --curve and --recover need texts. Add --text FILE or --pairs FILE."
        )
    from headwise import surgery
    from headwise.checkpoints import choose_format, prepare, save, source_files
    from headwise.cli import _inputs
    from headwise.cli._curves import QualityInputs, check_texts_suffice
    from headwise.corpora import read_pairs
    from headwise.models import device_of
    from headwise.models.texts import batches, encode
    from headwise.ownership import example_input
    from headwise.recovery import recover as recover_model
    from headwise.scoring import read_batches
    from headwise.tables import Curves, Scores, save_figure

    texts: _inputs.Texts = []
    if text is not None:
        texts = _inputs.read_drawn_texts(text, seed, max_texts, paragraphs)
    if pairs is not None:
        texts = _inputs.draw_texts(read_pairs(pairs), seed, max_texts)
    scores = Scores.load(by)
    if within is None:  # an impossible plan is refused before the model is opened
        surgery.plan(scores, remove=remove, uniform=uniform)
    if texts:
        check_texts_suffice(texts, "prune: --text or --pairs")
    full, tokenizer = _inputs.open_model(model, device, dtype, attention)
    source_files(model)
    # One half chooses, folds and trains; the other measures.
    training, held_out = (
        QualityInputs.of(half, scores.loss, full, tokenizer, max_tokens) if texts else None
        for half in (texts[::2], texts[1::2])
    )
    means = None if training is None else training.batches

    def curves_on(inputs: QualityInputs, label: str, random: int) -> Curves:
        with progress_bar(label) as on_progress:
            return surgery.plan_curves(
                full, inputs.batches, scores, reference=means,
                loss=inputs.loss, uniform=uniform, random=random, on_progress=on_progress,
            )  # fmt: skip

    curves = None
    if within is not None and training is not None:
        curves = curves_on(training, "Finding how many heads can be removed", random=0)
        curves = curves.of_score() if measure == "score" else curves
    costs = surgery.costs(full)
    plan = surgery.plan(
        scores, remove=remove, within=within, curves=curves, uniform=uniform, costs=costs
    )
    for line in str(plan).splitlines():
        print_note(line)
    if format is not None:
        prepare(format, full, tokenizer=tokenizer)
    # The mean outputs are those on plain texts; `read_batches` would mask tokens of some models.
    sentences, reference = _inputs.sentences_of(texts[::2]), None
    if sentences:
        _inputs.note_split_texts(sentences, full, tokenizer, max_tokens)
        pieces = encode(tokenizer, sentences, full, max_tokens)
        reference = [*batches(pieces, _BATCH_SIZE, device_of(full))]
    small = surgery.prune(full, plan, fold="mean" if reference else None, reference=reference)
    format = choose_format(small, model) if format is None else format
    prepare(format, small, tokenizer=tokenizer)  # refused before it is trained or measured
    partial = out.with_name(f"{out.name}.part")  # an interrupted recovery resumes
    distances: list[float] = []
    if recover:
        read = read_batches(sentences, full, tokenizer, max_tokens)
        with progress_bar("Recovering the smaller model") as on_progress:
            found = recover_model(
                small, full, read, steps=recover, rate=rate, seed=seed or 0,
                resume=partial, on_progress=on_progress,
            )  # fmt: skip
        distances = [float(distance) for distance in found]
    save(small, out, format=format, tokenizer=tokenizer, source=model, force=force)
    partial.unlink(missing_ok=True)
    if FORMATS[format].reader is None:
        print_note("Nothing has run the saved file: compare it where llama.cpp is installed")
    quality = held_out.compare(full, small, plan.removed, scores.heads) if held_out else {}
    _options.write_figure("A map of the plan", plan.plot, figure, force)
    if curve and held_out is not None:
        drawn = curves_on(held_out, "Drawing curves", random=5)
        allowed = drawn.allowance()
        drawn.frame(allowed).to_csv(out / "curves.csv", index=False)
        save_figure(drawn.plot(allowed=allowed), out / "curves.svg")
    timed = reference[0] if reference else example_input(full)
    facts: dict[str, Any] = {
        "removed": [str(head) for head in plan.removed],
        "why": plan.why,
        "quality": quality,
        "costs": {f"{cost} of heads": change for cost, change in plan.costs.items()}
        | {"parameters": _inputs.count_parameters(full, small)},
        "format": format,
        "MiB": [_inputs.size_of(module) for module in (full, small)],
        "seconds": [
            times.whole for times in surgery.time_passes([full, small], timed, passes=_TIMED)
        ],
        "recovery": distances,
    }
    if as_json:
        print_json(facts)
        return
    for name, (before, after) in quality.items():
        # Rounding errors of a distance from itself would read as a quality.
        print_result(
            f"{name}: {round(before, 6) + 0:.4g} before, {round(after, 6) + 0:.4g} after {_WHERE}"
        )
    before, after = facts["costs"]["parameters"]
    print_result(
        f"parameters: {before:,.0f} before, {after:,.0f} after ({after / before - 1:+.1%})"
    )
    if recover:
        print_result(f"Distance from the full model: {distances[0]:.3g}, then {distances[-1]:.3g}")
    (before, after), (slow, fast) = facts["MiB"], facts["seconds"]
    print_result(f"weights: {before:,.1f} MiB before, {after:,.1f} MiB after")
    on = counted(len(reference[0]["input_ids"]), "text") if reference else "a made-up text"
    print_result(f"a pass over {on}: {slow:.3g} s before, {fast:.3g} s after")
    print_result(f"The smaller model is in {out}")
    print_result(_opened_by(format, out))


def _opened_by(format: str, folder: Path) -> str:
    """A sentence that says what opens a folder."""
    opened, whole = FORMATS[format], folder / "config_sentence_transformers.json"
    if opened.reader not in ("headwise", "transformers"):
        return f"It is for {opened.opened_by}"
    calls = [f'headwise.load("{folder}")']
    is_stock = not (folder / "headwise.json").is_file()
    if whole.is_file() and (is_stock or opened.trust):
        kind = json.loads(whole.read_text("utf-8")).get("model_type", "SentenceTransformer")
        calls.insert(0, f'{kind}("{folder}"{"" if is_stock else ", trust_remote_code=True"})')
    elif opened.reader == "transformers":
        calls.insert(0, f"transformers{' and trust_remote_code=True' if opened.trust else ''}")
    return f"Open it with {' or '.join(calls)}"
