"""How well heads align words with those that they translate, by the measures of word alignment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.corpora import AnnotatedText, Corpus
from headwise.errors import InputError
from headwise.models import batches, context_of, in_evaluation
from headwise.roles._evidence import best_of, halves
from headwise.roles.evaluation import Units, check_reads_one_text
from headwise.roles.relations import Item, TokenText, texts_of, tokenize
from headwise.tables import Head, ratio_interval
from headwise.watch import Request, observe

Convention = Literal["identity", "prediction"]
CONVENTIONS: tuple[Convention, ...] = ("identity", "prediction")
_EQUAL = 1 - 1e-6  # weights this close to the largest are as large
_FARTHEST = 40  # words that an offset may lead back
_BATCH = 16  # texts that the model reads at once


def alignment(model: nn.Module, tokenizer: Any, corpus: Corpus, *, seed: int = 0) -> pd.DataFrame:
    """Take each head for an aligner: a word is aligned with the source word it attends to most.

    Source words are all before the first word that has a source; only words with one are asked.
    Who asks differs between two conventions, and so do the heads that answer: under `identity`
    the word itself, under `prediction` the token before it, which in a decoder has to say it.
    Over the pieces of a word that asks the mean is taken, over those of a source the sum.

    The best offset is chosen on half of the texts, all numbers are of the other half. Ties are
    scored as expected values.

    Args:
        corpus: Texts with links, each source before its translation: `read_aligned` reads them.
        seed: Decides the halves and the draws for intervals.
    Returns:
        A row per head and convention (`query`): `accuracy`, the share of words whose strongest
        source is linked with them, with its interval (95 %, over texts), and on the other half
        (`chosen_half`); `aer`, the alignment error rate with every link sure, from 0 to 1;
        what `chance`, the best `offset` and the `diagonal` score; `n` words in `texts` texts.
    Raises:
        ArgumentError: the corpus holds what is not a text.
        InputError: no text has a word that translates an earlier one.
        UnsupportedError: the model reads two texts (an encoder-decoder), it cannot be watched
            exactly, or the tokenizer does not say where its tokens stand.
    Source:
        Och & Ney 2003, section 2.2: `AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)`, `S = P`.
    """
    check_reads_one_text("alignment", model)
    _, texts = texts_of("alignment", corpus)
    pieces = tokenize(tokenizer, texts, context_of(model, tokenizer)).pieces
    asked = [one for piece in pieces if (one := _Asked.of(piece)) is not None]
    if not asked:
        raise InputError(
            f"alignment: no word of {len(texts)} texts is linked with an earlier one. Give texts "
            f"with links, each source before its translation."
        )
    # Pieces are batched by their lengths, which keeps equal ones in order.
    asked.sort(key=lambda one: len(one.item.ids))
    heads, hits = _read(model, asked)
    counted = _Counted.of(asked, hits)
    return pd.concat(
        [counted.table(heads, which, seed) for which in CONVENTIONS], ignore_index=True
    )


@dataclass(frozen=True)
class _Asked:
    """The words of a piece that have a source, as queries; and the words that may be it.

    Attributes:
        item: Its units are first the source words, then for each convention the queries.
        gold: Which source words each query is linked with.
        rules: Of each rule the source word it names for each query; −1 for none.
    """

    text: AnnotatedText
    item: Item
    gold: Float[Tensor, "Q S"]
    rules: np.ndarray

    @classmethod
    def of(cls, piece: TokenText) -> "_Asked | None":
        words = piece.words
        links: dict[int, set[int]] = {}
        for one, source in piece.text.links:
            if source < one and words[one] and words[source] and words[one][0]:
                links.setdefault(one, set()).add(source)
        if not links:
            return None
        sources = [at for at in range(min(links)) if words[at]]
        gold = torch.tensor([[float(at in those) for at in sources] for those in links.values()])
        units = [words[at] for at in sources]
        units += [words[one] for one in links] + [[words[one][0] - 1] for one in links]
        item = Item(piece.ids, {"token": (), "word": units, "mention": ()}, {})
        last = max(links)
        rules = [
            [_place(sources, one - by) for by in range(1, _FARTHEST)]
            + [(one - min(links)) * len(sources) // (last - min(links) + 1)]
            for one in links
        ]
        return cls(piece.text, item, gold, np.array(rules))

    def hits(self, weights: Float[Tensor, "H n n"]) -> Float[Tensor, "C H"]:
        """How many queries of each convention each head gets right, ties in expectation."""
        Q, S = self.gold.shape
        seen = weights[:, S : S + 2 * Q, :S].reshape(len(weights), 2, Q, S)  # H C Q S
        top = (seen >= seen.amax(-1, keepdim=True) * _EQUAL).float()
        right = (top * self.gold).sum(-1) / top.sum(-1)
        return right.sum(-1).T

    def of_rules(self) -> np.ndarray:
        """How many each rule gets right: every offset, and last the diagonal."""
        named = self.gold.numpy()[np.arange(len(self.gold))[:, None], self.rules]
        return (named * (self.rules >= 0)).sum(0)


def _place(sources: Sequence[int], at: int) -> int:
    return sources.index(at) if at in sources else -1


@torch.no_grad()
def _read(model: nn.Module, asked: Sequence[_Asked]) -> tuple[list[Head], np.ndarray]:
    """What each head gets right in each piece, under each convention: `pieces C H`."""
    device = next(model.parameters()).device
    found: list[Tensor] = []
    heads: list[Head] = []
    with in_evaluation(model), observe(model, Request(statistics=(), maps=True)) as watch:
        for batch in batches([one.item.ids for one in asked], _BATCH, device):
            those = asked[len(found) : len(found) + len(batch.input_ids)]
            frame = Units("word", [one.item for one in those], batch.input_ids.shape[1])
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            layers = watch.layers()
            heads = [head for layer in layers for head in layer.heads]
            folded = [frame.fold(block.weights).cpu() for one in layers for block in one.blocks()]
            weights = torch.cat(folded, dim=1)
            found += [one.hits(weights[row]) for row, one in enumerate(those)]
    return heads, torch.stack(found).double().numpy()


@dataclass(frozen=True)
class _Counted:
    """Sums of each text: words that are asked, their links, and who gets how many right.

    Attributes:
        right: Of each head, under each convention.
        rules: Of every offset, and last of the diagonal.
        chance: What the choice of any source word would get right.
    """

    right: Float[np.ndarray, "M C H"]
    n: Float[np.ndarray, " M"]
    links: Float[np.ndarray, " M"]
    rules: Float[np.ndarray, "M K"]
    chance: Float[np.ndarray, " M"]

    @classmethod
    def of(cls, asked: Sequence[_Asked], hits: np.ndarray) -> "_Counted":
        places = {text: at for at, text in enumerate(dict.fromkeys(one.text for one in asked))}
        owner = [places[one.text] for one in asked]

        def added(pieces: Any) -> np.ndarray:
            whole = np.zeros((len(places), *np.shape(pieces)[1:]))
            np.add.at(whole, owner, np.asarray(pieces, dtype=float))
            return whole

        return cls(
            right=added(hits),
            n=added([len(one.gold) for one in asked]),
            links=added([one.gold.sum() for one in asked]),
            rules=added([one.of_rules() for one in asked]),
            chance=added([one.gold.mean(-1).sum() for one in asked]),
        )

    def table(self, heads: Sequence[Head], query: Convention, seed: int) -> pd.DataFrame:
        """The rows of one convention."""
        chosen = halves(len(self.n), seed)
        held, right = ~chosen, self.right[:, CONVENTIONS.index(query)]
        n, links = self.n[held].sum(), self.links[held].sum()
        count = np.broadcast_to(self.n[held, None], right[held].shape)
        low, high = ratio_interval(right[held], count, seed=seed)
        best = int(best_of(self.rules[chosen, None, :-1], self.n[chosen, None])[0])
        return pd.DataFrame(
            {
                "name": [str(head) for head in heads],
                "stack": [head.stack for head in heads],
                "layer": [head.layer for head in heads],
                "head": [head.head for head in heads],
                "query": query,
                "accuracy": right[held].sum(0) / n,
                "ci_low": low,
                "ci_high": high,
                "aer": 1 - 2 * right[held].sum(0) / (n + links),
                "chance": self.chance[held].sum() / n,
                "offset": self.rules[held, best].sum() / n,
                "diagonal": self.rules[held, -1].sum() / n,
                "n": n,
                "texts": int(held.sum()),
                "chosen_half": right[chosen].sum(0) / max(1.0, self.n[chosen].sum()),
            }
        )
