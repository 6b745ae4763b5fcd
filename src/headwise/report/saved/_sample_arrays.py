"""The texts that a study shows, with their attention, as JSON content and named arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headwise.report._study_data import Sample, TopPairs
from headwise.report.saved._json_values import texts_of
from headwise.report.saved._named_arrays import NamedArrays
from headwise.tables import Head


def put_sample(sample: Sample, place: str, arrays: NamedArrays) -> dict[str, Any]:
    """Add the attention of a sample to the arrays; return the rest of it.

    Args:
        place: What the names of its arrays begin with.
    """
    content: dict[str, Any] = {"tokens": list(sample.tokens), "targets": list(sample.targets)}
    for number, heads in enumerate(_stackable(sample.weights)):
        stacked = np.stack([sample.weights[head] for head in heads])
        arrays.put(f"{place}.weights.{number}", stacked, np.float32)
        content.setdefault("weights", []).append([str(head) for head in heads])
    keys = {head: pairs.keys for head, pairs in sample.pairs.items()}
    for number, heads in enumerate(_stackable(keys)):
        pairs = [sample.pairs[head] for head in heads]
        arrays.put(f"{place}.keys.{number}", np.stack([each.keys for each in pairs]), np.int32)
        weights = np.stack([each.weights for each in pairs])
        arrays.put(f"{place}.pairs.{number}", weights, np.float32)
        content.setdefault("pairs", []).append([str(head) for head in heads])
    received = {Head(*layer, 0): values for layer, values in sample.received.items()}
    for number, heads in enumerate(_stackable(received)):
        arrays.put(f"{place}.received.{number}", [received[head] for head in heads], np.float32)
        content.setdefault("received", []).append([str(head) for head in heads])
    return content


def get_sample(
    content: Mapping[str, Any], place: str, heads: Sequence[Head], arrays: NamedArrays
) -> Sample:
    """The sample that `put_sample` took apart.

    Args:
        heads: The heads of the model.
    Raises:
        KeyError, TypeError, ValueError: content or arrays are of the wrong form.
    """
    text = Sample(texts_of(content["tokens"]), {}, texts_of(content["targets"]))
    weights: dict[Head, np.ndarray] = {}
    pairs: dict[Head, TopPairs] = {}
    received: dict[tuple[str, int], np.ndarray] = {}
    for number, group in enumerate(_groups(content, "weights", heads)):
        shape = _shape(text, group)
        stacked = arrays.get(f"{place}.weights.{number}", len(group), *shape, dtype=np.float32)
        weights |= zip(group, stacked, strict=True)
    for number, group in enumerate(_groups(content, "pairs", heads)):
        queries, n_keys = _shape(text, group)
        keys = arrays.get(f"{place}.keys.{number}", len(group), queries, None, dtype=np.int32)
        shares = arrays.get(f"{place}.pairs.{number}", *keys.shape, dtype=np.float32)
        if not ((keys >= -1) & (keys < n_keys)).all():
            raise ValueError(f"{place}.keys.{number} holds positions beyond {n_keys} keys")
        pairs |= zip(group, map(TopPairs, keys, shares), strict=True)
    layers = {Head(head.stack, head.layer, 0) for head in heads}
    for number, group in enumerate(_groups(content, "received", layers)):
        n_keys = _shape(text, group)[1]
        stacked = arrays.get(f"{place}.received.{number}", len(group), n_keys, dtype=np.float32)
        received |= zip([(head.stack, head.layer) for head in group], stacked, strict=True)
    return Sample(text.tokens, weights, text.targets, pairs, received)


def _stackable(arrays: Mapping[Head, np.ndarray]) -> list[list[Head]]:
    """The heads of each stack whose arrays have one shape, so that they can be stacked."""
    groups: dict[tuple[str, tuple[int, ...]], list[Head]] = {}
    for head, array in arrays.items():
        groups.setdefault((head.stack, array.shape), []).append(head)
    return list(groups.values())


def _groups(content: Mapping[str, Any], kind: str, known: Any) -> list[list[Head]]:
    groups = [[Head.parse(name) for name in texts_of(group)] for group in content.get(kind, [])]
    named = [head for group in groups for head in group]
    if len(set(named)) < len(named) or not set(named) <= set(known):
        raise ValueError(f"{kind} of heads that are repeated, or that the model does not have")
    if not all(groups):
        raise ValueError(f"{kind} of no head")
    return groups


def _shape(text: Sample, heads: Sequence[Head]) -> tuple[int, int]:
    """The number of queries and keys of heads that attend between the same texts."""
    sides = {text.sides(head) for head in heads}
    shapes = {tuple(len(text.side(side)) for side in pair) for pair in sides}
    if len(shapes) > 1:
        raise ValueError(f"maps of one shape for heads of several: {sorted(shapes)}")
    queries, keys = shapes.pop()
    return queries, keys
