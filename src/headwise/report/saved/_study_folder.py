"""The folder of a saved study: JSON for facts and results, safetensors for the numbers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError, OutputError
from headwise.files import (
    STUDY_FILES,
    build_from,
    check_not_moved,
    folder_beside,
    read_object,
    write_json,
)
from headwise.report._study_data import StudyData
from headwise.report.saved._json_values import facts_of, text_of
from headwise.report.saved._named_arrays import NamedArrays
from headwise.report.saved._sample_arrays import get_sample, put_sample
from headwise.report.saved._table_arrays import get_curves, get_table, put_curves, put_table
from headwise.roles import Roles
from headwise.surgery import Plan
from headwise.tables import Head, HeadTable, Scores

FORMAT = "headwise-study/1"
_FACTS, _ARRAYS = "study.json", "arrays.safetensors"
_RESULTS: Mapping[str, Any] = {"roles": Roles, "scores": Scores, "plan": Plan}
_ADVICE = "Give a folder that Study.save wrote."

Fields = dict[str, Any]


def write_study(study: StudyData, folder: Path, *, force: bool) -> Path:
    """Write a study into a folder, all of it or nothing.

    Raises:
        OutputError: the folder exists and `force` is False, holds something else than a study,
            cannot be written, or a text of the study is not Unicode.
    """
    arrays = NamedArrays()
    content = {
        "format": FORMAT,
        "title": study.title,
        "model": dict(study.model),
        "text": dict(study.text),
        "meanings": dict(study.meanings),
        "training": None if study.training is None else dict(study.training),
        "table": put_table(study.table, arrays),
        "samples": [
            put_sample(sample, f"samples.{number}", arrays)
            for number, sample in enumerate(study.samples)
        ],
        "curves": None if study.curves is None else put_curves(study.curves, arrays),
    }
    _check_characters(content)
    with folder_beside(folder, force, STUDY_FILES) as new:
        write_json(content, new / _FACTS)
        arrays.write(new / _ARRAYS)
        for name in _RESULTS:
            result = getattr(study, name)
            if result is not None:
                result.save(new / f"{name}.json")
    return folder


def read_study(folder: Path) -> Fields:
    """The fields of a study that `write_study` wrote.

    Raises:
        InputError: the folder is missing, or holds no complete study of this format.
    """
    check_not_moved(folder, "load_study")
    if not (folder / _FACTS).is_file():
        raise InputError(
            f"load_study: {folder} is not the folder of a study: it has no {_FACTS}. {_ADVICE}"
        )
    problem = "holds no study"
    content = read_object(folder / _FACTS, "load_study", _ADVICE, problem)
    whole = f"load_study: {folder} {problem}"
    if content.get("format") != FORMAT:
        raise InputError(f"{whole} (its format is {content.get('format')!r:.60}). {_ADVICE}")

    def build() -> Fields:
        results = {
            name: kind.load(path)
            for name, kind in _RESULTS.items()
            if (path := folder / f"{name}.json").is_file()
        }
        fields = _fields(content, NamedArrays.read(folder / _ARRAYS)) | results
        _check_results(fields)
        return fields

    return build_from(build, whole, _ADVICE)


def _fields(content: Mapping[str, Any], arrays: NamedArrays) -> Fields:
    table = get_table(content["table"], arrays)
    training, curves = content["training"], content["curves"]
    return {
        "title": text_of(content["title"]),
        "model": facts_of(content["model"]),
        "text": facts_of(content["text"]),
        "meanings": {name: text_of(meaning) for name, meaning in content["meanings"].items()},
        "training": None if training is None else facts_of(training),
        "table": table,
        "samples": tuple(
            get_sample(sample, f"samples.{number}", table.heads, arrays)
            for number, sample in enumerate(content["samples"])
        ),
        "curves": None if curves is None else get_curves(curves, arrays),
    }


def _check_results(fields: Fields) -> None:
    """Refuse results of another model, or of heads that the table does not have.

    Raises:
        ValueError: a result does not belong to the table.
    """
    table: HeadTable = fields["table"]
    for name in _RESULTS:
        result = fields.get(name)
        if result is None:
            continue
        if result.model and result.model != table.model:
            raise ValueError(f"{name} of the model {result.model:.40}, not {table.model:.40}")
        missing = {str(head) for head in _heads_of(result)} - {str(head) for head in table.heads}
        if missing:
            raise ValueError(f"{name} of {min(missing)}, which the table does not have")


def _heads_of(result: Roles | Scores | Plan) -> Iterable[Head | str]:
    if isinstance(result, Roles):
        return result.rows["name"]
    return result.removed if isinstance(result, Plan) else result.heads


def _check_characters(content: Mapping[str, Any]) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise OutputError(
            f"save: the study holds {surrogate!r}, a lone surrogate, in one of its texts. Give "
            f"titles and names that are Unicode."
        ) from error
