"""Rules of parts of speech are as strong as they can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.roles.scores import TagRows, fit_tag_rules
from headwise.roles.scores._tag_rules import FAR, SIDES, _fit, _rule_values

seeds = st.integers(0, 2**32 - 1)
TAGS = ("A", "B", "C", "D")


def rows_of(sentences, gold, role=0):
    """The rows of sentences of tags, where `gold` gives the key of each query or None."""
    item, tag, distance, right = [], [], [], []
    for number, words in enumerate(sentences):
        for query, own in enumerate(words):
            key = gold(words, query)
            if key is None:
                continue
            near = np.full((len(SIDES), 2, len(TAGS)), FAR, dtype=np.int16)
            hit = np.zeros(near.shape, dtype=bool)
            for column, name in enumerate(TAGS):
                places = [place for place in range(len(words)) if words[place] == name]
                left = [place for place in reversed(places) if place < query]
                after = [place for place in places if place > query]
                for side, keys in enumerate((left, after)):
                    for rank, place in enumerate(keys[:2]):
                        near[side, rank, column] = abs(place - query)
                        hit[side, rank, column] = place == key
            item.append(number)
            tag.append(TAGS.index(own))
            distance.append(near)
            right.append(hit)
    n = len(item)
    return TagRows(
        item=np.array(item),
        role=np.full(n, role),
        tag=np.array(tag),
        chance=np.full(n, 0.1, dtype=np.float32),
        distance=np.array(distance),
        right=np.array(right),
        offsets=np.zeros((n, 21), dtype=np.float32),
    )


def drawn(rng, n=60):
    return [rng.choice(TAGS, rng.integers(4, 12)).tolist() for _ in range(n)]


def nearest(tags, side=1, rank=0):
    def key(words, query):
        step = range(query + 1, len(words)) if side > 0 else range(query - 1, -1, -1)
        found = [place for place in step if words[place] in tags]
        return found[rank] if len(found) > rank else None

    return key


def own_class(words, query):
    return nearest({words[query]}, -1)(words, query)


def by_class(words, query):
    """To the right for some classes, to the left for others."""
    tags, side = {"A": ("B", 1), "B": ("C", -1)}.get(words[query], ("D", 1))
    return nearest({tags}, side)(words, query)


@pytest.mark.parametrize(
    ("gold", "kind", "name"),
    [
        (nearest({"A"}), "class", "nearest A to the right"),
        (nearest({"A", "C"}), "set", "nearest A/C to the right"),
        (nearest({"B", "C", "D"}, -1), "set", "nearest B/C/D to the left"),
        (nearest({"A", "C"}, rank=1), "set", "second nearest A/C to the right"),
        (own_class, "set", "nearest its own class to the left"),
        (by_class, "by class", "a rule for each class of the query"),
    ],
)
def test_a_rule_that_explains_everything_is_found(gold, kind, name):
    rows = rows_of(drawn(np.random.default_rng(0)), gold)
    rules = fit_tag_rules(rows, np.ones(len(rows.item), dtype=bool), TAGS, 1)
    assert rules[kind][1].mean() == 1.0
    assert rules[kind][0] == [name]


@given(seeds)
def test_sets_do_what_single_classes_do_on_the_queries_that_fit_them(seed):
    rng = np.random.default_rng(seed)
    rows = rows_of(drawn(rng, 8), lambda words, query: int(rng.integers(len(words))))
    rows = TagRows(*(rows.item, rng.integers(0, 3, len(rows.item))), *list(vars(rows).values())[2:])
    selected = rng.random(len(rows.item)) < 0.6
    rules = fit_tag_rules(rows, selected, TAGS, 3)
    for role in range(3):
        chosen = selected & (rows.role == role)
        single, best, split = (
            rules[kind][1][chosen].sum() for kind in ("class", "set", "by class")
        )
        assert best >= single - 1e-4
        assert split >= single - 1e-4


@given(seeds)
def test_the_value_of_a_rule_is_that_of_the_words_it_names(seed):
    rng = np.random.default_rng(seed)
    sentences = drawn(rng, 10)
    keys = {}

    def gold(words, query):
        return keys.setdefault((id(words), query), int(rng.integers(len(words))))

    rows = rows_of(sentences, gold)
    fitted = _fit(rows, np.ones(len(rows.item), dtype=bool), rows.role)
    tags = {tag for tag, has in zip(TAGS, fitted["sets"][0], strict=True) if has}
    named = nearest(tags, 1 if fitted["side"][0] == 1 else -1, int(fitted["rank"][0]))
    expected = []
    for words in sentences:
        for query in range(len(words)):
            place = named(words, query)
            expected.append(0.1 if place is None else float(place == gold(words, query)))
    np.testing.assert_allclose(_rule_values(fitted, rows, rows.role), expected, atol=1e-6)


def test_rules_are_fitted_to_the_selected_queries_alone():
    rng = np.random.default_rng(1)
    left = rows_of(drawn(rng, 20), nearest({"A"}, -1))
    right = rows_of(drawn(rng, 20), nearest({"B"}, 1))
    rows = TagRows.joined([left, right])
    selected = np.arange(len(rows.item)) < len(left.item)
    rules = fit_tag_rules(rows, selected, TAGS, 1)
    assert rules["set"][0] == ["nearest A to the left"]
    assert rules["set"][1][selected].mean() == 1.0
    assert rules["set"][1][~selected].mean() < 0.5


def test_roles_without_a_selected_query_get_chance():
    rows = rows_of(drawn(np.random.default_rng(2), 5), nearest({"A"}))
    rules = fit_tag_rules(rows, np.zeros(len(rows.item), dtype=bool), TAGS, 1)
    for _, value in rules.values():
        np.testing.assert_allclose(value, 0.1)
    assert rules["set"][0] == [""]
