"""Plans and models that cannot be pruned are refused, and the model is unchanged."""

import json
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from peft import LoraConfig, get_peft_model
from torch import nn

from folders import tiny_gemma, tiny_llama
from headwise import MultiHeadAttention, Plan, prune, recover
from headwise.errors import (
    ArgumentError,
    HeadError,
    HeadwiseError,
    InputError,
    ShapeError,
    UnsupportedError,
)
from headwise.models import fingerprint
from headwise.surgery import Costs, LayerPlan, plan
from headwise.tables import Curves, Head, Scores

HEADS = [Head("", layer, head) for layer in range(2) for head in range(3)]


def _llama(heads: int = 3) -> nn.Module:
    return tiny_llama(hidden_size=12, num_attention_heads=heads, num_key_value_heads=heads)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ({0: [3]}, r"no head \(0, 3\)"),
        ({2: [0]}, r"no head \(2, 0\)"),
        (["L0.H1", (0, 1)], "L0.H1 is named twice"),
        ({1: [0, 1, 2]}, "L1.H2 is the last head of its layer"),
    ],
)
def test_heads_that_cannot_be_removed(remove: Any, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        Plan.of(remove, HEADS)
    model = _llama()
    before = fingerprint(model)
    with pytest.raises(HeadError, match=message):
        prune(model, remove)
    assert fingerprint(model) == before


def test_a_layer_that_removes_missing_heads() -> None:
    with pytest.raises(HeadError, match=r"no head L4.H7.*has 3 heads"):
        LayerPlan("", 4, 3, (7,))
    with pytest.raises(HeadError, match=r"L4\.H1 is named twice"):
        LayerPlan("", 4, 3, (1, 1))


def _adapted() -> nn.Module:
    return get_peft_model(_llama(), LoraConfig(target_modules=["q_proj"]))


class _FixedWidth(MultiHeadAttention):
    """A layer whose code knows its width by heart."""

    def forward(self, query: torch.Tensor, **options: Any) -> Any:
        self.q_proj(query).reshape(*query.shape[:2], 4, 3)
        return super().forward(query, **options)


def _replaced() -> nn.Module:
    model = _llama()
    forward = model.forward
    model.forward = wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    return model


def _of_int8() -> nn.Module:
    layer = MultiHeadAttention(12, 4)
    layer.q_proj.weight = nn.Parameter(torch.ones(12, 12, dtype=torch.int8), requires_grad=False)
    return layer


def _with_a_further_key() -> nn.Module:
    return nn.MultiheadAttention(12, 4, add_bias_kv=True, batch_first=True)


OF_ANOTHER = Plan.of({0: [1]}, HEADS, model="0123456789abcdef")
MEAN = {"fold": "mean", "reference": [{"input_ids": torch.tensor([[3, 5, 7]])}]}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("make", "remove", "options", "kind", "message"), [
    (_llama, OF_ANOTHER, {}, ArgumentError, "for the model 0123456789abcdef"),
    (lambda: _llama(6), Plan.of({0: [1]}, HEADS), {}, ArgumentError, r"of \[3, 3\] heads.*\[6"),
    (_llama, {0: [1]}, {"fold": "median"}, ArgumentError, "fold='median'"),
    (_llama, {0: [1]}, {"fold": "mean"}, ArgumentError, "without a reference"),
    (partial(zoo.make, "Albert"), [(0, 1), (1, 1)], MEAN, UnsupportedError, "one bias for all"),
    (_adapted, {0: [1]}, {}, UnsupportedError, r"adapters. Call merge_and_unload"),
    (tiny_gemma, {0: [0, 1]}, {}, UnsupportedError,
     r"2\.self_attn attends to .*0\.self_attn, and would .* \[0, 1\] where \[1\] stay"),
    (tiny_gemma, {3: [0]}, {"expand": True}, UnsupportedError,
     r"3\.self_attn attends to .*1\.self_attn, and would .* \[0, 1, 1\] where \[0, 1\] stay"),
    (lambda: nn.Sequential(_FixedWidth(12, 4)), (0, 1), {"reference": torch.randn(2, 5, 12)},
     UnsupportedError, r"does not run .*: 0 \(_FixedWidth\) depends on the number of heads"),
    (_replaced, (0, 1), {}, UnsupportedError, "prune: the forward of .* was replaced by <func"),
    (_of_int8, (0, 1), {}, UnsupportedError, "q_proj.weight is Tensor of torch.int8"),
    (_with_a_further_key, (0, 1), {}, UnsupportedError, "add_bias_kv or add_zero_attn attends"),
])  # fmt: skip
def test_what_cannot_be_pruned(
    make: Callable[[], nn.Module], remove: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        prune(make(), remove, **options)


def test_masks_of_another_number_of_heads() -> None:
    small, x = prune(nn.MultiheadAttention(12, 4, batch_first=True), (0, 1)), torch.randn(2, 5, 12)
    with pytest.raises(ShapeError, match=r"\(6, 5, 5\) .* multiple of the 4 heads .* had"):
        small(x, x, x, attn_mask=torch.zeros(6, 5, 5))


class _Scaled(nn.Module):
    """A layer that divides by the total number of features of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(1, 2).flatten(2)) / q.shape[1]


def test_a_cut_that_would_change_the_output() -> None:
    x = torch.randn(2, 5, 12)
    with pytest.raises(
        UnsupportedError, match="output of _Scaled without these heads would be off by"
    ):
        prune(_Scaled(), (0, 1), reference=[x])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": []}, "it has no layer"),
        ({"model": None}, "None is not a text"),
        ({"why": 3}, "3 is not a text"),
        ({"costs": {"seconds": [1, "2"]}}, "'2' is not a finite number"),
        ({"costs": {"seconds": [True, 2]}}, "True is not a finite number"),
        ({"costs": {"seconds": [-1, 2]}}, r"its costs 'seconds' are \[-1, 2\]"),
        ({"costs": {"seconds": [float("nan"), 2]}}, "nan is not a finite number"),
        ({"layers": [{"stack": 1, "layer": 0, "n_heads": 3, "remove": []}]}, "1 is not a text"),
        ({"layers": [{"stack": "", "layer": 0, "n_heads": 3, "remove": ""}]}, "'' is not a list"),
        ({"layers": [{"stack": "", "layer": 0, "n_heads": 0, "remove": []}]}, "0 heads in layer 0"),
        ({"layers": [{"stack": "", "layer": -1, "n_heads": 3, "remove": []}]}, "in layer -1"),
    ],
)
def test_a_plan_with_a_wrong_value(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason").save(tmp_path / "plan.json")
    assert Plan.load(path).removed
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=rf"plan.json holds no plan \(.*{says}"):
        Plan.load(path)


# Impossible plans are refused with the request.


SCORED = tuple(Head("", layer, head) for layer in range(2) for head in range(4))
SCORES = Scores(SCORED, np.tile(np.arange(4), 2), np.arange(8.0)[None], model="abc")
EACH = {"parameters": np.ones(8)}


def _costs(model: str = "abc") -> Costs:
    return Costs(SCORED, SCORES.kv_heads, EACH, {"parameters": np.zeros(8)}, model)


def _curves(step: int) -> Curves:
    removed = np.array([0, step])
    return Curves(removed, 8, {"half-gate": np.array([[[1.0, 1.0], [2.0, 2.0]]])}, "lm")


def test_a_loss_without_a_score() -> None:
    with pytest.raises(ArgumentError, match="Curves: the loss 'lm' has no score of a task"):
        _curves(1).of_score()


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({}, ArgumentError, "remove=None, heads=None, budget=None, within=None. Give exac"),
    ({"remove": 0.3, "heads": "L0.H1"}, ArgumentError, "remove=0.3, heads=L0.H1"),
    ({"remove": 1.0}, ArgumentError, r"remove=1\.0\. Give a share"),
    ({"remove": 3}, ArgumentError, r"remove=3\. Give a share"),
    ({"remove": ["L0.H1"]}, ArgumentError, r"remove=\['L0.H1'\].*to name heads, give heads="),
    ({"remove": "0.3"}, ArgumentError, "remove='0.3'. Give a share"),
    ({"remove": 0.1}, ArgumentError, r"remove=0\.1 of 8 heads removes none.*is 1 head\b"),
    ({"remove": 0.9}, ArgumentError, r"remove=0\.9 of 8 heads would empty.*6 heads at most"),
    ({"remove": 0.2, "uniform": True}, ArgumentError, "removes none.*is 2 heads"),
    ({"heads": "L2.H0"}, HeadError, r"no head L2\.H0"),
    ({"heads": {1: [0, 1, 2, 3]}}, HeadError, r"L1\.H3 is the last head of its layer"),
    ({"budget": {"parameters": 4}}, ArgumentError, "a budget without costs"),
    ({"budget": {"watts": 4}, "costs": _costs()}, ArgumentError,
     "'watts' is not one of parameters"),
    ({"budget": {"parameters": 1}, "costs": _costs()}, ArgumentError,
     "1 parameters cannot be reached. The lowest possible is parameters 2"),
    ({"budget": {"parameters": 8}, "costs": _costs()}, ArgumentError,
     "all heads together fit into 8 parameters"),
    ({"budget": 4, "costs": _costs()}, ArgumentError, "budget=4. Give numbers by name"),
    ({"budget": {}, "costs": _costs()}, ArgumentError, r"budget=\{\}. Give numbers by name"),
    ({"remove": 0.5, "costs": _costs("other")}, ArgumentError,
     "costs are of the model 'other'.*scores of 'abc'"),
    ({"heads": "L0.H1", "uniform": True}, ArgumentError, "uniform=True, .* leave 3, 4 in the"),
    ({"within": 0.01}, ArgumentError, r"within=0\.01 without curves\. Give both: curves=plan_c"),
    ({"remove": 0.5, "curves": _curves(2)}, ArgumentError, "curves without within="),
    ({"within": 0, "curves": _curves(2)}, ArgumentError, "within=0 lets nothing go"),
    ({"within": "1", "curves": _curves(2)}, ArgumentError, "within='1' lets nothing go"),
    ({"within": 0.1, "curves": _curves(1)}, ArgumentError,
     r"without the first 1 head the loss lm grows by 0\.1 or more\. Give a larger within="),
    ({"within": 9, "curves": _curves(1), "uniform": True}, ArgumentError,
     r"points at \[0, 1\] of 8 heads, and plans of these scores end at \[0, 2, 4, 6\] of 8"),
])  # fmt: skip
def test_impossible_plans(options: dict[str, Any], kind: type[HeadwiseError], message: str) -> None:
    with pytest.raises(kind, match=message):
        plan(SCORES, **options)


def test_heads_without_scores_are_not_planned() -> None:
    with pytest.raises(ArgumentError, match=r"scores are a dict\. Give the result of"):
        plan({"L0.H1": 0.3}, remove=0.3)  # type: ignore[arg-type]


def test_a_layer_named_twice() -> None:
    with pytest.raises(HeadError, match="layer 3 of encoder is listed twice"):
        Plan((LayerPlan("encoder", 3, 4, (1,)), LayerPlan("encoder", 3, 4, (2,))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", "holds no object"),
        ('{"format": "headwise-costs/9"}', "its format is 'headwise-costs/9'"),
        ('{"format": "headwise-costs/1"}', "'heads'"),
    ],
)
def test_a_file_without_costs(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content, "utf-8")
    with pytest.raises(InputError, match=f"costs.json holds no costs .*{message}"):
        Costs.load(path)


def test_costs_of_too_few_heads(tmp_path: Path) -> None:
    path = _costs().save(tmp_path / "costs.json")
    content = json.loads(path.read_text("utf-8"))
    content["kv_heads"].pop()
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(InputError, match="7 numbers for 8 heads"):
        Costs.load(path)


# What cannot be recovered is refused by name, and both models are unchanged.


BATCH = {"input_ids": torch.tensor([[5, 9, 7], [4, 6, 3]])}


def _not_recovered(
    kind: type[HeadwiseError], message: str, small: nn.Module, teacher: nn.Module, **options: Any
) -> None:
    before = fingerprint(small), fingerprint(teacher)
    batches = options.pop("batches", [BATCH])
    with pytest.raises(kind, match=message):
        recover(small, teacher, batches, **options)
    assert (fingerprint(small), fingerprint(teacher)) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, r"steps=2\.5"),
        ({"steps": True}, "steps=True"),
        ({"rate": 0.0}, r"rate=0\.0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"batches": []}, "0 given"),
        ({"batches": ["a text"]}, "1 texts without a tokenizer"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    teacher = zoo.make("Bert")
    _not_recovered(ArgumentError, message, prune(teacher, "L0.H1"), teacher, **options)


def test_the_full_model_itself() -> None:
    teacher = zoo.make("Bert")
    message = r"embeddings\.word_embeddings\.weight is a weight of both models"
    _not_recovered(ArgumentError, message, teacher, teacher)
    small = prune(teacher, "L0.H1")
    small.pooler = teacher.pooler
    _not_recovered(ArgumentError, r"pooler\.dense\.weight is a weight of both", small, teacher)


def test_the_full_model_in_place_of_the_smaller_one() -> None:
    full = zoo.make("Llama")
    layers = full.config.num_hidden_layers
    n_heads, kv_heads = (
        layers * full.config.num_attention_heads, layers * full.config.num_key_value_heads,
    )  # fmt: skip
    small = prune(full, ["L0.H0", "L0.H1"])
    message = rf"the model to train has {n_heads} heads, and its teacher {n_heads - 2}\. Give the"
    _not_recovered(ArgumentError, message, full, small)
    sizes = full.config.to_dict() | {"num_key_value_heads": 1}
    grouped = type(full)(type(full.config)(**sizes))
    message = rf"the model to train has {kv_heads} kv heads, and its teacher {layers}\. Give the"
    _not_recovered(ArgumentError, message, full, grouped)
    for student in (small, grouped):
        assert len(recover(student, full, [BATCH], steps=1)) == 1


def test_frozen_weights() -> None:
    teacher = zoo.make("Bert")
    small = prune(teacher, "L0.H1").requires_grad_(False)
    _not_recovered(ArgumentError, "all weights of Bert.* are frozen", small, teacher)


def test_a_teacher_of_another_vocabulary() -> None:
    teacher, small = zoo.make("Llama"), zoo.make("Llama")
    small.lm_head = nn.Linear(24, 7)
    message = r"gives logits \(2, 3, 7\), the full one \(2, 3, 23\)"
    _not_recovered(ShapeError, message, small, teacher)


def test_a_diverging_rate() -> None:
    teacher = zoo.make("GPT2")
    small = prune(teacher, "L0.H1")
    _not_recovered(
        ArgumentError, r"the loss of step \d+ is (nan|inf).*lower rate than 1e\+30", small, teacher,
        rate=1e30, steps=9,
    )  # fmt: skip


class _Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.weight}


def test_outputs_that_cannot_be_compared() -> None:
    _not_recovered(ArgumentError, "dict has neither logits nor a vector", _Strange(), _Strange())
