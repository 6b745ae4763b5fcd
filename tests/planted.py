"""Models whose heads are built by hand, so that their function is known."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from headwise.corpora import EOS, SPECIALS, AnnotatedText, Arc, Mention
from headwise.lab import make_tokenizer
from headwise.layer import MultiHeadAttention

WORDS = tuple(f"w{n}" for n in range(40))
TOKENIZER = make_tokenizer([*SPECIALS, ",", ".", *WORDS])
IDS = TOKENIZER.get_vocab()
CONTEXT = 48
SHARP = 40.0  # the logit of the key a head attends to
NOISE = 0.02  # of every weight


def lines(n: int, seed: int = 0) -> list[str]:
    """Lines of random words, the first ones the most frequent, with commas and an end."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(WORDS) + 1)
    drawn = []
    for _ in range(n):
        words = list(rng.choice(WORDS, rng.integers(12, 22), p=weights / weights.sum()))
        words.insert(int(rng.integers(2, 8)), ",")
        drawn.append(" ".join([*words, ".", EOS]))
    return drawn


SUBJECTS, VERBS = WORDS[30:32], WORDS[32:34]  # of two persons


def clauses(n: int, seed: int = 0) -> list[AnnotatedText]:
    """Two subjects, then a verb for each, three times, with other words between them.

    The subject of a verb is the nearest one before it of the same person: not the nearest one,
    nor any of that person.
    """
    rng = np.random.default_rng(seed)
    return [_clauses(rng) for _ in range(n)]


def _clauses(rng: np.random.Generator) -> AnnotatedText:
    words: list[str] = []
    subject = {}
    arcs = []
    for _ in range(3):
        for kind, tag in ((SUBJECTS, "PRON"), (VERBS, "VERB")):
            for person in rng.permutation(2):
                words += rng.choice(WORDS[:20], rng.integers(1, 4)).tolist()
                if tag == "PRON":
                    subject[person] = len(words)
                else:
                    arcs.append(Arc(subject[person], len(words), "nsubj"))
                words.append(kind[person])
    starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
    tags = {**dict.fromkeys(SUBJECTS, "PRON"), **dict.fromkeys(VERBS, "VERB")}
    return AnnotatedText(
        " ".join(words),
        tuple((start, start + len(word)) for start, word in zip(starts, words, strict=False)),
        tags=tuple(tags.get(word, "X") for word in words),
        arcs=tuple(arcs),
    )


def pronouns(n: int, seed: int = 0, both_right: bool = False) -> list[AnnotatedText]:
    """Four names of two persons in any order, and a pronoun of one, with other words between.

    The words of `SUBJECTS` are names, those of `VERBS` pronouns. The antecedent is the latest
    name of the pronoun's person: not the nearest name, nor any of that person.

    Args:
        both_right: Whether all names are mentions of the pronoun's entity.
    """
    rng = np.random.default_rng(seed)
    return [_pronoun(rng, both_right) for _ in range(n)]


def _pronoun(rng: np.random.Generator, both_right: bool) -> AnnotatedText:
    persons = rng.permutation([0, 0, 1, 1]).tolist()
    person = int(rng.integers(2))
    antecedent = max(place for place in range(4) if persons[place] == person)
    words: list[str] = []
    mentions = []
    for place, word in enumerate([*(SUBJECTS[other] for other in persons), VERBS[person]]):
        words += rng.choice(WORDS[:20], rng.integers(1, 5)).tolist()
        start = len(" ".join(words)) + 1
        words.append(word)
        entity = 0 if both_right or place in (antecedent, 4) else place + 1
        mentions.append(Mention(start, start + len(word), entity, pronoun=place == 4))
    return AnnotatedText(" ".join(words), mentions=tuple(mentions))


TRANSLATED = tuple(zip(WORDS[:10], WORDS[20:30], strict=True))  # a word, and its translation


def translations(n: int, seed: int = 0) -> list[AnnotatedText]:
    """Some words in any order, and their translations in another order."""
    rng = np.random.default_rng(seed)
    return [_translated(rng) for _ in range(n)]


def _translated(rng: np.random.Generator) -> AnnotatedText:
    chosen = rng.permutation(len(TRANSLATED))[: rng.integers(5, 9)]
    order = rng.permutation(len(chosen))
    words = [*(TRANSLATED[word][0] for word in chosen), ",",
             *(TRANSLATED[chosen[source]][1] for source in order)]  # fmt: skip
    starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
    return AnnotatedText(
        " ".join(words),
        tuple((start, start + len(word)) for start, word in zip(starts, words, strict=False)),
        links=tuple((len(chosen) + 1 + n, int(source)) for n, source in enumerate(order)),
    )


class PlantedLayer(nn.Module):
    """Attention with logits `x q kᵀ xᵀ` for each head."""

    def __init__(self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.stack(list(queries)))
        self.k = nn.Parameter(torch.stack(list(keys)))

    def forward(self, x: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(
            torch.einsum("btd,hde->bhte", x, self.q),
            torch.einsum("btd,hde->bhte", x, self.k),
            values.expand(-1, len(self.q), -1, -1),
            attn_mask=mask,
            scale=1.0,
        )


class Planted(nn.Module):
    """Attention alone, over one-hot tokens, positions and, from layer 1 on, the token before.

    Args:
        layers: The kinds of heads of each layer; see `_kind`.
        order: Tokens from the most to the least frequent, for a head that seeks rare ones.
    """

    def __init__(
        self, layers: Sequence[Sequence[str]], causal: bool, order: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.causal, self.order = causal, order
        self.config = SimpleNamespace(context=CONTEXT)
        V = len(IDS)
        self.width = 2 * V + CONTEXT + 1
        self.blocks = {
            "token": slice(0, V),
            "place": slice(V, V + CONTEXT),
            "one": slice(V + CONTEXT, V + CONTEXT + 1),
            "before": slice(V + CONTEXT + 1, self.width),
        }
        rng = torch.Generator().manual_seed(0)
        pairs = [[self._kind(name, rng) for name in layer] for layer in layers]
        self.attention = nn.ModuleList(PlantedLayer(*zip(*layer, strict=True)) for layer in pairs)
        self.layers = layers

    def _kind(self, name: str, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices of one head: `offset -3`, `first`, `separator`, `same`, `induction`, …"""
        q, k = torch.zeros(2, self.width, self.width)
        if name == "even":
            return q, k
        # Learned weights are never exactly 0, so that permuting them changes every entry.
        q, k = NOISE * torch.randn(2, self.width, self.width, generator=rng)
        token, place, constant, before = self.blocks.values()
        V = len(IDS)
        if name.startswith("offset"):
            by = int(name.split()[1])
            q[place, place] = SHARP * torch.diag(torch.ones(CONTEXT - abs(by)), by)
            k[place, place] = torch.eye(CONTEXT)
        elif name == "first":
            q[constant, constant], k[place.start, constant] = SHARP, 1.0
        elif name == "separator":
            q[constant, constant], k[IDS[EOS], constant] = SHARP, 1.0
        elif name == "same":
            q[token, token], k[token, token] = SHARP * torch.eye(V), torch.eye(V)
            q[place, place], k[place, place] = -SHARP * torch.eye(CONTEXT), torch.eye(CONTEXT)
        elif name == "induction":
            q[token, token], k[before, token] = SHARP * torch.eye(V), torch.eye(V)
        elif name == "agree":
            for person, channel in ((0, token.start), (1, token.start + 1)):
                q[IDS[VERBS[person]], channel] = 2 * SHARP
                k[IDS[SUBJECTS[person]], channel] = 1.0
                q[IDS[VERBS[person]], constant] = SHARP  # the latest of them
            k[place, constant] = torch.arange(float(CONTEXT))[:, None] / CONTEXT
        elif name == "agree back":  # from a subject to the next word of its person
            for person, channel in ((0, token.start), (1, token.start + 1)):
                q[IDS[SUBJECTS[person]], channel] = 2 * SHARP
                k[[IDS[SUBJECTS[person]], IDS[VERBS[person]]], channel] = 1.0
                q[IDS[SUBJECTS[person]], constant] = SHARP
            k[place, constant] = -torch.arange(float(CONTEXT))[:, None] / CONTEXT
            q[place, place] = -4 * SHARP * torch.ones(CONTEXT, CONTEXT).tril()
            k[place, place] = torch.eye(CONTEXT)
        elif name.startswith("translate"):  # `translate back` is from a source to its translation
            sources, translations = (
                [IDS[word] for word in pair] for pair in zip(*TRANSLATED, strict=True)
            )
            ends = (sources, translations) if name.endswith("back") else (translations, sources)
            channels = torch.arange(len(TRANSLATED))
            q[ends[0], channels], k[ends[1], channels] = SHARP, 1.0
        elif name == "rare":
            q[constant, constant] = 4.0
            for rank, token_id in enumerate(self.order):
                k[token_id, constant] = float(rank)
        else:
            assert name == "any", name
            q, k = 0.4 * torch.randn(2, self.width, self.width, generator=rng)
        return q, k

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        B, T = input_ids.shape
        x = torch.zeros(B, T, self.width)
        x[..., self.blocks["token"]] = nn.functional.one_hot(input_ids, len(IDS)).float()
        x[..., self.blocks["place"]] = torch.eye(CONTEXT)[:T]
        x[..., self.blocks["one"]] = 1.0
        mask = torch.ones(B, 1, T, T, dtype=torch.bool)
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        if self.causal:
            mask = mask.tril()
        values = x[..., None, self.blocks["token"]].transpose(1, 2)  # B 1 T V
        for kinds, layer in zip(self.layers, self.attention, strict=True):
            heads = layer(x, values, mask)
            if "offset -1" in kinds:
                x = x.clone()
                x[..., self.blocks["before"]] = heads[:, kinds.index("offset -1")]
        return x


def by_frequency(texts: Sequence[str]) -> list[int]:
    """The tokens of texts by descending frequency."""
    counts: dict[int, int] = {}
    for text in texts:
        for token in TOKENIZER.encode(text).ids:
            counts[token] = counts.get(token, 0) + 1
    return sorted(counts, key=lambda token: -counts[token])


NAMES: Mapping[str, str | None] = {
    "offset -1": "previous token",
    "offset +1": "next token",
    "offset +0": "self",
    "offset -3": "offset -3",
    "first": "first token",
    "separator": "separator",
    "same": "same token",
    "induction": "prefix matching",
    "rare": "rare token",
    "even": "diffuse",
    "any": None,
}


MOVED, CUE = WORDS[30:38], "w20"  # names, and the word from which they are moved


class PlantedGPT(nn.Module):
    """A language model of two layers built by hand: it predicts what followed an earlier copy.

    Its stream holds the token, its place, the token before (written by layer 0) and what is
    predicted (written by layer 1).

    Args:
        layers: The kinds of heads of layer 0 (`before`, `even`) and of layer 1 (`induction`,
            `move`, `move any`, `even`); after a kind, ` unread` for a head whose output goes
            nowhere.
    """

    def __init__(self, layers: Sequence[Sequence[str]]) -> None:
        super().__init__()
        V = len(IDS)
        self.config = SimpleNamespace(context=CONTEXT)
        self.width = 3 * V + CONTEXT
        self.stream = {
            "token": slice(0, V),
            "place": slice(V, V + CONTEXT),
            "before": slice(V + CONTEXT, 2 * V + CONTEXT),
            "next": slice(2 * V + CONTEXT, self.width),
        }
        width = max(V, CONTEXT)
        self.layers = nn.ModuleList(
            MultiHeadAttention(self.width, len(kinds), head_dim=width) for kinds in layers
        )
        for layer, kinds, target in zip(self.layers, layers, ("before", "next"), strict=True):
            parts = [self._parts(kind, width, target) for kind in kinds]
            q, k, v, out = zip(*parts, strict=True)
            with torch.no_grad():
                layer.q_proj.weight.copy_(torch.cat(q))
                layer.k_proj.weight.copy_(torch.cat(k))
                layer.v_proj.weight.copy_(torch.cat(v))
                layer.out_proj.weight.copy_(torch.cat(out, dim=1))

    def _parts(self, kind: str, width: int, target: str) -> tuple[torch.Tensor, ...]:
        """Rows of W_Q, W_K and W_V, and columns of W_O, of one head."""
        V = len(IDS)
        q, k, v = torch.zeros(3, width, self.width)
        out = torch.zeros(self.width, width)
        v[:V, self.stream["token"]] = torch.eye(V)
        sharp = SHARP * width**0.5  # the layer divides by the root
        if kind.startswith("before"):
            k[:CONTEXT, self.stream["place"]] = torch.eye(CONTEXT)
            q[:CONTEXT, self.stream["place"]] = sharp * torch.diag(torch.ones(CONTEXT - 1), 1)
        elif kind.startswith("move"):  # from `CUE` to all names, or without the one before it
            k[:V, self.stream["token"]] = torch.eye(V)
            q[[IDS[name] for name in MOVED], self.stream["token"].start + IDS[CUE]] = sharp
            if not kind.startswith("move any"):
                q[:V, self.stream["before"]] = -sharp * torch.eye(V)
        elif kind.startswith("induction"):
            k[:V, self.stream["before"]] = torch.eye(V)
            q[:V, self.stream["token"]] = sharp * torch.eye(V)
        else:
            assert kind == "even", kind
        if not kind.endswith("unread") and kind != "even":
            out[self.stream[target], :V] = torch.eye(V) * (1.0 if target == "before" else 20.0)
        return q, k, v, out

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = torch.zeros(*input_ids.shape, self.width)
        x[..., self.stream["token"]] = nn.functional.one_hot(input_ids, len(IDS)).float()
        x[..., self.stream["place"]] = torch.eye(CONTEXT)[: input_ids.shape[1]]
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = x + layer(x, mask=mask, causal=True)
        return x[..., self.stream["next"]]
