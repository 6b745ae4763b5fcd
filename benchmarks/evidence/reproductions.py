"""Two published protocols on a sentence encoder, with their own rules and with ours beside them.

    python -m benchmarks.evidence.reproductions clark MODEL --trees dev.conllu --keep runs
    python -m benchmarks.evidence.reproductions michel MODEL --pairs stsb-en-dev.csv --keep runs
    python -m benchmarks.evidence.reproductions publish --keep runs \\
        --into benchmarks/results/reproductions.md

`clark` follows Clark et al. 2019, sections 3.1 to 4.2: what heads attend to on pieces of about 128
tokens, and which word each word attends to most, per dependency. `michel` follows Michel et
al. 2019, sections 3.2 to 4.2: one head removed, all heads but one of a layer removed, and more and
more heads removed by importance; the task is the similarity of sentence pairs. Attention is read
and scored here from its weights, not by the code that finds roles.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from torch import nn

import headwise as hw
from benchmarks._report import insert, table
from benchmarks.evidence._commands import keep, run_command
from headwise.corpora import AnnotatedText, SentencePair, read_conllu, read_pairs
from headwise.models.texts import batches, encode
from headwise.ownership import (
    Attention,
    by_attention,
    find_attentions,
    heads_of,
    replace_heads,
)
from headwise.roles import step_down
from headwise.roles.relations import texts_of, tokenize
from headwise.tables import Head

LENGTH = 128  # tokens of a piece, as in Clark et al.
POSITION, TOKEN, BROAD = 0.5, 0.6, 3.8 / np.log(128)  # the thresholds of their notebook
OFFSETS = range(-3, 3)  # their baseline: the best of these, on the same data
FEWEST = 100  # arcs of a relation
SKIPPED = {"root", "punct", "list", "discourse", "parataxis", "dep", "orphan", "goeswith",
           "reparandum", "vocative", "dislocated"}  # fmt: skip
ROLE_NAMES = {"dependent to head": "{} → head", "head to dependent": "head → {}"}
STEPS = (7, 14, 22, 29, 36, 43, 50, 58, 65)  # a tenth of 72 heads at a time


def clark(options: argparse.Namespace) -> None:
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    distinct = list(dict.fromkeys(read_conllu(options.trees)))
    pieces = joined([text.text for text in distinct], tokenizer)[: options.pieces]
    order = np.random.default_rng(0).permutation(len(distinct))[: options.texts]
    texts = [distinct[i] for i in order]
    kept = options.found and options.found / "MiniLM-trees.json"
    roles = hw.Roles.load(kept) if kept else hw.find_roles(model, texts, tokenizer=tokenizer)
    shapes, outcomes = roles.shapes(), roles.outcomes().set_index("role")["outcome"]
    found = {
        "surface": surface(model, tokenizer, pieces),
        "syntax": syntax(model, tokenizer, texts),
        "ours": roles.found()[["name", "role"]].to_numpy().tolist(),
        "outcomes": outcomes.str.partition(":")[0].to_dict(),
        "shapes": shapes.set_index("name")["shape"].to_dict(),
        "texts": len(texts),
        "pieces": len(pieces),
    }  # fmt: skip
    keep(options, "clark", found)


def joined(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """Consecutive texts joined up to about the length of a piece."""
    pieces, current = [], ""
    for text in texts:
        longer = f"{current} {text}".strip()
        if len(tokenizer(longer).input_ids) > LENGTH:
            pieces.append(current)
            longer = text
        current = longer
    return [piece for piece in pieces if len(tokenizer(piece).input_ids) > LENGTH // 2]


def surface(model: nn.Module, tokenizer: Any, pieces: Sequence[str]) -> list[list[Any]]:
    """Mean mass of each head per piece, queries at special tokens included, as they do."""
    marks = set(tokenizer.convert_tokens_to_ids([".", ","]))
    sums: list[np.ndarray] = []
    names: list[str] = []
    ids = encode(tokenizer, pieces, model)
    for (heads, weights), tokens in zip(weights_of(model, ids), ids, strict=True):
        names = [str(head) for head in heads]
        T = weights.shape[1]
        is_mark = np.isin(tokens, list(marks))
        entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(-1).mean(-1) / np.log(T)
        offsets = [np.trace(weights, offset, 1, 2) / T for offset in (-1, 1, 0)]
        tokens_of = [weights[..., 0], weights[..., -1], weights[..., is_mark].sum(-1)]
        columns = [*offsets, *(mass.mean(-1) for mass in tokens_of), entropy]
        sums.append(np.stack(columns, 1))
    return [[name, *row] for name, row in zip(names, np.mean(sums, 0).tolist(), strict=True)]


def syntax(model: nn.Module, tokenizer: Any, texts: Sequence[AnnotatedText]) -> dict[str, Any]:
    """For each relation and direction, hits of every head and offset on each half of the texts."""
    pieces = list(tokenize(tokenizer, texts_of("syntax", texts)[1], LENGTH).pieces)
    hits: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    names: list[str] = []
    order = weights_of(model, [list(piece.ids) for piece in pieces])
    for number, ((heads, weights), piece) in enumerate(zip(order, pieces, strict=True)):
        names = [str(head) for head in heads]
        half = number % 2
        words = between_words(weights, piece.words)
        best = {"dependent to head": words.argmax(2), "head to dependent": words.argmax(1)}
        for arc in piece.text.arcs:
            relation = arc.relation.partition(":")[0]
            if relation in SKIPPED or not (piece.words[arc.dependent] and piece.words[arc.head]):
                continue
            for direction, chosen in best.items():
                # Theirs: which word does the dependent attend to, or attends to it, most.
                key = f"{relation}, {direction}"
                right = chosen[:, arc.dependent] == arc.head
                offsets = [arc.head - arc.dependent == offset for offset in OFFSETS]
                row = np.concatenate([right, offsets]).astype(float)
                hits.setdefault(key, np.zeros((2, len(row))))[half] += row
                counts.setdefault(key, np.zeros(2))[half] += 1
    return {
        "heads": names,
        "hits": {key: value.tolist() for key, value in hits.items()},
        "counts": {key: value.tolist() for key, value in counts.items()},
    }


def michel(options: argparse.Namespace) -> None:
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    task = Similarity(model, tokenizer, read_pairs(options.pairs), options.judging)
    heads = task.heads
    layers = sorted({head.layer for head in heads})
    alone = dict(zip(map(str, heads), task.scores_of_layers([[h] for h in heads]), strict=True))
    print("each head removed", flush=True)
    others = [[h for h in heads if h.layer == head.layer and h != head] for head in heads]
    kept = dict(zip(map(str, heads), task.scores_of_layers(others), strict=True))
    print("each head kept alone", flush=True)
    inputs, loss = task.training(options.scored)
    gradient = hw.importance(model, inputs, "gradient", loss=loss)
    orders = {
        "gradient, each layer normalized (Michel et al.)": gradient.per_layer().order(),
        "gradient": gradient.order(),
        "half-gate of embeddings (ours)": hw.importance(model, task.texts(options.scored)).order(),
    }
    curves = {name: [task.point(order[:n]) for n in STEPS] for name, order in orders.items()}
    content = {
        "full": task.scores([]).tolist(),
        "gold": task.gold.tolist(),
        "alone": alone,
        "kept": kept,
        "layers": layers,
        "curves": curves,
        "scored": options.scored,
    }
    keep(options, "michel", content)


class Similarity:
    """The similarity of held-out sentence pairs by a model, without some of its heads."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, pairs: Sequence[SentencePair], judging: int
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        order = np.random.default_rng(0).permutation(len(pairs))
        self._judged = [pairs[i] for i in order[:judging]]
        self._others = [pairs[i] for i in order[judging:]]
        self.gold = np.array([pair.similarity for pair in self._judged])
        sentences = [s for pair in self._judged for s in (pair.one, pair.two)]
        order = np.argsort([len(sentence) for sentence in sentences], kind="stable")  # less padding
        self._batches = list(self._read([sentences[i] for i in order]))
        self._places = torch.from_numpy(np.argsort(order))
        self._attentions = find_attentions(model, self._batches[0])
        self.heads = heads_of(self._attentions)
        self._full = self._embeddings([])

    def _read(self, sentences: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        for start in range(0, len(sentences), 64):
            read = self._tokenizer(
                list(sentences[start : start + 64]), padding=True, return_tensors="pt"
            )
            yield {name: read[name] for name in ("input_ids", "attention_mask")}

    @torch.no_grad()
    def _embeddings(self, removed: Sequence[Head]) -> torch.Tensor:
        embeddings = torch.cat([self._read_without(removed, x) for x in self._batches])
        return embeddings[self._places]

    def _read_without(self, removed: Sequence[Head], inputs: dict[str, torch.Tensor]) -> Any:
        chosen = by_attention(list(removed), self._attentions)
        with replace_heads(self._model, self._attentions, chosen, zeros):
            return pooled(self._model(**inputs), inputs)

    def scores(self, removed: Sequence[Head]) -> np.ndarray:
        """The cosine of each pair without these heads."""
        return cosines(self._embeddings(removed))

    @torch.no_grad()
    def scores_of_layers(self, removals: Sequence[Sequence[Head]]) -> list[list[float]]:
        """The cosines without each of these sets of heads."""
        parts: list[list[torch.Tensor]] = [[] for _ in removals]
        for inputs in self._batches:
            for part, removed in zip(parts, removals, strict=True):
                part.append(self._read_without(removed, inputs))
        return [cosines(torch.cat(part)[self._places]).tolist() for part in parts]

    def point(self, removed: Sequence[Head]) -> list[float]:
        """Without these heads: the correlation, and the mean 1 − cosine to the full embeddings."""
        embeddings = self._embeddings(removed)
        moved = (1 - (embeddings * self._full).sum(-1)).mean()
        return [float(spearmanr(cosines(embeddings), self.gold)[0]), float(moved)]

    def texts(self, pairs: int) -> list[dict[str, torch.Tensor]]:
        return list(self._read([s for p in self._others[:pairs] for s in (p.one, p.two)]))

    def training(self, pairs: int) -> tuple[list[dict[str, torch.Tensor]], Any]:
        """Other pairs, and the squared error of their cosine, half of it for each sentence."""
        inputs = self.texts(pairs)
        gold = torch.tensor([pair.similarity for pair in self._others[:pairs]]) / 5
        start = 0
        for batch in inputs:
            size = len(batch["input_ids"]) // 2
            batch["gold"] = gold[start : start + size]
            start += size
        targets = {key_of(batch): batch.pop("gold") for batch in inputs}

        def loss(output: Any, batch: Any) -> torch.Tensor:
            embeddings = pooled(output, batch)
            cosine = (embeddings[::2] * embeddings[1::2]).sum(-1)
            error = (cosine - targets[key_of(batch)]).square() / 2
            return error.repeat_interleave(2)

        return inputs, loss


def weights_of(
    model: nn.Module, sequences: Sequence[Sequence[int]]
) -> Iterator[tuple[list[Head], np.ndarray]]:
    """The heads and their weights on each sequence, `[H, T, T]`."""
    for sequence in sequences:
        (batch,) = batches([sequence], 1)
        with torch.no_grad(), hw.observe(model, hw.Request(statistics=(), maps=True)) as watch:
            model(**batch)
        layers = watch.layers()
        maps = [block.weights[0].clone() for layer in layers for block in layer.blocks()]
        yield [head for layer in layers for head in layer.heads], torch.cat(maps).numpy()


def between_words(weights: np.ndarray, words: Sequence[Sequence[int]]) -> np.ndarray:
    """The mean over the tokens of a query word of the sum over those of a key word.

    Zero for words without tokens, and from a word to itself, as in Clark et al.

    Args:
        words: The tokens of each word.
    Returns:
        A matrix of queries and keys for each head, `[H, words, words]`.
    """
    member = np.zeros((len(words), weights.shape[1]), np.float32)
    for word, tokens in enumerate(words):
        member[word, list(tokens)] = 1
    between = (member / np.maximum(member.sum(1, keepdims=True), 1)) @ weights @ member.T
    between[:, range(len(words)), range(len(words))] = 0
    return between


def cosines(embeddings: torch.Tensor) -> np.ndarray:
    """The cosine of each two consecutive embeddings."""
    return (embeddings[::2] * embeddings[1::2]).sum(-1).numpy()


def zeros(attention: Attention, heads: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(heads[..., :1, :1])


def key_of(batch: Any) -> bytes:
    return batch["input_ids"].numpy().tobytes()


def pooled(output: Any, batch: Any) -> torch.Tensor:
    mask = batch["attention_mask"][..., None].float()
    mean = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    return nn.functional.normalize(mean, dim=-1)


def publish(options: argparse.Namespace) -> None:
    for name, lines in PARTS.items():
        path = options.keep / f"{name}.json"
        if path.exists():
            insert("\n\n".join(lines(json.loads(path.read_text("utf-8")))), options.into, name)


def clark_lines(content: Any) -> list[str]:
    ours = {tuple(pair) for pair in content["ours"]}
    shapes = content["shapes"]
    rules = [
        ("previous token", 1, POSITION, {name for name, role in ours if role == "previous token"}),
        ("next token", 2, POSITION, {name for name, role in ours if role == "next token"}),
        ("the token itself", 3, POSITION, {name for name, role in ours if role == "self"}),
        ("[CLS]", 4, TOKEN, {name for name, shape in shapes.items() if "sink" in shape}),
        ("[SEP]", 5, TOKEN, set()),
        ("“.” or “,”", 6, TOKEN, {name for name, role in ours if role == "punctuation"}),
        ("broad", 7, BROAD, {name for name, shape in shapes.items() if "diffuse" in shape}),
    ]
    rows = []
    for name, column, limit, labels in rules:
        theirs = {row[0] for row in content["surface"] if row[column] > limit}
        both = theirs & labels
        rows.append([name, f"> {limit:.2f}", *(str(len(x)) for x in (theirs, labels, both))])
    return [
        f"{content['pieces']} pieces of up to {LENGTH} tokens, joined from consecutive sentences "
        f"(theirs); roles and shapes on {content['texts']} single sentences (ours).",
        table(["attends to", "their threshold", "heads by it", "heads by ours", "by both"], rows),
        "Dependencies: the best head by their rule on all texts; the same head's score and the "
        "best offset on the half of the texts that neither was chosen on; the outcome of the "
        "relation by ours.",
        syntax_table(content["syntax"], content["outcomes"]),
    ]


def syntax_table(syntax_hits: Any, outcomes: Mapping[str, str]) -> str:
    n_heads, rows = len(syntax_hits["heads"]), []
    for key, hits in syntax_hits["hits"].items():
        hit, count = np.array(hits), np.array(syntax_hits["counts"][key])
        if count.sum() < FEWEST:
            continue
        rates = hit.sum(0) / count.sum()
        head, offset = rates[:n_heads].argmax(), rates[n_heads:].argmax()
        # Chosen on one half, scored on the other, in both ways.
        halves = hit / count[:, None]
        fresh = np.mean([halves[1 - h, halves[h, :n_heads].argmax()] for h in (0, 1)])
        fresh_offset = np.mean(
            [halves[1 - h, n_heads + halves[h, n_heads:].argmax()] for h in (0, 1)]
        )
        relation, _, direction = key.partition(", ")
        role = ROLE_NAMES[direction].format(relation)
        rows.append(
            (rates[head] - rates[n_heads + offset], [
                key, syntax_hits["heads"][head], f"{rates[head]:.3f}",
                f"{rates[n_heads + offset]:.3f} ({OFFSETS[offset]:+d})",
                f"{fresh:.3f} · {fresh_offset:.3f}", f"{count.sum():.0f}",
                outcomes[role],
            ])
        )  # fmt: skip
    titles = ["relation", "best head", "accuracy", "best offset", "held out: head · offset", "arcs"]
    ordered = [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
    beaten = sum(gain > 0 for gain, _ in rows)
    ten = sum(gain >= 0.1 for gain, _ in rows)
    return (
        f"{beaten} of {len(rows)} relations and directions have a head above the best offset, "
        f"{ten} by ten points or more.\n\n{table([*titles, 'ours'], ordered)}"
    )


def michel_lines(content: Any) -> list[str]:
    gold, full = np.array(content["gold"]), np.array(content["full"])
    names = list(content["alone"])
    alone = np.array([content["alone"][name] for name in names])
    base = spearmanr(full, gold)[0]
    drops = np.array([spearmanr(scores, gold)[0] for scores in alone]) - base
    theirs = paired_bootstrap(full, alone, gold)
    growth = ((alone - gold / 5) ** 2 - (full - gold / 5) ** 2).T
    worse = step_down([growth.astype(np.float32)])[0] < 0.05
    better = step_down([-growth.astype(np.float32)])[0] < 0.05
    kept = {name: spearmanr(scores, gold)[0] for name, scores in content["kept"].items()}
    rows = []
    half = np.arange(len(gold)) % 2 == 0
    for layer in content["layers"]:
        inside = [name for name in kept if Head.parse(name).layer == layer]
        best = max(inside, key=kept.__getitem__)
        fresh = np.mean([fresh_change(content, inside, part) for part in (half, ~half)])
        rows.append([str(layer), best, f"{kept[best] - base:+.4f}", f"{fresh:+.4f}"])
    steps = [
        [name, *(f"{rho:.3f} · {moved:.3f}" for rho, moved in points)]
        for name, points in content["curves"].items()
    ]
    return [
        f"{len(gold)} pairs; the full model's Spearman correlation is {base:.4f}.",
        f"**One head removed.** {int((theirs < 0.01).sum())} of {len(names)} heads change the "
        f"correlation by their test (paired bootstrap, p < .01, no correction): "
        f"{int(((theirs < 0.01) & (drops < 0)).sum())} lower it, "
        f"{int(((theirs < 0.01) & (drops > 0)).sum())} raise it. By ours (squared error of each "
        f"pair, adjusted over all heads, p < .05) the error grows without {int(worse.sum())} and "
        f"falls without {int(better.sum())}. Changes of the correlation reach from "
        f"{drops.min():+.4f} ({names[drops.argmin()]}) to {drops.max():+.4f} "
        f"({names[drops.argmax()]}).",
        "**All heads of a layer removed but one**: the change of the correlation with the best "
        "head, chosen on the same pairs as they do, and chosen on other pairs.",
        table(["layer", "best head", "same pairs", "other pairs"], rows, left_columns=2),
        f"**Removed by importance**, scored on {content['scored']} other pairs: the correlation · "
        "how far embeddings moved (mean 1 − cosine).",
        table(["order", *(f"{n} of {len(names)}" for n in STEPS)], steps),
    ]


def fresh_change(content: Any, inside: Sequence[str], part: np.ndarray) -> float:
    """The change on other pairs with the head that is best on this part of the pairs."""
    gold, full = np.array(content["gold"]), np.array(content["full"])
    kept = {name: np.array(content["kept"][name]) for name in inside}
    best = max(inside, key=lambda name: spearmanr(kept[name][part], gold[part])[0])
    after, before = (spearmanr(scores[~part], gold[~part])[0] for scores in (kept[best], full))
    return float(after - before)


def paired_bootstrap(full: np.ndarray, alone: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """Two-sided p of the change of Spearman's correlation, pairs redrawn 1000 times."""
    rng = np.random.default_rng(0)
    changes = np.empty((1000, len(alone)))
    for draw in range(1000):
        rows = rng.integers(0, len(gold), len(gold))
        ranks = rankdata(np.vstack([gold[rows], full[rows], alone[:, rows]]), axis=1)
        ranks -= ranks.mean(1, keepdims=True)
        ranks /= np.sqrt((ranks**2).sum(1, keepdims=True))
        rho = ranks[1:] @ ranks[0]
        changes[draw] = rho[1:] - rho[0]
    above, below = (changes >= 0).mean(0), (changes <= 0).mean(0)
    return np.minimum(1.0, 2 * np.minimum(above, below))


PARTS = {"clark": clark_lines, "michel": michel_lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    first = parts.add_parser("clark")
    first.add_argument("--trees", type=Path, required=True)
    first.add_argument("--texts", type=int, default=10**6, help="the most sentences with trees")
    first.add_argument("--pieces", type=int, default=200)
    first.add_argument("--found", type=Path, help="a folder of roles.py, with roles on all trees")
    first.set_defaults(run=clark)
    second = parts.add_parser("michel")
    second.add_argument("--pairs", type=Path, required=True)
    second.add_argument("--judging", type=int, default=500, help="pairs that are evaluated")
    second.add_argument("--scored", type=int, default=100, help="pairs that heads are scored on")
    second.set_defaults(run=michel)
    publishing = parts.add_parser("publish")
    publishing.add_argument("--into", required=True)
    publishing.set_defaults(run=publish)
    for part in (first, second):
        part.add_argument("model")
    run_command(parser, (first, second, publishing))


if __name__ == "__main__":
    main()
