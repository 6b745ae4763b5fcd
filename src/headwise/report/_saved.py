"""Saved studies: a folder with facts and results as JSON, the table as Parquet, and samples.

A file may hold a value of any type in any place. What is read is checked, and whatever Python
raises for a value of the wrong form becomes an InputError with the path (`files.build_from`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwise._tensors import read_arrays, write_arrays
from headwise.errors import InputError, OutputError
from headwise.files import STUDY_FILES, build_from, folder_beside, read_object, typed, write_json
from headwise.head_effects import HeadEffects
from headwise.report._comparison import Comparison
from headwise.report._samples import Sample, TopPairs
from headwise.report._study_data import StudyData
from headwise.roles import Roles
from headwise.surgery import Plan
from headwise.tables import Curves, Head, HeadTable, Scores

FORMAT = "headwise-study/1"
_FACTS, _ARRAYS, _TABLE = "study.json", "arrays.safetensors", "table.parquet"
_RESULTS: Mapping[str, Any] = {
    "roles": Roles, "effects": HeadEffects, "scores": Scores, "plan": Plan, "curves": Curves,
    "comparison": Comparison,
}  # fmt: skip
_ADVICE = "Give a folder that Study.save wrote."
# A grid of heads is drawn, which takes memory for each number up to the last.
_MOST_HEADS = 2**14

Content = dict[str, Any]
Arrays = dict[str, np.ndarray]


def write_study(study: StudyData, folder: Path, *, force: bool) -> Path:
    """Write a study into a folder, all of it or nothing.

    Raises:
        OutputError: the folder exists and `force` is False, holds something else than a study,
            cannot be written, or a text of the study is not Unicode.
    """
    arrays: Arrays = {}
    content = {
        "format": FORMAT,
        "title": study.title,
        "model": dict(study.model),
        "text": dict(study.text),
        "meanings": dict(study.meanings),
        "training": None if study.training is None else dict(study.training),
        "samples": [
            _put_sample(sample, f"samples.{number}", arrays)
            for number, sample in enumerate(study.samples)
        ],
    }
    names = [*study.table.statistics, *(study.curves.per_text if study.curves else ())]
    try:
        json.dumps([content, names], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise OutputError(
            f"save: the study holds {surrogate!r}, a lone surrogate, in one of its texts. Give "
            f"titles and names that are Unicode."
        ) from error
    with folder_beside(folder, force, STUDY_FILES) as new:
        write_json(content, new / _FACTS)
        write_arrays(arrays, new / _ARRAYS)
        study.table.save(new / _TABLE)
        for name in _RESULTS:
            result = getattr(study, name)
            if result is not None:
                result.save(new / f"{name}.json")
    return folder


def read_study(folder: Path) -> Content:
    """The fields of a study that `write_study` wrote.

    Raises:
        InputError: the folder is missing, or holds no complete study of this format.
    """
    if not (folder / _FACTS).is_file():
        raise InputError(
            f"load_study: {folder} is not the folder of a study: it has no {_FACTS}. {_ADVICE}"
        )
    problem = "holds no study"
    content = read_object(folder / _FACTS, "load_study", _ADVICE, problem)
    whole = f"load_study: {folder} {problem}"
    if content.get("format") != FORMAT:
        raise InputError(f"{whole} (its format is {content.get('format')!r:.60}). {_ADVICE}")

    def build() -> Content:
        paths = {name: folder / f"{name}.json" for name in _RESULTS}
        results = {name: _RESULTS[name].load(x) for name, x in paths.items() if x.is_file()}
        table = HeadTable.load(folder / _TABLE)
        last = max(max(head.layer, head.head) for head in table.heads)
        if last >= _MOST_HEADS:
            raise ValueError(f"a layer or head with the number {last}, not below {_MOST_HEADS}")
        for name, result in results.items():
            _check_result(name, result, table)
        fields = _fields(content, table.heads, read_arrays(folder / _ARRAYS))
        return {"table": table} | fields | results

    return build_from(build, whole, _ADVICE)


def _fields(content: Mapping[str, Any], heads: Sequence[Head], arrays: Arrays) -> Content:
    training = content["training"]
    return {
        "title": typed(content["title"], str),
        "model": _facts(content["model"]),
        "text": _facts(content["text"]),
        "meanings": {name: typed(meaning, str) for name, meaning in content["meanings"].items()},
        "training": None if training is None else _facts(training),
        "samples": tuple(
            _get_sample(sample, f"samples.{number}", heads, arrays)
            for number, sample in enumerate(content["samples"])
        ),
    }


def _check_result(
    name: str, result: Roles | HeadEffects | Scores | Plan | Curves | Comparison, table: HeadTable
) -> None:
    """Refuse a result of another model, or of heads that the table does not have."""
    if isinstance(result, Curves):  # of which only the numbers of heads are known
        return
    if isinstance(result, Comparison):
        if table.model not in result.models:
            raise ValueError(f"{name} of {result.models}, not of the model {table.model:.40}")
        return
    if result.model and result.model != table.model:
        raise ValueError(f"{name} of the model {result.model:.40}, not {table.model:.40}")
    heads: Iterable[Head | str]
    if isinstance(result, Roles | HeadEffects):
        heads = result.rows["name"]
    else:
        heads = result.removed if isinstance(result, Plan) else result.heads
    missing = {str(head) for head in heads} - {str(head) for head in table.heads}
    if missing:
        raise ValueError(f"{name} of {min(missing)}, which the table does not have")


def _put_sample(sample: Sample, place: str, arrays: Arrays) -> Content:
    """Add the attention of a sample to the arrays; return the rest of it.

    Heads of one stack whose arrays have one shape are stacked: the header of a safetensors file
    has an entry for each array, and a page may show 48 texts of a thousand heads.
    """
    content: Content = {"tokens": list(sample.tokens), "targets": list(sample.targets)}
    by_kind: dict[str, Mapping[Head, np.ndarray]] = {
        "weights": sample.weights,
        "pairs": {head: pairs.weights for head, pairs in sample.pairs.items()},
        "received": {Head(*layer, 0): values for layer, values in sample.received.items()},
    }
    for kind, values in by_kind.items():
        groups: dict[tuple[str, tuple[int, ...]], list[Head]] = {}
        for head, array in values.items():
            groups.setdefault((head.stack, array.shape), []).append(head)
        for number, heads in enumerate(groups.values()):
            _put(arrays, f"{place}.{kind}.{number}", [values[head] for head in heads], np.float32)
            if kind == "pairs":
                keys = [sample.pairs[head].keys for head in heads]
                _put(arrays, f"{place}.keys.{number}", keys, np.int32)
            content.setdefault(kind, []).append([str(head) for head in heads])
    return content


def _get_sample(
    content: Mapping[str, Any], place: str, heads: Sequence[Head], arrays: Arrays
) -> Sample:
    """The sample that `_put_sample` took apart."""
    text = Sample(_texts(content["tokens"]), {}, _texts(content["targets"]))
    layers = {Head(head.stack, head.layer, 0) for head in heads}
    weights: dict[Head, np.ndarray] = {}
    pairs: dict[Head, TopPairs] = {}
    received: dict[tuple[str, int], np.ndarray] = {}
    for name, group, queries, n_keys in _groups(content, "weights", heads, text):
        shape = len(group), queries, n_keys
        weights |= zip(
            group, _get(arrays, f"{place}.{name}", *shape, dtype=np.float32), strict=True
        )
    for name, group, queries, n_keys in _groups(content, "pairs", heads, text):
        number = name.partition(".")[2]
        keys = _get(arrays, f"{place}.keys.{number}", len(group), queries, None, dtype=np.int32)
        shares = _get(arrays, f"{place}.{name}", *keys.shape, dtype=np.float32)
        if not ((keys >= -1) & (keys < n_keys)).all():
            raise ValueError(f"{place}.keys.{number} holds positions beyond {n_keys} keys")
        pairs |= zip(group, map(TopPairs, keys, shares), strict=True)
    for name, group, _, n_keys in _groups(content, "received", layers, text):
        stacked = _get(arrays, f"{place}.{name}", len(group), n_keys, dtype=np.float32)
        received |= zip([(head.stack, head.layer) for head in group], stacked, strict=True)
    return Sample(text.tokens, weights, text.targets, pairs, received)


def _groups(
    content: Mapping[str, Any], kind: str, known: Iterable[Head], text: Sample
) -> Iterator[tuple[str, list[Head], int, int]]:
    """Each group of heads whose arrays are stacked: its name, and how many queries and keys."""
    groups = [[Head.parse(name) for name in _texts(group)] for group in content.get(kind, [])]
    named = [head for group in groups for head in group]
    if len(set(named)) < len(named) or not set(named) <= set(known):
        raise ValueError(f"{kind} of heads that are repeated, or that the model does not have")
    if not all(groups):
        raise ValueError(f"{kind} of no head")
    for number, group in enumerate(groups):
        shapes = {tuple(len(text.side(side)) for side in text.sides(head)) for head in group}
        if len(shapes) > 1:
            raise ValueError(f"maps of one shape for heads of several: {sorted(shapes)}")
        queries, keys = shapes.pop()
        yield f"{kind}.{number}", group, queries, keys


def _put(arrays: Arrays, name: str, array: Any, dtype: type = np.float64) -> None:
    arrays[name] = np.array(array, dtype=dtype, order="C")


def _get(arrays: Arrays, name: str, *shape: int | None, dtype: type = np.float64) -> np.ndarray:
    """The array of this name, of this dtype and shape; None is any size."""
    array = arrays[name]
    fits = len(array.shape) == len(shape) and all(
        size is None or size == actual for size, actual in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype != dtype:
        expected = tuple("any" if size is None else size for size in shape)
        raise ValueError(
            f"{name} is {array.dtype} of {array.shape}, not {np.dtype(dtype)} of {expected}"
        )
    return array


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(typed(value, str) for value in typed(values, list))


def _facts(values: Mapping[str, Any]) -> dict[str, str | int | float]:
    for name, value in values.items():
        if not isinstance(value, str | int | float):
            raise TypeError(f"{name} is {value!r:.40}, neither a text nor a number")
    return dict(values)
