"""Laws of the Mini-GPT: its outputs, its files and its training."""

import dataclasses
import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import _checkpoint, load, load_tokenizer
from headwise.corpora import BOS, EOS, PAD, Grammar
from headwise.lab import (
    MiniGPT,
    MiniGPTConfig,
    TrainSettings,
    evaluate,
    make_tokenizer,
    sample,
    save,
)
from headwise.lab import train as train_and_judge
from headwise.lab._model import draw_batch

GRAMMAR = Grammar()
TOKENIZER = make_tokenizer(GRAMMAR.vocabulary)
SMALL = TrainSettings(
    steps=7, batch_size=5, d_model=12, n_heads=3, n_layers=2, mlp_ratio=1, warmup=2, dropout=0.1
)
train = functools.partial(train_and_judge, lines_judged=16)
seeds = st.integers(0, 2**16)


class Interruption(Exception):
    pass


def interrupt_after(last):
    def on_progress(step, total, loss):
        if step == last:
            raise Interruption

    return on_progress


def small_model(seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"context": 37, "d_model": 12, "n_heads": 3, "n_layers": 2} | sizes
    return MiniGPT(MiniGPTConfig(len(GRAMMAR.vocabulary), **sizes)).eval()


def some_tokens(seed, B=2, T=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, len(GRAMMAR.vocabulary), (B, T), generator=generator)


def assert_same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# The model.


@given(seeds, st.integers(1, 10))
def test_later_tokens_never_change_earlier_outputs(seed, position):
    model, ids = small_model(seed), some_tokens(seed)
    changed = ids.clone()
    changed[:, position:] = some_tokens(seed + 1)[:, position:]
    torch.testing.assert_close(model(ids)[:, :position], model(changed)[:, :position])
    torch.testing.assert_close(model(ids)[:, :position], model(ids[:, :position]))


@given(seeds, st.integers(0, 7), st.sampled_from(["left", "right"]))
def test_padding_never_changes_the_text(seed, amount, side):
    model, ids = small_model(seed, n_kv_heads=1), some_tokens(seed)
    padding = ids.new_zeros(len(ids), amount)
    real, ones = torch.zeros_like(padding), torch.ones_like(ids)
    parts = ([padding, ids], [real, ones]) if side == "left" else ([ids, padding], [ones, real])
    padded, mask = (torch.cat(part, dim=1) for part in parts)
    logits = model(padded, mask)
    kept = logits[:, amount:] if side == "left" else logits[:, : ids.shape[1]]
    torch.testing.assert_close(kept, model(ids))
    assert logits.isfinite().all()


def test_every_parameter_gets_a_gradient():
    model = small_model()
    model(some_tokens(0, T=37)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


# The tokenizer and the lines.


@given(seeds)
def test_decoding_tokens_returns_the_words(seed):
    words = [GRAMMAR.vocabulary[4 + (seed * 31 + index) % (len(GRAMMAR.vocabulary) - 4)]
             for index in range(13)]  # fmt: skip
    encoding = TOKENIZER.encode(" ".join(words))
    assert encoding.tokens == [BOS, *words]
    assert TOKENIZER.decode(encoding.ids) == " ".join(words)


def test_every_word_is_one_token_in_the_order_of_the_vocabulary():
    assert [TOKENIZER.token_to_id(word) for word in GRAMMAR.vocabulary] == list(
        range(len(GRAMMAR.vocabulary))
    )
    assert TOKENIZER.encode("y'all work\n, tú").tokens == [BOS, "y'all", "work", ",", "tú"]
    assert TOKENIZER.encode("I frobnicate").tokens == [BOS, "I", "<unk>"]


@given(seeds)
def test_a_row_is_a_line_with_special_tokens_and_padding(seed):
    ids = draw_batch(GRAMMAR, TOKENIZER, 3, seed=(seed,))
    assert torch.equal(ids, draw_batch(GRAMMAR, TOKENIZER, 3, seed=(seed,)))
    for row in ids:
        words = [TOKENIZER.id_to_token(int(token)) for token in row]
        end = words.index(EOS)
        assert words[0] == BOS
        assert set(words[end + 1 :]) <= {PAD}
        assert not {PAD, EOS, BOS, "<unk>"} & set(words[1:end])


# Training.


def test_the_same_settings_give_the_same_weights_and_leave_the_random_state(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run = train(SMALL, tmp_path / "one")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert_same_weights(run.model, train(SMALL, tmp_path / "two").model)


@pytest.mark.parametrize(("last", "seconds", "kept"), [(3, -1.0, 3), (6, 5.0, 0), (7, 5.0, 7)])
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch, last, seconds, kept):
    monkeypatch.setattr(_checkpoint, "_SECONDS", seconds)  # -1: a write after every step
    monkeypatch.setattr(_checkpoint, "_COMPUTE_PER_WRITE", 0.0)
    whole = train(SMALL, tmp_path / "whole")
    with pytest.raises(Interruption):
        train(SMALL, tmp_path / "cut", on_progress=interrupt_after(last))
    steps = []
    resumed = train(SMALL, tmp_path / "cut", on_progress=lambda step, *_: steps.append(step))
    assert steps == list(range(kept + 1, 8))
    assert_same_weights(whole.model, resumed.model)
    facts = [run.facts() | {"seconds": 0} for run in (whole, resumed)]
    assert facts[0] == facts[1]


def test_a_finished_run_is_not_run_again(tmp_path):
    run = train(SMALL, tmp_path)
    two = train(SMALL, tmp_path, on_progress=interrupt_after(1))
    assert_same_weights(run.model, two.model)
    assert run.facts() == two.facts()


@pytest.mark.full
def test_training_lowers_the_loss_and_learns_the_line(tmp_path):
    losses = []
    settings = dataclasses.replace(
        SMALL, steps=60, batch_size=16, d_model=24, learning_rate=1e-2, repeat_share=0.0
    )
    trained = train(settings, tmp_path, on_progress=lambda step, total, loss: losses.append(loss))
    assert losses[0] > 5.5
    assert losses[-1] < 4
    assert trained.evaluation.seen.loss < 4


def test_facts_equal_the_file_and_have_no_nan(tmp_path):
    trained = train(dataclasses.replace(SMALL, adverb_share=0.0), tmp_path)
    written = json.loads((tmp_path / "training.json").read_text("utf-8"))
    assert written == {"settings": dataclasses.asdict(trained.settings), "facts": trained.facts()}
    assert "held-out translation without adverb" in written["facts"]
    assert "held-out translation with adverb" not in written["facts"]
    assert TrainSettings(**written["settings"]) == trained.settings


@given(st.integers(1, 300), st.integers(0, 50))
def test_the_learning_rate_rises_then_falls_to_a_tenth(steps, warmup):
    settings = TrainSettings(steps=steps, warmup=warmup, learning_rate=0.5)
    rates = [settings.learning_rate_at(step) for step in range(steps)]
    assert all(0 < rate <= 0.5 for rate in rates)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert settings.learning_rate_at(max(steps, warmup + 1)) == pytest.approx(0.05)


# Files.


@pytest.mark.parametrize("sizes", [{}, {"n_kv_heads": 1, "n_layers": 1, "mlp_ratio": 3}])
def test_a_saved_file_loads_equal(tmp_path, sizes):
    model = small_model(3, **sizes)
    save(model, tmp_path / "a" / "b", tokenizer=TOKENIZER)
    again, tokenizer = (read(tmp_path / "a" / "b") for read in (load, load_tokenizer))
    assert again.config == model.config
    assert_same_weights(again, model)
    assert tokenizer.to_str() == TOKENIZER.to_str()
    assert torch.equal(again(some_tokens(1)), model(some_tokens(1)))
    assert not again.training


def test_saving_over_a_model_replaces_it(tmp_path):
    save(small_model(1), tmp_path, tokenizer=TOKENIZER)
    save(small_model(2, n_layers=1), tmp_path, tokenizer=TOKENIZER)
    assert_same_weights(load(tmp_path), small_model(2, n_layers=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "headwise.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_training_saves_the_model_it_returns(tmp_path):
    trained = train(SMALL, tmp_path)
    assert_same_weights(trained.model, load(tmp_path))


# Evaluation and sampling.


class Knowing(MiniGPT):
    """A predictor that looks the next token up in the evaluated batch."""

    def __init__(self, wrong_after=None):
        super().__init__(MiniGPTConfig(len(GRAMMAR.vocabulary)))
        self.wrong_after = wrong_after

    def forward(self, ids, attention_mask=None):
        following = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], 2)], dim=1)
        if self.wrong_after is not None:
            following[ids == TOKENIZER.token_to_id(self.wrong_after)] = 1
        return 50 * torch.nn.functional.one_hot(following, len(GRAMMAR.vocabulary)).float()


def test_a_perfect_predictor_scores_one_everywhere():
    judged = evaluate(Knowing(), GRAMMAR, tokenizer=TOKENIZER, lines=37)
    for scores in (judged.held_out, judged.seen):
        assert dataclasses.asdict(scores) == {
            name: pytest.approx(0 if name == "loss" else 1) for name in dataclasses.asdict(scores)
        }
    assert judged.copying == 1


def test_a_predictor_wrong_after_pronouns_fails_without_adverbs():
    judged = evaluate(Knowing(wrong_after="he"), GRAMMAR, tokenizer=TOKENIZER, lines=211)
    assert judged.held_out.conjugation_with_adverb == 1
    assert 0.5 < judged.held_out.conjugation_without_adverb < 0.95
    assert judged.held_out.translation == 1


def test_a_predictor_wrong_after_the_equals_sign_translates_nothing():
    judged = evaluate(Knowing(wrong_after="="), GRAMMAR, tokenizer=TOKENIZER, lines=29)
    assert judged.seen.translation == judged.held_out.translation == 0
    assert judged.seen.conjugation == 1


def test_evaluation_is_repeatable_and_keeps_the_mode():
    model = small_model().train()
    judged = [evaluate(model, GRAMMAR, tokenizer=TOKENIZER, lines=5) for _ in range(2)]
    assert dataclasses.astuple(judged[0].held_out)[0] == dataclasses.astuple(judged[1].held_out)[0]
    assert model.training


@settings(max_examples=12)
@given(seeds, st.sampled_from([0, 1, 40]))
def test_a_sample_continues_its_prompt_repeatably(seed, words):
    model = small_model(seed)
    text = sample(model, "I work , y'all", tokenizer=TOKENIZER, max_new_tokens=words)
    assert text == sample(model, "I work , y'all", tokenizer=TOKENIZER, max_new_tokens=words)
    assert text.startswith("I work , y'all")
    assert len(text.split()) <= min(4 + words, model.config.context)


def test_the_likeliest_words_are_those_of_the_logits():
    model = small_model(2)
    text = sample(model, "I work", tokenizer=TOKENIZER, max_new_tokens=5)
    ids = torch.tensor([TOKENIZER.encode(text).ids])
    likeliest = model(ids)[0].argmax(-1)
    assert torch.equal(likeliest[2:-1], ids[0, 3:])
