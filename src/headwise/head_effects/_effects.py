"""`effects`: what each head writes of a difference of logits, and what is lost without it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.random import default_rng
from torch import Tensor, nn

from headwise._display import BEFOREHAND, counted, measured_on
from headwise._evaluation import differentiable_evaluation
from headwise._extras import versions
from headwise._progress import Passes, Progress, shows_progress
from headwise.errors import ArgumentError, UnsupportedError
from headwise.files import typed
from headwise.head_effects._direct import Batch, DirectWay, Written, difference
from headwise.head_effects._evidence import FEWEST_EXAMPLES, kinds_of, sign_flips
from headwise.head_effects._examples import SIZE, Examples, Read, batches_of, read_examples
from headwise.models import check_model, fingerprint
from headwise.models.texts import check_reads_text, reads_two_texts, tokenizer_of
from headwise.ownership import Attention, find_attentions
from headwise.scoring import GatedModel
from headwise.tables import (
    Head,
    HeadsLike,
    TableFile,
    address_columns,
    at_prompt,
    halves,
    heads_of_rows,
    mean_interval,
    named_heads,
    notebook_html,
    numbers_of,
    plot_effects,
    rows_of,
    texts_of,
)

_OF_ANSWERS = 4  # how often answers are exchanged
KINDS = ("writer", "canceller", "none", "not tested")
_NUMBERS = (
    *("direct", "ci_low", "ci_high", "p_adj", "answers", "weights", "total", "repair", "n"),
    "smallest",
)
_ABOUT = ("difference", "rest", "notes", "examples", "seed", "model", "versions")
_EXAMPLES: tuple[tuple[str, type], ...] = (("examples", int), ("held_out", int), ("sha256", str))
Answers = tuple[int, int]  # the ids of the compared tokens


@dataclass(frozen=True, eq=False)
class Removal(TableFile):
    """How the difference of logits changes without some heads, in the same examples.

    Attributes:
        heads: The names of the removed heads.
        before: The mean difference of the model as it is.
        after: The mean difference without the heads.
        change: The mean of `after − before` over the examples.
        ci_low: The lower end of the interval of `change` (95 %, bootstrap over examples).
        ci_high: The upper end.
        p: The two-sided p of `change`, by sign flips over examples. It is that of heads which
            other examples chose.
        controls: The change without each distinct random set of as many other heads of the same
            layers; empty where a layer does not have as many.
        examples: A row per example: `tokens`, the ids `right` and `other` (−1 is the mean of all
            logits), and its difference `before` and `after`.
        beforehand: Whether the heads are those that were named before the examples were seen.
        notes: What replaced the outputs, and what was measured: the examples, their digest and that
            of the model, the seed and the version.
    """

    _schema = ("headwise_removal", 1)

    heads: tuple[str, ...]
    before: float
    after: float
    change: float
    ci_low: float
    ci_high: float
    p: float
    controls: tuple[float, ...]
    examples: pd.DataFrame
    beforehand: bool = False
    notes: tuple[str, ...] = ()

    def frame(self) -> pd.DataFrame:
        """A row per example: tokens, right, other, before, after."""
        return self.examples.copy()

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        about = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = about.pop("examples")
        about["removed"] = about.pop("heads")
        return rows.assign(tokens=[np.array(ids) for ids in rows["tokens"]]), about

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "Removal":
        tokens = [[typed(id, int) for id in np.asarray(ids).tolist()] for ids in frame["tokens"]]
        columns: dict[str, Any] = {"tokens": tokens}
        for name in ("right", "other"):
            columns[name] = [typed(id, int) for id in frame[name].tolist()]
        columns |= {name: numbers_of(frame, name) for name in ("before", "after")}
        names = ("before", "after", "change", "ci_low", "ci_high", "p")
        numbers: dict[str, Any] = {name: float(about[name]) for name in names}
        return cls(
            tuple(str(Head.parse(name)) for name in typed(about["removed"], list)),
            **numbers,
            controls=tuple(map(float, about["controls"])),
            examples=pd.DataFrame(columns),
            beforehand=typed(about["beforehand"], bool),
            notes=tuple(map(str, about["notes"])),
        )

    def __str__(self) -> str:
        """The difference before and after, its change with the interval and p, and the controls."""
        chosen = "too small for heads that these examples chose"
        of = f"heads{BEFOREHAND}" if self.beforehand else chosen
        line = (
            f"logit difference {self.before:+.2f}, {self.after:+.2f} without "
            f"{', '.join(self.heads)}: {self.change:+.2f} [{self.ci_low:+.2f}, "
            f"{self.ci_high:+.2f}] over {counted(len(self.examples), 'example')}, p = {self.p:.2g} "
            f"({of}); "
        )
        if not self.controls:
            return f"{line}no random sets of the same layers were removed"
        sets = counted(len(self.controls), "distinct random set")
        low, high = min(self.controls), max(self.controls)
        return f"{line}{sets} of the same layers change it by {low:+.2f} to {high:+.2f}"

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class HeadEffects(TableFile):
    """The direct and the total effect of each head on a difference of logits.

    All numbers are those of the held-out half of the examples, or of all where no head is tested:
    they are too few, or have the same answers, which a head may write whatever the text.

    Attributes:
        rows: A row per head. `direct` is what the head writes of the difference: its contribution
            to the residual stream, through the last norm with its scale held, times the difference
            of the unembeddings; with its interval (95 %, over examples) from `ci_low` to
            `ci_high`. `kind` is `writer`, `canceller` or `none`, by `p_adj`, the larger adjusted p
            of two nulls: that the head writes as much for the answers of other examples, which
            `answers` is the mean of, and that it writes what its weights would in another order, of
            which `weights` is the standard deviation. p is 1 for a head that the other half does
            not call for a test. If no head is tested, `kind` is `not tested`, and p NaN. `total`
            is what the difference loses without the head (NaN for heads that were not named),
            `repair` is `direct − total`: what other heads put in its place; `n` is the number of
            examples; `smallest` is the smallest mean effect beyond `answers` with which a head is
            found in four cases of five (NaN: so few examples show none).
        difference: The mean difference of logits.
        rest: What of it no head writes: embeddings, other layers, biases.
        notes: How the numbers were obtained.
        examples: The number of distinct examples, of those held out, and the SHA-256 of their
            tokens.
        seed: The seed of the halves and the nulls.
        model: The fingerprint of the model's weights.
        versions: The versions of the packages that computed the table.
    """

    _schema = ("headwise_effects", 2)

    rows: pd.DataFrame
    difference: float
    rest: float
    notes: tuple[str, ...] = ()
    examples: Mapping[str, int | str] = field(default_factory=dict)
    seed: int = 0
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    _without: Callable[[Sequence[Head]], np.ndarray] | None = field(default=None, repr=False)
    _read: Sequence[Read] = field(default=(), repr=False)
    _named: frozenset[Head] = field(default=frozenset(), repr=False)
    _replaced: str = field(default="", repr=False)

    def frame(self) -> pd.DataFrame:
        """A row per head: name, stack, layer, head, direct, its interval, and what follows."""
        return self.rows.copy()

    def found(self) -> pd.DataFrame:
        """The rows of writers and cancellers, from the largest direct effect down."""
        rows = self.rows[self.rows["kind"].isin(KINDS[:2])]
        return rows.sort_values("direct", ascending=False, kind="stable", ignore_index=True)

    def remove(self, heads: HeadsLike, *, controls: int = 10) -> Removal:
        """Measure how the difference of logits changes without some heads, removed at once.

        Args:
            heads: The heads.
            controls: How many random sets are drawn, of as many other heads of the same layers,
                with the seed of the effects. A set that is drawn again counts once. Each one costs
                a pass over the examples.
        Raises:
            ArgumentError: no head is named, or the effects were loaded from a file, which holds no
                model.
            HeadError: there is no such head, or one is named twice.
        """
        existing = heads_of_rows(self.rows)
        # None is no head here, as it is where heads are named to be tested, all of them.
        chosen = named_heads("HeadEffects.remove", () if heads is None else heads, existing)
        if self._without is None:
            raise ArgumentError(
                f"HeadEffects.remove: these effects of {len(self.rows)} heads were loaded from a "
                f"file. Compute them with headwise.effects, which keeps the model at hand."
            )
        before, after = (-self._without(removed) for removed in ([], chosen))
        # Some of the named heads may be those that looked best in these examples.
        beforehand = {*chosen} == self._named
        change = after - before
        # Of both directions, adjusted for there being two.
        p = sign_flips(np.stack([change, -change], 1), self.seed).min()
        low, high = mean_interval(change[:, None])
        read = pd.DataFrame(self._read, columns=["tokens", "right", "other"])
        # What a layer adds differs from layer to layer, so that other layers would be no control.
        sizes, rng = Counter(map(_layer, chosen)), default_rng(self.seed)
        rest = [head for head in existing if head not in chosen]
        others = {layer: [head for head in rest if _layer(head) == layer] for layer in sizes}
        exist = all(len(others[layer]) >= size for layer, size in sizes.items())
        sets = {
            tuple(
                others[layer][number]
                for layer, size in sizes.items()
                for number in sorted(rng.choice(len(others[layer]), size, replace=False))
            )
            for _ in range(controls if exist else 0)
        }
        return Removal(
            tuple(map(str, chosen)),
            float(before.mean()), float(after.mean()), float(change.mean()),
            float(low[0]), float(high[0]), float(p),
            tuple(float((-self._without(one) - before).mean()) for one in sorted(sets)),
            read.assign(before=before, after=after),
            beforehand,
            (
                f"{counted(len(chosen), 'head')}{BEFOREHAND * beforehand}: outputs replaced by "
                f"{self._replaced}, in {counted(len(read), 'example')} of "
                f"{self.examples['examples']} distinct ones",
                self.notes[-1],
            ),
        )  # fmt: skip

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the total against the direct effect, a dot per head: off the diagonal is repair.

        Without total effects a map of the heads shows the direct ones.

        Args:
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes; writers and cancellers are named, or marked on the map.
        Raises:
            ArgumentError: `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        return plot_effects("HeadEffects.plot", self.rows, ax)

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        return self.frame(), {name: getattr(self, name) for name in _ABOUT}

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "HeadEffects":
        rows, kinds = rows_of(frame, _NUMBERS, ("kind",)), {*texts_of(frame, "kind")}
        heads_of_rows(frame)  # which refuses a head that is there twice
        if kinds - {*KINDS} or not np.isfinite(rows["n"]).all():
            raise ValueError(f"{len(rows)} rows of the kinds {sorted(kinds)}")
        return cls(
            rows=rows,
            difference=float(about["difference"]),
            rest=float(about["rest"]),
            notes=tuple(map(str, about["notes"])),
            examples={name: typed(about["examples"][name], kind) for name, kind in _EXAMPLES},
            seed=typed(about["seed"], int),
            model=str(about["model"]),
            versions=dict(about["versions"]),
        )

    def __str__(self) -> str:
        """The difference of logits, what heads write of it, and how many do."""
        tested = bool(self.rows["p_adj"].notna().any())
        n = counted(int(self.rows["n"].iloc[0]), "held-out example" if tested else "example")
        counts = [counted(int((self.rows["kind"] == kind).sum()), kind) for kind in KINDS[:2]]
        said = " and ".join(counts)
        if tested and not self.rows["kind"].isin(KINDS[:2]).any():
            half, most = self.rows["smallest"].median(), self.rows["smallest"].max()
            if np.isnan(half):
                said += "; so few examples show no effect: give more"
            else:
                said += (
                    f"; these examples show effects from about {half:.2g} on in half of the heads, "
                    f"from {most:.2g} on in all"
                )
        if not tested:
            distinct = int(self.examples["examples"])
            few = f"{counted(distinct, 'distinct example')}, {FEWEST_EXAMPLES} needed"
            same = "all examples have the same answers, which a head may write whatever the text"
            said = f"not tested: {few if distinct < FEWEST_EXAMPLES else same}"
        if self.rows["total"].isna().all():
            said += "; direct effects alone, total effects were not measured"
        return (
            f"logit difference {self.difference:+.2f} over {n}, of which heads write "
            f"{self.difference - self.rest:+.2f}: {said}"
        )

    def __repr__(self) -> str:
        shown = self.rows.drop(columns=["stack", "layer", "head", "answers", "weights", "n"])
        strongest = shown["direct"].abs().sort_values(ascending=False, kind="stable").index
        return at_prompt(f"Effects: {self}", shown.loc[strongest])

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plot)


def _layer(head: Head) -> tuple[str, int]:
    return head.stack, head.layer


@shows_progress("Measuring the effects of heads")
def effects(
    model: nn.Module,
    examples: Examples,
    *,
    tokenizer: Any = None,
    heads: HeadsLike | None = None,
    total: str | None = "mean",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> HeadEffects:
    """Measure what each head writes of a difference of logits, and what is lost without it.

    The direct effect of a head is its own contribution to the difference, past all later layers:
    heads and everything else sum to the difference exactly. One pass over the examples gives it for
    all heads. The total effect is what the difference loses without the head; where others repair
    it, that is less. Heads write for the right answer (writers) or against it (cancellers).

    Half of the examples choose the direction of each head; all numbers and the test are those of
    the other half. Nulls are the same head with the answers of other examples, by sign flips over
    examples, and with its weights permuted. p is adjusted over all tested heads.

    Args:
        model: A causal language model.
        examples: 20 or more distinct ones of several answers, of (text, right, other): answers
            follow the text, as ' Mary' does with its space, and their first tokens that differ are
            compared. `other` is None for the mean of all logits. All three may be token ids.
        tokenizer: A fast tokenizer, for texts.
        heads: Heads named before these examples were seen: they alone are tested and removed, all
            of them, and p is adjusted for them alone. None tests all heads that half of the
            examples call for, and removes every head.
        total: What replaces the outputs of a removed head: `mean`, its mean over the tokens of the
            examples, or `zero`. Each one costs a pass over half of the examples. Total effects of
            other heads are NaN. None leaves total effects out.
        seed: The seed of the halves, the nulls and the sign flips.
        on_progress: Called after each batch, then after each removed head, with the steps done and
            of all.
    Returns:
        A row per head.
    Raises:
        ArgumentError: an example is malformed, `total` is unknown, or `heads` names none.
        HeadError: there is no such head.
        InputError: answers do not differ, or an example is too long.
        UnsupportedError: the model reads two texts, or its heads do not reach the logits by
            additions, norms and scalings alone.
    Source:
        Wang et al. 2023 (arXiv 2211.00593) for direct effects; McDougall et al. 2023 (arXiv
        2310.04625) for heads that cancel and heads that repair.
    """
    wrapper, model = model, check_model("effects", model)
    if total not in ("mean", "zero", None):
        raise ArgumentError(f"effects: total={total!r}. Choose 'mean', 'zero' or None.")
    check_reads_text("effects", model)
    if reads_two_texts(model):
        raise UnsupportedError(
            f"effects: {type(model).__name__} reads two texts. Give a causal language model."
        )
    read, remarks = read_examples(examples, tokenizer_of(wrapper, tokenizer), model)
    # No null would refuse a head that writes the same answers whatever the text.
    tests = len(read) >= FEWEST_EXAMPLES and len({one[1:] for one in read}) > 1
    selection = halves(len(read), seed) if tests else np.zeros(len(read), dtype=bool)
    chosen, held = ([read[n] for n in np.flatnonzero(of)] for of in (selection, ~selection))
    with differentiable_evaluation(model, weights=False):
        (example,) = batches_of(model, read[:1])
        attentions = find_attentions(model, dict(example.inputs))
        gated = _gated(model, attentions, held)
        named = named_heads("effects", heads, gated.heads)
        batches = batches_of(model, chosen) + batches_of(model, held)
        passes = Passes(on_progress, len(batches) + len(named) * (total is not None))
        way = DirectWay(model, attentions, example)
        answers = [one[1:] for one in chosen + held]
        pairs = torch.tensor([answers, *(_exchanged(answers, seed) if tests else [])])
        of_batches = torch.split(pairs, [len(batch.positions) for batch in batches], dim=1)
        parts: list[Written] = []
        for batch, of_batch in zip(batches, of_batches, strict=True):
            parts.append(way.written(batch, [*of_batch]))
            passes(len(parts), len(batches))
        written = Written.joined(parts)
        direct, *of_others = written.of_heads()
        others = np.mean(of_others, 0) if tests else np.full_like(direct, np.nan)
        by_chance = written.by_chance(slice(len(chosen), None))
        lost = np.full((len(held), len(gated.heads)), np.nan)
        of = [gated.heads.index(head) for head in named]
        without = partial(gated.losses_without, mean=total != "zero")
        if total is not None:
            before = without([])
            for done, (column, head) in enumerate(zip(of, named, strict=True), 1):
                lost[:, column] = without([head]) - before
                passes(done, len(named))
    n = len(chosen)
    p_adj, smallest = np.full((2, len(gated.heads)), np.nan)
    kind = np.full(len(gated.heads), "not tested")
    if tests:
        chance = by_chance[0][of], by_chance[1][of]
        p_adj[of], kind[of], smallest[of] = kinds_of(
            direct[:, of], others[:, of], chance, n, seed, screened=heads is None
        )
    mean, mean_lost = direct[n:].mean(0), lost.mean(0)
    low, high = mean_interval(direct[n:])
    columns = address_columns(gated.heads) | {
        "direct": mean, "ci_low": low, "ci_high": high, "p_adj": p_adj,
        "kind": kind.tolist(), "total": mean_lost, "repair": mean - mean_lost,
        "answers": others[n:].mean(0), "weights": by_chance[1], "n": float(len(held)),
        "smallest": smallest,
    }  # fmt: skip
    split = (
        f"of {len(read)} distinct examples {n} chose directions, {len(held)} were held out, as "
        f"independent ones"
    )
    differences = written.differences[0][n:]
    least, most = (float(end[0]) for end in mean_interval(differences[:, None]))
    notes = [
        *[split] * tests,
        *remarks,
        f"the right answer has the larger logit in {(differences > 0).sum()} of {len(held)} "
        f"examples; the difference is {differences.mean():+.2f} [{least:+.2f}, {most:+.2f}]",
    ]
    notes += [f"total effects: outputs replaced by {total}"] * (total is not None)
    family = f"p adjusted over {counted(len(named), 'head')}{BEFOREHAND * (heads is not None)}"
    notes += [family] * tests
    weights, digest = fingerprint(model), hashlib.sha256(repr(chosen + held).encode()).hexdigest()
    made_with = versions()
    notes.append(measured_on(weights, "examples", digest, seed, made_with["headwise"]))
    return HeadEffects(
        rows=pd.DataFrame(columns),
        difference=float(differences.mean()),
        rest=float(written.rest[0][n:].mean()),
        notes=tuple(notes),
        examples={"examples": len(read), "held_out": len(held), "sha256": digest},
        seed=seed,
        model=weights,
        versions=made_with,
        _without=without,
        _read=held,
        _named=frozenset(named if heads is not None else ()),
        _replaced=total or "mean",
    )


def _exchanged(answers: Sequence[Answers], seed: int) -> list[list[Answers]]:
    """The answers of other examples, in several orders."""
    order = default_rng(seed).permutation(len(answers))
    back = np.argsort(order)
    steps = range(1, _OF_ANSWERS + 1)
    return [[answers[n] for n in order[(back + step) % len(answers)]] for step in steps]


def _gated(model: nn.Module, attentions: list[Attention], read: Sequence[Read]) -> GatedModel:
    """The model with gates, and minus the difference of logits as its loss."""
    batches = batches_of(model, read)
    pairs = torch.split(torch.tensor([example[1:] for example in read]), SIZE)
    # They were found in a single example.
    attentions = [replace(a, rows=len(batches[0].positions) * a.rows) for a in attentions]

    def loss(batch: Batch, pair: Tensor, output: Any) -> Tensor:
        return -difference(batch.logits(output).double(), pair)

    parts = [(b.inputs, partial(loss, b, pair)) for b, pair in zip(batches, pairs, strict=True)]
    return GatedModel.with_loss_by_batch(model, attentions, "difference", parts)
