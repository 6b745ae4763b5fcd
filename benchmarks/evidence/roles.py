"""The roles of heads in three models, and whether they hold on other texts and in other runs.

    python -m benchmarks.evidence.roles model MODEL --name MiniLM --trees trees.conllu --keep runs
    python -m benchmarks.evidence.roles model MODEL --name MiniLM --coref gap.tsv --keep runs
    python -m benchmarks.evidence.roles model MODEL --name BabyLlama --trees trees.conllu \\
        --keep runs
    python -m benchmarks.evidence.roles lab --seeds 0 1 2 3 4 --keep runs
    python -m benchmarks.evidence.roles publish --keep runs --into benchmarks/results/roles.md

`model` finds the roles of a model on texts with parse trees and, apart from them, on texts with
coreference: on all that fit into its context, and with --halves on two halves that share none.
`lab` trains a Mini-GPT for each seed, finds its roles and ablates its heads. Both store tables, and
existing ones are not computed again. `publish` writes the page.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import headwise as hw
from benchmarks._report import BEGIN, END, insert, table
from benchmarks.evidence._commands import run_command
from headwise.corpora import AnnotatedText, read_conllu, read_gap
from headwise.lab import TrainSettings, train
from headwise.models.texts import encode
from headwise.report import roles_of_lab
from headwise.roles import rules_of, shape_line, shapes_summary, shown_outcomes

CORPORA = {"trees": "UD English EWT", "coref": "GAP"}
READERS = {"trees": read_conllu, "coref": read_gap}
HALVES = ("A", "B")
MODELS = ("MiniLM", "BabyLlama")
# Roles that agreement, translation and repetition of the Mini-GPT may depend on.
ROLES = (
    *("next subject", "head → nsubj", "next translation", "translation → source"),
    "prefix matching",
)
PARTS = (", beside", ", apart")


def find_in_model(options: argparse.Namespace) -> None:
    """Find roles on all texts of each corpus that the model can read, and on each half of them."""
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    for corpus, read in READERS.items():
        if getattr(options, corpus) is None:
            continue
        texts = readable(read(getattr(options, corpus)), model, tokenizer)
        order = np.random.default_rng(0).permutation(len(texts))[: options.texts]
        parts = {corpus: np.sort(order)}
        if options.halves:
            parts |= {f"{corpus}-{half}": order[start::2] for start, half in enumerate(HALVES)}
        for name, indices in parts.items():
            path = options.keep / f"{options.name}-{name}.json"
            if not path.exists():
                chosen = [texts[i] for i in indices]
                hw.find_roles(model, chosen, tokenizer=tokenizer, on_progress=print_progress).save(
                    path
                )


def readable(texts: Sequence[AnnotatedText], model: Any, tokenizer: Any) -> list[AnnotatedText]:
    """The distinct texts that fit into the model's context."""
    distinct = dict.fromkeys(texts)
    return [text for text in distinct if len(encode(tokenizer, [text.text], model)) == 1]


def find_in_lab(options: argparse.Namespace) -> None:
    """Find the roles of a Mini-GPT of each seed, and its loss without each head."""
    for seed in options.seeds:
        folder = options.keep / f"seed-{seed}"
        if not (folder / "roles.json").exists():
            trained = train(TrainSettings(seed=seed, steps=options.steps), folder)
            evaluation = asdict(trained.evaluation)
            (folder / "judged.json").write_text(json.dumps(evaluation), "utf-8")
            # Written last, so that its existence means that the run is complete.
            roles_of_lab(trained, lines=options.lines, on_progress=print_progress).save(
                folder / "roles.json"
            )


def print_progress(done: int, total: int) -> None:
    print(f"{done}/{total}", flush=True)


def publish(options: argparse.Namespace) -> None:
    """Write the sections whose tables exist; the page keeps its other sections."""
    sections = sections_of(options.into)
    for name in MODELS:
        for corpus, title in CORPORA.items():
            files = (f"{name}-{part}.json" for part in (corpus, *(f"{corpus}-{h}" for h in HALVES)))
            found = [
                hw.Roles.load(path) for file in files if (path := options.keep / file).exists()
            ]
            if found:
                sections[f"{name} on {title}"] = model_lines(found[0], found[1:])
    complete = [path.parent for path in options.keep.glob("seed-*/roles.json")]
    folders = sorted(complete, key=lambda path: int(path.name[5:]))
    if folders:
        runs = {path.name[5:]: hw.Roles.load(path / "roles.json") for path in folders}
        judged = [json.loads((path / "judged.json").read_text("utf-8")) for path in folders]
        sections = {t: lines for t, lines in sections.items() if not t.startswith("Mini-GPT")}
        sections[f"Mini-GPT, {len(runs)} seeds"] = lab_lines(runs, judged)
    # Texts are sorted stably: the Mini-GPT comes last.
    sections = dict(sorted(sections.items(), key=lambda item: item[0].startswith("Mini-GPT")))
    text = (f"## {title}\n\n" + "\n\n".join(lines) for title, lines in sections.items())
    insert("\n\n".join(text), options.into)


def sections_of(page: str) -> dict[str, list[str]]:
    """The sections of the measured part of a page, by title."""
    measured = Path(page).read_text("utf-8").split(BEGIN)[1].split(END)[0]
    parts = (part.partition("\n\n") for part in measured.split("\n## ")[1:])
    return {title: [text.strip()] for title, _, text in parts}


def model_lines(whole: hw.Roles, halves: Sequence[hw.Roles]) -> list[str]:
    """The outcome of every role, the labels, their stability, and the heads without a role."""
    with_roles = whole.found().sort_values(["layer", "head", "lift"], ascending=[True, True, False])
    rows = [
        [
            row["name"],
            row["label"],
            f"{row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]",
            f"{row['mass']:.2f} → {row['value']:.2f}",
            f"{row['baseline']:.3f}, {row['null']}",
            f"{row['lift']:.2f}",
            f"{row['p_adj']:.2g}",
            f"{row['n']:,.0f} in {row['texts']:,.0f}",
        ]
        for row in with_roles.to_dict("records")
    ]
    names = list(dict.fromkeys(whole.frame()["name"]))
    none = [name for name in names if name not in set(with_roles["name"])]
    titles = ["head", "role", "effect", "mass → value mass", "strongest null", "lift", "p"]
    return [
        f"{len(names)} heads: {len(names) - len(none)} have {len(with_roles)} roles; "
        f"{len(none)} have none: {', '.join(none) or '–'}.",
        "; ".join(whole.notes) + ".",
        shape_lines(whole),
        *([stability(whole, halves)] if halves else []),
        "Every role that some text has a query for, and the head that comes nearest to it:",
        outcome_table(whole),
        *rule_lines(whole),
        "Every label:",
        table([*titles, "queries in texts"], rows, left_columns=2),
    ]


def outcome_table(roles: hw.Roles) -> str:
    """What became of each role: found, not found or not tested, with the head that is nearest."""
    outcomes = shown_outcomes(roles.outcomes())
    rows = [
        [
            row["role"],
            row["outcome"].partition(":")[0] + (f" ({row['heads']})" if row["heads"] else ""),
            row["nearest"],
            *(scores_of(row) if row["n"] else ("–", "–")),
            known(row["smallest"]),
            known(row["control"]),
            f"{row['n']:,.0f} in {row['texts']:,.0f}",
            row["outcome"].partition(": ")[2],
        ]
        for row in outcomes.to_dict("records")
    ]
    titles = ["role", "outcome", "head", "effect", "strongest null", "needed", "planted"]
    return table([*titles, "queries in texts", "missing"], rows, left_columns=3)


def rule_lines(roles: hw.Roles) -> list[str]:
    """What the rules score that choose among candidates, beside the head of each such role."""
    rows = [
        [row["role"], row["nearest"], f"{row['effect']:.3f}", *map("{:.3f}".format, rules.values())]
        for row in roles.outcomes().to_dict("records")
        if (rules := rules_of(row))
    ]
    if not rows:
        return []
    titles = ["role", "head", "its score", "nearest", "first", "longest", "most repeated"]
    lead = "What rules score that choose among the candidates, beside that head:"
    return [lead, table([*titles, "best place"], rows, left_columns=2)]


def scores_of(row: Mapping[Any, Any]) -> tuple[str, str]:
    """The effect of a row with its interval, and its strongest null."""
    return (
        f"{row['effect']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]",
        f"{row['baseline']:.3f}, {row['null']}",
    )


def known(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def shape_lines(roles: hw.Roles) -> str:
    """The sinks and diffuse heads, apart from roles."""
    shapes = roles.shapes()
    if shapes.empty:
        return "No head is a sink, and none attends diffusely."
    lines = [f"- {row['name']}: {shape_line(row)}" for row in shapes.to_dict("records")]
    return f"Apart from roles: {shapes_summary(shapes)}.\n\n" + "\n".join(lines)


def stability(whole: hw.Roles, halves: Sequence[hw.Roles]) -> str:
    """The number of labels per role on all texts, on each half, and on both halves."""
    sets = [labels_of(whole), *(labels_of(roles) for roles in halves)]
    in_both = sets[1] & sets[2]
    roles = sorted({role for labels in sets for _, role in labels})
    rows = [
        [role, *(str(sum(label == role for _, label in labels)) for labels in (*sets, in_both))]
        for role in roles
    ]
    rows.append(["all", *(str(len(labels)) for labels in (*sets, in_both))])
    counts = table(["role", "all texts", "half A", "half B", "both halves"], rows, left_columns=1)
    either = len(sets[1] | sets[2])
    return (
        f"{len(in_both)} of the {either} labels found on either half are found on "
        f"both; Cohen's κ over all heads and roles is {kappa(*halves):.2f}. Of the "
        f"{len(sets[0])} labels on all texts {len(sets[0] & in_both)} are found on both halves, "
        f"{len(sets[0] & (sets[1] ^ sets[2]))} on one, {len(sets[0] - sets[1] - sets[2])} on "
        f"neither.\n\n{counts}"
    )


def kappa(first: hw.Roles, second: hw.Roles) -> float:
    """Cohen's κ of two tables, over the pairs of head and role that both tested."""
    key, (a, b) = ["name", "role"], (roles.frame() for roles in (first, second))
    tested = a[a["p_adj"].notna()].merge(b[b["p_adj"].notna()], on=key, suffixes=(".a", ".b"))
    a, b = tested["found.a"].astype(bool), tested["found.b"].astype(bool)
    by_chance = a.mean() * b.mean() + (~a).mean() * (~b).mean()
    return float(((a == b).mean() - by_chance) / (1 - by_chance))


def labels_of(roles: hw.Roles) -> set[tuple[str, str]]:
    with_roles = roles.found()
    return set(zip(with_roles["name"], with_roles["role"], strict=True))


def lab_lines(runs: dict[str, hw.Roles], judged: Sequence[dict]) -> list[str]:
    """The heads with a role in each run, and the loss of each run without a head."""
    rows = [
        [
            seed,
            *(f"{scores['seen'][name]:.0%}" for name in ("conjugation", "translation")),
            f"{scores['copying']:.0%}",
        ]
        for seed, scores in zip(runs, judged, strict=True)
    ]
    return [
        table(["seed", "conjugation", "translation", "copying"], rows, left_columns=0),
        *notes_of(runs),
        "Heads with a role, each with its score:",
        table(
            ["role", "seeds", *(f"seed {seed}" for seed in runs)], role_rows(runs), left_columns=1
        ),
        "The head of each run with the best score for the relation on one half of the texts, with "
        "or without a label; its score on the other half with nothing between subject and verb · "
        "with an adverb between them:",
        table(["relation", *(f"seed {seed}" for seed in runs)], part_rows(runs), left_columns=1),
        "The loss of each run without its most important head, with its interval; this head was "
        "selected as the worst of many on these same texts:",
        table(["behavior", *(f"seed {seed}" for seed in runs)], effect_rows(runs), left_columns=1),
        "Heads that back each other up:",
        "\n".join(
            f"- seed {seed}: {line}" for seed, roles in runs.items() for line in groups(roles)
        )
        or "None were found.",
    ]


def notes_of(runs: dict[str, hw.Roles]) -> list[str]:
    """How the roles of the runs were computed: once if all agree, else for each seed."""
    notes = {seed: "; ".join(roles.notes) for seed, roles in runs.items()}
    if len(set(notes.values())) == 1:
        return [f"Each run: {next(iter(notes.values()))}."]
    return ["\n".join(f"- seed {seed}: {line}." for seed, line in notes.items())]


def role_rows(runs: dict[str, hw.Roles]) -> list[list[str]]:
    """For each role and run the heads that have it, with their labels, or the outcome."""
    rows = []
    for role in ROLES:
        cells, having = [], 0
        for roles in runs.values():
            with_roles = roles.found()
            labels = with_roles[with_roles["role"] == role].to_dict("records")
            names = (
                f"{row['name']} {row['effect']:.2f}"
                + (f" ({row['label']})" if row["label"] != role else "")
                for row in labels
            )
            cells.append(", ".join(names) or outcome_of(roles, role))
            having += bool(labels)
        rows.append([role, f"{having} of {len(runs)}", *cells])
    rows.append(
        [
            "sinks and diffuse heads",
            "",
            *(shapes_summary(r.shapes()) or "none" for r in runs.values()),
        ]
    )
    return rows


def outcome_of(roles: hw.Roles, role: str) -> str:
    outcomes = roles.outcomes().set_index("role")["outcome"]
    return str(outcomes[role]).partition(":")[0]


def part_rows(runs: dict[str, hw.Roles]) -> list[list[str]]:
    """The best head on one half of the texts, and its score on the other half."""
    rows = []
    for role in ("next subject", "head → nsubj"):
        cells = []
        for roles in runs.values():
            frame = roles.frame().set_index(["role", "name"])
            best = frame.loc[role, "chosen_half"].idxmax()
            beside, apart = (frame.loc[(role + part, best), "effect"] for part in PARTS)
            cells.append(f"{best} {beside:.2f} · {apart:.2f}")
        rows.append([role, *cells])
    return rows


def effect_rows(runs: dict[str, hw.Roles]) -> list[list[str]]:
    behaviors = next(iter(runs.values())).ablation_effects.says
    rows = []
    for name, says in behaviors.items():
        cells = []
        for roles in runs.values():
            frame = roles.ablation_effects.frame()
            worst = frame[frame["behavior"] == name].nlargest(1, "effect").iloc[0]
            ends = f"[{worst['ci_low']:+.2f}, {worst['ci_high']:+.2f}]"
            cells.append(f"{worst['name']} {worst['effect']:+.2f} {ends}")
        rows.append([f"{name} ({says})", *cells])
    return rows


def groups(roles: hw.Roles) -> list[str]:
    return [
        f"{', '.join(group.together.heads)} ({group.role}): ablating all of them costs "
        f"{group.together.behavior} {group.together.effect:+.2f} "
        f"[{group.together.low:+.2f}, {group.together.high:+.2f}], ablating each alone "
        f"{group.alone:+.2f} in sum"
        for group in roles.ablation_effects.groups
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    of_model = parts.add_parser("model")
    of_model.add_argument("model")
    of_model.add_argument("--name", choices=MODELS, required=True, help="its name on the page")
    of_model.add_argument("--trees", type=Path, help="CoNLL-U")
    of_model.add_argument("--coref", type=Path, help="a GAP table")
    of_model.add_argument("--texts", type=int, help="the most texts of each file")
    of_model.add_argument("--halves", action="store_true", help="find roles on two halves as well")
    of_model.set_defaults(run=find_in_model)
    lab = parts.add_parser("lab")
    lab.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    lab.add_argument("--steps", type=int, default=TrainSettings.steps)
    lab.add_argument("--lines", type=int, default=160, help="sentences for roles, and for ablation")
    lab.set_defaults(run=find_in_lab)
    publishing = parts.add_parser("publish")
    publishing.add_argument("--into", required=True)
    publishing.set_defaults(run=publish)
    run_command(parser, (of_model, lab, publishing), arguments)


if __name__ == "__main__":
    main()
