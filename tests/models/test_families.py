"""What works on each family of models, as docs/models.md says, and each step by its law."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from architectures.trial import answer_in_this_process
from families import FAMILIES, VOCABULARY, make_family
from test_head_cache import plan_of, visible_by_definition
from torch import Tensor, nn

import headwise as hw
from headwise.checkpoints import _save
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.ownership import Attention, find_attentions
from tiers import tiers

pytestmark = pytest.mark.usefixtures("fresh")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Reasons of the page, by number: a part of the message.
REASONS = (
    "depend on one another, as under a norm over all of them",
    "makes the keys of all heads from what it caches",
    "an indexer chooses the keys of all heads",
    "it holds entries shared by all heads",
    "takes no other cache than its own",
    "depends on the number of heads",
    "which share the columns of its weight",
)
SINKS = 1


def _ids() -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (2, 17), generator=rng)


def _removed(table: hw.HeadTable) -> list[hw.Head]:
    """The query heads of the first kv head of each layer, or half of the heads."""
    rows = zip(table.heads, table.kv_heads, strict=True)
    grouped = table.kv_heads.max() > 0
    return [head for head, kv in rows if (kv == 0 if grouped else head.head < 2)]


def _observe(model: nn.Module, ids: Tensor) -> hw.HeadTable:
    plain = model(ids).logits
    with hw.observe(model) as watch:
        assert torch.equal(model(ids).logits, plain)
    return watch.table()


def _attentions(model: nn.Module, ids: Tensor) -> None:
    ours = hw.attentions(model, {"input_ids": ids})
    model.set_attn_implementation("eager")
    theirs = model(ids, output_attentions=True).attentions
    # Those of linear layers are of other shapes.
    theirs = [x for x in theirs if x is not None and x.shape[-2] == ids.shape[1]]
    for weights, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weights, expected[..., : weights.shape[-1]], rtol=0, atol=1e-5)


def _ablate(model: nn.Module, ids: Tensor) -> None:
    plain, heads = model(ids).logits, _removed(_observe(model, ids))
    with hw.ablate(model, heads):
        assert not torch.equal(model(ids).logits, plain)
    assert torch.equal(model(ids).logits, plain)


def _importance(model: nn.Module, ids: Tensor) -> None:
    scores = hw.importance(model, [{"input_ids": ids, "labels": ids}])
    assert np.isfinite(scores.importance).all()
    assert (scores.importance != 0).any()


def _prune(model: nn.Module, ids: Tensor) -> nn.Module:
    heads = _removed(_observe(model, ids))
    assert torch.equal(hw.prune(model, [])(ids).logits, model(ids).logits)
    with hw.ablate(model, heads):
        ablated = model(ids).logits
    small = hw.prune(model, heads)
    torch.testing.assert_close(small(ids).logits, ablated, rtol=0, atol=1e-5)
    return small


def _save_and_load(model: nn.Module, ids: Tensor, folder: Path) -> None:
    small = hw.prune(model, _removed(_observe(model, ids)))
    with mock.patch.object(_save, "answer_in_fresh_process", answer_in_this_process):
        hw.save(small, folder / "small")
    assert torch.equal(hw.load(folder / "small")(ids).logits, small(ids).logits)


@contextmanager
def _masked(
    model: nn.Module, attentions: Sequence[Attention], windows: Sequence[Sequence[int | None]]
) -> Iterator[None]:
    """The model with eager attention, whose masks also hide what each kv head drops."""
    model.set_attn_implementation("eager")
    own = [attention.site for attention in attentions if attention.lender is None]
    hooks = []
    for attention in attentions:
        site, layer = attention.site, windows[own.index(attention.lender or attention.site)]

        def hide(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            H: int = site.n_heads,
            layer: Sequence[int | None] = layer,
        ) -> Any:
            mask = kwargs["attention_mask"]
            by_kind = mask if isinstance(mask, dict) else {"attention": mask}
            kind, causal = next((k, x) for k, x in by_kind.items() if x is not None and x.ndim == 4)
            real = torch.ones(len(causal), causal.shape[-1], dtype=torch.long)
            visible = visible_by_definition(layer, H // len(layer), real, SINKS)
            lowest = torch.finfo(causal.dtype).min
            causal = causal.expand(-1, H, -1, -1).masked_fill(~visible, lowest)
            whole = by_kind | {kind: causal} if isinstance(mask, dict) else causal
            return args, kwargs | {"attention_mask": whole}

        hooks.append(attention.module.register_forward_pre_hook(hide, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cache_plan(model: nn.Module, ids: Tensor) -> None:
    plan = hw.cache_plan(model, [{"input_ids": ids}], keep=0.5, sinks=SINKS, window=4)
    assert plan.measured["loss of this cache"] > 0
    windows = [
        [(None, 5, 3)[(layer.layer + head) % 3] for head in range(len(layer.windows))]
        for layer in plan.layers
    ]
    with plan_of(windows, SINKS).cache(model) as cache:
        pieces = [model(piece, cache=cache).logits for piece in ids.split([9, *[1] * 8], 1)]
    attentions = find_attentions(model, {"input_ids": ids})
    with _masked(model, attentions, windows):
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-4)


def _our_kernel(model: nn.Module, ids: Tensor) -> None:
    hw.register_attention()
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("headwise")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


def _works(step: Callable[[], Any]) -> str:
    """A tick, or the number of the reason."""
    try:
        step()
    except HeadwiseError as error:
        numbers = [number for number, part in enumerate(REASONS, 1) if part in str(error)]
        return " ".join(map(str, numbers)) or str(error)
    return "✓"


def _page() -> Mapping[str, list[str]]:
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {name: results for name, *results in rows if name in FAMILIES}


def test_the_page_has_every_family_and_reason() -> None:
    assert _page().keys() == FAMILIES.keys()
    listed = re.findall(r"^(\d+)\. ", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [*map(int, listed)] == [*range(1, len(REASONS) + 1)]


# Each reason of the page, and of what works everywhere: a linear recurrence, convolutions, states,
# sinks, and keys that layers share.
SAMPLE = (
    "OLMo-Hybrid", "DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4", "MiniMax", "ZAYA",
    "Qwen3.5", "LFM2", "Jamba", "gpt-oss", "Gemma 4, shared keys",
)  # fmt: skip


@pytest.mark.parametrize("name", tiers([], SAMPLE, FAMILIES))
def test_the_page_is_true(name: str, tmp_path: Path) -> None:
    ids = _ids()
    steps: dict[str, Callable[[nn.Module], Any]] = {
        "observe": lambda model: _observe(model, ids),
        "attentions": lambda model: _attentions(model, ids),
        "ablate": lambda model: _ablate(model, ids),
        "importance": lambda model: _importance(model, ids),
        "prune": lambda model: _prune(model, ids),
        "save": lambda model: _save_and_load(model, ids, tmp_path),
        "cache plan": lambda model: _cache_plan(model, ids),
        "our kernel": lambda model: _our_kernel(model, ids),
    }
    results = {}
    for step, function in steps.items():
        model = make_family(name)
        with torch.enable_grad() if step == "importance" else torch.no_grad():
            results[step] = _works(lambda function=function, model=model: function(model))
    assert results == dict(zip(steps, _page()[name], strict=True))


@pytest.mark.full
@torch.no_grad()
def test_heads_are_cut_with_their_gates() -> None:
    model = make_family("Qwen3.5")
    small = _prune(model, _ids())
    before, after = (each.model.layers[1].self_attn.q_proj.weight for each in (model, small))
    assert (len(before), len(after)) == (4 * 2 * 8, 2 * 2 * 8)  # queries and gates, head by head


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3-Next", "LFM2"])
def test_a_gate_is_a_statistic(name: str) -> None:
    model, ids, gates = make_family(name), _ids(), list[np.ndarray]()

    def collect(module: nn.Module, _: Any, out: Tensor) -> None:
        gate = out.unflatten(-1, (4, 2, -1)).sigmoid()[..., 1, :]
        gates.append(gate.mean((0, 1, 3)).numpy())

    for module_name, module in model.named_modules():
        if name == "Qwen3-Next" and module_name.endswith("q_proj"):  # which interleaves both
            module.register_forward_hook(collect)
    with hw.observe(model, hw.Request(statistics=("gate", "output_norm"))) as watch:
        model(ids)
    table = watch.table()
    expected = np.concatenate(gates) if gates else np.full(len(table.heads), np.nan)
    np.testing.assert_allclose(table.mean("gate"), expected, rtol=0, atol=1e-5)
    assert np.isfinite(table.mean("output_norm")).all()


@pytest.mark.full
@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Falcon-H1", "Gemma 4, shared keys"])
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_full_heads_generate_what_the_cache_of_transformers_does(name: str, how: str) -> None:
    model, ids = make_family(name), _ids()
    plan = hw.cache_plan(model, full={}, window=3)
    full = plan_of([[None] * len(layer.windows) for layer in plan.layers], SINKS)
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    more |= {"num_beams": 3} if how == "beams" else {}
    with full.cache(model) as cache:
        ours = model.generate(ids, cache=cache, **more)
        assert cache.nbytes > 0
    assert torch.equal(ours, model.generate(ids, **more))


@pytest.mark.full
def test_assisted_generation_takes_tokens_back_or_is_refused() -> None:
    ids, more = _ids()[:1], {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for name in ("LFM2", "Qwen3.5"):
        model, assistant = make_family(name), make_family(name)
        expected = model.generate(ids, **more)
        with plan_of([[None, None]] * 2, SINKS).cache(model) as cache:
            if name == "LFM2":
                ours = model.generate(ids, cache=cache, assistant_model=assistant, **more)
                assert torch.equal(ours, expected)
                continue
            with pytest.raises(ValueError, match="stateful models, such as Qwen3_5ForCausalLM"):
                model.generate(ids, cache=cache, assistant_model=assistant, **more)


def test_tokens_are_taken_back_from_states_of_convolutions_alone() -> None:
    ids = _ids()
    conv, recurrent = make_family("LFM2"), make_family("Qwen3.5")
    windows = [[None, 5], [3, None]]
    with plan_of(windows).cache(conv) as cache, torch.no_grad():
        cache.activate_past_recording()
        whole = [conv(piece, cache=cache).logits for piece in ids.split([9, 4, 4], 1)][-1]
        cache.crop(-4)
        torch.testing.assert_close(conv(ids[:, -4:], cache=cache).logits, whole)
    with plan_of(windows).cache(recurrent) as cache, torch.no_grad():
        recurrent(ids, cache=cache)
        with pytest.raises(UnsupportedError, match=r"crop\(-4\), but layer 0 of the model keeps"):
            cache.crop(-4)
