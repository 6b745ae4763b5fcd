"""Roles from shards: sums of each text, measured anywhere, from which all roles are judged."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._tensors import read_tensors, write_tensors
from headwise.corpora import AnnotatedText
from headwise.corpora.streams import windows
from headwise.errors import InputError
from headwise.files import build_from, parse_json, write_beside
from headwise.models import check_model, originals_of
from headwise.roles._find import copying_of
from headwise.roles._judged import EXCERPT, Studied, judged, notes_on
from headwise.roles._survey import Survey, kept
from headwise.roles.evaluation import DetailedScores, Evaluator, RoleScores, TagRows
from headwise.roles.relations import Pairs, Role, TokenText, tokenize
from headwise.roles.results import Roles
from headwise.roles.testing import (
    Evaluated,
    Evidence,
    Split,
    Trial,
    best_null_heads,
    digest_of_text,
    distinct_texts,
    halves_of_texts,
    resplit,
    text_trial,
)
from headwise.tables import Head

_SCHEMA = 1
_TEXTS, _PROBE = "texts", "probe"
_TAGS = "tags"
# Sums of the watched model; `tag_rows` and what is no sum are stored apart.
_DETAILS = tuple(
    f.name for f in fields(DetailedScores) if f.name not in ("heads", "causal", "tag_rows")
)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RoleSums:
    """What the heads of a model score on each text of a shard, with every null and baseline.

    Attributes:
        about: What is no array, as JSON.
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
        text = np.frombuffer(json.dumps(self.about).encode(), np.uint8).copy()
        arrays = {"about": text, **self.arrays}
        with write_beside(path) as beside:
            write_tensors({n: torch.from_numpy(a.copy()) for n, a in arrays.items()}, beside)
        return path

    @classmethod
    def load(cls, path: Path) -> "RoleSums":
        """What `save` wrote.

        Raises:
            InputError: the file is damaged.
        """
        arrays = {name: tensor.numpy() for name, tensor in read_tensors(path).items()}
        about = build_from(
            lambda: parse_json(arrays.pop("about").tobytes().decode()),
            f"corpus: {path} is damaged",
            "Run the shard again.",
        )
        if not isinstance(about, dict) or about.get("headwise_role_sums") != _SCHEMA:
            raise InputError(f"corpus: {path} holds no sums of roles. Run the shard again.")
        return cls(about, arrays)


def sums_of_shard(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[AnnotatedText],
    shard: int,
    survey: Survey,
    relations: Mapping[str, Callable[[TokenText], Pairs]],
    evidence: Evidence,
) -> RoleSums | None:
    """Evaluate the model and its null models on a shard; the first one has the probes too.

    Raises:
        UnsupportedError: the model cannot be observed exactly, the tokenizer does not report
            character offsets, or a null named in `evidence` is not available.
    """
    model = check_model("find_roles", model)
    roles = survey.roles(relations)
    parts: list[RoleSums] = []
    digests: list[bytes] = []
    excerpts: list[str] = []
    for window in windows(kept(texts, survey.left_out(shard))):
        distinct = distinct_texts(window)
        tokenized = tokenize(tokenizer, window, survey.limit)
        if tokenized.pieces:
            trial = text_trial(tokenized, window, roles, evidence, survey.tags)
            parts.append(_evaluated(model, trial, evidence, len(digests)))
        digests += [digest_of_text(text) for text in distinct]
        excerpts += [text[:EXCERPT] for text in distinct]
    about: dict[str, Any] = {"headwise_role_sums": _SCHEMA, "excerpts": excerpts}
    about["digests"] = [digest.hex() for digest in digests]
    arrays: Arrays = {}
    if parts:
        joined = _joined(parts)
        about[_TEXTS] = joined.about
        arrays = {f"{_TEXTS}.{name}": array for name, array in joined.arrays.items()}
    probe = survey.probe_trial(evidence.seed) if shard == 0 else None
    if probe is not None:
        sums = _evaluated(model, probe, evidence, 0)
        about[_PROBE] = sums.about
        arrays |= {f"{_PROBE}.{name}": array for name, array in sums.arrays.items()}
        causal = sums.about["causal"]
        about["copying"] = copying_of(model, probe, evidence.seed) if causal else {}
    if parts or probe is not None:
        heads = [Head(*head) for head in about.get(_TEXTS, about.get(_PROBE))["heads"]]
        about["original"] = [str(was or "") for was in originals_of(model, heads) or ()]
    return RoleSums(about, arrays) if digests or arrays else None


def merge_roles(
    shards: Iterable[RoleSums],
    survey: Survey,
    relations: Mapping[str, Callable[[TokenText], Pairs]],
    evidence: Evidence,
    model: str,
) -> Roles:
    """The roles that `find_roles` finds on the texts of all shards.

    Args:
        relations: Only the names count.
        model: The fingerprint of the model.
    """
    parts = list(shards)
    digests = [bytes.fromhex(digest) for part in parts for digest in part.about["digests"]]
    excerpts = [excerpt for part in parts for excerpt in part.about["excerpts"]]
    text_of = dict(zip(reversed(digests), reversed(excerpts), strict=True))
    distinct = list(dict.fromkeys(digests))
    merged = [_Merged.of(parts, _TEXTS)]
    number = {digest: index for index, digest in enumerate(distinct)}
    rows = np.array([number[digests[row]] for row in merged[0].arrays["row"].tolist()])
    split = Split(rows, halves_of_texts(distinct, evidence.seed), distinct)
    trials = [_text_trial(merged[0], split, survey.roles(relations), survey.tags)]
    probe = survey.probe_trial(evidence.seed)
    if probe is not None:
        trials.append(probe)
        merged.append(_Merged.of(parts, _PROBE))
    splits = [[resplit(t, evidence, n) for t in trials] for n in range(evidence.n_splits)]
    null_heads: dict[str, list[Any]] = {}
    for index, name in enumerate(merged[0].nulls):
        of_null = [trial.null(index) for trial in merged]
        null_heads.setdefault(name, []).append(best_null_heads(of_null, splits))
    evaluated = Evaluated(
        splits, [each.scores() for each in merged], [each.contrast() for each in merged], null_heads
    )
    first = next(part.about for part in parts if "original" in part.about)
    studied = Studied(
        texts=[text_of[digest] for digest in distinct],
        notes=notes_on(survey.tokenized(), survey.texts, trials),
        copying=next((part.about["copying"] for part in parts if "copying" in part.about), {}),
        original=first["original"],
        model=model,
    )
    return judged(evaluated, studied, evidence)


def _text_trial(
    merged: "_Merged", split: Split, roles: Sequence[Role], tags: Sequence[str]
) -> Trial:
    """The trial of all texts, without the texts themselves."""
    structural = [role for role in roles if role.kind == "structure"]
    contrast = Evaluator((), structural) if merged.contrast() is not None else None
    sizes = merged.arrays["sizes"]
    return Trial(Evaluator((), roles, tags), split, "shuffled", contrast, sizes)


def _evaluated(model: nn.Module, trial: Trial, evidence: Evidence, first: int) -> RoleSums:
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
    nulls = []
    for null, null_model in evidence.models_like(model):
        others[f"null.{len(nulls)}"] = trial.evaluator.evaluate(null_model)
        nulls.append(null)
    for name, other in others.items():
        arrays[f"{name}.value"] = per_text(other.value)
        arrays[f"{name}.count"] = per_text(other.count)
    heads = [[head.stack, head.layer, head.head] for head in scores.heads]
    return RoleSums(
        {"heads": heads, "causal": scores.causal, "nulls": nulls},
        {name: _narrow(array) if _is_of_queries(name) else array for name, array in arrays.items()},
    )


def _is_of_queries(name: str) -> bool:
    """Whether an array is of queries, which are the same for all heads of most models."""
    return name.split(".")[-1] in ("count", "chance") and not name.startswith(_TAGS)


def _narrow(array: np.ndarray) -> np.ndarray:
    """A single column for all heads, if they are equal."""
    return array[..., :1] if (array == array[..., :1]).all() else array


def _joined(parts: Sequence[RoleSums]) -> RoleSums:
    """The sums of parts one below the other."""
    about = {**parts[0].about, "causal": all(part.about["causal"] for part in parts)}
    return RoleSums(about, dict(_joined_arrays([part.arrays for part in parts])))


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


@dataclass(frozen=True)
class _Merged:
    """The sums of one trial on all shards."""

    about: Mapping[str, Any]
    arrays: Arrays

    @classmethod
    def of(cls, shards: Sequence[RoleSums], trial: str) -> "_Merged":
        parts, rows = [], 0
        for shard in shards:
            if trial in shard.about:
                arrays = {
                    name.removeprefix(f"{trial}."): array
                    for name, array in shard.arrays.items()
                    if name.startswith(f"{trial}.")
                }
                arrays["row"] = arrays["row"] + (rows if trial == _TEXTS else 0)
                parts.append(RoleSums(shard.about[trial], arrays))
            rows += len(shard.about["digests"])
        joined = _joined(parts)
        return cls(joined.about, joined.arrays)

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
        count = np.broadcast_to(self.arrays[f"{name}.count"], value.shape)
        # What even attention scores is taken from the watched model.
        chance = np.broadcast_to(np.float32(np.nan), value.shape)
        return RoleScores(self.heads, self.about["causal"], value, count, chance)
