"""Synthetic studies with some structure, to test and to inspect the report."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from headwise.head_effects import HeadEffects
from headwise.report import Sample, Study
from headwise.roles import Effect, Effects, Group, Roles
from headwise.roles.evidence import NULLS
from headwise.tables import Head, HeadTable, Totals, address_columns

SENTENCES = (
    "the animal crossed the road because it was tired",
    "I always work , you always work , he never works = yo siempre trabajo , tú siempre trabajas",
)


def make_totals(
    means: np.ndarray,
    evens: np.ndarray | float,
    texts: int = 40,
    noise: float = 0.02,
    seed: int = 0,
) -> Totals:
    """Totals of texts of various lengths that vary around the means; NaN without rows."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.integers(5, 30, (texts, 1)).astype(float), len(means), 1)
    rows[:, np.isnan(means)] = 0
    each = np.nan_to_num(means) + noise * rng.standard_normal(rows.shape)
    maximum = np.where(np.isnan(means), np.nan, np.nan_to_num(means) + 3 * noise)
    return Totals.of_texts(each * rows, rows, maximum, evens * rows)


def make_heads(layers: int, heads: int, stack: str = "") -> tuple[Head, ...]:
    return tuple(Head(stack, layer, head) for layer in range(layers) for head in range(heads))


def make_study(
    layers: int = 2,
    heads: int = 4,
    *,
    title: str = "Mini-GPT",
    relations: Mapping[str, str] | None = None,
    sentences: Sequence[str] = SENTENCES,
    causal: bool = True,
    stacks: Sequence[str] = ("",),
) -> Study:
    """A study whose heads attend to the previous token, the first, relations, or widely."""
    rows = tuple(head for stack in stacks for head in make_heads(layers, heads, stack))
    rng = np.random.default_rng(layers * 100 + heads)
    relations = relations or {}
    shares = ["first", "self", "previous", *([] if causal else ["next"]), *relations]
    styles = rng.integers(0, len(shares) + 2, len(rows))
    styles[0] = shares.index("previous")
    totals = {
        name: make_totals(
            np.where(styles == index, rng.beta(8, 2, len(rows)), rng.beta(1, 12, len(rows))),
            0.09,
            seed=index,
        )
        for index, name in enumerate(shares)
    }
    width = rng.uniform(0.3, 2.6, len(rows))
    none = np.nan
    totals = {
        "entropy": make_totals(width, none),
        "max_weight": make_totals(np.exp(-width), none),
        **totals,
        **({"next": make_totals(np.full(len(rows), none), none)} if causal else {}),
        "distance": make_totals(rng.uniform(0.5, 9, len(rows)), 4.0, noise=0.3),
        "max_logit": make_totals(rng.normal(6, 4, len(rows)), none),
        "lse": make_totals(rng.normal(5, 4, len(rows)), none),
    }
    order = [*(name for name in totals if name not in relations), *relations]
    table = HeadTable(
        rows,
        np.arange(len(rows)),
        {name: totals[name] for name in order},
        model="5f1d0c9a7e3b4466",
        versions={"headwise": "0.1.0", "torch": "2.13.0", "transformers": "5.1.0"},
    )
    samples = tuple(make_sample(text.split(" "), rows, styles, causal) for text in sentences)
    return Study(
        title=title,
        model={
            "class": "MiniGPT",
            "parameters": 812_544,
            "layers": layers,
            "heads": heads,
            "width": 128,
        },
        text={"source": "the generated verb grammar", "texts": 512, "tokens": 19_204},
        table=table,
        meanings=relations,
        samples=samples,
        training={"steps": 1500, "seconds": 71.4, "held-out loss": 0.4127} if relations else None,
    )


def make_sample(
    tokens: Sequence[str], heads: Sequence[Head], styles: np.ndarray, causal: bool = True
) -> Sample:
    """Maps in the style of each head: first token, itself, previous token, or wide."""
    size = len(tokens)
    rng = np.random.default_rng(size)
    query, key = np.indices((size, size))
    patterns = [key == 0, key == query, key == query - 1, (key * 7 + query * 3) % 5 == 0]
    weights = {}
    for head, style in zip(heads, styles, strict=True):
        logits = rng.normal(0, 1, (size, size)) + 4 * patterns[min(style, len(patterns) - 1)]
        if causal:
            logits[key > query] = -np.inf
        odds = np.exp(logits - logits.max(1, keepdims=True))
        weights[head] = (odds / odds.sum(1, keepdims=True)).astype(np.float32)
    return Sample(tuple(tokens), weights)


def make_roles(
    study: Study, with_role: Sequence[int] = (0,), text: str = "previous token"
) -> Roles:
    """Roles of a study's heads: the numbered heads have the role."""
    heads = study.table.heads
    places = np.arange(len(heads))
    has = np.isin(places, with_role)
    effect = np.where(has, 0.875, 0.125)
    columns = {
        "name": [str(head) for head in heads],
        "stack": [head.stack for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
        "role": text,
        "label": np.where(has, text, ""),
        "found": has,
        "outcome": np.where(has, "found", "not found"),
        "effect": effect,
        "null": text,
        "baseline": 0.25,
        "lift": (effect - 0.25) / 0.75 - places * 1e-6,
        "ci_low": effect - 0.0625,
        "ci_high": effect + 0.0625,
        "n": 1234.0,
        "texts": 56.0,
        "p_adj": np.where(has, 0.00025, 1.0),
        "split": "held-out",
        "smallest": 0.5,
        "control": 0.75,
        "chosen_half": effect,
    }
    nulls = {f"null.{name}": 0.25 for name in NULLS}
    rows = pd.DataFrame(columns | {"mass": effect, "value": effect} | nulls)
    first, second = columns["name"][0], columns["name"][-1]
    effects = Effects(
        alone=(Effect((first,), text, 0.5, 0.375, 0.625, 56, 0.00025),),
        groups=(Group(text, Effect((first, second), text, 0.75, 0.5, 1.0, 56), 0.125),),
        says={text: f"{text}, in nats"},
        roles={text: (text,)},
    )
    return Roles(
        rows=effects.joined(rows),
        meanings={text: f"a token → the token before it: {text}"},
        notes=(f"56 texts: {text}",),
        model=study.table.model,
        ablation_effects=effects,
    )


def make_effects(study: Study, text: str = "outputs replaced by mean") -> HeadEffects:
    """Effects of a study's heads: the first one writes, the last one cancels."""
    heads = study.table.heads
    direct = np.linspace(1.0, -0.5, len(heads))
    kinds = ["writer", *["none"] * (len(heads) - 2), "canceller"]
    numbers = {"direct": direct, "ci_low": direct - 0.125, "ci_high": direct + 0.125,
               "p_adj": np.where(np.isin(kinds, "none"), 1.0, 0.00025)}  # fmt: skip
    later = {"total": direct / 2, "repair": direct / 2, "answers": np.nan, "weights": 0.25,
             "smallest": 0.125}  # fmt: skip
    rows = pd.DataFrame(address_columns(heads) | numbers | {"kind": kinds} | later | {"n": 20.0})
    rows["smallest"] = 0.25
    examples: dict[str, int | str] = {"examples": 40, "held_out": 20, "sha256": "0123"}
    return HeadEffects(rows, 2.5, 0.5, (text,), examples, model=study.table.model)
