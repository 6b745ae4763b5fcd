"""`headwise prune`: a smaller model, without the heads that matter least."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headwise._display import counted
from headwise._packages import require
from headwise.cli._options import Figure, Model, ModelOutput, PairsFile, Shared, check_figure, opt
from headwise.cli._print import print_json, print_note, print_result, progress_bar
from headwise.errors import ArgumentError
from headwise.files import write_beside

if TYPE_CHECKING:
    from torch import nn

    from headwise.cli._curves import QualityInputs
    from headwise.scoring import Inputs
    from headwise.tables import Curves, Head, Scores

_WHERE = "(on every second text; the others fold and train the smaller model)"
_BATCH_SIZE = 16
# The size of the input that passes are timed on.
_TIMED_TEXTS, _TIMED_TOKENS = 8, 128
# Points of a recovered curve; each one trains a smaller model.
_RECOVERED_POINTS = 9
# Times the square root of the number of pairs: by how much Spearman's correlation differs between
# draws of the pairs (0.02 at 100 pairs; docs/pruning.md).
_NOISE_OF_SPEARMAN = 0.2


def prune(
    model: Model,
    by: Annotated[Path, opt("The scores of MODEL, written by headwise importance.")],
    remove: Annotated[
        str,
        opt(
            "The share of heads to remove, such as 0.3. auto: as many as possible while every "
            "second text loses at most --quality; the result is measured on the other texts.",
            metavar="SHARE|auto",
        ),
    ],
    quality: Annotated[
        float | None, opt("With --remove auto: how much may be lost.", shown="0.01", min=0)
    ] = None,
    measure: Annotated[
        Literal["loss", "cosine", "spearman"] | None,
        opt(
            "With --remove auto: what must not be lost. loss: the share by which the loss grows. "
            "cosine: the mean of 1 − cosine between embeddings before and after. spearman: the "
            "drop of the correlation with the similarities of --pairs.",
            shown="loss; cosine for scores of the loss embedding",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        opt(
            "A UTF-8 file, or - for standard input: removed heads are replaced by their mean "
            "output on it."
        ),
    ] = None,
    pairs: PairsFile = None,
    uniform: Annotated[
        bool, opt("Remove the same number of heads from each layer.", "--uniform")
    ] = False,
    timed: Annotated[bool, opt("Measure the time of a pass before and after.", "--time")] = False,
    curve: Annotated[
        bool,
        opt(
            "Write curves.svg and curves.csv: the loss as heads are removed, with random "
            "orders for comparison.",
            "--curve",
        ),
    ] = False,
    beside: Annotated[
        list[Path] | None,
        opt(
            "With --curve: scores by another method, drawn in the same figure. Repeatable.",
            metavar="<path>",
        ),
    ] = None,
    format: Annotated[
        Literal["headwise", "stock", "padded", "remote-code", "gguf", "onnx"],
        opt(
            "What can load it. headwise: this library. stock: plain Transformers. padded: "
            "plain Transformers, at the original size, with zeros for removed heads. remote-code: "
            "Transformers with trust_remote_code. gguf: llama.cpp. onnx: ONNX runtimes.",
            "--format",
        ),
    ] = "headwise",
    figure: Figure = None,
    recover: Annotated[
        int, opt("Train the smaller model for this many steps to match the full one.", min=0)
    ] = 0,
    rate: Annotated[
        float | None, opt("With --recover: the peak learning rate.", shown="0.0001", min=0)
    ] = None,
    *,
    output: ModelOutput,
    shared: Shared,
) -> None:
    """Remove the least important heads from a model."""
    output.check()
    check_figure(figure, output.force)
    if rate is not None and not (recover and rate > 0):
        raise ArgumentError(
            f"prune: --rate {rate:g} with --recover {recover}. Use numbers above 0."
        )
    share = _share_of(remove)
    if share is not None and (quality is not None or measure is not None):
        option = "--measure" if quality is None else "--quality"
        raise ArgumentError(f"prune: {option} with --remove {remove}. Give --remove auto.")
    if quality == 0:
        raise ArgumentError("prune: --quality 0 lets nothing go. Give a number above 0.")
    if measure == "spearman" and pairs is None:
        raise ArgumentError("prune: --measure spearman without --pairs. Add --pairs FILE.")
    if text is not None and pairs is not None:
        raise ArgumentError("prune: --text and --pairs are both given. Give one of them.")
    needs = {"--remove auto": share is None, "--curve": curve, "--recover": recover > 0}
    needing = next((name for name, needed in needs.items() if needed), None)
    if needing is not None and text is None and pairs is None:
        raise ArgumentError(f"prune: {needing} without a text. Add --text FILE or --pairs FILE.")
    if curve:
        require("matplotlib", "plot", "prune --curve")
    elif beside:
        raise ArgumentError(f"prune: --beside {beside[0]} without --curve. Add --curve.")
    from headwise import surgery
    from headwise.checkpoints import as_format, save, source_files
    from headwise.cli import _curves, _inputs
    from headwise.corpora import read_pairs
    from headwise.models import device_of
    from headwise.models.texts import batches, encode
    from headwise.recovery import recover as recover_model
    from headwise.scoring import read_batches
    from headwise.tables import Elbow, Scores, save_figure

    texts: _inputs.Texts = [] if text is None else _inputs.read_drawn_texts(text, shared)
    if pairs is not None:
        texts = _inputs.draw_texts(read_pairs(pairs), shared)
    scores = Scores.load(by)
    if curve and pairs is not None and scores.loss != "embedding":
        raise ArgumentError(
            f"prune: --pairs with scores of the loss {scores.loss!r}. Score the heads with "
            f"headwise importance --loss embedding, or use --text."
        )
    if measure is not None and (measure == "loss") == (scores.loss == "embedding"):
        raise ArgumentError(
            f"prune: --measure {measure} with scores of the loss {scores.loss!r}. Use loss with "
            f"scores of lm, masked-lm or label, cosine and spearman with scores of embedding: "
            f"headwise importance --loss."
        )
    orders = _removal_orders(scores, [Scores.load(path) for path in beside or ()], uniform)
    if share is not None:  # an impossible plan is refused before the model is opened
        surgery.plan(scores, remove=share, uniform=uniform)
    full, tokenizer = _inputs.open_model(model, shared)
    source_files(model)
    full_costs = surgery.costs(full)
    if scores.model != full_costs.model:
        raise ArgumentError(
            f"prune: the scores in {by} belong to the model {scores.model}, and {model} is "
            f"{full_costs.model}. Score the heads of this model: headwise importance."
        )
    if texts:
        option = "--remove auto" if share is None else "--text" if pairs is None else "--pairs"
        _curves.check_texts_suffice(texts, f"prune: {option}")
    # One half chooses, folds and trains; the other measures.
    training, held_out = texts[::2], texts[1::2]
    quality_of = _curves.QualityInputs.of
    if share is None:
        chosen_on = quality_of(training, scores.loss, full, tokenizer, shared)
        quality = _curves.AUTO_SHARE if quality is None else quality
        share = _removable_share(full, scores, chosen_on, quality, measure == "spearman", uniform)
    measured = quality_of(held_out, scores.loss, full, tokenizer, shared) if texts else None
    planned = surgery.plan(scores, remove=share, uniform=uniform, costs=full_costs)
    for line in str(planned).splitlines():
        print_note(line)
    as_format(format, full)
    # The mean outputs are those on plain texts; `read_batches` would mask tokens of some models.
    sentences, reference = _inputs.sentences_of(training), None
    if sentences:
        _inputs.note_split_texts(sentences, full, tokenizer, shared)
        pieces = encode(tokenizer, sentences, full, shared.max_tokens)
        reference = [vars(batch) for batch in batches(pieces, _BATCH_SIZE, device_of(full))]
    small = surgery.prune(full, planned, fold="mean" if reference else None, reference=reference)
    as_format(format, small)  # refused before it is trained or measured
    recovery: dict[str, Any] = {"steps": recover, "seed": shared.seed or 0}
    recovery |= {"rate": rate} if rate else {}
    # From this file an interrupted recovery resumes.
    partial = output.out.with_name(f"{output.out.name}.part")
    distances: list[float] = []
    read = read_batches(sentences, full, tokenizer, shared.max_tokens) if recover or curve else []
    if recover:
        if partial.exists():
            print_note(f"Resuming from {partial}")
        with progress_bar("Recovering the smaller model") as bar:
            found = recover_model(small, full, read, resume=partial, on_progress=bar, **recovery)
        distances = [float(distance) for distance in found]
        print_note(
            f"Distance from the full model: {distances[0]:.3g} at the first step, "
            f"{distances[-1]:.3g} at the last"
        )
    costs: dict[str, tuple[float, ...]] = {
        f"{cost} of heads": change for cost, change in planned.costs.items()
    }
    costs["parameters"] = _inputs.count_parameters(full, small)
    costs |= _milliseconds(full, small) if timed else {}
    curves = []
    if curve and measured is not None:
        _, ends = surgery.removal_order(scores, uniform=uniform)
        curves = [_curves.curves_of(full, orders, ends, read, measured)]
        if recover:
            curves += [_recovered_curves(full, orders, ends, read, measured, recovery)]
    save(small, output.out, format=format, tokenizer=tokenizer, source=model, force=output.force)
    partial.unlink(missing_ok=True)
    if format == "gguf":
        print_note("Nothing has run the saved file: compare it where llama.cpp is installed")
    else:
        print_note("Loaded in a fresh process, the saved model gives the same outputs")
    losses = measured.compare(full, small, planned.removed, scores.heads) if measured else {}
    if figure is not None:
        print_note(f"A map of the plan: {save_figure(planned.plot(), figure)}")
    if format == "padded":
        print_note("The saved model is as large and as slow as before: removed heads are zeros")
    elbows = _write_curves(curves, output.out) if curves else []
    if output.as_json:
        print_json(
            {
                "removed": [str(head) for head in planned.removed],
                "why": planned.why,
                "quality": losses,
                "costs": costs,
                "elbows": elbows,
                "recovery": distances,
            }
        )
        return
    for unit, both in losses.items():
        # Rounding errors of a distance from itself would read as a quality.
        before, after = (round(value, 6) + 0.0 for value in both)
        print_result(f"{unit}: {before:.4g} before, {after:.4g} after {_WHERE}")
    for name, (before, after) in costs.items():
        if not name.endswith(" of heads"):  # the plan's notes have those
            change = f"{after / before - 1:+.1%}"
            amounts = f"{surgery.amount(before)} before, {surgery.amount(after)} after"
            print_result(f"{name}: {amounts} ({change})")
    for name, allowed, *elbow in (row.values() for row in elbows):
        print_result(
            f"{name}: {Elbow(*elbow)} heads can be removed before the loss grows by {allowed:.4g}"
        )
    if curve:
        print_result(
            f"Intervals are 95 % over resampled texts. The curves are in {output.out}: curves.svg, "
            f"curves.csv"
        )
    print_result(f"The smaller model is in {output.out}")


def _share_of(remove: str) -> float | None:
    """The share of heads to remove; None for `auto`."""
    if remove == "auto":
        return None
    try:
        share = float(remove)
    except ValueError:
        share = float("nan")
    if not 0 < share < 1:
        raise ArgumentError(
            f"prune: --remove {remove}. Give a share above 0 and below 1, such as 0.3, or auto."
        )
    return share


def _removal_orders(
    by: "Scores", beside: "Sequence[Scores]", uniform: bool
) -> "dict[str, list[Head]]":
    """The order in which each method removes heads, by the method's name; that of `by` first.

    Raises:
        ArgumentError: scores are of another model, or two are by the same method.
    """
    from headwise.surgery import removal_order

    orders: dict[str, list[Head]] = {}
    for scores in (by, *beside):
        if scores.model != by.model:
            raise ArgumentError(
                f"prune: --beside has scores of the model {scores.model}, --by scores of "
                f"{by.model}. Score the heads of one model."
            )
        rounds = 1 + int(scores.round.max())
        name = scores.method if rounds == 1 else f"{scores.method}, {rounds} rounds"
        if name in orders:
            raise ArgumentError(
                f"prune: --by and --beside have two orders by {name}. Use one order per method."
            )
        orders[name], _ = removal_order(scores, uniform=uniform)
    return orders


def _removable_share(
    full: "nn.Module",
    scores: "Scores",
    chosen_on: "QualityInputs",
    quality: float,
    by_score: bool,
    uniform: bool,
) -> float:
    """The share of heads at the elbow of the plans' curve; a note states the bar.

    Args:
        quality: What may be lost: a share of the full model's loss, or of 1 if the loss
            compares with the full model.
        by_score: Whether the task's score may fall by so much, whatever the loss does.
        uniform: Whether plans remove the same number of heads from each layer.
    Raises:
        ArgumentError: not even one head can be removed under the bar.
    """
    from headwise.cli._curves import UNITS, share_at_elbow
    from headwise.scoring import in_fifths, prune_curves
    from headwise.surgery import removal_order

    order, ends = removal_order(scores, uniform=uniform)
    points = in_fifths(ends)
    print_note(
        f"auto: the loss is measured at {counted(1 + len(points), 'number')} of heads, each in "
        f"{counted(len(chosen_on.batches), 'pass', 'passes')} over half of the texts"
    )
    with progress_bar("Finding how many heads can be removed") as on_progress:
        curves = prune_curves(
            full, chosen_on.batches, {"order": order}, reference=chosen_on.batches,
            loss=chosen_on.loss, points=points, random=0, on_progress=on_progress,
        )  # fmt: skip
    unit, change = UNITS.get(curves.loss, curves.loss), "the loss grows"
    if by_score:  # a curve like any other: what the score lacks grows
        pairs = curves.per_text["order"].shape[-1] // 2  # a loss for each of their sentences
        unit, change = f"on {pairs} pairs", f"{curves.score} falls"
        noise = _NOISE_OF_SPEARMAN / pairs**0.5
        if quality < noise:
            print_note(f"auto: {unit}, a change of {curves.score} below {noise:.1g} can be noise")
        lost = -curves.scores["order"][..., None]
        curves = replace(curves, per_text={"order": lost}, compares=True)
    allowed = curves.allowance(quality)
    elbow = curves.elbow("order", allowed)
    bar = f"{allowed:.4g} ({unit})"
    if elbow.heads == 0:
        first = "head" if ends[:1] == [1] else counted(next(iter(ends), 0), "head")
        raise ArgumentError(
            f"prune: --remove auto: without the first {first} {change} by more than {bar}. "
            f"Give a larger --quality, a share, such as --remove 0.1, or score the heads on "
            f"more texts."
        )
    of_what = "" if curves.compares else f", {quality:.2g} of the full model's"
    print_note(
        f"auto: {elbow} of {len(scores.heads)} heads can be removed before {change} by "
        f"{bar}{of_what}"
    )
    return share_at_elbow(curves, quality)


def _recovered_curves(
    model: "nn.Module",
    orders: "Mapping[str, list[Head]]",
    ends: list[int],
    reference: "list[Inputs]",
    evaluation: "QualityInputs",
    recovery: Mapping[str, Any],
) -> "Curves":
    """The curve of the first order where each smaller model is trained on the reference."""
    from headwise.recovery import recovering
    from headwise.scoring import prune_curves

    name, order = next(iter(orders.items()))
    stride = max(1, (len(ends) + 1) // _RECOVERED_POINTS)
    with progress_bar(f"Recovering {_RECOVERED_POINTS} smaller models") as on_progress:
        return prune_curves(
            model, evaluation.batches, {f"{name}, recovered": [order]},
            loss=evaluation.loss, points=[0, *ends][::stride],
            cut=recovering(model, reference, **recovery), on_progress=on_progress,
        )  # fmt: skip


def _milliseconds(*models: "nn.Module") -> dict[str, tuple[float, ...]]:
    """The milliseconds of a pass over 8 texts of 128 tokens, or of the longest context below."""
    import torch

    from headwise.models import device_of
    from headwise.surgery import time_passes

    config: Any = models[0].config
    length = min(_TIMED_TOKENS, getattr(config, "max_position_embeddings", _TIMED_TOKENS))
    size = (_TIMED_TEXTS, length)
    ids = torch.randint(config.vocab_size, size, device=device_of(models[0]))
    times = time_passes(models, {"input_ids": ids})
    return {
        "milliseconds of attention blocks": tuple(1000 * sum(time.blocks) for time in times),
        "milliseconds of a pass": tuple(1000 * time.whole for time in times),
    }


def _write_curves(all_curves: "list[Curves]", folder: Path) -> list[dict[str, Any]]:
    """Write the table and the picture of curves; return the elbow of each order."""
    import pandas as pd

    from headwise.tables import save_figure

    allowed = all_curves[0].allowance()
    frame = pd.concat([curves.frame(allowed) for curves in all_curves], ignore_index=True)
    with write_beside(folder / "curves.csv") as beside:
        frame.to_csv(beside, index=False)
    first, *others = all_curves
    save_figure(first.plot(*others, allowed=allowed), folder / "curves.svg")
    return [
        {"order": name, "allowed": allowed, **asdict(curves.elbow(name, allowed))}
        for curves in all_curves
        for name in curves.per_text
    ]
