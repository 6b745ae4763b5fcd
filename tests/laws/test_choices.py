"""Choices of the grammar: the right word and another form of the same verb."""

import numpy as np
import pytest

from headwise.corpora import Grammar, choices, relations

GRAMMAR = Grammar()


def drawn(n: int = 300) -> list:
    rng = np.random.default_rng(3)
    return [GRAMMAR.sentence(rng) for _ in range(n)]


@pytest.mark.parametrize("apart", [False, True])
def test_the_right_word_is_in_the_line_and_the_wrong_word_is_another_form(apart: bool) -> None:
    lines = drawn()
    result = choices(lines, apart)
    texts = [str(line) for line in lines]
    assert 200 < len(result) <= len(lines)
    for choice in result:
        assert any(text.startswith(f"{choice.before} {choice.right}") for text in texts)
        assert choice.right != choice.wrong in GRAMMAR.vocabulary
        # The wrong form would be right beside another subject, so it is a form of the same verb.
        words = (*choice.before.split(), choice.right)
        subject = dict(relations(words)["subject"])[len(words) - 1]
        assert (len(words) - 1 - subject > 1) == apart
    assert {"=" in choice.before.split() for choice in result} == {False, True}


def test_the_first_verb_of_a_line_is_never_tested() -> None:
    for choice in choices(drawn(), apart=False):
        assert relations(choice.before.split())["subject"]


def test_a_repeated_sequence_has_no_choice() -> None:
    assert choices([GRAMMAR.repeat(np.random.default_rng(0))], apart=False) == []


def test_the_seed_decides_which_verb_is_tested() -> None:
    lines = drawn(40)
    assert choices(lines, False, seed=1) == choices(lines, False, seed=1)
    assert choices(lines, False, seed=1) != choices(lines, False, seed=2)
