"""How sure the statistics of this library are: error rates, coverage, other texts, other draws.

    python -m benchmarks.evidence.uncertainty simulate --keep runs
    python -m benchmarks.evidence.uncertainty simulate-tasks --keep runs
    python -m benchmarks.evidence.uncertainty elbows MODEL --pairs stsb-en-dev.csv --keep runs
    python -m benchmarks.evidence.uncertainty intervals MODEL --trees dev.conllu --keep runs
    python -m benchmarks.evidence.uncertainty corpora MODEL --trees dev.conllu --coref gap.tsv \\
        --keep runs
    python -m benchmarks.evidence.uncertainty publish --keep runs \\
        --into benchmarks/results/uncertainty.md

The simulations need no model: data with a known answer go through the test and the intervals.
`elbows` repeats the protocol of docs/pruning.md on independent draws of sentences, and compares the
numbers of removable heads with the intervals of each draw. `corpora` finds roles and scores heads
on two corpora apart, and on short and long texts of one. Each stores JSON; `publish` writes the
parts of a page that have results.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import headwise as hw
from benchmarks._report import insert, table
from benchmarks.evidence._commands import keep, run_command
from benchmarks.evidence._simulations import (
    GAINS,
    covered,
    false_discoveries,
    hits,
    importances,
    outcomes,
    task_outcomes,
)
from headwise.corpora import AnnotatedText, read_conllu, read_gap, read_pairs
from headwise.scoring import paired, read_batches
from headwise.tables import Curves, ratio_interval

POINTS = (4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16)
TEXTS = (30, 60, 135, 270)
KNOWN = {"treebank": "trees", "paragraphs": "coref"}  # corpora whose tables roles.py keeps
OBSERVED, DRAWN = ("distance", "lse", "entropy", "max_weight"), (30, 100)
EXAMPLES, CANDIDATES = (60, 120), (2, 3, 6)
WHAT_OTHERS_DO = {
    "noise": "the others at random",
    "place": "40 look at the first candidate",
    "rule": "40 are right as often as the best rule, half of the time",
}
BETTER = (0.0, 0.1, 0.2, 0.3)  # than a rule, as a share of queries


def simulate(options: argparse.Namespace) -> None:
    """The rate of any false discovery by sign flips and by ours, and the coverage of intervals."""
    errors = [
        [name, *(f"{signs:.2f} · {ours:.2f}" for signs, ours in (
            false_discoveries(draw, texts, options.repeats) for texts in TEXTS))]
        for name, draw in GAINS.items()
    ]  # fmt: skip
    found = [
        [f"{100 * better:.0f} points", *(
            shares(outcomes(better, texts, options.repeats)) for texts in TEXTS)]
        for better in BETTER
    ]  # fmt: skip
    coverage = [
        [f"share of {rate} per query", *(
            f"{covered(partial(hits, rate=rate), texts, options.repeats):.3f}" for texts in TEXTS)]
        for rate in (0.02, 0.1, 0.3, 0.7, 0.95)
    ]  # fmt: skip
    coverage.append(
        ["mean importance, log-normal over texts",
         *(f"{covered(importances, texts, options.repeats):.3f}" for texts in TEXTS)]
    )  # fmt: skip
    keep(
        options,
        "simulate",
        {"errors": errors, "found": found, "coverage": coverage, "n": options.repeats},
    )


def simulate_tasks(options: argparse.Namespace) -> None:
    """How often `find_heads` finds a planted head, and how often one that is none."""
    found = [
        [f"{candidates} candidates; {WHAT_OTHERS_DO[others]}", *(
            "{:.3f} · {:.3f} · {:.3f}".format(
                *task_outcomes(examples, candidates, others, 0.9, options.repeats))
            for examples in EXAMPLES)]
        for candidates in CANDIDATES for others in ("noise", "place")
    ]  # fmt: skip
    wrong = [
        [f"{candidates} candidates; {WHAT_OTHERS_DO[others]}", *(
            f"{task_outcomes(examples, candidates, others, None, options.repeats)[2]:.3f}"
            for examples in EXAMPLES)]
        for candidates in CANDIDATES for others in ("noise", "rule")
        if (candidates, others) != (2, "rule")  # chance is right as often as the rule
    ]  # fmt: skip
    keep(options, "simulate-tasks", {"found": found, "wrong": wrong, "n": options.repeats})


def shares(numbers: Sequence[float]) -> str:
    return " · ".join(f"{number:.2f}" for number in numbers)


def intervals(options: argparse.Namespace) -> None:
    """Coverage of intervals of statistics, where all texts of a corpus together are the truth."""
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    texts = sorted({text.text for text in read_conllu(options.trees)}, key=len)
    request = hw.Request(statistics=OBSERVED, per_text=True)
    with torch.no_grad(), hw.observe(model, request) as watch:
        for start in range(0, len(texts), 32):
            batch = texts[start : start + 32]
            model(**tokenizer(batch, padding=True, truncation=True, return_tensors="pt"))
    rows = []
    for texts_drawn, name in product(DRAWN, OBSERVED):
        sums = watch.table().per_text(name)
        truth, held, widths = watch.table().mean(name), np.zeros((2, sums.total.shape[1])), []
        for seed in range(options.draws):
            rng = np.random.default_rng([seed, texts_drawn])
            drawn = rng.choice(len(texts), texts_drawn, replace=False)
            ends = [
                ratio_interval(
                    sums.total[drawn], sums.count[drawn], studentized=better, draws=600, seed=seed
                )
                for better in (False, True)
            ]
            held += [(low <= truth) & (truth <= high) for low, high in ends]
            widths.append(np.median((ends[1][1] - ends[1][0]) / (ends[0][1] - ends[0][0])))
        held /= options.draws
        cells = [f"{old:.3f} · {new:.3f}" for old, new in (held.mean(1), held.min(1))]
        below = " · ".join(map(str, (held < 0.9).sum(1)))
        rows.append([name, str(texts_drawn), *cells, below, f"{np.median(widths):.2f}"])
        print(rows[-1], flush=True)
        keep(options, "intervals", {"rows": rows, "n": options.draws, "texts": len(texts)})


def elbows(options: argparse.Namespace) -> None:
    """The elbow on independent draws, and the intervals that each draw alone would state."""
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    pairs = read_pairs(options.pairs)
    path = options.keep / "elbows.json"
    rows = json.loads(path.read_text("utf-8")) if path.exists() else []
    for seed in range(len(rows), options.draws):
        chosen = np.random.default_rng(seed).permutation(len(pairs))
        held_out = [pairs[i] for i in chosen[:100]]
        used = {sentence for pair in held_out for sentence in (pair.one, pair.two)}
        others = (pairs[i] for i in chosen[100:])
        fresh = sorted({s for pair in others for s in (pair.one, pair.two)} - used)
        scored = [fresh[i] for i in np.random.default_rng(seed).permutation(len(fresh))[:64]]
        batches = read_batches(scored, model, tokenizer)
        scores = hw.importance(model, batches, "half-gate", loss="embedding")
        orders = {"half-gate": [scores.order()]}
        if seed < options.intervals:
            orders["redrawn"] = scores.redrawn_orders(options.orders)
        else:
            orders["half-gate"] *= 2  # with several orders, none are drawn at random
        evaluate, loss = paired(held_out, model, tokenizer)
        curves = hw.prune_curves(
            model, evaluate, orders, reference=batches, loss=loss, points=POINTS
        )
        row: dict[str, Any] = {"elbow": str(curves.elbow("half-gate", 0.01).heads)}
        if seed < options.intervals:
            row["evaluated"] = ends(curves, "half-gate")
            row["scored too"] = ends(curves, "redrawn")
        rows.append(row)
        print(seed, row, flush=True)
        keep(options, "elbows", rows)


def ends(curves: Curves, name: str) -> list[float]:
    elbow = curves.elbow(name, 0.01)
    return [elbow.low, elbow.high]


def corpora(options: argparse.Namespace) -> None:
    """Roles, shapes and importance on two corpora apart, and on short and long texts."""
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    trees, paragraphs = (
        drawn(read(path), options.texts)
        for read, path in ((read_conllu, options.trees), (read_gap, options.coref))
    )
    long_enough = [text for text in trees if len(text.text.split()) >= 4]
    by_length = sorted(long_enough, key=lambda text: len(text.text))
    half = len(by_length) // 2
    parts = {
        "treebank": trees,
        "paragraphs": paragraphs,
        "short": by_length[:half],
        "long": by_length[half:],
    }
    path = options.keep / "corpora.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name in options.parts:
        texts = parts[name]
        roles = kept_roles(options, name) or hw.find_roles(model, texts, tokenizer=tokenizer)
        roles.save(options.keep / f"{file_of(name)}.json")
        with_roles, shapes = roles.found(), roles.shapes()
        strings = [text.text for text in texts[:64]]
        scores = hw.importance(model, strings, "half-gate", tokenizer=tokenizer)
        found[name] = {
            "texts": int(roles.notes[0].split()[0].replace(",", "")),
            "tested": sorted(set(roles.frame().dropna(subset="p_adj")["role"])),
            "labels": [
                list(pair) for pair in zip(*(with_roles[c] for c in ("name", "role")), strict=True)
            ],
            "stability": with_roles["stability"].tolist(),
            "shapes": shapes.set_index("name")["shape"].to_dict(),
            "sinks": shapes.loc[shapes["attention"].notna(), "attention"].tolist(),
            "importance": scores.importance.tolist(),
            "notes": list(roles.notes),
        }
        print(name, roles, flush=True)
        keep(options, path.stem, found)


def file_of(name: str) -> str:
    return f"MiniLM-{KNOWN.get(name, name)}"


def kept_roles(options: argparse.Namespace, name: str) -> hw.Roles | None:
    """The roles of a part, if this benchmark or roles.py has stored them."""
    for folder in (options.keep, options.found):
        path = folder / f"{file_of(name)}.json"
        if path.exists():
            return hw.Roles.load(path)
    return None


def drawn(texts: Sequence[AnnotatedText], most: int) -> list[AnnotatedText]:
    distinct = list(dict.fromkeys(texts))
    return [distinct[i] for i in np.random.default_rng(0).permutation(len(distinct))[:most]]


def publish(options: argparse.Namespace) -> None:
    """Write each part of the page whose results are stored."""
    for name, lines in PARTS.items():
        path = options.keep / f"{FILES.get(name, name)}.json"
        written = lines(json.loads(path.read_text("utf-8"))) if path.exists() else []
        if written and f": {name} -->" in options.into.read_text("utf-8"):
            insert("\n\n".join(written), options.into, name)


def simulated(content: Any) -> list[str]:
    titles = [f"{texts} texts" for texts in TEXTS]
    return [
        f"The share of {content['n']} simulations in which any of 100 hypotheses without an effect "
        "got p ≤ .05, by sign flips · by the studentized bootstrap; .05 is promised:",
        table(["gain of a text over its null, 0 on average", *titles], content["errors"]),
        f"The share of {content['n']} simulations in which a head gets a label that is so much "
        "better than its rule, by the whole procedure · if every head were tested; and in which "
        "one of 299 heads that are not better gets p ≤ .05:",
        table(["better than the rule by", *titles], content["found"]),
        f"The share of {5 * content['n']} simulations in which the 95 % interval held the truth:",
        table(["what is estimated", *titles], content["coverage"]),
    ]


def simulated_tasks(content: Any) -> list[str]:
    titles = [f"{examples} examples" for examples in EXAMPLES]
    return [
        f"The share of {content['n']} simulations in which a planted head, right in 90 % of the "
        "examples, is found among 72 · if every head were tested, none screened out · in which "
        "another head is found:",
        table(["example", *titles], content["found"]),
        "Without a planted head, the share in which any head or the set is found:",
        table(["example", *titles], content["wrong"]),
    ]


def drawn_elbows(rows: Any) -> list[str]:
    numbers = np.array([int(row["elbow"]) for row in rows])
    counts = ", ".join(f"{n} heads {(numbers == n).sum()} times" for n in np.unique(numbers))
    lines, held = [], {"evaluated": [], "scored too": []}
    for place, row in enumerate(rows):
        if "evaluated" in row:
            others = np.delete(numbers, place)
            for name, shares in held.items():
                low, high = row[name]
                shares.append(((low <= others) & (others <= high)).mean())
            lines.append([row["elbow"], *("{:g} to {:g}".format(*row[name]) for name in held)])
    shares = [f"{np.mean(part):.0%}" for part in held.values()]
    titles = ["elbow of a draw", "interval over evaluated texts", "over scored texts too"]
    return [
        f"{len(rows)} independent draws: {counts} (median {np.median(numbers):g}).",
        table(titles, [*lines, ["share of the other draws inside, in the mean", *shares]]),
    ]


def compared(names: tuple[str, str], found: Any) -> list[str]:
    """The tables of two parts; none if one is not stored."""
    if not set(names) <= set(found):
        return []
    tested = set.intersection(*(set(found[name]["tested"]) for name in names))
    labels = [
        {tuple(label) for label in found[name]["labels"] if label[1] in tested} for name in names
    ]
    shapes = [found[name]["shapes"] for name in names]
    either = {**shapes[0], **shapes[1]}
    alike = sum(shapes[0].get(head) == shapes[1].get(head) for head in either)
    sinks = [sum("sink" in shape for shape in part.values()) for part in shapes]
    rank = spearmanr(*(found[name]["importance"] for name in names))[0]
    row = [
        " · ".join(names), " · ".join(f"{found[name]['texts']:,}" for name in names),
        f"{len(labels[0])} · {len(labels[1])}", str(len(labels[0] & labels[1])),
        f"{sinks[0]} · {sinks[1]}", f"{alike} of {len(either)}", f"{rank:.2f}",
    ]  # fmt: skip
    stable = [
        [name, str(len(found[name]["labels"])),
         str(sum(share == 1 for share in found[name]["stability"])),
         str(sum(share < 0.5 for share in found[name]["stability"]))]
        for name in names
    ]  # fmt: skip
    titles = ["texts", "number", "labels of roles that both test", "in both", "sinks"]
    return [
        table([*titles, "same shape", "rank correlation of importance"], [row]),
        "Labels under five further splits of each into halves:",
        table(["texts", "labels", "found under all five", "under fewer than half"], stable),
    ]


def drawn_intervals(content: Any) -> list[str]:
    titles = [
        "statistic",
        "texts",
        "held, mean over heads",
        "worst head",
        "heads below .9",
        "width",
    ]
    return [
        f"Draws of sentences from {content['texts']:,}, {content['n']} of each size; the truth is "
        "the mean over all. The share of 95 % intervals that held it, by percentiles · "
        "studentized; the width is that of the second in terms of the first:",
        table(titles, content["rows"]),
    ]


PARTS = {
    "simulate": simulated,
    "simulate-tasks": simulated_tasks,
    "elbows": drawn_elbows,
    "intervals": drawn_intervals,
    "corpora": partial(compared, ("treebank", "paragraphs")),
    "lengths": partial(compared, ("short", "long")),
}
FILES = {"lengths": "corpora"}  # where a part of the page does not have a file of its name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    simulating = parts.add_parser("simulate")
    simulating.add_argument("--repeats", type=int, default=200)
    simulating.set_defaults(run=simulate)
    simulating_tasks = parts.add_parser("simulate-tasks")
    simulating_tasks.add_argument("--repeats", type=int, default=200)
    simulating_tasks.set_defaults(run=simulate_tasks)
    drawing = parts.add_parser("elbows")
    drawing.add_argument("--pairs", type=Path, required=True)
    drawing.add_argument("--draws", type=int, default=20)
    drawing.add_argument("--intervals", type=int, default=5, help="draws that get intervals")
    drawing.add_argument("--orders", type=int, default=10, help="redrawn orders of each interval")
    drawing.set_defaults(run=elbows)
    covering = parts.add_parser("intervals")
    covering.add_argument("--trees", type=Path, required=True)
    covering.add_argument("--draws", type=int, default=200)
    covering.set_defaults(run=intervals)
    comparing = parts.add_parser("corpora")
    comparing.add_argument("--trees", type=Path, required=True)
    comparing.add_argument("--coref", type=Path, required=True)
    comparing.add_argument("--texts", type=int, default=10**6, help="the most texts of a corpus")
    comparing.add_argument(
        "--found", type=Path, default=Path(), help="a folder of roles.py, with tables of MiniLM"
    )
    comparing.add_argument(
        "--parts", nargs="+", default=["treebank", "paragraphs", "short", "long"]
    )
    comparing.set_defaults(run=corpora)
    publishing = parts.add_parser("publish")
    publishing.add_argument("--into", type=Path, required=True)
    publishing.set_defaults(run=publish)
    for part in (drawing, covering, comparing):
        part.add_argument("model")
    run_command(
        parser,
        (simulating, simulating_tasks, drawing, covering, comparing, publishing),
    )


if __name__ == "__main__":
    main()
