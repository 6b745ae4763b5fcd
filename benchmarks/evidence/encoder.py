"""The roles of small bidirectional encoders, trained on the spot by masked-word prediction.

    python -m benchmarks.evidence.encoder measure --keep runs
    python -m benchmarks.evidence.encoder measure --languages attractors --seed 1 --keep runs1
    python -m benchmarks.evidence.encoder publish --keep runs --others runs1 \\
        --into benchmarks/results/roles.md

`measure` trains a BERT of 4 layers of 8 heads on each of two generated languages with gold
relations (`_languages.py`), and finds its roles on sentences that it was not trained on. In the
project's grammar the nearest pronoun to the left is always the subject, so that no head can stand
above that rule; in the other language nouns that are not the subject stand nearer, and the number
of a masked verb has to be predicted. Results are stored; existing ones are not computed again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwise as hw
from benchmarks._report import insert, table
from benchmarks.evidence._commands import run_command
from benchmarks.evidence._languages import (
    MASK,
    SPECIALS,
    Language,
    attracted,
    new_encoder,
    new_tokenizer,
    translated,
    with_mask,
)
from benchmarks.evidence.roles import known, model_lines
from headwise.corpora import AnnotatedText

LANGUAGES: dict[str, Callable[[], Language]] = {"grammar": translated, "attractors": attracted}
# The file of each table: its language, the title of its section, and how sentences are read.
TABLES = {
    "encoder-grammar.roles.json": ("grammar", "BERT on the grammar", "as they are"),
    "encoder-attractors.roles.json": ("attractors", "BERT on attractors", "as they are"),
    "encoder-attractors.masked.json": (
        "attractors",
        "BERT on attractors, masked",
        "with one verb masked, to which the noun of agreement belongs",
    ),
}
# The share of words that are predicted: of those that the task is about, and of the others. As in
# BERT 80 % of these are masked and 10 % are random.
SELECTED = (0.5, 0.15)
EVALUATED = 500  # sentences
# The roles that other seeds are asked for.
CLAIMED = ("noun of agreement", "head → nsubj", "head → obj")
RUN_TITLES = (
    "seed", "model", "role", "right", "outcome", "head", "effect", "strongest null", "needed"
)  # fmt: skip


def measure(options: argparse.Namespace) -> None:
    for name in options.languages:
        path = options.keep / f"encoder-{name}.json"
        if path.with_suffix(".roles.json").exists():
            continue
        language = LANGUAGES[name]()
        tokenizer = new_tokenizer(language.vocabulary)
        started = time.perf_counter()
        model, loss = trained(language, tokenizer, options.steps, options.seed)
        seconds = time.perf_counter() - started
        texts = sentences(language, options.texts, seed=1)
        accuracy = evaluate(model, tokenizer, language, sentences(language, EVALUATED, seed=2))
        facts = {"steps": options.steps, "seconds": seconds, "loss": loss, "accuracy": accuracy,
                 "task": language.task, "seed": options.seed}  # fmt: skip
        print(name, facts, flush=True)
        path.write_text(json.dumps(facts), "utf-8")
        if texts[0].pairs:
            roles = hw.find_roles(model, one_masked(language, texts), tokenizer=tokenizer)
            roles.save(path.with_suffix(".masked.json"))
        hw.find_roles(model, texts, tokenizer=tokenizer).save(path.with_suffix(".roles.json"))


def sentences(language: Language, n: int, seed: int) -> list[AnnotatedText]:
    """Distinct sentences; training draws others."""
    rng = np.random.default_rng(seed)
    distinct: dict[AnnotatedText, None] = {}
    while len(distinct) < n:
        distinct[language.draw(rng)] = None
    return list(distinct)


def one_masked(language: Language, texts: Sequence[AnnotatedText]) -> list[AnnotatedText]:
    """The texts, in each of them one of the words masked that the task is about."""
    rng = np.random.default_rng(4)
    return [with_mask(text, int(rng.choice(places_of(language, text)))) for text in texts]


def trained(language: Language, tokenizer: Any, steps: int, seed: int) -> tuple[Any, float]:
    """An encoder after training, and its mean loss over the last hundred steps."""
    model = new_encoder(len(tokenizer), seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=0.1)
    rng, losses = np.random.default_rng([0, seed]), []
    share = shares(language, tokenizer)
    for step in range(steps):
        inputs = tokenizer(
            [language.draw(rng).text for _ in range(64)], padding=True, return_tensors="pt"
        )
        ids, labels = masked(inputs["input_ids"], share, tokenizer)
        loss = model(ids, inputs["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(step + 1, f"{np.mean(losses[-100:]):.3f}", flush=True)
    return model.eval(), float(np.mean(losses[-100:]))


def shares(language: Language, tokenizer: Any) -> torch.Tensor:
    """The probability of each token to be predicted."""
    share = torch.zeros(len(tokenizer))
    texts = sentences(language, EVALUATED, seed=3)
    for words, probability in (
        ((text.word(n) for text in texts for n in range(len(text.words))), SELECTED[1]),
        ((text.word(n) for text in texts for n in places_of(language, text)), SELECTED[0]),
    ):
        share[tokenizer.convert_tokens_to_ids(sorted(set(words)))] = probability
    return share


def places_of(language: Language, text: AnnotatedText) -> list[int]:
    """The words that the task of a language is about."""
    return [place for place in range(len(text.words)) if language.alternatives(text, place)]


def masked(
    ids: torch.Tensor, share: torch.Tensor, tokenizer: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of which some are masked or replaced, and the labels of these."""
    chosen = torch.rand(ids.shape) < share[ids]
    labels = torch.where(chosen, ids, -100)
    fate = torch.rand(ids.shape)
    drawn = torch.randint(len(SPECIALS), len(tokenizer), ids.shape)
    mask = tokenizer.convert_tokens_to_ids(MASK)
    ids = torch.where(chosen & (fate < 0.8), mask, ids)
    return torch.where(chosen & (fate >= 0.9), drawn, ids), labels


@torch.no_grad()
def evaluate(
    model: Any, tokenizer: Any, language: Language, texts: Sequence[AnnotatedText]
) -> float:
    """The share of masked words for which the right one is the likeliest of its alternatives."""
    mask, hits = tokenizer.convert_tokens_to_ids(MASK), []
    for text in texts:
        ids = torch.tensor(tokenizer(text.text).input_ids)
        places = places_of(language, text)
        rows = ids.repeat(len(places), 1)
        rows[range(len(places)), [place + 1 for place in places]] = mask
        logits = model(input_ids=rows).logits
        for place, scores in zip(places, logits, strict=True):
            words = language.alternatives(text, place) or ()
            ids_of_words = tokenizer.convert_tokens_to_ids(list(words))
            likeliest = words[int(scores[place + 1, ids_of_words].argmax())]
            hits.append(likeliest == text.word(place))
    return float(np.mean(hits))


def publish(options: argparse.Namespace) -> None:
    """Write the sections whose tables exist."""
    parts = []
    for file, (name, title, reading) in TABLES.items():
        path = options.keep / file
        if path.exists():
            facts = json.loads((options.keep / f"encoder-{name}.json").read_text("utf-8"))
            line = (
                f"Trained for {facts['steps']:,} steps of 64 sentences. It predicts "
                f"{facts['task']}: right for {facts['accuracy']:.1%} of those in {EVALUATED} other "
                f"sentences. Its roles are found on sentences {reading}."
            )
            lines = [line, *model_lines(hw.Roles.load(path), [])]
            parts.append(f"## {title}\n\n" + "\n\n".join(lines))
    if options.others:
        rows = [row for keep in (options.keep, *options.others) for row in runs_of(keep)]
        parts.append("## Several seeds\n\n" + table(RUN_TITLES, rows, left_columns=3))
    insert("\n\n".join(parts), options.into, "encoder")


def runs_of(keep: Path) -> Iterator[tuple[str, ...]]:
    """A row for each role with a claim, in each way that a run's sentences were read."""
    for file, (name, title, _) in TABLES.items():
        if name != "attractors" or not (keep / file).exists():
            continue
        facts = json.loads((keep / f"encoder-{name}.json").read_text("utf-8"))
        for row in hw.Roles.load(keep / file).outcomes().to_dict("records"):
            if row["role"] in CLAIMED:
                yield (
                    str(facts["seed"]), title, row["role"], f"{facts['accuracy']:.1%}",
                    row["outcome"].partition(":")[0], row["nearest"],
                    *(known(row[column]) for column in ("effect", "baseline", "smallest")),
                )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    measuring = parts.add_parser("measure")
    measuring.add_argument("--languages", nargs="+", choices=LANGUAGES, default=list(LANGUAGES))
    measuring.add_argument("--steps", type=int, default=2000)
    measuring.add_argument("--texts", type=int, default=600, help="sentences for roles")
    measuring.add_argument("--seed", type=int, default=0, help="of the weights and of the texts")
    measuring.set_defaults(run=measure)
    publishing = parts.add_parser("publish")
    publishing.add_argument("--into", required=True)
    publishing.add_argument("--others", type=Path, nargs="+", default=[], help="other seeds")
    publishing.set_defaults(run=publish)
    run_command(parser, (measuring, publishing))


if __name__ == "__main__":
    main()
