"""`headwise group`: a model whose heads share keys and values, with a smaller cache."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headwise.cli._options import Model, ModelOutput, Shared, opt
from headwise.cli._print import print_json, print_note, print_result

if TYPE_CHECKING:
    from headwise.surgery import GroupedLayer


def group(
    model: Model,
    n_kv_heads: Annotated[int, opt("Key/value heads per layer.", "--kv-heads", min=1)],
    text: Annotated[
        Path | None,
        opt(
            "A UTF-8 file, or - for standard input: fit the outputs of the heads on these "
            "texts, not on arbitrary inputs."
        ),
    ] = None,
    *,
    output: ModelOutput,
    shared: Shared,
) -> None:
    """Make the heads of a model share keys and values.

    The grouped model has fewer key/value heads, and so a smaller cache. Its costs are printed
    before and after, and with --text its loss.
    """
    output.check()
    from headwise.checkpoints import save, source_files
    from headwise.cli import _inputs
    from headwise.cli._curves import QualityInputs, check_texts_suffice
    from headwise.scoring import read_batches
    from headwise.surgery import amount, costs, group_heads

    texts = None if text is None else _inputs.read_drawn_texts(text, shared)
    full, tokenizer = _inputs.open_model(model, shared)
    source_files(model)
    layers: list[GroupedLayer] = []

    def on_layer(layer: "GroupedLayer") -> None:
        layers.append(layer)
        print_note(str(layer))

    reference = None
    if texts is not None:
        check_texts_suffice(texts, "group: --text")
        _inputs.note_split_texts(texts, full, tokenizer, shared)
        reference = read_batches(texts[::2], full, tokenizer, shared.max_tokens)
    grouped = group_heads(full, n_kv_heads, reference=reference, on_layer=on_layer)
    before, after = costs(full), costs(grouped)
    changes = {
        f"{cost} of heads": (before.after((), cost), after.after((), cost)) for cost in before.own
    } | {"parameters": _inputs.count_parameters(full, grouped)}
    quality = {}
    if texts is not None:
        held_out = QualityInputs.of(texts[1::2], "", full, tokenizer, shared)
        quality = held_out.compare(full, grouped, before.heads[:1], before.heads)
    save(grouped, output.out, tokenizer=tokenizer, source=model, force=output.force)
    if output.as_json:
        rows = [asdict(layer) for layer in layers]
        print_json({"layers": rows, "costs": changes, "quality": quality})
        return
    for name, (full_cost, cost) in changes.items():
        change = f"{cost / full_cost - 1:+.1%}"
        print_result(f"{name}: {amount(full_cost)} before, {amount(cost)} after ({change})")
    for unit, (full_loss, loss) in quality.items():
        print_result(
            f"{unit}: {full_loss:.4g} before, {loss:.4g} after (on every second text; the others "
            f"fit)"
        )
    print_result(f"The grouped model is in {output.out}")
