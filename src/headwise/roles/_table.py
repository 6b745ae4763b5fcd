"""The table of roles: a row per head and role, with the evidence for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from torch import nn

from headwise._display import counted
from headwise._progress import Progress, shows_progress
from headwise.corpora import Several, list_items
from headwise.errors import ArgumentError
from headwise.models import check_model, fingerprint
from headwise.roles._behaviors import Behavior
from headwise.roles._effects import WITHOUT, Effects, ablate_each
from headwise.roles._rows import FURTHER, GROUP, TEXT, labels_of_rows
from headwise.roles._summaries import (
    categories_of,
    explanations,
    is_shape,
    none_found,
    outcomes_by_role,
    shape_rows,
    shapes_summary,
    signs_of,
)
from headwise.roles.evidence import NULLS
from headwise.tables import (
    Head,
    HeadLike,
    HeadsLike,
    TableFile,
    at_prompt,
    notebook_html,
    plot_categories,
    resolve_heads,
    rows_of,
)

# The columns that every file has, beside the nulls, the measures of some roles and the effects.
_NUMBERS = (
    *("effect", "baseline", "lift", "ci_low", "ci_high", "n", "texts", "p_adj"),
    *("mass", "value", "chosen_half", "smallest", "control"),
)
_TEXTS = ("role", "label", "outcome", "null")

_COLUMNS = (
    "name", "label", "found", "outcome", "effect", "null", "baseline", "lift", "p_adj", "n",
    "texts",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Roles(TableFile):
    """The roles of each head, with the evidence. Many heads have none.

    All numbers come from held-out texts: offsets, parts of speech and null heads are selected
    on the other half.

    Attributes:
        rows: A row per head and role, the `shapes` included. `label` is the name of the role,
            or of the behavior that it was shown to have as well: `prefix matching` is labeled
            `induction`, and `next name` `name moving`, if the `copying` score (−1 to 1, with its
            interval) is above 0, or if `effects` showed that the behavior needs the head;
            `same token` with a score below 0 is `duplicate suppression`. `outcome` is
            `found` (then `found` is true), `not found`, or `not tested: ` and what is missing.
            `smallest` is the smallest effect for which a head is labeled in four cases of five,
            against its own nulls (NaN: none is, or the head had it, or the planted head, and was
            not found), `control` the score of a planted head that the test found unless the
            outcome says otherwise. `effect` is the score per query, from 0 to 1, with its
            interval (95 %, over texts) from `ci_low` to `ci_high`; `null` is the strongest null
            (a baseline without knowledge of the relation), `baseline` its score, `lift` the
            share of the range above it that the head reaches, `n` the queries, `texts` the texts
            with a query, `p_adj` the p adjusted over all tested rows (NaN where a role was not
            tested, 1 where the selection half shows less than half of what a label needs; below
            one in a few hundred it comes from a fitted tail), `chosen_half` the effect on the
            selection half; `null.…` is the score of each null, and for a choice among candidates
            `rule.…` that of each rule that chooses (`null.offset`: the best place before or
            after the query); `stability` is the share of further splits of the texts under which
            the same procedure finds the role. `mass` is
            the attention on the relation, and `value` the same with each key weighted by the
            norm of its projected value, `‖v_j W_O‖`: a head may attend to keys that add little
            to its output. Both are from 0 to 1, and NaN for a role without a relation or a head
            without an output projection. A role that a head cannot have is NaN. After
            `effects`, `without.…` is the growth of a behavior's loss without the head, for the
            roles that the behavior may depend on. `original` is a head's name before pruning.
        meanings: A description of each role.
        notes: How the numbers were obtained: texts, split, what was left out.
        texts: For each role of a head, the texts that show it most and least: text, score,
            queries.
        sample: What was measured: the number of distinct texts, of their groups where they were
            given, of what was held out, the SHA-256 of the texts, and the seed.
        model: The fingerprint of the model's weights.
        versions: The versions of the packages that computed the table.
        ablation_effects: The effects of ablating heads on behaviors; empty before `effects`.
    """

    _schema = ("headwise_roles", 2)

    rows: pd.DataFrame
    meanings: Mapping[str, str]
    notes: tuple[str, ...] = ()
    texts: Mapping[str, Sequence[tuple[str, float, int]]] = field(default_factory=dict)
    sample: Mapping[str, int | str] = field(default_factory=dict)
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    ablation_effects: Effects = field(default_factory=Effects)

    def frame(self) -> pd.DataFrame:
        """All rows: name, stack, layer, head, role, then the evidence."""
        return self.rows.copy()

    def found(self) -> pd.DataFrame:
        """The rows of roles that heads have, from the largest lift down; `shapes` are apart."""
        rows = self._role_rows[self._role_rows["found"]]
        return rows.sort_values("lift", ascending=False, kind="stable", ignore_index=True)

    def outcomes(self) -> pd.DataFrame:
        """What became of each role: a row per role, whatever its outcome.

        Returns:
            A frame: role, outcome (`found`, `not found`, or `not tested: ` and what is missing),
            heads (the number that have it), nearest (the strongest of them, else the head that
            comes nearest), and that head's evidence, as in `rows`.
        """
        return outcomes_by_role(self._role_rows)

    def shapes(self) -> pd.DataFrame:
        """The heads that are sinks or attend diffusely, whatever the text says.

        Returns:
            A row per head: name, stack, layer, head, then `shape` (`sink`, `diffuse` or
            `sink + diffuse`), `token` (the tokens that take the attention), `attention` on the
            one that takes most, from 0 to 1, with its interval (95 %, over texts) in `ci_low`
            and `ci_high`, `value`, the same weighted by value norm, and `carries`: `empty` if
            it would be no sink by that, else `broadcasting`. `short` and `long` are the
            attention in the shortest and the longest third of the held-out texts. `evenness` is
            the entropy as a share of that of uniform attention, diffuse from 0.85 on;
            `evenness_beside_sinks` leaves out the first token and special tokens.
        """
        return shape_rows(self.rows)

    def shape(self, head: HeadLike) -> str:
        """The shape of a head's attention: `sink`, `diffuse`, `sink + diffuse`, or "".

        Raises:
            HeadError: there is no such head.
        """
        shapes = self.shapes().set_index("name")["shape"]
        return str(shapes.get(str(self._head(head)), ""))

    def of(self, head: HeadLike) -> list[str]:
        """The labels of a head's roles, from the largest lift down; often none."""
        name = str(self._head(head))
        found = self.found()
        return found.loc[found["name"] == name, "label"].tolist()

    def none_found(self) -> str:
        """Describe all heads without a role: none was found, or none was tested."""
        return none_found(self._role_rows, self._unit)

    def none_found_by_head(self) -> dict[str, str]:
        """The same for each head, by its name."""
        by_head = self._role_rows.groupby("name", sort=False)
        return {str(name): none_found(of_head, self._unit) for name, of_head in by_head}

    def why(self, head: HeadLike) -> str:
        """The evidence for a head: its roles, the nulls they beat, and the roles just missed.

        Raises:
            HeadError: there is no such head.
        """
        name = str(self._head(head))
        return self.why_by_head([name])[name]

    def why_by_head(self, heads: Sequence[str]) -> dict[str, str]:
        """`why` of each of these heads, by name, in one pass over the rows."""
        lines = {name: list(self.ablation_effects.lines(name)) for name in heads}
        return explanations(self._role_rows, self.shapes(), lines, self.meanings, self._unit)

    @shows_progress("Measuring the effects of heads")
    def effects(
        self,
        model: nn.Module,
        behaviors: Several[Behavior],
        *,
        heads: HeadsLike | None = None,
        seed: int = 0,
        on_progress: Progress | None = None,
    ) -> "Roles":
        """Measure how much behaviors of the model depend on heads, by ablating the heads.

        A role says what a head attends to; its effect says whether a behavior needs it. An
        ablated head outputs its mean over the texts of the behavior, and the loss is compared
        on the same texts with and without the ablation. Each head costs a pass over the texts
        of each behavior; groups of redundant heads cost further passes.

        Args:
            model: The model in which the roles were found.
            behaviors: Made by functions of `headwise.roles`, such as `induction` or
                `behavior`. The rows of the roles that a behavior names get the growth of
                its loss as `without.NAME`, with the interval (95 %, over texts) in `.low` and
                `.high`.
            heads: Which heads to ablate. None is every head that has a role.
            seed: The seed of all random draws.
            on_progress: Called after each head with the number of heads done and of all.
        Returns:
            The same roles with `ablation_effects` filled in.
        Raises:
            ArgumentError: the roles are of another model, something is not a behavior or there
                is none, two have one name, or a loss is not finite.
            HeadError: there is no such head.
        """
        model = check_model("effects", model)
        actual = fingerprint(model)
        if actual != self.model:
            raise ArgumentError(
                f"effects: these are roles of the model {self.model}, not of {actual}. "
                f"Give the model that they were found in."
            )
        known = self._heads()
        tried = list(dict.fromkeys(self.found()["name"])) if heads is None else heads
        found = self.found().groupby("role")["name"]
        effects = ablate_each(
            model,
            list_items("effects", "behaviors", behaviors, Behavior),
            sorted(resolve_heads(tried, known, measured=True)),
            {str(role): [Head.parse(name) for name in names] for role, names in found},
            seed=seed,
            on_progress=on_progress,
        )
        rows = effects.joined(self.rows)
        rows["label"] = labels_of_rows(rows, effects)
        return replace(self, rows=rows, ablation_effects=effects)

    def examples(self, head: HeadLike) -> pd.DataFrame:
        """The held-out texts where the roles of a head are strongest, and where they are weakest.

        Roles that are tested on random sequences have no examples.

        Returns:
            A frame: role, score (per query, from 0 to 1), queries, text.
        Raises:
            HeadError: there is no such head.
        """
        name, found = str(self._head(head)), self.found()
        rows = [
            (role, score, n, text)
            for role in found.loc[found["name"] == name, "role"]
            for text, score, n in self.texts.get(f"{name} {role}", ())
        ]
        return pd.DataFrame(rows, columns=["role", "score", "queries", "text"])

    @property
    def _role_rows(self) -> pd.DataFrame:
        return self.rows[~is_shape(self.rows["role"])]

    @property
    def _unit(self) -> str:
        return GROUP if "groups" in self.sample else TEXT

    def _head(self, head: HeadLike) -> Head:
        return resolve_heads(head, self._heads(), measured=True)[0]

    def _heads(self) -> list[Head]:
        return [Head.parse(name) for name in dict.fromkeys(self.rows["name"])]

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the role of each head: a hue and a letter, paler where it is weaker.

        Sinks are marked ○, and heads that attend diffusely ≈. They have a hue only if a role takes
        half of their attention, and more than the sink.

        Args:
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes; their legend counts the heads of each role.
        Raises:
            ArgumentError: `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        shapes = self.shapes()
        categories = categories_of(self.found(), shapes)
        return plot_categories("Roles.plot", self._heads(), categories, ax, signs_of(shapes))

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        metadata = {
            "meanings": dict(self.meanings),
            "notes": list(self.notes),
            "texts": {name: [list(row) for row in rows] for name, rows in self.texts.items()},
            "sample": dict(self.sample),
            "model": self.model,
            "versions": dict(self.versions),
            "effects": self.ablation_effects.to_json(),
        }
        return self.frame(), metadata

    @classmethod
    def _built(cls, frame: pd.DataFrame, metadata: dict[str, Any]) -> "Roles":
        further = [name for name in FURTHER if name in frame]
        effects = [name for name in map(str, frame) if name.startswith(WITHOUT)]
        nulls = [f"null.{null}" for null in NULLS]
        originals = ["original"] if "original" in frame else []
        numbers = (*_NUMBERS, "found", *nulls, *further, *effects)
        rows = rows_of(frame, numbers, (*_TEXTS, *originals))
        rows["found"] = rows["found"] == 1
        meanings = {role: str(metadata["meanings"][role]) for role in metadata["meanings"]}
        if unknown := sorted(set(rows["role"]) - meanings.keys()):
            raise ValueError(f"the role {unknown[0]!r} has no description")
        return cls(
            rows=rows,
            meanings=meanings,
            notes=tuple(map(str, metadata["notes"])),
            texts={
                name: [(str(text), float(score), int(n)) for text, score, n in rows]
                for name, rows in metadata["texts"].items()
            },
            sample=dict(metadata["sample"]),
            model=str(metadata["model"]),
            versions=dict(metadata["versions"]),
            ablation_effects=Effects.from_json(metadata["effects"]),
        )

    def __str__(self) -> str:
        """The number of heads with a role, and of roles; then the sinks and diffuse heads."""
        found = self.found()
        heads = found["name"].nunique()
        verb = "has" if heads == 1 else "have"
        line = f"{counted(heads, 'head')} {verb} {counted(len(found), 'role')}"
        line = line if len(found) else f"{line}: {self.none_found()}"
        apart = shapes_summary(self.shapes())
        return f"{line}. Apart from roles: {apart}" if apart else line

    def __repr__(self) -> str:
        shown = self.found()[list(_COLUMNS)].drop(columns="found")
        return at_prompt(f"Roles: {self}", shown)

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plot)
