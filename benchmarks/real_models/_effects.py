"""SmolLM2-135M-Instruct: which heads write an answer, which cancel it, and what repairs them.

The weights are of four bits (Q4_1). Examples A choose heads, examples B, of other words and
templates, test them.
"""

import sys
from collections.abc import Iterator
from functools import cache
from random import Random
from time import process_time
from typing import Any

import numpy as np
import torch

import headwise as hw
from benchmarks._report import in_process, peak_of, table, titled
from benchmarks._whole_way import batch_of_lines, whole_way
from benchmarks.real_models._packages import stored
from benchmarks.real_models._smollm2 import opened
from headwise._evaluation import differentiable_evaluation
from headwise.head_effects._direct import DirectWay
from headwise.head_effects._examples import batches_of, read_examples
from headwise.ownership import find_attentions
from headwise.tables import mean_interval

# Examples of a task on each side; half of them choose, and half test. Where they were fewer than
# first intended, that was before anything of the task was measured.
N_OBJECTS, N = 80, 48
SIZE = 5  # heads of a set: the strongest that were found on A
TEXTS, TOKENS = 8, 256  # of which memory is measured
WAYS = (
    "a pass, all logits",
    "a pass, the logits of the last tokens",
    "the same pass in a watch",
    "direct effects of all heads, with their nulls",
)
# What would count as found, as it was written down before any of it was measured. Five writers and
# five cancellers of indirect objects had been seen before, on 24 examples of one template.
EXPECTED = {
    "writers of indirect objects": (
        "without the five strongest writers of A, the difference of logits on B falls below half"
    ),
    "cancellers of indirect objects": (
        "without the five strongest cancellers of A, the difference on B rises by 40 % or more"
    ),
    "random heads": (
        "without five random heads, in each of five draws, it changes by less than a fifth"
    ),
    "repair": (
        "the strongest writer of A has a total effect on B of less than half its direct effect"
    ),
    "writers of antonyms": "the same as for indirect objects: below half",
    "cancellers of antonyms": "the difference on B rises by 40 % or more",
    "writers of greater numbers": "the same: below half",
    "cancellers of greater numbers": "the difference on B rises by 40 % or more",
    "heads of their own": (
        "of the five writers of indirect objects, at most two are among those of antonyms, and at "
        "most two among those of greater numbers"
    ),
    "answers at random": "with right and other exchanged at random in A, no head is found",
    "direct paths": (
        "of the heads with |t| > 4, patching the direct path exactly has the same sign for 98 %"
    ),
    "cost": "direct effects of all 270 heads in 16 examples take at most 1.2 forward passes",
}
NAMES = {
    "A": ("Mary", "John", "Tom", "Anna", "James", "Sarah", "Paul", "Emma"),
    "B": ("Lisa", "Mark", "Kate", "David", "Susan", "Peter", "Alice", "Robert"),
}
TEMPLATES = {
    "A": (
        "When {x} and {y} went to the store, {s} gave a drink to",
        "After {x} and {y} had lunch, {s} handed the bill to",
    ),
    "B": (
        "While {x} and {y} were working at the office, {s} sent a letter to",
        "Then {x} and {y} sat down in the garden, and {s} told a story to",
    ),
}
WORDS = {
    "A": (
        "hot cold,big small,up down,good bad,rich poor,fast slow,happy sad,light dark,young old,"
        "hard soft,true false,open closed,early late,full empty,strong weak,high low,left right,"
        "wet dry,long short,thick thin"
    ),
    "B": (
        "black white,clean dirty,loud quiet,safe dangerous,near far,deep shallow,first last,"
        "inside outside,love hate,win lose,begin end,buy sell,push pull,alive dead,"
        "day night,war peace,cheap expensive,easy difficult,wide narrow,always never"
    ),
}
FRAMES = {
    "A": ("The opposite of {w} is", "{w} is the opposite of"),
    "B": ("Q: What is the antonym of {w}? A: The antonym of {w} is", "{w} means the reverse of"),
}
EVENTS = {"A": ("war", "project"), "B": ("journey", "famine")}


def smollm2_effects() -> str:
    """Measures everything that is not in build/ yet."""
    once = cache(opened)
    measured = {
        task: stored(f"smollm2-effects-{task}", lambda task=task: of_task(*once(), task))
        for task in TASKS
    }
    measured["direct"] = stored("smollm2-effects-direct", lambda: direct_paths(*once()))
    measured["cost"] = stored("smollm2-effects-cost", lambda: cost(*once()))
    measured["memory"] = stored(
        "smollm2-effects-memory", lambda: {way: in_process(__name__, way) for way in WAYS}
    )
    measured["totals"] = stored("smollm2-effects-totals", lambda: totals(*once()))
    return titled(_tables(measured))


def smollm2_whole_way() -> str:
    """Goes the whole way with the model, on sentences about three people."""
    model, tokenizer = opened()
    scoring, held_out = (
        batch_of_lines(tokenizer, [f"{x[0]}{x[1]}" for x in indirect_objects(half, 16)])
        for half in "AB"
    )
    return table(["", "value"], whole_way(model, scoring, held_out))


def indirect_objects(half: str, n: int = N_OBJECTS) -> list[tuple[str, str, str]]:
    rng, examples = Random(f"objects {half}"), []
    for number in range(n):
        right, other = rng.sample(NAMES[half], 2)
        first, second = (right, other) if rng.random() < 0.5 else (other, right)
        template = TEMPLATES[half][number % 2]
        text = template.format(x=first, y=second, s=other)
        examples.append((text, f" {right}", f" {other}"))
    return examples


def antonyms(half: str) -> list[tuple[str, str, str]]:
    """The antonym against the word itself, in both directions."""
    examples = []
    for pair in dict.fromkeys(WORDS[half].split(",")):
        for word, right in (pair.split(), pair.split()[::-1]):
            for frame in FRAMES[half]:
                examples.append((frame.format(w=word), f" {right}", f" {word}"))
    return Random(f"antonyms {half}").sample(examples, N)


def greater(half: str, n: int = N) -> list[tuple[str, str, str]]:
    """A decade after that of the beginning against one before it."""
    rng, examples = Random(f"greater {half}"), []
    for number in range(n):
        decade = rng.randint(2, 7)
        later, earlier = rng.randint(decade + 1, 9), rng.randint(0, decade - 1)
        event = EVENTS[half][number % 2]
        century = rng.choice((16, 17, 18))
        year = f"{century}{decade}{rng.randint(1, 8)}"
        text = f"The {event} lasted from the year {year} to the year {century}"
        examples.append((text, str(later), str(earlier)))
    return examples


TASKS = {
    "indirect objects": indirect_objects,
    "antonyms": antonyms,
    "greater numbers": greater,
}


def of_task(model: Any, tokenizer: Any, task: str) -> Any:
    """Chooses heads on A, and measures B without them."""
    on_a, on_b = (
        hw.effects(model, TASKS[task](half), tokenizer=tokenizer, total=None) for half in "AB"
    )
    found, frame = on_a.found(), on_b.frame()
    sets = {
        "writers": found[found["kind"] == "writer"]["name"].head(SIZE).tolist(),
        "cancellers": found[found["kind"] == "canceller"]["name"].tail(SIZE).tolist()[::-1],
    }
    names = frame["name"].tolist()
    objects = task == "indirect objects"
    if objects:
        sets |= {f"random, set {n}": Random(n).sample(names, SIZE) for n in range(5)}
    rows = []
    for name, heads in sets.items():
        if heads:
            removal = on_b.remove(heads, controls=0)
            ends = mean_interval(removal.examples[["after"]].to_numpy())
            row = {"set": name, "heads": heads, "before": removal.before, "after": removal.after}
            rows.append(row | dict(zip(("ci_low", "ci_high"), map(float, ends), strict=True)))
    both = frame.set_index("name")["direct"]
    exchanged = [
        (text, *(answers if flip else answers[::-1]))
        for (text, *answers), flip in zip(
            TASKS[task]("A"), np.random.default_rng(0).integers(2, size=999), strict=False
        )
    ]
    at_random = []
    if objects:
        effects = hw.effects(model, exchanged, tokenizer=tokenizer, total=None)
        at_random = effects.found()["name"].tolist()
    return {
        "before": {"A": on_a.difference, "B": on_b.difference},
        "heads": {"A": on_a.difference - on_a.rest, "B": on_b.difference - on_b.rest},
        "n": {"A": int(on_a.frame()["n"][0]), "B": int(on_b.frame()["n"][0])},
        "found": found[["name", "direct", "p_adj", "kind"]].to_dict("records"),
        "on B": {name: float(both[name]) for name in found["name"]},
        "correlation": float(np.corrcoef(on_a.frame()["direct"], frame["direct"])[0, 1]),
        "rows": rows,
        "at random": at_random,
    }


def totals(model: Any, tokenizer: Any) -> Any:
    """Direct and total effects on B of the heads that write most on A."""
    found = stored("smollm2-effects-indirect objects", dict)["found"]
    names = [head["name"] for head in sorted(found, key=lambda head: -abs(head["direct"]))[:8]]
    on_b = hw.effects(model, indirect_objects("B", N), tokenizer=tokenizer, total=None)
    direct = on_b.frame().set_index("name")["direct"]
    removals = {name: on_b.remove(name, controls=0) for name in names}
    return [[name, float(direct[name]), x.before - x.after] for name, x in removals.items()]


@torch.no_grad()
def direct_paths(model: Any, tokenizer: Any) -> Any:
    """Direct effects beside exact patching of the direct path, whose norm is computed again.

    Written for Llama alone, without anything of `hw.effects`.
    """
    # Too few for a test, so that all are measured, each once.
    examples = [*dict.fromkeys(indirect_objects("A", 19))]
    frame = hw.effects(model, examples, tokenizer=tokenizer, total=None).frame()
    n_heads, width = model.config.num_attention_heads, model.config.head_dim
    exact, frozen = [], []
    for text, *answers in examples:
        inputs: dict[int, torch.Tensor] = {}
        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, args, number=number, to=inputs: to.update({number: args[0][0, -1]})
            )
            for number, layer in enumerate(model.model.layers)
        ]
        streams: dict[str, torch.Tensor] = {}
        hooks.append(
            model.model.norm.register_forward_pre_hook(
                lambda _, args, to=streams: to.update(x=args[0][0, -1])
            )
        )
        ids = torch.tensor([tokenizer(text).input_ids])
        model(input_ids=ids)
        for hook in hooks:
            hook.remove()
        x = streams["x"]
        right, other = (tokenizer(answer).input_ids[0] for answer in answers)
        row = model.lm_head.weight[right] - model.lm_head.weight[other]
        added = torch.cat(
            [
                torch.einsum(
                    "dhk,hk->hd",
                    layer.self_attn.o_proj.weight.unflatten(1, (n_heads, width)),
                    inputs[number].view(n_heads, width),
                )
                for number, layer in enumerate(model.model.layers)
            ]
        )
        exact.append((model.model.norm(x) @ row - model.model.norm(x - added) @ row).numpy())
        scale = (x.square().mean() + model.config.rms_norm_eps).rsqrt()
        frozen.append((added * scale * model.model.norm.weight @ row).numpy())
    mean = np.mean(exact, 0)
    t = np.mean(frozen, 0) / (np.std(frozen, 0, ddof=1) / len(frozen) ** 0.5)
    clear = np.abs(t) > 4
    direct = frame["direct"].to_numpy()
    return {
        "heads": int(clear.sum()),
        "same sign": float((np.sign(mean) == np.sign(direct))[clear].mean()),
        "gap": float(np.abs(np.mean(frozen, 0) - direct).max() / np.abs(direct).max()),
    }


def cost(model: Any, tokenizer: Any) -> Any:
    """CPU seconds of a pass over 16 examples, of direct effects in it, and of finding the way."""
    read = read_examples(indirect_objects("A", 16), tokenizer, model)
    (batch,), (first,) = batches_of(model, read), batches_of(model, read[:1])
    pairs = torch.tensor([answers for _, *answers in read])
    plain = {name: x for name, x in batch.inputs.items() if name != "logits_to_keep"}
    with differentiable_evaluation(model, weights=False):
        start = process_time()
        way = DirectWay(model, find_attentions(model, dict(first.inputs)), first)
        once = process_time() - start
        work = {
            "pass": torch.no_grad()(lambda: model(**plain)),
            "last": torch.no_grad()(lambda: model(**batch.inputs)),
            "direct": lambda: way.written(batch, [pairs]).of_heads(),
            "with nulls": lambda: way.written(batch, [pairs] * 5).of_heads(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(5):
            for name, run in work.items():
                start = process_time()
                run()
                seconds[name].append(process_time() - start)
    return {"once": once, **{name: min(each) for name, each in seconds.items()}}


def memory_of(way: str) -> int:
    """Peak memory of one way to run the model on long texts, beyond that of the model."""
    torch.set_num_threads(1)
    model, _ = opened()
    rng = np.random.default_rng(0)
    texts = [rng.integers(9999, size=TOKENS - n).tolist() for n in range(TEXTS)]
    read = read_examples([(ids, 5, 7) for ids in texts], None, model)
    (batch,), (first,) = batches_of(model, read), batches_of(model, [(texts[0][:8], 5, 7)])
    every = {name: x for name, x in batch.inputs.items() if name != "logits_to_keep"}
    pairs = torch.tensor([answers for _, *answers in read])

    def direct() -> None:
        with differentiable_evaluation(model, weights=False):
            way = DirectWay(model, find_attentions(model, dict(first.inputs)), first)
            way.written(batch, [pairs] * 5).of_heads()

    @torch.no_grad()
    def watched() -> None:
        with hw.observe(model) as watch:
            model(**batch.inputs)
        watch.table()

    runs = (
        torch.no_grad()(lambda: model(**every)),
        torch.no_grad()(lambda: model(**batch.inputs)),
        watched,
        direct,
    )
    with torch.no_grad():
        model(**first.inputs)  # one-time setup
    return peak_of(dict(zip(WAYS, runs, strict=True))[way])


def _tables(measured: dict[str, Any]) -> Iterator[tuple[str, str]]:
    outcomes = {claim: answer for claim, *answer in _outcomes(measured)}
    lines = [[claim, EXPECTED[claim], *outcomes.get(claim, ("", "open"))] for claim in EXPECTED]
    titles = ("claim", "counts as found if", "measured", "holds")
    yield "What was expected", table(titles, lines, left_columns=3)
    rows = []
    for task in TASKS:
        for row in measured[task]["rows"]:
            change = row["after"] / row["before"] - 1
            ends = f"{row['after']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}]"
            names = ", ".join(row["heads"])
            rows.append([task, row["set"], names, f"{row['before']:.2f}", ends, f"{change:+.0%}"])
    titles = ("task", "removed", "heads", "before", "after", "change")
    yield "Sets chosen on A, removed on B", table(titles, rows, left_columns=3)
    rows = []
    for task in TASKS:
        one = measured[task]
        counts = [sum(h["kind"] == kind for h in one["found"]) for kind in ("writer", "canceller")]
        same = np.mean([h["direct"] * one["on B"][h["name"]] > 0 for h in one["found"]])
        rows.append(
            [task, f"{one['n']['A']}, {one['n']['B']}", f"{one['before']['A']:.2f}",
             f"{one['heads']['A']:.2f}", *map(str, counts), f"{same:.0%}" if one["found"] else "–",
             f"{one['correlation']:.2f}"]
        )  # fmt: skip
    titles = (
        "task", "held-out A, B", "difference", "of heads", "writers", "cancellers",
        "same sign on B", "correlation",
    )  # fmt: skip
    yield "Heads that were found on A", table(titles, rows)
    rows = [
        [name, *(f"{x:+.2f}" for x in (direct, total, direct - total))]
        for name, direct, total in measured["totals"]
    ]
    titles = ("head", "direct", "total", "repair")
    yield "Direct and total effects on indirect objects of B, the strongest", table(titles, rows)
    rows = [[way, f"{peak / 2**20:,.0f} MiB"] for way, peak in measured["memory"].items()]
    about = f"Peak memory beyond the model, {TEXTS} texts of up to {TOKENS} tokens"
    yield about, table(("what runs", "peak"), rows)


def _outcomes(measured: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for task in TASKS:
        rows = {row["set"]: row for row in measured[task]["rows"]}
        for kind in ("writers", "cancellers"):
            row = rows.get(kind)
            if row is None:
                yield f"{kind} of {task}", "none was found on A", "no"
                continue
            share = row["after"] / row["before"]
            # Shares of next to nothing say nothing: then the model does not do the task.
            holds = row["before"] > 0.5 and (share < 0.5 if kind == "writers" else share >= 1.4)
            said = f"{row['before']:.2f} → {row['after']:.2f} ({share - 1:+.0%})"
            yield f"{kind} of {task}", said, "yes" if holds else "no"
    objects = measured["indirect objects"]
    changes = [r["after"] / r["before"] - 1 for r in objects["rows"] if "random" in r["set"]]
    said = f"{min(changes):+.0%} to {max(changes):+.0%}"
    yield "random heads", said, "yes" if max(map(abs, changes)) < 0.2 else "no"
    name, direct, total = measured["totals"][0]
    yield (
        "repair",
        f"{name}: direct {direct:+.2f}, total {total:+.2f}",
        "yes" if total < direct / 2 else "no",
    )
    writers = {
        task: {h["name"] for h in measured[task]["found"][:SIZE] if h["kind"] == "writer"}
        for task in TASKS
    }
    first_task, *others = TASKS
    shared = {task: sorted(writers[first_task] & writers[task]) for task in others}
    said = "; ".join(f"{task}: {', '.join(names) or 'none'}" for task, names in shared.items())
    yield "heads of their own", said, "yes" if max(map(len, shared.values())) <= 2 else "no"
    yield (
        "answers at random",
        ", ".join(objects["at random"]) or "none",
        "no" if objects["at random"] else "yes",
    )
    direct = measured["direct"]
    said = (
        f"{direct['same sign']:.1%} of {direct['heads']} heads; formula off by {direct['gap']:.0e}"
    )
    yield "direct paths", said, "yes" if direct["same sign"] >= 0.98 else "no"
    shares = {name: x / measured["cost"]["pass"] for name, x in measured["cost"].items()}
    said = (
        f"{shares['direct']:.2f} passes; {shares['with nulls']:.2f} with the answers of four other "
        f"examples; the way is found once, in {shares['once']:.1f} passes; a pass without the "
        f"logits of other tokens takes {shares['last']:.2f}"
    )
    yield "cost", said, "yes" if shares["direct"] <= 1.2 else "no"


if __name__ == "__main__":
    print(memory_of(sys.argv[1]))
