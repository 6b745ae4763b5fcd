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


@pytest.mark.parametrize(("remove", "message"), [
    ({0: [3]}, r"no head \(0, 3\)"),
    ({2: [0]}, r"no head \(2, 0\)"),
    (["L0.H1", (0, 1)], "L0.H1 is named twice"),
    ({1: [0, 1, 2]}, "L1.H2 is the last head of its layer"),
])  # fmt: skip
def test_heads_that_cannot_be_removed(remove: Any, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        Plan.of(remove, HEADS)
    model = _llama()
    before = fingerprint(model)
    with pytest.raises(HeadError, match=message):
        prune(model, remove)
    assert fingerprint(model) == before


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


OF_ANOTHER = Plan.of({0: [1]}, HEADS, model="0123456789abcdef")
MEAN = {"fold": "mean", "reference": [{"input_ids": torch.tensor([[3, 5, 7]])}]}
VECTORS = {"reference": torch.randn(2, 5, 12)}


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
    (lambda: nn.Sequential(_FixedWidth(12, 4)), (0, 1), VECTORS, UnsupportedError,
     r"does not run .*: 0 \(_FixedWidth\) depends on the number of heads"),
    (_Scaled, (0, 1), VECTORS, UnsupportedError,
     "output of _Scaled without these heads would be off by"),
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


# Impossible plans are refused with the request.


SCORED = tuple(Head("", layer, head) for layer in range(2) for head in range(4))
SCORES = Scores(SCORED, np.tile(np.arange(4), 2), np.arange(8.0)[None], model="abc")
EACH = {"parameters": np.ones(8)}


def _costs(model: str = "abc") -> Costs:
    return Costs(SCORED, SCORES.kv_heads, EACH, {"parameters": np.zeros(8)}, model)


def _curves(step: int) -> Curves:
    removed = np.array([0, step])
    return Curves(removed, 8, {"half-gate": np.array([[[1.0, 1.0], [2.0, 2.0]]])}, "lm")


PLANS: list[tuple[dict[str, Any], type[HeadwiseError], str]] = [
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
]  # fmt: skip


def _twice(stack: str, *removed: tuple[int, ...]) -> Plan:
    return Plan(tuple(LayerPlan(stack, 3, 4, heads) for heads in removed))


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(plan, SCORES, **options), *said) for options, *said in PLANS),
    (lambda: plan({"L0.H1": 0.3}, remove=0.3), ArgumentError,
     r"scores are a dict\. Give the result of"),
    (lambda: LayerPlan("", 4, 3, (7,)), HeadError, r"no head L4.H7.*has 3 heads"),
    (lambda: LayerPlan("", 4, 3, (1, 1)), HeadError, r"L4\.H1 is named twice"),
    (lambda: _twice("encoder", (1,), (2,)), HeadError, "layer 3 of encoder is listed twice"),
    (lambda: _curves(1).of_score(), ArgumentError,
     "Curves: the loss 'lm' has no score of a task"),
])  # fmt: skip
def test_impossible_plans(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


def _layers(**changes: Any) -> dict[str, Any]:
    return {"layers": [{"stack": "", "layer": 0, "n_heads": 3, "remove": []} | changes]}


ONE_PLAN = Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason")


# What a file holds, with changes, or as a whole.
@pytest.mark.parametrize(("saved", "changes", "says"), [
    (ONE_PLAN, {"layers": []}, "it has no layer"),
    (ONE_PLAN, {"model": None}, "None is not a text"),
    (ONE_PLAN, {"why": 3}, "3 is not a text"),
    (ONE_PLAN, {"costs": {"seconds": [1, "2"]}}, "'2' is not a finite number"),
    (ONE_PLAN, {"costs": {"seconds": [True, 2]}}, "True is not a finite number"),
    (ONE_PLAN, {"costs": {"seconds": [-1, 2]}}, r"its costs 'seconds' are \[-1, 2\]"),
    (ONE_PLAN, {"costs": {"seconds": [float("nan"), 2]}}, "nan is not a finite number"),
    (ONE_PLAN, _layers(stack=1), "1 is not a text"),
    (ONE_PLAN, _layers(remove=""), "'' is not a list"),
    (ONE_PLAN, _layers(n_heads=0), "0 heads in layer 0"),
    (ONE_PLAN, _layers(layer=-1), "in layer -1"),
    (_costs(), "", "Expecting value"),
    (_costs(), "[]", "holds no object"),
    (_costs(), {"format": "headwise-costs/9"}, "its format is 'headwise-costs/9'"),
    (_costs(), '{"format": "headwise-costs/1"}', "'heads'"),
    (_costs(), {"kv_heads": [0] * 7}, "7 numbers for 8 heads"),
])  # fmt: skip
def test_a_file_without_a_plan_or_costs(
    saved: Plan | Costs, changes: Any, says: str, tmp_path: Path
) -> None:
    kind = type(saved)
    path = saved.save(tmp_path / "file.json")
    assert kind.load(path) is not None
    whole = json.loads(path.read_text())
    text = changes if isinstance(changes, str) else json.dumps(whole | changes)
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=rf"file.json holds no (plan|costs) \(.*{says}"):
        kind.load(path)


# What cannot be recovered is refused by name, and both models are unchanged.


BATCH = {"input_ids": torch.tensor([[5, 9, 7], [4, 6, 3]])}


def _pruned(name: str = "Bert") -> tuple[nn.Module, nn.Module]:
    teacher = zoo.make(name)
    return prune(teacher, "L0.H1"), teacher


def _with_its_pooler() -> tuple[nn.Module, nn.Module]:
    small, teacher = _pruned()
    small.pooler = teacher.pooler
    return small, teacher


def _exchanged() -> tuple[nn.Module, nn.Module]:
    full = zoo.make("Llama")
    return full, prune(full, ["L0.H0", "L0.H1"])


def _with_one_kv_head() -> tuple[nn.Module, nn.Module]:
    full = zoo.make("Llama")
    sizes = full.config.to_dict() | {"num_key_value_heads": 1}
    return full, type(full)(type(full.config)(**sizes))


def _frozen() -> tuple[nn.Module, nn.Module]:
    small, teacher = _pruned()
    return small.requires_grad_(False), teacher


def _of_another_vocabulary() -> tuple[nn.Module, nn.Module]:
    teacher, small = zoo.make("Llama"), zoo.make("Llama")
    small.lm_head = nn.Linear(24, 7)
    return small, teacher


class _Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.weight}


@pytest.mark.parametrize(("make", "options", "kind", "message"), [
    *((_pruned, {"steps": steps}, ArgumentError, f"steps={steps}") for steps in (0, 2.5, True)),
    *((_pruned, {"rate": rate}, ArgumentError, f"rate={rate}") for rate in (0.0, float("nan"))),
    (_pruned, {"texts": []}, ArgumentError, "0 given"),
    (_pruned, {"texts": ["a text"]}, ArgumentError, "1 text without a tokenizer"),
    (lambda: (zoo.make("Bert"),) * 2, {}, ArgumentError,
     r"embeddings\.word_embeddings\.weight is a weight of both models"),
    (_with_its_pooler, {}, ArgumentError, r"pooler\.dense\.weight is a weight of both"),
    (_exchanged, {}, ArgumentError,
     r"the model to train has 8 heads, and its teacher 6\. Give the"),
    (_with_one_kv_head, {}, ArgumentError,
     r"the model to train has 4 kv heads, and its teacher 2\. Give the"),
    (_frozen, {}, ArgumentError, "all weights of Bert.* are frozen"),
    (_of_another_vocabulary, {}, ShapeError,
     r"gives logits \(2, 3, 7\), the full one \(2, 3, 23\)"),
    (lambda: _pruned("GPT2"), {"rate": 1e30, "steps": 9}, ArgumentError,
     r"the loss of step \d+ is (nan|inf).*lower rate than 1e\+30"),
    (lambda: (_Strange(), _Strange()), {}, ArgumentError,
     "dict has neither logits nor a vector"),
])  # fmt: skip
def test_what_cannot_be_recovered(
    make: Callable[[], tuple[nn.Module, nn.Module]], options: dict[str, Any],
    kind: type[HeadwiseError], message: str,
) -> None:  # fmt: skip
    models = make()
    before = [fingerprint(model) for model in models]
    with pytest.raises(kind, match=message):
        recover(*models, **{"texts": [BATCH]} | options)
    assert [fingerprint(model) for model in models] == before


@pytest.mark.parametrize("make", [_exchanged, _with_one_kv_head])
def test_the_smaller_of_two_models_learns_from_the_other(
    make: Callable[[], tuple[nn.Module, nn.Module]],
) -> None:
    full, small = make()
    assert len(recover(small, full, [BATCH], steps=1)) == 1
