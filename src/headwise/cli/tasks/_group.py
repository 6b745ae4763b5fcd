"""A model whose heads share keys and values: grouped, reported, saved."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.cli._options import Shared
from headwise.cli._print import print_note
from headwise.cli.tasks._curves import check_texts_suffice
from headwise.cli.tasks._models import count_parameters, open_model
from headwise.cli.tasks._quality import QualityInputs
from headwise.cli.tasks._texts import note_split_texts, read_drawn_texts
from headwise.models import save
from headwise.models.checkpoints import source_files
from headwise.scoring import read_batches
from headwise.surgery import GroupedLayer, costs, group_heads


def group_model(
    name: str,
    n_kv_heads: int,
    text: Path | None,
    shared: Shared,
    out: Path,
    force: bool,
) -> dict[str, Any]:
    """Group the heads of a model, note for each layer what is lost, and write the grouped model.

    Returns:
        JSON content: the layers, the costs before and after by name, and the loss before and after
        on every second text; the others fit the grouped model.
    """
    texts = None if text is None else read_drawn_texts(text, shared)
    model, tokenizer = open_model(name, shared)
    source_files(name)
    layers: list[GroupedLayer] = []

    def on_layer(layer: GroupedLayer) -> None:
        layers.append(layer)
        print_note(str(layer))

    reference = None
    if texts is not None:
        check_texts_suffice(texts, "group: --text")
        note_split_texts(texts, model, tokenizer, shared)
        reference = read_batches(texts[::2], model, tokenizer, shared.max_tokens)
    grouped = group_heads(model, n_kv_heads, reference=reference, on_layer=on_layer)
    before, after = costs(model), costs(grouped)
    all_costs = {
        f"{cost} of heads": (before.after((), cost), after.after((), cost)) for cost in before.own
    }
    all_costs["parameters"] = count_parameters(model), count_parameters(grouped)
    quality = {}
    if texts is not None:
        held_out = QualityInputs.of(texts[1::2], "", model, tokenizer, shared)
        quality = held_out.compare(model, grouped, before.heads[:1], before.heads)
    save(grouped, out, tokenizer=tokenizer, source=name, force=force)
    return {
        "layers": [asdict(layer) for layer in layers],
        "costs": all_costs,
        "quality": quality,
    }
