"""The roles of every head from shards: sums of single texts, judged together."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError, HeadwiseError
from headwise.files import build_from
from headwise.jobs._measurement import Corpus, Opened, code_of
from headwise.models import context_of
from headwise.roles import (
    ChoiceRelation,
    Evidence,
    Pairs,
    Relation,
    Relations,
    Roles,
    RoleSums,
    Survey,
    TokenText,
    check_reads_one_text,
    merge_roles,
    own_roles,
    sums_of_shard,
)


@dataclass(frozen=True)
class RolesRequest:
    """A corpus job that finds the roles of heads, in place of computing statistics.

    The merged roles are those of `find_roles` on the same texts, up to rounding.

    Attributes:
        relations: Your own roles, by name, as `find_roles` takes them.
        evidence: Which nulls to evaluate, and the seed, as `find_roles` takes it. None is
            `Evidence()`.
    Raises:
        ArgumentError: one of them is of the wrong type.
    """

    relations: Relations = field(default_factory=dict)
    evidence: Evidence | None = None

    def __post_init__(self) -> None:
        own_roles("RolesRequest", self.relations)
        if not isinstance(self.evidence, Evidence | None):
            raise ArgumentError(
                f"RolesRequest: evidence={self.evidence!r:.80}. Give an Evidence(...)."
            )


class RoleEvidence:
    """Sums of each text for every head, role and null; merging tests the sums of all shards."""

    surveys = True

    def __init__(self, request: RolesRequest) -> None:
        self._relations = request.relations
        self._evidence = request.evidence or Evidence()

    @classmethod
    def described(cls, about: Mapping[str, Any]) -> "RoleEvidence":
        """A measurement from the description of a job, which can merge shards but not measure."""
        nulls = about["evidence"]["nulls"]
        evidence = Evidence(
            **{**about["evidence"], "nulls": None if nulls is None else tuple(nulls)}
        )
        relations = {name: _without_pairs(code) for name, code in about["relations"].items()}
        return cls(RolesRequest(relations, evidence))

    def describe(self) -> dict[str, Any]:
        """The nulls, the seed, and the relations by name with a hash of their code."""
        return {
            "kind": "roles",
            "evidence": asdict(self._evidence),
            "relations": {name: _code_of(each) for name, each in self._relations.items()},
        }

    def survey(self, opened: Opened, corpus: Corpus) -> dict[str, Any]:
        """Statistics of the whole corpus that every shard needs: duplicates, token counts, tags.

        Raises:
            InputError: no text has a token, or most tokens are unknown to the tokenizer.
            UnsupportedError: the model reads two texts, or none.
        """
        check_reads_one_text("find_roles", opened.model)
        limit = context_of(opened.model, opened.tokenizer, opened.max_tokens)
        return Survey.of(opened.tokenizer, corpus.read, corpus.shards, limit).as_json()

    def read_survey(self, content: Mapping[str, Any]) -> Survey:
        """What `survey` returned.

        Raises:
            InputError: something is missing or of the wrong form.
        """
        return Survey.from_json(content)

    def measure(
        self, opened: Opened, texts: Iterable[AnnotatedText], shard: int
    ) -> RoleSums | None:
        """The sums of some texts, some hundred at a time; all of them are kept in memory.

        Raises:
            UnsupportedError: the model cannot be observed exactly, or a null is not available.
        """
        return sums_of_shard(
            opened.model,
            opened.tokenizer,
            texts,
            shard,
            opened.survey,
            self._relations,
            self._evidence,
        )

    def load(self, path: Path) -> RoleSums:
        """The sums of a shard."""
        return RoleSums.load(path)

    def merge(self, results: Iterable[RoleSums], survey: Survey, model: str) -> Roles:
        """The roles of the heads on the texts of all shards.

        Raises:
            InputError: the sums of a shard are damaged, or do not fit the survey.
        """
        return build_from(
            lambda: merge_roles(results, survey, self._relations, self._evidence, model),
            "corpus: what lies in shards does not fit survey.json",
            "Delete both, and run the job again.",
            keep=(HeadwiseError,),
        )


def _code_of(relation: Relation) -> Any:
    """A hash of the code of a relation; of a choice, by part."""
    if isinstance(relation, ChoiceRelation):
        parts = {"pairs": code_of(relation.pairs), "candidates": code_of(relation.candidates)}
        return parts | {"incoming": relation.incoming}
    return code_of(relation)


def _without_pairs(code: Any) -> Relation:
    """A placeholder for a relation, from its code: merging needs its kind only."""
    if isinstance(code, Mapping):
        return ChoiceRelation(_no_pairs, _no_pairs, bool(code["incoming"]))
    return _no_pairs


def _no_pairs(text: TokenText) -> Pairs:
    return ()
