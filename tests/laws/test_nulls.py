"""Null models and shuffled texts are correct, and the model is unchanged."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.roles import Evidence, find_roles
from headwise.roles._samples import Split
from headwise.roles.evidence import null_head_baseline, strongest
from headwise.roles.evidence._nulls import initialized, permuted
from headwise.roles.relations import Item, Role, shuffled
from headwise.roles.scores import RoleScores
from planted import IDS, SUBJECTS, TOKENIZER, VERBS, Planted, clauses, lines

CONFIG = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=1, n_heads=2, d_model=8)


def models():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    return [MiniGPT(CONFIG), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)]


@pytest.mark.parametrize("make", [permuted, initialized])
@pytest.mark.parametrize("model", models(), ids=["made from its config", "with reset_parameters"])
def test_a_null_model_loses_what_was_learned_and_the_model_is_unchanged(make, model):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.random.get_rng_state()
    changed, same, reseeded = make(model, 0), make(model, 0), make(model, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, matrix in changed.named_parameters():
        assert torch.equal(matrix, same.get_parameter(name))
        if matrix.ndim > 1:
            assert not torch.equal(matrix, before[name])
            assert not torch.equal(matrix, reseeded.get_parameter(name))
        if make is permuted and matrix.ndim > 1:
            assert torch.equal(matrix.flatten().sort()[0], before[name].flatten().sort()[0])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_model_without_initialization_has_no_untrained_null():
    assert initialized(Planted([("first",)], causal=True)) is None


TEXT = Item(
    ids=tuple(range(100, 110)),
    nodes={
        "token": [(token,) for token in range(1, 9)],
        "word": [(1,), (2, 3), (3, 4), (), (5,), (6,), (7, 8)],
        "mention": [(1,), (5, 6)],
    },
    pairs={"of tokens": [(1, 5), (5, 0)], "of words": [(0, 1)]},
)
ROLES = [Role("of tokens", "", lambda text: ()), Role("of words", "", lambda text: (), "word")]


@given(st.integers(0, 2**32 - 1))
def test_shuffled_words_keep_their_tokens_and_their_pairs(seed):
    (item,) = shuffled([TEXT], ROLES, seed)
    assert (item.ids[0], item.ids[9]) == (100, 109)
    assert sorted(item.ids) == list(TEXT.ids)
    for level in ("word", "mention"):
        for old, new in zip(TEXT.nodes[level], item.nodes[level], strict=True):
            assert [TEXT.ids[index] for index in old] == [item.ids[index] for index in new]
            assert list(new) == list(range(new[0], new[0] + len(new))) if new else not old
    ids = [tuple(item.ids[index] for index in pair) for pair in item.pairs["of tokens"]]
    assert ids == [(101, 105), (105, 100)]
    assert item.pairs["of words"] == TEXT.pairs["of words"]


@pytest.mark.full
def test_without_tags_the_nearest_token_that_looks_like_a_key_is_a_null():
    """Between a verb and its subject stand others, but none of its own person."""

    def subject_of(*persons):
        def pairs(text):
            latest = {}
            for query, token in enumerate(text.ids):
                for person in persons:
                    if token == IDS[SUBJECTS[person]]:
                        latest[person] = query
                    elif token == IDS[VERBS[person]]:
                        yield query, latest[person]

        return pairs

    relations = {"one person": subject_of(0), "two persons": subject_of(0, 1)}
    roles = find_roles(
        Planted([("agree", "even")], causal=True), [text.text for text in clauses(70)],
        tokenizer=TOKENIZER, relations=relations, evidence=Evidence(("shuffled",), splits=1),
    )  # fmt: skip
    rows = roles.frame().query("name == 'L0.H0'").set_index("role").loc[[*relations]]
    assert rows["effect"].tolist() == pytest.approx([1.0, 1.0])
    assert rows["null.class"].tolist() == pytest.approx([1.0, 0.6], abs=0.15)
    assert rows["found"].tolist() == [False, True]
    nulls = roles.outcomes().set_index("role")["null"]
    assert nulls["one person"] == "nearest usual key of one person to the left"
    forms = "one person, two persons: pairs, among all tokens; a ChoiceRelation"
    assert roles.notes[-1].startswith(forms)
    assert re.fullmatch(r"model \w{16}, texts \w{16}, seed 0, headwise .+", roles.notes[-2])


_PASSES = "permuted", "random", "shuffled"


@pytest.mark.full
def test_every_null_states_its_cost():
    model = Planted([("offset -1",)], causal=True)
    relations = {"own": lambda text: [(2, 1)]}
    for evidence, tells in (
        (Evidence(()), r"^1 pass over the texts, about equally long: the model's own$"),
        (Evidence(models=2), r"^4 passes .* own, 2 with permuted weights, one of shuffled words$"),
    ):
        roles = find_roles(
            model, lines(8), tokenizer=TOKENIZER, relations=relations, evidence=evidence
        )
        (note,) = (note for note in roles.notes if "about equally long" in note)
        assert re.search(tells, note), note
        without = [note for note in roles.notes if "were left out" in note]
        names = ", ".join(name for name in _PASSES if not evidence.wants(name))
        assert without == ([f"nulls that were left out: {names}"] if names else [])


def test_a_null_head_sees_as_many_keys():
    """One of two heads sees a window: it has fewer queries and a higher chance level."""
    rng = np.random.default_rng(0)
    count = np.stack([np.full((20, 2), 3.0), np.full((20, 2), 30.0)] * 2, axis=-1)  # M R N
    value = count * np.array([0.2, 0.6, 0.4, 0.5]) * rng.choice([0.99, 1.01], (20, 2, 1))
    best = null_head_baseline(
        RoleScores((), value, count, count), Split(np.arange(20), np.arange(20) < 10)
    )
    selection, rates = best
    for shown in (selection, rates.mean(0)):
        np.testing.assert_allclose(shown, [[0.4, 0.6, 0.4, 0.6]] * 2, rtol=0.02)
    weaker = selection - 0.1, rates * 0
    np.testing.assert_array_equal(strongest([weaker, best])[1], rates)


@pytest.mark.full
def test_more_null_models_only_raise_the_baseline():
    model = MiniGPT(CONFIG)
    few, many = (
        find_roles(
            model,
            lines(12),
            tokenizer=TOKENIZER,
            evidence=Evidence(("permuted", "random"), models=m),
        )
        for m in (1, 3)
    )
    for name in ("null.permuted", "null.random"):
        # Chosen on one half, the best of three is mostly better on the other half too.
        gain = many.frame()[name] - few.frame()[name]
        assert gain.mean() > 0
