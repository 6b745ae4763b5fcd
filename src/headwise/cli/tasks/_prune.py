"""A model without some heads: planned, cut, recovered, measured and saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.cli._options import Shared
from headwise.cli._print import print_note, progress_bar
from headwise.cli.tasks._curves import (
    check_texts_suffice,
    curve_inputs,
    curves_of,
    removal_orders,
    write_curves,
)
from headwise.cli.tasks._models import count_parameters, open_model
from headwise.cli.tasks._quality import QualityInputs
from headwise.cli.tasks._texts import Texts, note_split_texts, sentences_of
from headwise.corpora import SentencePair
from headwise.errors import ArgumentError
from headwise.models import (
    device_of,
    save,
)
from headwise.models.checkpoints import (
    Format,
    as_format,
    source_files,
)
from headwise.models.ownership import example_input
from headwise.models.texts import (
    batches,
    encode,
)
from headwise.recovery import recover
from headwise.scoring import read_batches
from headwise.surgery import Costs, Plan, costs, plan, prune, time_passes
from headwise.tables import Scores, save_figure

_BATCH_SIZE = 16
# The size of the input that passes are timed on.
_TIMED_TEXTS, _TIMED_TOKENS = 8, 128


@dataclass(frozen=True)
class PruneOptions:
    """What to remove, and what to do besides.

    Attributes:
        by: The file with the scores that decide which heads are removed.
        remove: The share of heads to remove; None is the elbow on every second text.
        beside: Files with scores by other methods, whose curves are drawn too.
        recovery: The arguments of `recover`, which is called if there are steps.
        figure: A file for the map of removed heads.
    """

    by: Path
    beside: Sequence[Path]
    remove: float | None
    uniform: bool
    timed: bool
    curve: bool
    recovery: Mapping[str, Any]
    format: Format
    figure: Path | None = None


def prune_model(
    name: str, options: PruneOptions, texts: Texts, shared: Shared, out: Path, force: bool
) -> dict[str, Any]:
    """Note which heads are removed and what that saves, cut them, and write the smaller model.

    Returns:
        JSON content: the removed heads, the quality and the costs before and after by name, the
        elbow of each curve, and the distance from the full model at each step of the recovery.
    """
    scores = Scores.load(options.by)
    orders = removal_orders(scores, [Scores.load(path) for path in options.beside])
    # An impossible plan is refused before the model is opened.
    if options.remove is not None:
        plan(scores, remove=options.remove, uniform=options.uniform)
    full, tokenizer = open_model(name, shared)
    source_files(name)
    full_costs = _costs_of(name, full, scores, options)
    training, held_out = _halves(texts, options)
    if options.remove is None:
        chosen_on = QualityInputs.of(training, scores.loss, full, tokenizer, shared)
        options = replace(options, remove=chosen_on.removable_share(full, scores))
    measured = QualityInputs.of(held_out, scores.loss, full, tokenizer, shared) if texts else None
    planned = _planned(scores, options, full_costs)
    _check_format(options.format, full, planned, folds=bool(texts))
    all_costs: dict[str, tuple[float, ...]] = {
        f"{cost} of heads": change for cost, change in planned.costs.items()
    }
    sentences = sentences_of(training)
    reference = _reference(sentences, full, tokenizer, shared)
    inputs = curve_inputs(texts, scores.loss, full, tokenizer, shared) if options.curve else None
    small = prune(full, planned, fold="mean" if reference else None, reference=reference)
    distances = _recover(small, full, sentences, tokenizer, options.recovery, shared, out)
    all_costs |= _costs_in_all(full, small, options.timed)
    curves = None if inputs is None else curves_of(full, orders, inputs, options.recovery)
    save(small, out, format=options.format, tokenizer=tokenizer, source=name, force=force)
    _note_saved(out)
    quality = measured.compare(full, small, planned.removed, scores.heads) if measured else {}
    _note_plan(planned, options)
    return {
        "removed": [str(head) for head in planned.removed],
        "why": planned.why,
        "quality": quality,
        "costs": all_costs,
        "elbows": [] if curves is None else write_curves(curves, out),
        "recovery": distances,
    }


def _reference(
    sentences: list[str], model: nn.Module, tokenizer: Any, shared: Shared
) -> list[Any] | None:
    """The batches on which removed heads are replaced by their mean output; None without texts."""
    if not sentences:
        return None
    note_split_texts(sentences, model, tokenizer, shared)
    return _encoded(sentences, model, tokenizer, shared)


def _costs_in_all(full: nn.Module, small: nn.Module, timed: bool) -> dict[str, tuple[float, ...]]:
    parameters = {"parameters": (count_parameters(full), count_parameters(small))}
    return parameters | (_milliseconds(full, small) if timed else {})


def _note_plan(planned: Plan, options: PruneOptions) -> None:
    if options.figure is not None:
        print_note(f"A map of the plan: {save_figure(planned.plot(), options.figure)}")
    if options.format == "padded":
        print_note("The saved model is as large and as slow as before: removed heads are zeros")


def _halves(texts: Texts, options: PruneOptions) -> tuple[Texts, Texts]:
    """The texts that choose, fold and train, and the others, which measure.

    Raises:
        ArgumentError: there are too few texts for two halves.
    """
    if not texts:
        return texts, texts
    pairs = isinstance(texts[0], SentencePair)
    option = "--remove auto" if options.remove is None else "--pairs" if pairs else "--text"
    check_texts_suffice(texts, f"prune: {option}")
    return texts[::2], texts[1::2]


def _partial(out: Path) -> Path:
    """The file from which an interrupted recovery resumes."""
    return out.with_name(f"{out.name}.part")


def _note_saved(out: Path) -> None:
    _partial(out).unlink(missing_ok=True)
    print_note("Loaded in a fresh process, the saved model gives the same outputs")


def _planned(scores: Scores, options: PruneOptions, full_costs: Costs) -> Plan:
    """The plan, which is printed as notes."""
    planned = plan(scores, remove=options.remove, uniform=options.uniform, costs=full_costs)
    for line in str(planned).splitlines():
        print_note(line)
    return planned


def _costs_of(name: str, full: nn.Module, scores: Scores, options: PruneOptions) -> Costs:
    """The costs of a model.

    Raises:
        ArgumentError: the scores are of another model.
    """
    full_costs = costs(full)
    if scores.model != full_costs.model:
        raise ArgumentError(
            f"prune: the scores in {options.by} belong to the model {scores.model}, and {name} is "
            f"{full_costs.model}. Score the heads of this model: headwise importance."
        )
    return full_costs


def _check_format(format: Format, model: nn.Module, planned: Plan, *, folds: bool) -> None:
    """Refuse a format that the smaller model cannot have, before texts are read.

    Raises:
        UnsupportedError: the smaller model cannot be saved in this format.
    """
    as_format(format, model)
    if format in ("stock", "padded"):
        # The mean over any text gives the smaller model weights of the same shapes.
        reference = [example_input(model)] if folds else None
        as_format(
            format, prune(model, planned, fold="mean" if folds else None, reference=reference)
        )


def _encoded(texts: list[str], model: nn.Module, tokenizer: Any, shared: Shared) -> list[Any]:
    pieces = encode(tokenizer, texts, model, shared.max_tokens)
    return [vars(batch) for batch in batches(pieces, _BATCH_SIZE, device_of(model))]


def _recover(
    small: nn.Module,
    full: nn.Module,
    texts: list[str],
    tokenizer: Any,
    recovery: Mapping[str, Any],
    shared: Shared,
    out: Path,
) -> list[float]:
    """Recover a smaller model; its distance from the full one at each step."""
    if not recovery["steps"]:
        return []
    partial = _partial(out)
    if partial.exists():
        print_note(f"Resuming from {partial}")
    reference = read_batches(texts, full, tokenizer, shared.max_tokens)
    with progress_bar("Recovering the smaller model") as on_progress:
        distances = recover(
            small, full, reference, resume=partial, on_progress=on_progress, **recovery
        )
    print_note(
        f"Distance from the full model: {distances[0]:.3g} at the first step, "
        f"{distances[-1]:.3g} at the last"
    )
    return [float(distance) for distance in distances]


def _milliseconds(*models: nn.Module) -> dict[str, tuple[float, ...]]:
    """The milliseconds of a pass over 8 texts of 128 tokens, or of the longest context below."""
    config: Any = models[0].config
    length = min(_TIMED_TOKENS, getattr(config, "max_position_embeddings", _TIMED_TOKENS))
    size = (_TIMED_TEXTS, length)
    ids = torch.randint(config.vocab_size, size, device=device_of(models[0]))
    times = time_passes(models, {"input_ids": ids})
    return {
        "milliseconds of attention blocks": tuple(1000 * sum(time.blocks) for time in times),
        "milliseconds of a pass": tuple(1000 * time.whole for time in times),
    }
