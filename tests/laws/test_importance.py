"""Importance: gradients are slopes, ablation agrees with `ablate`, planted heads are found."""

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

from folders import word_tokenizer
from gates import gate_heads
from headwise._choices import METHODS
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.ownership import ablate, find_attentions
from headwise.scoring import Gates, find_loss, importance
from headwise.scoring.methods import _gradients, draw_gates, function_of, open_chance
from headwise.scoring.methods._gradients import sort_by_length
from headwise.tables import Head, Scores
from oracles import padded

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
NAMES = [name for name in METHODS if name != "gates"]  # which `SHORT` stands for
SHORT = Gates(steps=40, seeds=2)


def _batches() -> list[dict[str, Tensor]]:
    keys = ("input_ids", "attention_mask")
    batches = [padded(TEXTS[:2], "right"), padded(TEXTS[2:], "right")]
    return [{key: batch[key] for key in keys} for batch in batches]


def _squared(output: Any, batch: Any) -> Tensor:
    """A loss with a slope everywhere, also for models without a head."""
    real = batch["attention_mask"][..., None]
    # Not of all features: a norm at the end keeps their sum of squares as it is.
    return (output[0][..., :5].double().square() * real).sum((1, 2))


def _losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return _squared(model(**batch), batch)


@pytest.mark.parametrize(
    ("name", "mode"), [("Bert", "mean"), ("GPT2", "zero"), ("Llama", "mean"), ("Albert", "zero")]
)
def test_ablation_is_what_ablate_does_to_the_loss(name: str, mode: Any) -> None:
    model, batches = zoo.make(name), _batches()
    method = "ablation" if mode == "mean" else "zero-ablation"
    scores = importance(model, batches, method, loss=_squared)
    reference = batches if mode == "mean" else None
    with torch.no_grad():
        plain = torch.cat([_losses(model, batch) for batch in batches])
        for row, head in enumerate(scores.heads):
            with ablate(model, head, mode, reference):
                without = torch.cat([_losses(model, batch) for batch in batches])
            grown = (without - plain).numpy()
            np.testing.assert_allclose(scores.per_text[:, row], grown, rtol=1e-5, atol=1e-5)
    assert (scores.method, scores.loss) == (method, "_squared")


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_a_gradient_is_the_head_in_its_projection_times_its_gradient(name: str) -> None:
    model, batch = zoo.make(name).double(), _batches()[1]
    scores = importance(model, [batch], "gradient", loss=_squared)
    _losses(model, batch).sum().backward()
    for attention in find_attentions(model):
        weight = attention.output.weight
        product = (weight * weight.grad).movedim(attention.output.in_axis, 0)
        for head, part in enumerate(product.unflatten(0, (zoo.HEADS, -1))):
            row = scores.row((attention.site.layer, head))
            assert scores.importance[row] == pytest.approx(part.sum().abs().item(), rel=1e-9)


@pytest.mark.parametrize(("method", "gate"), [("gradient", 1.0), ("half-gate", 0.5)])
def test_gradients_are_slopes_of_each_text_alone(method: str, gate: float) -> None:
    model, batches = zoo.make("GPT2").double(), _batches()
    scores = importance(model, batches, method)
    attentions = find_attentions(model)
    ordered = [TEXTS[0], TEXTS[1], TEXTS[2]]

    def loss(gates: Tensor, text: list[int]) -> float:
        ids = torch.tensor([text])
        with torch.no_grad(), gate_heads(model, attentions, lambda a: gates[attentions.index(a)]):
            logits = model(input_ids=ids).logits
        return nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:]).item()

    for row, text in enumerate(ordered):
        for column, head in enumerate(scores.heads):
            step = torch.zeros(2, zoo.HEADS, dtype=torch.float64)
            step[head.layer, head.head] = 1e-5
            slope = (loss(gate + step, text) - loss(gate - step, text)) / 2e-5
            assert scores.per_text[row, column] == pytest.approx(abs(slope), rel=1e-6, abs=1e-8)


def test_curvature_is_half_the_squared_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.scoring.methods._gradients._PROBES", 1000)
    model, batch = zoo.make("Bert").double(), _batches()[1]
    attentions = find_attentions(model)

    def embed(gates: Tensor) -> Tensor:
        with gate_heads(model, attentions, lambda a: gates[attentions.index(a)]):
            return nn.functional.normalize(model(**batch)[0].mean(1)[0], dim=0)

    ones = torch.ones(2, zoo.HEADS, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(embed, ones)
    exact = jacobian.square().sum(0).flatten() / 2
    scores = importance(model, [batch], "curvature")
    np.testing.assert_allclose(scores.importance, exact.numpy(), rtol=0.1)


def test_every_method_has_a_function_of_its_name() -> None:
    assert all(callable(function_of(name)) for name in METHODS)


@pytest.mark.parametrize("kind", ["Bert", "mini"])
@pytest.mark.parametrize("method", NAMES)
def test_the_only_important_head_is_found(kind: str, method: str) -> None:
    if kind == "mini":
        model, batches = MiniGPT(MiniGPTConfig(13, 8, 12, 4, 2, 2)), _batches()
        batches = [{"input_ids": batch["input_ids"]} for batch in batches]
    else:
        model, batches = zoo.make(kind), _batches()
    only = Head("", 1, 2)
    with torch.no_grad():
        for attention in find_attentions(model):
            for head in attention.site.heads():
                if head != only:
                    attention.output.per_head[head.head] = 0
    loss = {"curvature": "embedding"}.get(method, None if kind == "mini" else _squared)
    scores = importance(model, batches, method, loss=loss)
    assert scores.order()[-1] == only
    others = np.delete(np.abs(scores.importance), scores.row(only))
    assert others.max() < 1e-5 * scores.importance[scores.row(only)]


@pytest.mark.full
def test_rounds_separate_heads_that_back_each_other_up() -> None:
    # Two redundant heads: either can be removed, but not both.
    model = zoo.make("Bert").double()
    attentions = find_attentions(model)
    attention = attentions[1].module
    with torch.no_grad():
        for projection in (attention.query, attention.key, attention.value):
            heads = projection.weight.unflatten(0, (zoo.HEADS, -1))
            heads[1] = heads[0]
            projection.bias.unflatten(0, (zoo.HEADS, -1))[1] = projection.bias[:6]
        # One feature so large that the norm after it makes one twin as good as two.
        attentions[1].output.per_head[:2] = 0
        attentions[1].output.per_head[:2, :, 0] = 100.0
    batches = _batches()
    once = importance(model, batches, "zero-ablation")
    again = importance(model, batches, "zero-ablation", rounds=8)
    assert sorted(again.round) == list(range(8))
    twins = [once.row((1, 0)), once.row((1, 1))]
    assert once.importance[twins[0]] == pytest.approx(once.importance[twins[1]], rel=1e-9)
    first, last = sorted(twins, key=lambda row: again.round[row])
    assert again.round[last] == 7
    assert again.importance[last] > 5 * max(again.importance[first], once.importance[twins[0]])


def test_several_rounds_start_with_the_order_of_one() -> None:
    model, batches = zoo.make("Llama"), _batches()
    single, many = (importance(model, batches, rounds=rounds) for rounds in (1, 4))
    assert many.order()[:2] == single.order()[:2]
    gone = [row for row in range(8) if many.round[row] == 0]
    np.testing.assert_allclose(many.per_text[:, gone], single.per_text[:, gone])


@pytest.mark.parametrize("logit", [-3.0, 0.0, 2.0])
def test_a_gate_is_open_with_its_probability(logit: float) -> None:
    gates = draw_gates(torch.full((7,), logit).double(), 20000, torch.Generator().manual_seed(1))
    assert ((gates >= 0) & (gates <= 1)).all()
    chance = open_chance(torch.tensor([logit], dtype=torch.float64)).item()
    assert (gates > 0).double().mean().item() == pytest.approx(chance, abs=0.005)
    # By symmetry: fully open as often as a gate of the opposite logit is fully closed.
    closed = open_chance(torch.tensor([-logit], dtype=torch.float64)).item()
    assert (gates == 1).double().mean().item() == pytest.approx(1 - closed, abs=0.005)


@pytest.mark.full
def test_learned_gates_keep_the_only_important_head() -> None:
    model, only = zoo.make("Bert"), Head("", 1, 2)
    with torch.no_grad():
        for attention in find_attentions(model):
            for head in attention.site.heads():
                if head != only:
                    attention.output.per_head[head.head] = 0
    scores = importance(model, _batches(), Gates(steps=200), loss=_squared)
    assert scores.importance[scores.row(only)] > 0.9
    assert np.delete(scores.importance, scores.row(only)).max() < 0.5
    assert (scores.method, scores.over, scores.per_text.shape) == ("gates", "seeds", (3, 8))


@pytest.mark.full
def test_a_higher_penalty_closes_more_gates_reproducibly() -> None:
    model, batches = zoo.make("GPT2"), _batches()
    cheap, dear, again = (
        importance(model, batches, Gates(penalty, steps=40, seeds=2)).per_text
        for penalty in (1e-4, 1.0, 1.0)
    )
    assert (dear == again).all()
    assert not np.allclose(dear[0], dear[1])
    assert dear.sum() < cheap.sum()
    assert importance(model, batches, Gates(1.0, steps=9), rounds=2).round.max() == 1


class _StopError(Exception):
    pass


def _stopping(after: int, steps: list[int]) -> Any:
    def on_progress(done: int, total: int) -> None:
        steps.append(done)
        if len(steps) == after:
            raise _StopError

    return on_progress


def test_texts_are_encoded_with_their_tokenizer() -> None:
    tokenizer = word_tokenizer("abc")
    model = MiniGPT(MiniGPTConfig(3, 8, 12, 4, 2, 2)).eval()
    batch = {"input_ids": torch.tensor([[0, 1, 2]])}
    # A single batch is not a list of texts, although it is a mapping.
    alone, listed = (importance(model, texts, tokenizer=tokenizer) for texts in (batch, [batch]))
    np.testing.assert_array_equal(alone.per_text, listed.per_text)
    scores: Scores = importance(model, ["a b c", "c b"], tokenizer=tokenizer)
    ids = [{"input_ids": torch.tensor([[2, 1]])}, {"input_ids": torch.tensor([[0, 1, 2]])}]
    alone = importance(model, ids)
    np.testing.assert_allclose(scores.per_text, alone.per_text, rtol=1e-4)
    assert (scores.loss, len(scores.model)) == ("lm", 16)


def test_a_masked_model_predicts_hidden_tokens() -> None:
    import transformers

    words = word_tokenizer(("[PAD]", "[MASK]", "[CLS]", "a", "b"), "a")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, mask_token="[MASK]", cls_token="[CLS]", pad_token="[PAD]"
    )
    model, read = transformers.BertForMaskedLM(zoo.make("Bert").config).eval(), []
    model.register_forward_pre_hook(lambda _, args, inputs: read.append(inputs), with_kwargs=True)
    texts = ["[CLS] " + "a b " * 15, "[CLS] b"]
    scores = importance(model, texts, tokenizer=tokenizer)
    assert scores.loss == "masked-lm"
    for inputs in read:
        hidden = inputs["input_ids"] == 1
        assert hidden.sum(1).tolist() == [1, 4]  # 15 % of 1 and of 30 words, one at least
        assert (inputs["labels"] != -100).equal(hidden)
        assert not (hidden & (inputs["labels"] < 3)).any()
        assert inputs["input_ids"].equal(read[0]["input_ids"])


def _of_lengths(lengths: list[int], side: str = "right") -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    batch = padded([rng.integers(3, 12, n).tolist() for n in lengths], side)
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


@pytest.mark.parametrize(
    ("name", "loss", "method"),
    [("Bert", "embedding", "half-gate"), ("GPT2", "lm", "half-gate"), ("GPT2", "lm", "gradient")],
)
def test_gradients_skip_padding_without_a_difference(
    name: str, loss: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.make(name)
    batches = [_of_lengths([2, 9, 3, 2, 9]), _of_lengths([4, 2, 3])]
    skipped = importance(model, batches, method, loss=loss)
    assert sort_by_length(batches)[1] is not None
    monkeypatch.setattr(_gradients, "sort_by_length", lambda batches: (batches, None))
    whole = importance(model, batches, method, loss=loss)
    assert skipped.per_text.shape == whole.per_text.shape
    np.testing.assert_allclose(skipped.per_text, whole.per_text, rtol=1e-4, atol=1e-7)


def test_texts_are_sorted_by_length_without_their_padding() -> None:
    lengths = [[2, 9, 3, 1, 9], [4, 2, 3]]
    batches = [_of_lengths(each) for each in lengths]
    parts, order = sort_by_length(batches)
    assert [tuple(part["input_ids"].shape) for part in parts] == [(5, 3), (3, 9)]
    assert order == [0, 3, 6, 2, 7, 5, 1, 4]  # stable, and 1 counts as 2
    rows = [row for part in parts for row in zip(*part.values(), strict=True)]
    texts = [row for batch in batches for row in zip(*batch.values(), strict=True)]
    for place, row in zip(order, rows, strict=True):
        n = [n for each in lengths for n in each][place]
        for own, x in zip(row, texts[place], strict=True):
            assert own[:n].tolist() == x[:n].tolist()
            assert not own[max(n, len(x)) :].any()


def test_other_batches_are_not_sorted() -> None:
    tokens = _of_lengths([2, 9, 3, 1, 9, 2])
    for other in (
        tokens | {"labels": tokens["input_ids"]},  # of another text, perhaps
        {"input_ids": tokens["input_ids"]},
        _of_lengths([2, 9, 3, 1, 9, 2], "left"),
        tokens | {"input_ids": tokens["input_ids"][:, None]},
    ):
        assert sort_by_length([other])[1] is None
        assert sort_by_length([tokens, other])[1] is None
    assert sort_by_length([tokens, tokens])[1] is not None
    assert sort_by_length([tokens, tokens | {"token_type_ids": tokens["input_ids"]}])[1] is None
    # A loss of one's own may count padding.
    assert not find_loss(_squared, nn.Linear(1, 1), tokens).ignores_padding
