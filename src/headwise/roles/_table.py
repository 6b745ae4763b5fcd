"""What was found: a row per head and role, and the whole case for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from headwise._display import at_prompt, counted, printable
from headwise.corpora import Several, list_items
from headwise.errors import ArgumentError
from headwise.models import check_model, fingerprint
from headwise.roles._rows import NULLS, none_found, outcomes, untested
from headwise.roles.effects import WITHOUT, Behaviour, Effects, try_without
from headwise.tables import (
    Head,
    HeadLike,
    HeadsLike,
    numbers_of,
    read_saved,
    resolve_heads,
    texts_of,
    write_table_file,
)

SCHEMA = 1
_COLUMNS = ("name", "role", "found", "effect", "null", "baseline", "lift", "p_adj", "n", "texts")
_NEAREST = 3  # roles that a head fell short of, in `why`


@dataclass(frozen=True, eq=False)
class Roles:
    """What each head does, with its evidence. No role is a common answer.

    All numbers are of texts that nothing was chosen on: fixed offsets, classes of words and
    null heads were chosen on the other half.

    Attributes:
        rows: A row per head and role. `outcome` is `found` (then `found` is true), `not found`,
            or `not tested: ` and what is missing. `effect` is the score per query, from 0 to 1,
            with its interval (95 %, over texts) from `ci_low` to `ci_high`; `null` the strongest
            null, `baseline` what it scores, `lift` the share of the rest that the head gains, `n`
            the queries, `texts` the texts with one, `p_adj` adjusted over all rows (NaN below
            20 queries or 30 texts), `chosen_half` the effect on the other half of the texts;
            `null.…` what each null scores. `mass` is the attention on the relation, and
            `value` the same with each key weighted by the size of what it would write,
            `‖v_j W_O‖`: a head may give much attention to keys of which it reads little. Both
            are from 0 to 1, and NaN where there is no relation or no output projection. A role
            that a head cannot have is NaN. After `effects`, `without.…` is what a behaviour that
            the role is for loses without the head.
        meanings: What each role says.
        notes: How the numbers came about: texts, splits, what was left out.
        texts: Where a head that has a role shows it most and least: text, score, queries.
        model: The fingerprint of the model's weights.
        versions: The versions of what the table was made with.
        ablation_effects: What behaviours lose without heads; empty before `Roles.effects`.
    """

    rows: pd.DataFrame
    meanings: Mapping[str, str]
    notes: tuple[str, ...] = ()
    texts: Mapping[str, Sequence[tuple[str, float, int]]] = field(default_factory=dict)
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    ablation_effects: Effects = field(default_factory=Effects)

    def frame(self) -> pd.DataFrame:
        """All rows: name, stack, layer, head, role, then the evidence."""
        return self.rows.copy()

    def found(self) -> pd.DataFrame:
        """The rows of roles that heads have, from the largest lift down."""
        rows = self.rows[self.rows["found"]]
        return rows.sort_values("lift", ascending=False, kind="stable", ignore_index=True)

    def of(self, head: HeadLike) -> list[str]:
        """The roles of a head, from the largest lift down; often none."""
        name = str(self._head(head))
        found = self.found()
        return found.loc[found["name"] == name, "role"].tolist()

    def none_found(self, head: HeadLike | None = None) -> str:
        """What to say of a head, or of all, without a role: `no role found` is for those tested.

        Raises:
            HeadError: there is no such head.
        """
        if head is None:
            return none_found(self.rows)
        return none_found(self.rows[self.rows["name"] == str(self._head(head))])

    def why(self, head: HeadLike) -> str:
        """The whole case of a head: what it has, against which nulls, and what it fell short of.

        Raises:
            HeadError: there is no such head.
        """
        name = str(self._head(head))
        mine = self.rows[self.rows["name"] == name].sort_values("lift", ascending=False)
        lines = [name]
        for row in mine[mine["found"]].to_dict("records"):
            lines += self._case(row)
        if len(lines) == 1:
            lines.append(f"  {none_found(mine)}")
        short = mine[~mine["found"] & mine["effect"].notna()].head(_NEAREST)
        lines += [
            f"  not {printable(row['role'])}: {_short(row)}" for row in short.to_dict("records")
        ]
        lines += [f"  {printable(line)}" for line in self.ablation_effects.lines(name)]
        return "\n".join(lines)

    def effects(
        self,
        model: nn.Module,
        behaviours: Several[Behaviour],
        *,
        heads: HeadsLike | None = None,
        seed: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> "Roles":
        """What behaviours lose without heads: attending is not doing.

        A head is taken out by giving what it gives in the mean over the texts of the behaviour;
        the same texts are judged with it and without. Each head costs a pass over the texts of
        each behaviour, and heads that back each other up some more.

        Args:
            model: The model that the roles are of.
            behaviours: Made by `agreement`, `translation`, `repetition` or `behaviour` of
                `headwise.roles`. Beside the roles that one names stands what it loses, as
                `without.NAME`, with its interval (95 %, over texts) to `.low` and `.high`.
            heads: Which heads to try. None is every head that has a role.
            seed: Decides all draws.
            on_pass: Told after each head how many are done, of how many.
        Returns:
            The same roles with `ablation_effects` filled in.
        Raises:
            ArgumentError: the roles are of another model, something is no behaviour or there is
                none, two have one name, or a loss is not finite.
            HeadError: there is no such head.
        """
        model = check_model("effects", model)
        now = fingerprint(model)
        if now != self.model:
            raise ArgumentError(
                f"effects: these are roles of the model {self.model}, not of {now}. "
                f"Give the model that they were found in."
            )
        known = [Head.parse(name) for name in dict.fromkeys(self.rows["name"])]
        tried = list(dict.fromkeys(self.found()["name"])) if heads is None else heads
        effects = try_without(
            model,
            list_items("effects", "behaviours", behaviours, Behaviour),
            sorted(resolve_heads(tried, known)),
            self._strongest,
            seed=seed,
            on_progress=on_progress,
        )
        return replace(self, rows=effects.beside(self.rows), ablation_effects=effects)

    def examples(self, head: HeadLike) -> pd.DataFrame:
        """Held-out texts where the roles of a head are strongest, and where they fail.

        Roles of random sequences have none: those are no texts.

        Returns:
            A frame: role, score (per query, from 0 to 1), queries, text.
        Raises:
            HeadError: there is no such head.
        """
        name = str(self._head(head))
        rows = [
            (role, score, n, text)
            for role in self.of(name)
            for text, score, n in self.texts.get(f"{name} {role}", ())
        ]
        return pd.DataFrame(rows, columns=["role", "score", "queries", "text"])

    def _strongest(self, role: str) -> list[Head]:
        """The heads that have a role, from the largest lift down."""
        found = self.found()
        return [Head.parse(name) for name in found.loc[found["role"] == role, "name"]]

    def _head(self, head: HeadLike) -> Head:
        known = [Head.parse(name) for name in dict.fromkeys(self.rows["name"])]
        return resolve_heads(head, known)[0]

    def _case(self, row: Mapping[Any, Any]) -> list[str]:
        strong = "strongly" if row["lift"] >= 0.5 else "weakly"
        nulls = [
            f"{null} {row[f'null.{null}']:.2f}"
            for null in NULLS
            if row[f"null.{null}"] == row[f"null.{null}"]
        ]
        return [
            f"  {printable(row['role'])}, {strong}: {printable(self.meanings[row['role']])}",
            f"    {row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}] over "
            f"{counted(int(row['n']), 'query', 'queries')} of "
            f"{counted(int(row['texts']), 'held-out text')} "
            f"({row['chosen_half']:.3f} on the other half)",
            f"    attention {_or_unknown(row['mass'])}, by the size of what it reads "
            f"{_or_unknown(row['value'])}",
            f"    nulls: {', '.join(nulls)}; the strongest is {printable(row['null'])}",
            f"    lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}",
        ]

    def save(self, path: str | Path) -> Path:
        """Write everything; the ending says how: .parquet, .csv or .json.

        Raises:
            ArgumentError: another ending.
            OutputError: the file cannot be written; nothing is left half-written.
        """
        about = {
            "headwise_roles": SCHEMA,
            "meanings": dict(self.meanings),
            "notes": list(self.notes),
            "texts": {name: [list(one) for one in those] for name, those in self.texts.items()},
            "model": self.model,
            "versions": dict(self.versions),
            "effects": self.ablation_effects.about(),
        }
        return write_table_file(self.frame(), about, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Roles":
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, or holds no roles of this schema.
        """
        return read_saved("Roles", path, ("headwise_roles", SCHEMA), _from_frame)

    def __str__(self) -> str:
        """How many heads have how many roles."""
        found = self.found()
        heads = found["name"].nunique()
        verb = "has" if heads == 1 else "have"
        line = f"{counted(heads, 'head')} {verb} {counted(len(found), 'role')}"
        return line if len(found) else f"{line}: {none_found(self.rows)}"

    def __repr__(self) -> str:
        shown = self.found()[list(_COLUMNS)].drop(columns="found")
        return at_prompt(f"Roles: {self}", shown)

    def _repr_html_(self) -> str:
        found = self.found()[list(_COLUMNS)]
        return found.to_html(index=False, float_format="{:.3f}".format, escape=True)


def _from_frame(frame: pd.DataFrame, about: Mapping[str, Any]) -> Roles:
    frame.attrs.clear()
    numbers = ["effect", "baseline", "lift", "ci_low", "ci_high", "n", "texts", "p_adj"]
    numbers += ["mass", "value", "chosen_half", *(f"null.{null}" for null in NULLS)]
    numbers += [name for name in map(str, frame) if name.startswith(WITHOUT)]
    heads = [Head.parse(name) for name in texts_of(frame, "name")]
    columns: dict[str, Any] = {name: numbers_of(frame, name) for name in numbers}
    columns |= {name: texts_of(frame, name) for name in ("name", "stack", "role", "null")}
    columns |= {"layer": [head.layer for head in heads], "head": [head.head for head in heads]}
    columns |= {"found": numbers_of(frame, "found") == 1}
    if "outcome" not in frame:  # of a table that was saved before there was one
        frame.insert(list(frame).index("found") + 1, "outcome", "")
        columns["outcome"] = outcomes(*(columns[name] for name in ("found", "p_adj", "texts")))
    # In the order of the file, in which a statistic of the future would keep its place too.
    rows = pd.DataFrame({name: columns.get(name, frame[name]) for name in map(str, frame)})
    meanings = {role: str(about["meanings"][role]) for role in about["meanings"]}
    unknown = sorted(set(columns["role"]) - meanings.keys())
    if unknown:
        raise ValueError(f"nothing says what the role {unknown[0]!r} means")
    return Roles(
        rows=rows,
        meanings=meanings,
        notes=tuple(map(str, about["notes"])),
        texts={
            name: [(str(text), float(score), int(n)) for text, score, n in those]
            for name, those in about["texts"].items()
        },
        model=str(about["model"]),
        versions=dict(about["versions"]),
        ablation_effects=Effects.of_about(about["effects"]),
    )


def _short(row: Mapping[Any, Any]) -> str:
    """Why a head does not have a role."""
    null = printable(row["null"] or "no null")
    said = f"{row['effect']:.3f} against {row['baseline']:.3f} of {null}"
    if row["p_adj"] != row["p_adj"]:
        return f"{said}, {untested(int(row['texts']))}"
    return (
        f"{said}, lift {row['lift']:.2f}, adjusted p {row['p_adj']:.2g}, "
        f"{row['chosen_half']:.3f} on the other half"
    )


def _or_unknown(share: float) -> str:
    return "unknown" if share != share else f"{share:.3f}"
