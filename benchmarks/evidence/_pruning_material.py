"""The texts of the results on pruning: to score heads on, to recover on, and to evaluate on."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evidence._languages import MASK, Language, new_tokenizer
from benchmarks.evidence.encoder import LANGUAGES, places_of, sentences, trained
from headwise.corpora import AnnotatedText, Grammar, read_conllu, read_gap, read_pairs
from headwise.models.texts import IGNORED, batches, encode
from headwise.scoring import Loss, Score, find_loss, paired, read_batches

SHORTEST = 64  # tokens: a shorter text has little context, so its loss is not typical


@dataclass(frozen=True)
class Material:
    """Batches to score heads and take means on, to recover on, and to evaluate on."""

    score: list[Any]
    recover_on: list[Any]
    evaluate: list[Any]
    loss: Loss | str
    kind: str


def material_from_pairs(model: nn.Module, tokenizer: Any, options: argparse.Namespace) -> Material:
    pairs = read_pairs(options.pairs)
    chosen = np.random.default_rng(0).permutation(len(pairs))
    held_out = [pairs[i] for i in chosen[: options.judging]]
    used = {sentence for pair in held_out for sentence in (pair.one, pair.two)}
    others = (pairs[i] for i in chosen[options.judging :])
    fresh = sorted({s for pair in others for s in (pair.one, pair.two)} - used)
    fresh = [fresh[i] for i in np.random.default_rng(1).permutation(len(fresh))]
    read = partial(read_batches, model=model, tokenizer=tokenizer)
    evaluate, loss = paired(held_out, model, tokenizer)
    score, recover_on = read(fresh[: options.texts]), read(fresh[options.texts :])
    return Material(score, recover_on, evaluate, loss, "embedding")


def material_from_corpus(model: nn.Module, tokenizer: Any, options: argparse.Namespace) -> Material:
    """Texts of an annotated corpus, drawn at random; the scored ones are not evaluated."""
    texts = read_conllu(options.trees) if options.trees else read_gap(options.coref)
    strings = list(dict.fromkeys(text.text for text in texts))
    drawn = [strings[i] for i in np.random.default_rng(0).permutation(len(strings))]
    ends = np.cumsum([options.judging, options.texts, options.own])
    read = partial(read_batches, model=model, tokenizer=tokenizer)
    evaluate, score, recover_on = (read(part) if part else [] for part in _split(drawn, ends))
    return Material(score, recover_on, evaluate, "embedding", "embedding")


def _split(texts: list[str], ends: np.ndarray) -> Iterator[list[str]]:
    start = 0
    for end in map(int, ends):
        yield texts[start:end]
        start = end


def material_from_text(model: nn.Module, tokenizer: Any, options: argparse.Namespace) -> Material:
    stories = [story.strip() for story in options.text.read_text("utf-8").split("<|endoftext|>")]
    pieces = [ids for ids in encode(tokenizer, stories, model) if len(ids) >= SHORTEST]
    evaluate = [*batches(pieces, 16)]
    generated = generate_texts(model, options.texts + options.own)
    score, recover_on = ([{"input_ids": ids} for ids in part.split(8)]
                    for part in generated.split([options.texts, options.own]))  # fmt: skip
    return Material(score, recover_on, evaluate, "lm", "lm")


def material_from_grammar(
    model: nn.Module, tokenizer: Any, options: argparse.Namespace
) -> Material:
    """Fresh lines: half are sentences, half repeat a random sequence."""
    grammar, rng = Grammar(), np.random.default_rng([0, 9])
    sizes = (options.texts, options.own, options.judging)
    drawn = [
        [
            str(grammar.repeat(rng) if number % 2 else grammar.sentence(rng))
            for number in range(size)
        ]
        for size in sizes
    ]
    read = [[*batches(encode(tokenizer, lines, model), 16)] for lines in drawn]
    return Material(*read, "lm", "lm")


def generate_texts(model: nn.Module, texts: int) -> torch.Tensor:
    """Texts of the model's full length, sampled from its predictions."""
    torch.manual_seed(0)
    start = torch.full((texts, 1), model.config.bos_token_id)
    length = model.config.max_position_embeddings - 1
    sampling = {"min_new_tokens": length, "max_new_tokens": length, "top_k": 0, "do_sample": True}
    return model.generate(start, attention_mask=torch.ones_like(start), **sampling)


def encoder_in(folder: Path, language: str, steps: int) -> None:
    """Train an encoder on a generated language and save it, unless the folder holds one."""
    if (folder / "config.json").exists():
        return
    spoken = LANGUAGES[language]()
    tokenizer = new_tokenizer(spoken.vocabulary)
    model, loss = trained(spoken, tokenizer, steps, seed=0)
    print(f"trained to a loss of {loss:.3f}", flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def material_from_language(
    model: nn.Module, tokenizer: Any, options: argparse.Namespace
) -> Material:
    """Sentences of a generated language, each with one word masked that its task is about."""
    language = LANGUAGES[options.language]()
    drawn = sentences(language, options.texts + options.own + options.judging, seed=5)
    ends = np.cumsum([options.texts, options.own, options.judging])
    parts = [with_labels(part, language, tokenizer) for part in _split(drawn, ends)]
    score, recover_on, evaluate = parts
    return Material(
        score,
        recover_on,
        evaluate,
        number_of_verbs(other_forms(drawn, language, tokenizer)),
        "masked-lm",
    )


def with_labels(
    texts: Sequence[AnnotatedText], language: Language, tokenizer: Any
) -> list[dict[str, torch.Tensor]]:
    """Batches in which one word of each text is masked, which is its label."""
    rng, mask = np.random.default_rng(6), tokenizer.convert_tokens_to_ids(MASK)
    labelled = []
    for start in range(0, len(texts), 32):
        part = texts[start : start + 32]
        read = tokenizer([text.text for text in part], padding=True, return_tensors="pt")
        ids, real = read["input_ids"], read["attention_mask"]
        # The first token of a text is [CLS].
        places = [1 + int(rng.choice(places_of(language, text))) for text in part]
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        chosen[range(len(part)), places] = True
        labels = ids.masked_fill(~chosen, IGNORED)
        ids = ids.masked_fill(chosen, mask)
        labelled.append({"input_ids": ids, "attention_mask": real, "labels": labels})
    return labelled


def other_forms(texts: Sequence[AnnotatedText], language: Language, tokenizer: Any) -> torch.Tensor:
    """For each form of a verb in these texts its other form, as tokens; 0 for other tokens."""
    partner = torch.zeros(len(tokenizer), dtype=torch.long)
    for text in texts:
        for place in places_of(language, text):
            forms = list(language.alternatives(text, place) or ())
            ids = tokenizer.convert_tokens_to_ids(forms)
            partner[ids] = torch.tensor(ids[::-1])
    return partner


def number_of_verbs(partner: torch.Tensor) -> Loss:
    """The loss of masked verbs, with the share whose number is right as the task score.

    Args:
        partner: For each form of a verb its other form, as tokens.
    """

    def right(output: Any, batch: Any) -> torch.Tensor:
        labels = batch["labels"]
        chosen = labels != IGNORED
        logits, forms = output.logits[chosen], labels[chosen]
        both = logits.gather(1, torch.stack([forms, partner[forms]], 1))
        return (both[:, :1] > both[:, 1:]).float()

    score = Score("number right", right, lambda rows: float(rows.mean()))
    return replace(find_loss("masked-lm", nn.Identity(), {}), score=score)


def preparation(options: argparse.Namespace) -> Callable[..., Material]:
    """Which material the options name."""
    if options.pairs:
        return material_from_pairs
    if options.trees or options.coref:
        return material_from_corpus
    if options.language:
        return material_from_language
    return material_from_grammar if options.grammar else material_from_text
