"""The long part of `headwise group`: fit, tell, save."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.cli._options import Shared
from headwise.cli._print import note
from headwise.cli._progress import open_model, some_texts, tell_pieces
from headwise.cli._prune_model import count_weights
from headwise.models import save, source_files
from headwise.scoring import read_batches
from headwise.surgery import GroupedLayer, Method, costs, group_heads


def regroup(
    model: str,
    kv_heads: int,
    method: Method,
    text: Path | None,
    shared: Shared,
    out: Path,
    force: bool,
) -> dict[str, Any]:
    """Tell layer by layer which heads come together and what that loses, and write the model.

    Returns:
        What can be written as JSON: the layers, and costs before and after by name.
    """
    texts = None if text is None else some_texts(text, shared)
    opened, tokenizer = open_model(model, shared)
    source_files(model)
    layers: list[GroupedLayer] = []

    def tell(layer: GroupedLayer) -> None:
        layers.append(layer)
        note(str(layer))

    if texts is not None:
        tell_pieces(texts, opened, tokenizer, shared)
    read = None if texts is None else read_batches(texts, opened, tokenizer, shared.max_tokens)
    small = group_heads(opened, kv_heads, method=method, reference=read, on_layer=tell)
    counted = costs(opened), costs(small)
    told = {
        f"{name} of heads": tuple(one.after((), name) for one in counted) for name in counted[0].own
    }
    told["parameters"] = count_weights(opened), count_weights(small)
    save(small, out, tokenizer=tokenizer, source=model, force=force)
    return {"layers": [asdict(layer) for layer in layers], "costs": told}
