"""The expected table, computed from whole attention matrices, one text at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise.tables import HeadTable
from headwise.watch import Request, Watch, observe

OF_WEIGHTS = ("entropy", "max_weight", "first", "self", "previous", "next", "distance")


def padded(texts: Sequence[Sequence[int]], side: str) -> dict[str, torch.Tensor]:
    """Texts as the arguments of a model, padded on one side."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), 1)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        span = slice(0, len(text)) if side == "right" else slice(longest - len(text), longest)
        ids[row, span] = torch.tensor(text)
        mask[row, span] = 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if side == "left":  # learned positions need the start of the text
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return batch


def means(
    maps: Iterable[np.ndarray],
    pairs: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
    logits: Sequence[np.ndarray] = (),
    writes: Sequence[np.ndarray] = (),
    gates: Sequence[np.ndarray] = (),
) -> dict[str, np.ndarray]:
    """Means per head of the statistics of weights, as DESIGN defines them.

    Args:
        maps: For each text the weights `[H, T, T]` of its real tokens alone.
        pairs: For each relation its (text, query, key).
        logits: For each text the logits `[H, T, T]`: those of rows that a default request lacks
            or that need more than weights come with them.
        writes: For each text what each head writes, `[H, T, D]`.
        gates: For each text the factor of each head, `[H, T]`.
    """
    rows: dict[str, list[np.ndarray]] = {}

    def add(name: str, values: np.ndarray) -> None:
        rows.setdefault(name, []).append(values)

    for number, weights in enumerate(maps):
        _, T, _ = weights.shape
        for query in range(T):
            row = weights[:, query]
            visible = (weights[:, query] > 0).any(0)
            if logits:
                highest = logits[number][:, query, visible].max(-1)
                add("max_logit", highest)
                add("lse", highest - np.log(row.max(-1)))
                add("sink", 1 - row.sum(-1))
                add("gate", gates[number][:, query])
                add("output_norm", np.linalg.norm(writes[number][:, query], axis=-1))
            if visible.sum() < 2:
                continue  # its weight is always 1
            logs = np.log(np.where(row > 0, row, 1.0))
            add("entropy", -(row * logs).sum(-1))
            add("max_weight", row.max(-1))
            if logits:
                add("participation", row.sum(-1) ** 2 / np.square(row).sum(-1))
            add("distance", (row * np.abs(np.arange(T) - query)).sum(-1))
            keys = {"first": 0, "self": query, "previous": query - 1, "next": query + 1}
            for name, key in keys.items():
                if 0 <= key < T and visible[key]:
                    add(name, row[:, key])
            for name, triples in (pairs or {}).items():
                key_positions = [
                    key for text, position, key in triples if (text, position) == (number, query)
                ]
                key_positions = [key for key in key_positions if visible[key]]
                if key_positions:
                    add(name, row[:, key_positions].sum(-1))
    return {name: np.mean(values, axis=0) for name, values in rows.items()}


def eager_maps(model: nn.Module, texts: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """For each layer and text, the weights that the model itself returns, without padding."""
    per_text = []
    for text in texts:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([text]), output_attentions=True)
        per_text.append([layer[0].double().numpy() for layer in out.attentions])
    return [list(layer) for layer in zip(*per_text, strict=True)]


def assert_of_weights(
    table: HeadTable, maps_of_layers: Sequence[Sequence[np.ndarray]], tolerance: float = 1e-4
) -> None:
    """The means of a table are those of the weights of each layer and text, in its first stack."""
    for layer, maps in enumerate(maps_of_layers):
        expected, H = means(maps), len(maps[0])
        place = (table.heads[0].stack, layer)
        rows = [row for row, head in enumerate(table.heads) if (head.stack, head.layer) == place]
        assert len(rows) == H
        for name in OF_WEIGHTS:
            theirs = expected.get(name, np.full(H, np.nan))
            np.testing.assert_allclose(
                table.mean(name)[rows], theirs, rtol=0, atol=tolerance, err_msg=f"{name} L{layer}"
            )


def assert_tables_close(
    one: HeadTable, two: HeadTable, rtol: float = 1e-6, atol: float = 1e-9
) -> None:
    """Two tables have the same counts, and the same numbers up to rounding."""
    assert one.heads == two.heads
    assert one.statistics == two.statistics
    for name in one.statistics:
        np.testing.assert_array_equal(one.count(name), two.count(name), err_msg=name)
        for column in ("mean", "standard_error", "maximum", "uniform"):
            mine, theirs = (getattr(table, column)(name) for table in (one, two))
            np.testing.assert_allclose(mine, theirs, rtol, atol, err_msg=name)


def modules_of(model: nn.Module) -> dict[str, object]:
    """Everything that watching could leave on a model's modules."""
    return {
        f"{name}.{key}": id(value) if not isinstance(value, dict) else (id(value), len(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }


def first_tensor(output: Any) -> torch.Tensor:
    """A model's output, or the first of its outputs."""
    return output if isinstance(output, torch.Tensor) else output[0]


def watched(
    model: nn.Module, *args: Any, request: Request | None = None, passes: int = 1, **kwargs: Any
) -> Watch:
    """A watch of passes without gradients, which changes no bit of the output."""
    with torch.no_grad():
        plain = first_tensor(model(*args, **kwargs))
        with observe(model, request or Request()) as watch:
            for _ in range(passes):
                assert torch.equal(first_tensor(model(*args, **kwargs)), plain)
    return watch
