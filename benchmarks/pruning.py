"""What a model loses as its heads go, by each order of importance and by random ones.

    python benchmarks/pruning.py measure MODEL --pairs stsb-en-dev.csv --keep minilm --recover 20
    python benchmarks/pruning.py measure MODEL --text stories.txt --keep babyllama --recover 20
    python benchmarks/pruning.py tell minilm babyllama --into docs/pruning.md

Of sentence pairs (two sentences and their similarity in a row, no header) the embeddings are to
be kept, and Spearman's correlation with the similarities is told too. Of texts, parted by
`<|endoftext|>`, the loss of the language model is: all of them judge, and heads are scored and
models recovered on texts that the full model writes itself.

Scores and curves are kept in a folder, and what is kept already is not measured again: first the
curves without recovery, then one for each method whose smaller models are trained towards the
full one. `tell` writes the tables and draws a picture of each folder beside the page.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _telling import insert, table
from torch import nn

import headwise as hw
from headwise.corpora import read_pairs
from headwise.files import write_beside
from headwise.models import batches, encode
from headwise.recovery import recovering
from headwise.scoring import Gates, Loss, paired, read_batches
from headwise.tables import Curves, bootstrap_means, draw_curves, random_orders

# By each method, how often it scores.
METHODS = {
    "half-gate": ("half-gate", 1),
    "half-gate, 9 rounds": ("half-gate", 9),
    "gradient": ("gradient", 1),
    "curvature": ("curvature", 1),
    "ablation": ("ablation", 1),
    "zero-ablation": ("zero-ablation", 1),
    "gates": (Gates(steps=120, seeds=2), 1),
}
SILENT = {"embedding": {"gradient"}, "lm": {"curvature"}}  # these say nothing there
PLAIN, RANDOM, RECOVERED = "plain", "random", ", recovered"
SHORTEST = 64  # tokens: the loss of a shorter text is that of its beginning


@dataclass(frozen=True)
class Material:
    """Batches to score heads and take means on, to recover by, and to judge by."""

    score: list[Any]
    learn: list[Any]
    judge: list[Any]
    loss: Loss | str
    kind: str


def of_pairs(model: nn.Module, tokenizer: Any, how: argparse.Namespace) -> Material:
    pairs = read_pairs(how.pairs)
    chosen = np.random.default_rng(0).permutation(len(pairs))
    judging = [pairs[at] for at in chosen[: how.judging]]
    seen = {sentence for pair in judging for sentence in (pair.one, pair.two)}
    others = (pairs[at] for at in chosen[how.judging :])
    fresh = sorted({s for pair in others for s in (pair.one, pair.two)} - seen)
    fresh = [fresh[at] for at in np.random.default_rng(1).permutation(len(fresh))]
    read = partial(read_batches, model=model, tokenizer=tokenizer)
    judge, loss = paired(judging, model, tokenizer)
    score, learn = read(fresh[: how.texts]), read(fresh[how.texts :])
    return Material(score, learn, judge, loss, "embedding")


def of_text(model: nn.Module, tokenizer: Any, how: argparse.Namespace) -> Material:
    stories = [story.strip() for story in how.text.read_text("utf-8").split("<|endoftext|>")]
    pieces = [ids for ids in encode(tokenizer, stories, model) if len(ids) >= SHORTEST]
    judge = [vars(batch) for batch in batches(pieces, 16)]
    own = written_by(model, how.texts + how.own)
    score, learn = ([{"input_ids": ids} for ids in part.split(8)]
                    for part in own.split([how.texts, how.own]))  # fmt: skip
    return Material(score, learn, judge, "lm", "lm")


def written_by(model: nn.Module, texts: int) -> torch.Tensor:
    """Texts of the model's own, each as long as it reads, drawn from its predictions."""
    torch.manual_seed(0)
    start = torch.full((texts, 1), model.config.bos_token_id)
    length = model.config.max_position_embeddings - 1
    how = {"min_new_tokens": length, "max_new_tokens": length, "top_k": 0, "do_sample": True}
    return model.generate(start, attention_mask=torch.ones_like(start), **how)


def measure(how: argparse.Namespace) -> None:
    """Score the heads by each method, and draw the curves that are not kept yet."""
    torch.set_num_threads(1)
    how.keep.mkdir(parents=True, exist_ok=True)
    model, tokenizer = hw.load(how.model), hw.load_tokenizer(how.model)
    material = (of_pairs if how.pairs else of_text)(model, tokenizer, how)
    judged = partial(
        hw.prune_curves, model, material.judge, loss=material.loss, on_progress=progress
    )
    names = [name for name in how.methods if name not in SILENT[material.kind]]
    scores = {name: scores_of(model, material, name, how.keep) for name in names}
    orders = {name: [one.order()] for name, one in scores.items()}
    keep(
        how.keep / f"{PLAIN}.npz",
        partial(judged, orders, reference=material.score, points=how.points),
    )
    if how.recover:
        recovered = {"steps": how.recover, "rate": how.rate}
        cut = recovering(model, material.learn, reference=material.score, **recovered)
        orders[RANDOM] = random_orders(scores[names[0]].heads)
        for name in [one for one in how.recovered if one in orders]:
            points = how.recovered_random if name == RANDOM else how.recovered_points
            order = {f"{name}{RECOVERED}": orders[name]}
            keep(
                how.keep / f"{name}{RECOVERED}.npz", partial(judged, order, cut=cut, points=points)
            )


def scores_of(model: nn.Module, material: Material, name: str, folder: Path) -> hw.Scores:
    path = folder / f"{name}.parquet"
    if not path.exists():
        method, rounds = METHODS[name]
        found = hw.importance(model, material.score, method, loss=material.kind, rounds=rounds)
        found.save(path)
    scores = hw.Scores.load(path)
    print(f"{name}: first to go {', '.join(map(str, scores.order()[:5]))}", flush=True)
    return scores


def progress(done: int, total: int) -> None:
    print(f"{done}/{total}", flush=True)


def keep(path: Path, make: Callable[[], Curves]) -> None:
    """Write curves as plain arrays, unless they are there."""
    if path.exists():
        return
    print(path.stem, flush=True)
    told = asdict(make())
    with write_beside(path) as beside:
        for name in ("per_text", "scores"):
            told |= {f"{name}/{order}": values for order, values in told.pop(name).items()}
        np.savez(beside, **told)


def kept(path: Path) -> Curves:
    with np.load(path) as file:
        told: dict[str, Any] = {"per_text": {}, "scores": {}}
        for key in file.files:
            name, _, order = key.partition("/")
            if order:
                told[name][order] = file[key]
            else:
                told[name] = file[key] if file[key].ndim else file[key].item()
    return Curves(**told)


def tell(how: argparse.Namespace) -> None:
    """Write the tables and the pictures of each folder, as far as their curves are kept."""
    for folder in how.keep:
        found = Found(folder)
        for end, curves in zip(("", "-recovered"), found.pictures(), strict=False):
            picture = draw_curves(*curves, title="What is lost as heads go", allowed=found.allowed)
            (how.into.parent / f"pruning-{folder.name}{end}.svg").write_text(picture, "utf-8")
        insert("\n\n".join(found.told()), how.into, folder.name)


class Found:
    """The curves of one model."""

    def __init__(self, folder: Path) -> None:
        self.plain = kept(folder / f"{PLAIN}.npz")
        names = [f"{name}{RECOVERED}" for name in self.plain.per_text]
        paths = {name: folder / f"{name}.npz" for name in names}
        self.recovered = {name: kept(path) for name, path in paths.items() if path.exists()}
        self.allowed = self.plain.allowance()

    def pictures(self) -> Iterator[list[Curves]]:
        """All without recovery; then what is recovered beside the same without."""
        yield [self.plain]
        later = {name: f"{name}{RECOVERED}" for name in self.plain.per_text if name != RANDOM}
        found = {name: self.recovered[x] for name, x in later.items() if x in self.recovered}
        if found:
            last = max(int(one.removed[-1]) for one in found.values())
            yield [part_of(self.plain, list(found), last), *found.values()]

    def told(self) -> Iterator[str]:
        full = self.plain.mean(next(iter(self.plain.per_text)))[0, 0]
        start = "" if self.plain.compares else f" The full model's mean loss is {full:.3f}."
        yield f"How many heads go before {self.allowed:.2g} more is lost:"
        yield table(["order", "without recovery", "recovered"], list(self._elbows()))
        yield f"Looked at {'; '.join(self._looked())}."
        yield (
            "What is lost: the mean and half the width of its 95 % interval; of several orders "
            f"the mean, the least and the largest.{start}"
        )
        yield self._table(growth)
        if self.plain.compares:
            yield "The 95th percentile: one text in twenty loses more than this."
            yield self._table(percentile)
        if self.plain.score:
            known = next(iter(self.plain.scores.values()))[0, 0]
            yield f"The score of the task, {self.plain.score}; {known:.3f} for the full model:"
            yield self._table(score)

    def _looked(self) -> Iterator[str]:
        """After how many heads; orders that were looked at alike together."""
        alike: dict[tuple[int, ...], list[str]] = {tuple(self.plain.removed[1:]): [PLAIN]}
        for name, one in self.recovered.items():
            alike.setdefault(tuple(one.removed[1:]), []).append(name)
        for points, names in alike.items():
            which = "" if PLAIN in names else f" for {' and '.join(names)}"
            yield f"after {', '.join(map(str, points))}{which}"

    def _elbows(self) -> Iterator[list[str]]:
        for name in self.plain.per_text:
            later = f"{name}{RECOVERED}"
            found = [self.plain.elbow(name, self.allowed)]
            if later in self.recovered:
                found.append(self.recovered[later].elbow(later, self.allowed))
            yield [name, *map(str, found), *[""] * (2 - len(found))]

    def _table(self, of: Callable[[Curves, str, int], str]) -> str:
        """A row for each order, a column for each point that is not close to the last one."""
        shown = {int(at) for one in self.recovered.values() for at in one.removed[1:]}
        for point in map(int, self.plain.removed[1:]):
            if not any(at * 6 / 7 < point < at * 7 / 6 for at in shown):
                shown.add(point)
        points, rows = sorted(shown), []
        for name, one in (dict.fromkeys(self.plain.per_text, self.plain) | self.recovered).items():
            looked = {int(heads): at for at, heads in enumerate(one.removed)}
            rows.append([name, *(of(one, name, looked[p]) if p in looked else "" for p in points)])
        return table([f"heads removed, of {self.plain.n_heads}", *map(str, points)], rows)


def part_of(curves: Curves, names: list[str], last: int) -> Curves:
    """Some orders of the curves, up to so many heads."""
    upto = curves.removed <= last
    chosen = {name: curves.per_text[name][:, upto] for name in names}
    return replace(curves, removed=curves.removed[upto], per_text=chosen, score="", scores={})


def growth(curves: Curves, name: str, at: int) -> str:
    """What the mean loss has grown by, texts drawn with replacement for its interval."""
    lost = curves.per_text[name][:, at] - curves.per_text[name][:, 0]
    if len(lost) > 1:
        return ranging(lost.mean(1), 3)
    low, high = np.quantile(bootstrap_means(lost.T), [0.025, 0.975])
    digits = 4 if curves.compares else 3
    return f"{lost.mean():.{digits}f} ± {(high - low) / 2:.{digits}f}".replace("-", "−")


def percentile(curves: Curves, name: str, at: int) -> str:
    return f"{np.quantile(curves.per_text[name][:, at], 0.95, axis=1).mean():.3f}"


def score(curves: Curves, name: str, at: int) -> str:
    return ranging(curves.scores[name][:, at], 3)


def ranging(values: np.ndarray, digits: int) -> str:
    """The mean of several orders and their range; the value of a single one."""
    mean, low, high = (f"{x:.{digits}f}" for x in (values.mean(), values.min(), values.max()))
    return mean if len(values) == 1 else f"{mean} ({low}–{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    measuring = parts.add_parser("measure")
    measuring.set_defaults(run=measure)
    measuring.add_argument("model")
    measuring.add_argument("--pairs", type=Path)
    measuring.add_argument("--text", type=Path)
    measuring.add_argument("--keep", type=Path, required=True, help="where curves are kept")
    measuring.add_argument("--texts", type=int, default=64, help="texts that heads are scored on")
    measuring.add_argument("--own", type=int, default=96, help="own texts that models recover by")
    measuring.add_argument("--judging", type=int, default=150, help="pairs that curves are of")
    measuring.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    measuring.add_argument("--points", type=int, nargs="+", help="after how many heads to look")
    measuring.add_argument("--recover", type=int, default=0, help="steps; none without")
    measuring.add_argument("--rate", type=float, default=1e-4)
    few = [name for name in METHODS if name not in ("half-gate, 9 rounds", "zero-ablation")]
    measuring.add_argument("--recovered", nargs="+", default=[*few, RANDOM])
    measuring.add_argument("--recovered-points", type=int, nargs="+")
    measuring.add_argument("--recovered-random", type=int, nargs="+")
    telling = parts.add_parser("tell")
    telling.set_defaults(run=tell)
    telling.add_argument("keep", type=Path, nargs="+", help="folders of curves")
    telling.add_argument("--into", type=Path, required=True, help="the page")
    how = parser.parse_args()
    how.run(how)


if __name__ == "__main__":
    main()
