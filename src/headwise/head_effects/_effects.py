"""`effects`: what each head writes of a difference of logits, and what is lost without it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from headwise._display import counted, measured_on
from headwise._evaluation import differentiable_evaluation
from headwise._progress import Passes, Progress, shows_progress
from headwise.errors import ArgumentError, UnsupportedError
from headwise.files import typed
from headwise.head_effects._direct import Batch, DirectWay, Written, difference
from headwise.head_effects._evidence import FEWEST_EXAMPLES, kinds_of
from headwise.head_effects._examples import SIZE, Examples, Read, batches_of, read_examples
from headwise.models import check_model, fingerprint
from headwise.models.texts import check_reads_text, reads_two_texts, tokenizer_of
from headwise.ownership import Attention, find_attentions
from headwise.scoring import GatedModel
from headwise.scoring.methods import ablation, zero_ablation
from headwise.tables import (
    Head,
    HeadsLike,
    TableFile,
    address_columns,
    at_prompt,
    halves,
    heads_of_rows,
    mean_interval,
    notebook_html,
    numbers_of,
    plot_effects,
    plot_heads,
    resolve_heads,
    texts_of,
)

_OF_ANSWERS = 4  # how often answers are exchanged
KINDS = ("writer", "canceller", "none")
_NUMBERS = ("direct", "ci_low", "ci_high", "p_adj", "answers", "weights", "total", "repair", "n")
_EXAMPLES: tuple[tuple[str, type], ...] = (("examples", int), ("held_out", int), ("sha256", str))
Answers = tuple[int, int]  # the ids of the compared tokens


@dataclass(frozen=True)
class Removal:
    """The difference of logits with and without some heads.

    Attributes:
        heads: The names of the removed heads.
        before: The mean difference of the model as it is.
        after: The mean difference without the heads.
        ci_low: The lower end of the interval of `after` (95 %, bootstrap over examples).
        ci_high: The upper end.
        n: The number of examples.
    """

    heads: tuple[str, ...]
    before: float
    after: float
    ci_low: float
    ci_high: float
    n: int

    def __str__(self) -> str:
        """The difference of logits before and after, with the interval."""
        return (
            f"logit difference {self.before:+.2f}, {self.after:+.2f} "
            f"[{self.ci_low:+.2f}, {self.ci_high:+.2f}] without {', '.join(self.heads)}"
        )

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class HeadEffects(TableFile):
    """The direct and the total effect of each head on a difference of logits.

    All numbers are those of the held-out half of the examples, or of all where they are too few
    for a test.

    Attributes:
        rows: A row per head. `direct` is what the head writes of the difference: its contribution
            to the residual stream, through the last norm with its scale held, times the difference
            of the unembeddings; with its interval (95 %, over examples) from `ci_low` to
            `ci_high`. `kind` is `writer`, `canceller` or `none`, by `p_adj`, the larger adjusted p
            of two nulls: that the head writes as much for the answers of other examples, which
            `answers` is the mean of (NaN if all are the same), and that it writes what its weights
            would in another order, of which `weights` is the standard deviation. p is NaN if no
            head was tested, and 1 for a head that the other half does not call for a test. `total`
            is what the difference loses without the head, `repair` is `direct − total`: what other
            heads put in its place; `n` is the number of examples.
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

    def frame(self) -> pd.DataFrame:
        """A row per head: name, stack, layer, head, direct, its interval, and what follows."""
        return self.rows.copy()

    def found(self) -> pd.DataFrame:
        """The rows of writers and cancellers, from the largest direct effect down."""
        rows = self.rows[self.rows["kind"] != "none"]
        return rows.sort_values("direct", ascending=False, kind="stable", ignore_index=True)

    def remove(self, heads: HeadsLike) -> Removal:
        """Measure the difference of logits without some heads, all removed at once.

        Raises:
            ArgumentError: the effects were loaded from a file, which holds no model.
            HeadError: there is no such head, or one is named twice.
        """
        chosen = resolve_heads(heads, heads_of_rows(self.rows))
        if self._without is None:
            raise ArgumentError(
                f"HeadEffects.remove: these effects of {len(self.rows)} heads were loaded from a "
                f"file. Compute them with headwise.effects, which keeps the model at hand."
            )
        after = -self._without(chosen)
        low, high = mean_interval(after[:, None])
        return Removal(
            tuple(map(str, chosen)),
            self.difference,
            float(after.mean()),
            float(low[0]),
            float(high[0]),
            len(after),
        )

    def plot(self, *, ax: Any = None) -> Any:
        """Draw the total against the direct effect, a dot per head: off the diagonal is repair.

        Without total effects a map of the heads shows the direct ones.

        Args:
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes; writers and cancellers are named.
        Raises:
            ArgumentError: `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        if self.rows["total"].isna().all():
            values, heads = self.rows["direct"].to_numpy(), heads_of_rows(self.rows)
            return plot_heads("HeadEffects.plot", heads, values, "direct effect", ax)
        return plot_effects("HeadEffects.plot", self.rows, ax)

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        about = {
            "difference": self.difference,
            "rest": self.rest,
            "notes": list(self.notes),
            "examples": dict(self.examples),
            "seed": self.seed,
            "model": self.model,
            "versions": dict(self.versions),
        }
        return self.frame(), about

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "HeadEffects":
        columns = address_columns(heads_of_rows(frame))
        columns |= {name: numbers_of(frame, name) for name in _NUMBERS}
        columns["kind"] = kinds = texts_of(frame, "kind")
        if (
            frame.empty
            or not set(kinds) <= set(KINDS)
            or not np.isfinite(numbers_of(frame, "n")).all()
        ):
            raise ValueError(f"{len(frame)} rows of the kinds {sorted(set(kinds))}")
        return cls(
            rows=pd.DataFrame({str(name): columns[str(name)] for name in frame}),
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
        counts = [counted(int((self.rows["kind"] == kind).sum()), kind) for kind in KINDS[:2]]
        tested = self.rows["p_adj"].notna().any()
        n = counted(int(self.rows["n"].iloc[0]), "held-out example" if tested else "example")
        return (
            f"logit difference {self.difference:+.2f} over {n}, of which heads write "
            f"{self.difference - self.rest:+.2f}: {' and '.join(counts)}"
        )

    def __repr__(self) -> str:
        shown = self.rows.drop(columns=["stack", "layer", "head", "answers", "weights", "n"])
        strongest = shown["direct"].abs().sort_values(ascending=False, kind="stable").index
        return at_prompt(f"Effects: {self}", shown.loc[strongest])

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plot)


@shows_progress("Measuring the effects of heads")
def effects(
    model: nn.Module,
    examples: Examples,
    *,
    tokenizer: Any = None,
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
        examples: 20 or more distinct ones, of (text, right, other): the answers follow the text,
            as ' Mary' does with its space, and their first tokens that differ are compared. `other`
            is None for the mean of all logits. Or token ids and two ids.
        tokenizer: A fast tokenizer, for texts.
        total: What replaces the outputs of a removed head: `mean`, its mean over the tokens of the
            examples, or `zero`. Each head costs a pass over half of the examples. None leaves total
            effects out.
        seed: The seed of the halves, the nulls and the sign flips.
        on_progress: Called after each pass over a batch with the passes done and of all.
    Returns:
        A row per head.
    Raises:
        ArgumentError: an example is malformed, or `total` is unknown.
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
    tests = len(read) >= FEWEST_EXAMPLES
    selection = halves(len(read), seed) if tests else np.zeros(len(read), dtype=bool)
    chosen, held = ([read[n] for n in np.flatnonzero(of)] for of in (selection, ~selection))
    with differentiable_evaluation(model, weights=False):
        (example,) = batches_of(model, read[:1])
        attentions = find_attentions(model, dict(example.inputs))
        gated = _gated(model, attentions, held)
        batches = batches_of(model, chosen) + batches_of(model, held)
        n_ablations = len(gated.heads) * len(gated.batches) if total else 0
        passes = Passes(on_progress, len(batches) + n_ablations)
        way = DirectWay(model, attentions, example)
        answers = [one[1:] for one in chosen + held]
        pairs = [torch.tensor(of) for of in (answers, *_exchanged(answers, seed))]
        parts: list[Written] = []
        start = 0
        for number, batch in enumerate(batches):
            stop = start + len(batch.positions)
            parts.append(way.written(batch, [of[start:stop] for of in pairs]))
            start = stop
            passes(number + 1, len(batches))
        written = Written.joined(parts)
        direct, *of_others = written.of_heads()
        others = np.mean(of_others, 0) if of_others else np.zeros_like(direct)
        by_chance = written.by_chance(slice(len(chosen), None))
        lost = np.full((len(held), len(gated.heads)), np.nan)
        if total is not None:
            method = ablation if total == "mean" else zero_ablation
            kept = torch.zeros(len(gated.heads), dtype=torch.bool)
            lost = method(gated, kept, passes).double().numpy()
    n = len(chosen)
    p_adj, kind = np.full(len(gated.heads), np.nan), ["none"] * len(gated.heads)
    if tests:
        p_adj, kind = kinds_of(direct, others, by_chance, n, seed)
    mean, mean_lost = direct[n:].mean(0), lost.mean(0)
    low, high = mean_interval(direct[n:])
    columns = address_columns(gated.heads) | {
        "direct": mean, "ci_low": low, "ci_high": high, "p_adj": p_adj,
        "kind": kind, "total": mean_lost, "repair": mean - mean_lost,
        "answers": others[n:].mean(0) if of_others else np.nan, "weights": by_chance[1],
        "n": float(len(held)),
    }  # fmt: skip
    split = f"{n} chose directions, {len(held)} were held out"
    notes = [f"of {counted(len(read), 'distinct example')} {split}"]
    if not tests:
        few = counted(len(read), "distinct example")
        notes = [f"{few}, too few for a test: give {FEWEST_EXAMPLES}"]
    notes += remarks
    if not of_others:
        notes.append("all examples have the same answers: none were permuted")
    notes.append(f"total effects: outputs replaced by {total}" if total else "no total effects")
    weights, digest = fingerprint(model), hashlib.sha256(repr(chosen + held).encode()).hexdigest()
    versions = {package: version(package) for package in ("headwise", "torch")}
    notes.append(measured_on(weights, "examples", digest, seed, versions["headwise"]))
    return HeadEffects(
        rows=pd.DataFrame(columns),
        difference=float(written.differences[0][n:].mean()),
        rest=float(written.rest[0][n:].mean()),
        notes=tuple(notes),
        examples={"examples": len(read), "held_out": len(held), "sha256": digest},
        seed=seed,
        model=weights,
        versions=versions,
        _without=partial(gated.losses_without, mean=total != "zero"),
    )


def _exchanged(answers: Sequence[Answers], seed: int) -> list[list[Answers]]:
    """The answers of other examples, in several orders; none if all answers are the same."""
    if len(set(answers)) < 2:
        return []
    order = np.random.default_rng(seed).permutation(len(answers))
    back = np.argsort(order)
    steps = range(1, min(_OF_ANSWERS, len(answers) - 1) + 1)
    return [[answers[n] for n in order[(back + step) % len(answers)]] for step in steps]


def _gated(model: nn.Module, attentions: list[Attention], read: Sequence[Read]) -> GatedModel:
    """The model with gates, and minus the difference of logits as its loss."""
    batches = batches_of(model, read)
    pairs = torch.split(torch.tensor([example[1:] for example in read]), SIZE)
    # They were found in a single example.
    rows = len(batches[0].positions)
    attentions = [replace(attention, rows=rows * attention.rows) for attention in attentions]

    def loss(batch: Batch, pair: Tensor, output: Any) -> Tensor:
        return -difference(batch.logits(output).double(), pair)

    parts = [(b.inputs, partial(loss, b, pair)) for b, pair in zip(batches, pairs, strict=True)]
    return GatedModel.with_loss_by_batch(model, attentions, "difference", parts)
