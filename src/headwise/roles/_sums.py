"""Sums of each text for every head, role and null: measured, saved, and concatenated."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from headwise._tensors import read_arrays, write_arrays
from headwise.errors import InputError
from headwise.files import build_from, parse_json, write_beside
from headwise.roles.evaluation import DetailedScores, RoleScores, TagRows
from headwise.roles.testing import Evidence, Trial
from headwise.tables import Head

SCHEMA = 1
TEXTS, PROBE = "texts", "probe"  # the trials
_TAGS = "tags"
# Sums of the watched model; `tag_rows`, and fields that are not sums, are stored apart.
_DETAILS = tuple(
    f.name for f in fields(DetailedScores) if f.name not in ("heads", "causal", "tag_rows")
)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RoleSums:
    """What the heads of a model score on each text of a shard, with every null and baseline.

    Attributes:
        about: Everything but the arrays, as JSON.
        arrays: Sums by trial and name; the first axis is that of texts.
    """

    about: Mapping[str, Any]
    arrays: Arrays

    def save(self, path: Path) -> Path:
        """Write the sums as one safetensors file.

        Raises:
            OutputError: the file cannot be written.
        """
        # As an array, since the library writes metadata in no fixed order.
        text = np.frombuffer(json.dumps(self.about).encode(), np.uint8)
        with write_beside(path) as beside:
            write_arrays({"about": text, **self.arrays}, beside)
        return path

    @classmethod
    def load(cls, path: Path) -> "RoleSums":
        """What `save` wrote.

        Raises:
            InputError: the file is damaged.
        """
        arrays = read_arrays(path)
        about = build_from(
            lambda: parse_json(arrays.pop("about").tobytes().decode()),
            f"corpus: {path} is damaged",
            "Run the shard again.",
        )
        if not isinstance(about, dict) or about.get("headwise_role_sums") != SCHEMA:
            raise InputError(f"corpus: {path} holds no sums of roles. Run the shard again.")
        return cls(about, arrays)


@dataclass(frozen=True)
class TrialSums:
    """The sums of one trial: of some texts, of a shard, or of all shards.

    Attributes:
        about: The heads, the names of null models, and whether the model is causal.
        arrays: Sums by name; the first axis is that of texts.
    """

    about: Mapping[str, Any]
    arrays: Arrays

    @classmethod
    def joined(cls, parts: Sequence["TrialSums"]) -> "TrialSums":
        """The sums of all parts, concatenated along the texts."""
        about = {**parts[0].about, "causal": all(part.about["causal"] for part in parts)}
        return cls(about, dict(_joined_arrays([part.arrays for part in parts])))

    @classmethod
    def of_shards(cls, shards: Sequence[RoleSums], trial: str) -> "TrialSums":
        """The sums of one trial on all shards."""
        parts, rows = [], 0
        for shard in shards:
            if trial in shard.about:
                arrays = {
                    name.removeprefix(f"{trial}."): array
                    for name, array in shard.arrays.items()
                    if name.startswith(f"{trial}.")
                }
                arrays["row"] = arrays["row"] + (rows if trial == TEXTS else 0)
                parts.append(cls(shard.about[trial], arrays))
            rows += len(shard.about["digests"])
        return cls.joined(parts)

    @property
    def nulls(self) -> Sequence[str]:
        """The null models, by the names of their nulls."""
        return tuple(self.about["nulls"])

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        return tuple(Head(*head) for head in self.about["heads"])

    def scores(self) -> DetailedScores:
        """The scores of the watched model."""
        sums = {name: self.arrays[name] for name in _DETAILS}
        for name in ("count", "chance"):
            sums[name] = np.broadcast_to(sums[name], sums["value"].shape)
        rows = None
        if f"{_TAGS}.item" in self.arrays:
            rows = TagRows(**{f.name: self.arrays[f"{_TAGS}.{f.name}"] for f in fields(TagRows)})
        return DetailedScores(heads=self.heads, causal=self.about["causal"], tag_rows=rows, **sums)

    def contrast(self) -> RoleScores | None:
        """The scores on the contrast; None without one."""
        return self._of("contrast") if "contrast.value" in self.arrays else None

    def null(self, index: int) -> RoleScores:
        """The scores of a null model."""
        return self._of(f"null.{index}")

    def _of(self, name: str) -> RoleScores:
        value = self.arrays[f"{name}.value"]
        return RoleScores(value, np.broadcast_to(self.arrays[f"{name}.count"], value.shape))


def evaluate_trial(model: nn.Module, trial: Trial, evidence: Evidence, first: int) -> TrialSums:
    """The sums of each text of a trial; the first of its texts has the number `first`."""
    split = trial.split
    rows = np.unique(split.text_of_item)
    row_of_item = np.searchsorted(rows, split.text_of_item)

    def per_text(sums: np.ndarray) -> np.ndarray:
        total = np.zeros((len(rows), *sums.shape[1:]), sums.dtype)
        np.add.at(total, row_of_item, sums)
        return total

    scores = trial.evaluator.evaluate_detailed(model)
    arrays = {name: per_text(getattr(scores, name)) for name in _DETAILS} | {"row": rows + first}
    if trial.sizes is not None:
        arrays["sizes"] = per_text(trial.sizes)
    if scores.tag_rows is not None:
        arrays |= {f"{_TAGS}.{f.name}": getattr(scores.tag_rows, f.name) for f in fields(TagRows)}
        arrays[f"{_TAGS}.item"] = row_of_item[scores.tag_rows.item]
    others = {} if trial.contrast is None else {"contrast": trial.contrast.evaluate(model)}
    nulls: list[str] = []
    for null, null_model in evidence.models_like(model):
        others[f"null.{len(nulls)}"] = trial.evaluator.evaluate(null_model)
        nulls.append(null)
    for name, other in others.items():
        arrays[f"{name}.value"] = per_text(other.value)
        arrays[f"{name}.count"] = per_text(other.count)
    heads = [[head.stack, head.layer, head.head] for head in scores.heads]
    return TrialSums(
        {"heads": heads, "causal": scores.causal, "nulls": nulls},
        {name: _narrow(array) if _is_of_queries(name) else array for name, array in arrays.items()},
    )


def _is_of_queries(name: str) -> bool:
    """Whether an array depends on queries alone, and is equal for all heads of most models."""
    return name.split(".")[-1] in ("count", "chance") and not name.startswith(_TAGS)


def _narrow(array: np.ndarray) -> np.ndarray:
    """A single column for all heads, if they are equal."""
    return array[..., :1] if (array == array[..., :1]).all() else array


def _joined_arrays(parts: Sequence[Arrays]) -> Iterator[tuple[str, np.ndarray]]:
    rows = np.cumsum([0, *(len(part["value"]) for part in parts)])
    heads = parts[0]["value"].shape[-1]
    for name in parts[0]:
        arrays = [part[name] for part in parts]
        if name == f"{_TAGS}.item":
            arrays = [array + row for array, row in zip(arrays, rows, strict=False)]
        if _is_of_queries(name) and len({array.shape[-1] for array in arrays}) > 1:
            arrays = [np.broadcast_to(array, (*array.shape[:-1], heads)) for array in arrays]
        yield name, np.concatenate(arrays)
