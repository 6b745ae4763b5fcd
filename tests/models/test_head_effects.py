"""Effects of heads: parts that sum to the difference of logits, in any model; planted heads."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from architectures import CASES
from tokenizers import Tokenizer
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, HeadError, InputError, UnsupportedError
from headwise.files import read_json, write_json
from headwise.head_effects import Removal
from headwise.head_effects._direct import Batch, DirectWay
from headwise.head_effects._evidence import kinds_of, sign_flips
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import fingerprint
from headwise.ownership import find_attentions
from planted_writers import ANSWER, KINDS, PlantedWriters, cued, discoveries, exchanged
from tiers import tiers

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 32, "vocab_size": 23, "max_position_embeddings": 40}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
_CAPPED = {"head_dim": 8, "sliding_window": 3, "final_logit_softcapping": 0.5}


def _of(name: str, **config: Any) -> nn.Module:
    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**config))
    return model


def _pruned() -> nn.Module:
    return hw.prune(zoo.make("Llama"), [(0, 1), (0, 2)])


# What is special about the way to the logits, or what else is added beside heads.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "final softcap, norms after attention": lambda: _of("Gemma3ForCausalLM", **_GROUPED | _CAPPED),
    "norms after attention alone": lambda: zoo.make("Olmo2"),
    "scaled logits and residuals": lambda: _of(
        "GraniteForCausalLM", **_GROUPED, logits_scaling=3.0, residual_multiplier=0.3
    ),
    "parallel blocks": lambda: zoo.make("GPTNeoX"),
    "parallel, with biases of the unembedding": lambda: zoo.make("Phi"),
    "tied weights, learned positions": lambda: zoo.make("GPT2"),
    "norms on the residual stream": lambda: _of(
        "OpenAIGPTLMHeadModel", n_embd=24, n_layer=2, n_head=4, n_positions=40, vocab_size=23
    ),
    "positions that are not learned": lambda: zoo.make("XGLMForCausalLM"),
    "experts": lambda: zoo.make("Qwen3Moe"),
    "experts and a shared one": lambda: CASES["Llama4ForCausalLM"].make()[0],
    "gated attention, a gate on the shared expert": lambda: CASES["Qwen3NextForCausalLM"].make()[0],
    "latent attention": lambda: zoo.make("DeepseekV3"),
    "sinks": lambda: zoo.make("GptOss"),
    "hybrid": lambda: CASES["FalconH1ForCausalLM"].make()[0],
    "convolutions between": lambda: CASES["Lfm2ForCausalLM"].make()[0],
    "state spaces and experts": lambda: CASES["JambaForCausalLM"].make()[0],
    "pruned": _pruned,
    "a vision tower beside": lambda: CASES["Qwen2VLForConditionalGeneration"].make()[0],
    "ours": lambda: MiniGPT(MiniGPTConfig(23, 40, 20, 4, 2, 2)),
}


def _made(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for weight in model.parameters():  # gains of one and biases of zeros prove nothing
        if weight.ndim == 1 and len(weight) in (20, 23, 24):
            nn.init.normal_(weight, mean=0.3, std=0.3)
    return model


def _examples(n: int, seed: int = 0) -> list[tuple[list[int], int, int | None]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(5, 23, rng.integers(3, 9)).tolist(), *rng.permutation(23)[:2])
        for _ in range(n)
    ]


def _differences(model: nn.Module, examples: Any) -> list[float]:
    """The difference of logits of each example, by a pass of its own."""
    found = []
    for ids, right, other in examples:
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids]))
        logits = getattr(output, "logits", output)[0, -1].double()
        found.append(float(logits[right] - (logits.mean() if other is None else logits[other])))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_everything_else_are_the_difference_of_logits(name: str) -> None:
    model, examples = _made(name), _examples(19)
    effects = hw.effects(model, examples, total=None)
    direct = effects.frame()["direct"]
    assert effects.difference == pytest.approx(np.mean(_differences(model, examples)), abs=1e-5)
    size = direct.abs().sum() + abs(effects.rest)
    assert direct.sum() + effects.rest == pytest.approx(effects.difference, abs=1e-4 * size)
    assert (direct.abs() > 1e-5 * size).all()


@torch.no_grad()
def _by_hand(model: Any, example: tuple[list[int], int, int], layer: int, head: int) -> float:
    """The direct effect of a head of a model of Gemma's kind, by its formulas."""
    ids, right, other = example
    held: dict[str, Tensor] = {}
    block = model.model.layers[layer]
    modules = {"heads": block.self_attn.o_proj, "after": block.post_attention_layernorm}
    modules |= {"last": model.model.norm, "unembedding": model.lm_head}
    hooks = [
        module.register_forward_hook(
            lambda m, args, out, name=name: held.update({name: args[0][0, -1], f"{name}.out": out})
        )
        for name, module in modules.items()
    ]
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    for hook in hooks:
        hook.remove()

    def gain(name: str) -> Tensor:
        rms = (held[name].square().mean() + model.config.rms_norm_eps).sqrt()
        return (1 + modules[name].weight) / rms

    width = block.self_attn.head_dim
    part = slice(head * width, (head + 1) * width)
    added = block.self_attn.o_proj.weight[:, part] @ held["heads"][part]
    capped = logits / held["unembedding.out"][0, -1]
    rows = model.lm_head.weight * capped[:, None]
    return float((rows[right] - rows[other]) @ (added * gain("after") * gain("last")))


def test_a_direct_effect_is_that_of_the_formulas_of_gemma() -> None:
    model = _of("Gemma2ForCausalLM", **_GROUPED | _CAPPED).eval()
    examples = _examples(3)
    frame = hw.effects(model, examples, total=None).frame()
    for name in ("L0.H1", "L1.H3"):
        head = hw.Head.parse(name)
        expected = np.mean([_by_hand(model, one, head.layer, head.head) for one in examples])
        actual = frame.set_index("name").loc[name, "direct"]
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_an_answer_may_be_compared_with_the_mean_of_all() -> None:
    model, examples = _made("sinks"), [(ids, right, None) for ids, right, _ in _examples(7)]
    effects = hw.effects(model, examples, total=None)
    assert effects.difference == pytest.approx(np.mean(_differences(model, examples)), abs=1e-5)


def test_an_example_that_comes_twice_counts_once() -> None:
    examples = _examples(20)
    once, twice = (hw.effects(_made("sinks"), x) for x in (examples, examples * 2))
    assert once.frame().equals(twice.frame())
    assert twice.notes[0] == (
        "of 20 distinct examples 10 chose directions, 10 were held out, as independent ones"
    )
    assert twice.notes[1] == "20 examples left out: the same as another one"
    assert "left out" not in str(once.notes)
    assert re.search(r"larger logit in (\d|10) of 10 examples", str(twice.notes))
    assert f"the difference is {twice.difference:+.2f} [" in str(twice.notes)


@pytest.mark.parametrize("mode", ["mean", "zero"])
def test_a_total_effect_is_what_ablation_takes_away(mode: Any) -> None:
    model, examples = zoo.make("Llama"), _examples(5)
    effects = hw.effects(model, examples, total=mode)
    batches = [{"input_ids": torch.tensor([ids])} for ids, _, _ in examples]
    before = np.mean(_differences(model, examples))
    for heads in (["L1.H2"], ["L0.H0", "L1.H3"]):
        reference = batches if mode == "mean" else None
        with hw.ablate(model, heads, mode=mode, reference=reference):
            after = np.mean(_differences(model, examples))
        removal = effects.remove(heads)
        assert (removal.before, removal.after) == pytest.approx((before, after), abs=1e-5)
    row = effects.frame().set_index("name").loc["L1.H2"]
    removal = effects.remove("L1.H2")
    assert row["total"] == pytest.approx(removal.before - removal.after, abs=1e-6)
    assert row["repair"] == pytest.approx(row["direct"] - row["total"], abs=1e-9)


def test_a_removal_is_a_change_in_the_same_examples() -> None:
    model, examples = PlantedWriters(), cued(40)
    effects = hw.effects(model, examples, total=None, seed=2)
    removal = effects.remove("L1.H3")
    before, after = removal.examples[["before", "after"]].to_numpy().T
    assert removal.change == pytest.approx((after - before).mean())
    error = (after - before).std(ddof=1) / len(before) ** 0.5
    width = removal.ci_high - removal.ci_low
    assert width == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert removal.ci_low > 0.1
    assert removal.p < 0.001
    known = [([*ids], right, other) for ids, right, other in examples]
    given = removal.examples[["tokens", "right", "other"]].itertuples(index=False, name=None)
    rows = [*given]
    assert all(row in known for row in rows)
    assert before.tolist() == pytest.approx(_differences(model, rows), abs=1e-5)
    assert 2 <= len(removal.controls) <= 4
    assert removal.controls == effects.remove("L1.H3").controls
    alone = [effects.remove((1, head), controls=0).change for head in range(5) if head != 3]
    assert all(min(abs(one - control) for one in alone) < 1e-9 for control in removal.controls)
    assert str(removal).endswith(
        f"over 20 examples, p = {removal.p:.2g} (too small for heads that these examples chose); "
        f"{len(removal.controls)} distinct random sets of the same layers change it by "
        f"{min(removal.controls):+.2f} to {max(removal.controls):+.2f}"
    )
    # As many heads of each layer, in whatever layers the heads are.
    sets: list[Any] = []
    drawn = replace(effects, _without=lambda heads: sets.append([*map(str, heads)]) or np.zeros(20))
    drawn.remove({0: [0, 1], 1: [4]}, controls=99)
    assert sets[:2] == [[], ["L0.H0", "L0.H1", "L1.H4"]]
    assert {*map(tuple, sets[2:])} == {
        (*pair, f"L1.H{head}")
        for pair in combinations(("L0.H2", "L0.H3", "L0.H4"), 2)
        for head in range(4)
    }
    most = effects.remove({0: range(3)})
    assert most.controls == ()
    assert str(most).endswith("; no random sets of the same layers were removed")
    nn.init.zeros_(model.layers[1].out_proj.weight.detach())
    nothing = effects.remove("L1.H0", controls=0)
    assert (nothing.change, nothing.p) == (0.0, 1.0)
    for none in ((), None):
        with pytest.raises(ArgumentError, match=r"remove: heads=\(\) names none of 10\."):
            effects.remove(none)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_a_saved_removal_loads_equal(ending: str, tmp_path: Path) -> None:
    effects = hw.effects(PlantedWriters(), cued(40), total=None, heads=["L1.H3"])
    for heads in ("L1.H3", {0: range(3)}):  # the latter without random sets
        removal = effects.remove(heads)
        loaded = Removal.load(removal.save(tmp_path / f"removal.{ending}"))
        pd.testing.assert_frame_equal(loaded.frame(), removal.frame(), check_dtype=False)
        assert str(loaded) == str(removal)
        assert (loaded.notes, loaded.controls) == (removal.notes, removal.controls)
    with pytest.raises(InputError, match=r"holds an effect of heads removed together \(Removal\)"):
        hw.HeadEffects.load(tmp_path / f"removal.{ending}")


@pytest.mark.parametrize(("change", "message"), [
    ({"removed": "L1.H3"}, "'L1.H3' is not a list"),
    ({"removed": ["\x1b[31m"]}, "names no head"),
    ({"rows": [{"tokens": [1.5], "right": 1, "other": -1}]}, "1.5 is not a whole number"),
    ({"rows": [{"tokens": [1], "right": None, "other": -1}]}, "None is not a whole number"),
    ({"rows": [{"tokens": [1], "right": 1, "other": 2.5}]}, "2.5 is not a whole number"),
])  # fmt: skip
def test_a_changed_removal_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    examples = pd.DataFrame({"tokens": [[1, 2]], "right": 3, "other": -1, "before": 1.0})
    removal = Removal(("L1.H3",), 1, 0, -1, -1, -1, 1, (), examples.assign(after=0.0))
    path = removal.save(tmp_path / "removal.json")
    write_json(read_json(path, "test", "") | change, path)
    with pytest.raises(InputError, match=rf"Removal\.load: .*damaged \(.*{message}"):
        Removal.load(path)


def test_addresses_of_saved_effects_are_those_of_the_names(tmp_path: Path) -> None:
    effects = hw.effects(PlantedWriters(), cued(40), total=None)
    path = effects.save(tmp_path / "effects.json")
    content = read_json(path, "test", "")
    for row in content["heads"]:
        del row["layer"]
        row |= {"stack": "decoder", "head": 7}
    write_json(content, path)
    columns = ["name", "stack", "layer", "head"]
    pd.testing.assert_frame_equal(
        hw.HeadEffects.load(path).rows[columns], effects.rows[columns], check_dtype=False
    )


@pytest.mark.full
def test_a_removal_without_a_direction_is_rarely_significant() -> None:
    model, examples, found = PlantedWriters(), cued(12), 0
    for seed in range(60):
        effects = hw.effects(model, exchanged(examples, seed), total=None)
        found += effects.remove(["L0.H1", "L1.H0"], controls=0).p < 0.05
    assert found / 60 <= 0.11  # .05, and two standard errors


@pytest.mark.parametrize("draws", tiers([2], [20], [200]))
def test_planted_writers_and_cancellers_are_found(draws: int) -> None:
    found = discoveries(draws)
    assert found["recall"] >= 0.9
    assert found["false"] <= 0.05
    assert found["alarms"] <= 0.05


def test_heads_named_beforehand_alone_are_tested() -> None:
    model, examples = PlantedWriters(), cued(40)
    every = hw.effects(model, examples)
    assert "p adjusted over 10 heads" in every.notes
    steps: list[tuple[int, int]] = []
    named = hw.effects(
        model, examples, heads=["L0.H0", "L1.H3"], on_progress=lambda *step: steps.append(step)
    )
    assert steps == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]  # four batches, two heads
    assert "p adjusted over 2 heads named beforehand" in named.notes
    before, after = (x.frame().set_index("name") for x in (every, named))
    assert after["kind"][after["kind"] != "not tested"].to_dict() == {
        "L0.H0": "none",
        "L1.H3": "canceller",
    }
    columns = ["direct", "ci_low", "ci_high", "answers", "weights"]
    assert after[columns].equals(before[columns])
    for column in ("p_adj", "total", "repair"):
        assert {*after.index[after[column].notna()]} == {"L0.H0", "L1.H3"}
    assert after["total"].equals(before["total"].where(after["p_adj"].notna()))
    assert (after["p_adj"] <= before["p_adj"])[["L0.H0", "L1.H3"]].all()
    # Heads that these examples chose, or chose among the named ones, have too small a p.
    for effects, heads, beforehand in (
        (named, ["L1.H3", "L0.H0"], True), (named, "L1.H3", False), (every, "L1.H3", False)
    ):  # fmt: skip
        removal = effects.remove(heads, controls=0)
        assert removal.beforehand == beforehand
        assert ("p = 0.00025 (heads named beforehand); " in str(removal)) == beforehand
        assert ("too small" in str(removal)) != beforehand
        said = "2 heads named beforehand" if beforehand else "1 head"
        assert removal.notes == (
            f"{said}: outputs replaced by mean, in 20 examples of 40 distinct ones",
            effects.notes[-1],
        )


@torch.no_grad()
def _patched(model: PlantedWriters, example: Any) -> list[float]:
    """What the difference loses without what each head adds, if only the last norm sees it."""
    ids, right, other = example
    heads: list[Tensor] = []
    last: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0][0, -1]))
        for module, kept in ((model.norm, last), *((x.out_proj, heads) for x in model.layers))
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()

    def of(x: Tensor) -> float:
        logits = model.unembedding(model.norm(x))
        return float(logits[right] - logits[other])

    weights = [layer.out_proj.weight.view(-1, 5, 7) for layer in model.layers]
    return [
        of(last[0]) - of(last[0] - weight[:, head] @ outputs.view(5, 7)[head])
        for weight, outputs in zip(weights, heads, strict=True)
        for head in range(5)
    ]


@pytest.mark.full
def test_a_clear_effect_has_the_sign_of_exact_direct_path_patching() -> None:
    same: list[bool] = []
    for seed in range(8):
        model, examples = PlantedWriters(seed), cued(16, seed)
        frame = hw.effects(model, examples, total=None).frame()
        exact = np.mean([_patched(model, example) for example in examples], 0)
        error = (frame["ci_high"] - frame["ci_low"]) / 3.92
        clear = (frame["direct"] / error).abs() > 4
        same += (np.sign(exact) == np.sign(frame["direct"]))[clear].tolist()
    assert len(same) >= 30
    assert np.mean(same) >= 0.98


def test_chance_is_what_permuted_weights_give() -> None:
    model, n = PlantedWriters(), 9
    examples = cued(n)
    ids = [text[:4] for text, _, _ in examples]
    batch = Batch({"input_ids": torch.tensor(ids)}, torch.full((n,), 3))
    first = Batch({"input_ids": torch.tensor(ids[:1])}, torch.tensor([3]))
    answers = torch.tensor([pair for _, *pair in examples])
    for weight in model.parameters():
        weight.requires_grad_(False)
    attentions = find_attentions(model, dict(first.inputs))
    written = DirectWay(model, attentions, first).written(batch, [answers])
    mean, deviation = written.by_chance(slice(None))
    projection = model.layers[0].out_proj.weight.view(-1, 5, 7)
    generator, effects = torch.Generator().manual_seed(0), []
    for _ in range(600):
        for head in range(5):
            order = torch.randperm(projection[:, head].numel(), generator=generator)
            projection[:, head] = projection[:, head].flatten()[order].view(-1, 7)
        effects.append(written.of_heads()[0].mean(0)[:5])
    error = deviation[:5] / 600**0.5
    assert (np.abs(np.mean(effects, 0) - mean[:5]) < 4 * error).all()
    assert np.std(effects, 0) == pytest.approx(deviation[:5], rel=0.15)


def test_sign_flips_give_the_share_of_all_flips() -> None:
    gains = np.random.default_rng(1).normal(0.5, 1.0, (9, 1))
    signs = 1.0 - 2 * np.array(np.meshgrid(*[[0, 1]] * 9)).reshape(9, -1).T
    exact = (signs @ gains >= gains.sum()).mean()
    assert sign_flips(gains, 0)[0] == pytest.approx(exact, abs=0.01)


def test_effects_without_a_direction_are_rarely_found() -> None:
    rng, found = np.random.default_rng(0), 0
    for seed in range(150):
        # The gains of heads depend on each other, and have long tails.
        direct = rng.standard_t(3, (40, 60)) + 0.5 * rng.standard_normal((40, 1))
        none = np.zeros(60), np.full(60, 1e-3)  # permuted weights are always beaten
        kinds = kinds_of(direct, np.zeros_like(direct), none, 20, seed)[1]
        found += any(kind != "none" for kind in kinds)
    assert found / 150 <= 0.09  # .05, and two standard errors


def test_the_smallest_effect_is_found_in_four_cases_of_five() -> None:
    rng, found = np.random.default_rng(0), [0, 0]
    for seed in range(120):
        noise = rng.standard_normal((60, 40))
        none = np.zeros(40), np.full(40, 1e-3)
        smallest = kinds_of(noise, np.zeros_like(noise), none, 30, seed)[2][0]
        for number, share in enumerate((1.0, 0.5)):
            direct = noise + share * smallest * (np.arange(40) == 0)
            kinds = kinds_of(direct, np.zeros_like(direct), none, 30, seed)[1]
            found[number] += kinds[0] == "writer"
    assert 0.7 <= found[0] / 120 <= 0.92
    assert found[1] / 120 <= 0.3
    too_few = rng.standard_normal((12, 40))
    assert np.isnan(kinds_of(too_few, np.zeros_like(too_few), none, 6, 0)[2]).all()


def test_texts_are_read_before_the_first_token_that_differs() -> None:
    from planted import IDS, TOKENIZER

    model = MiniGPT(MiniGPTConfig(len(IDS), 40, 20, 4, 2, 2)).eval()
    texts = [("w1 w2 ,", " w3", " w4"), ("w1", " w2 w5", " w2 w6"), ("w7 w8", " w9", None)]
    ids = [(TOKENIZER.encode(text).ids, right, other) for text, right, other in (
        ("w1 w2 ,", IDS["w3"], IDS["w4"]), ("w1 w2", IDS["w5"], IDS["w6"]),
        ("w7 w8", IDS["w9"], None))]  # fmt: skip
    by_text = hw.effects(model, texts, tokenizer=TOKENIZER, total=None)
    assert by_text.frame().equals(hw.effects(model, ids, total=None).frame())
    assert "without a space" not in str(by_text.notes)
    joined = [*texts, ("w1", "w2", " w3"), ("w1 ,", " w2", "w3"), ("w1 ", "w2", "w3")]
    notes = hw.effects(model, joined, tokenizer=TOKENIZER, total=None).notes
    assert notes[0].startswith("in 2 examples an answer follows the text without a space")


def test_effects_say_what_they_were_measured_on() -> None:
    model = PlantedWriters()
    first, other = (hw.effects(model, cued(24, seed), total=None, seed=3) for seed in range(2))
    assert (first.seed, first.model) == (3, fingerprint(model))
    assert {**first.examples} == {
        "examples": 24,
        "held_out": 12,
        "sha256": first.examples["sha256"],
    }
    assert first.examples["sha256"] != other.examples["sha256"]
    again = hw.effects(model, cued(24), total=None, seed=3)
    assert again.examples == first.examples
    facts = f"model {first.model}, examples {str(first.examples['sha256'])[:16]}, seed 3, headwise"
    assert first.notes[-1].startswith(facts)


def test_effects_are_saved_drawn_and_shown(tmp_path: Path) -> None:
    effects = hw.effects(PlantedWriters(), cued(40))
    assert str(effects).endswith("2 writers and 2 cancellers")
    assert effects.found()["kind"].tolist() == ["writer", "writer", "canceller", "canceller"]
    for ending in ("parquet", "csv", "json"):
        loaded = hw.HeadEffects.load(effects.save(tmp_path / f"effects.{ending}"))
        assert loaded.frame().equals(effects.frame())
        assert (repr(loaded), loaded.notes) == (repr(effects), effects.notes)
        measured_on = (loaded.examples, loaded.seed, loaded.model, loaded.versions)
        assert measured_on == (effects.examples, effects.seed, effects.model, effects.versions)
    changed = effects.save(tmp_path / "changed.json")
    changed.write_text(changed.read_text("utf-8").replace('"canceller"', '"eraser"'), "utf-8")
    with pytest.raises(InputError, match=r"10 rows of the kinds \['eraser', 'none', 'writer'\]"):
        hw.HeadEffects.load(changed)
    with pytest.raises(ArgumentError, match="effects of 10 heads were loaded from a file"):
        loaded.remove("L0.H1")
    names = {text.get_text() for text in effects.plot().texts}
    assert names == set(KINDS)
    assert "<img" in effects._repr_html_()
    random = hw.effects(PlantedWriters(), exchanged(cued(24)), total=None)
    for shown, words in (
        (
            random,
            r"; these examples show effects from about 0\.\d+ on in half of the heads, from \d",
        ),
        (
            replace(random, rows=random.rows.assign(smallest=np.nan)),
            "so few examples show no effect",
        ),
    ):
        assert re.search(f"0 writers and 0 cancellers.*{words}", str(shown))
        assert str(hw.HeadEffects.load(shown.save(tmp_path / "random.json"))) == str(shown)
    alone = hw.effects(PlantedWriters(), cued(40), total=None)
    assert str(alone).endswith(
        "2 writers and 2 cancellers; direct effects alone, total effects were not measured"
    )
    drawn = alone.plot()
    assert "direct effect" in [ax.get_ylabel() for ax in drawn.figure.axes]
    marked = {
        f"L{layer}.H{head}": str(line.get_label()).partition(",")[0]
        for line in drawn.lines
        if line.get_marker() in ("^", "v")
        for head, layer in line.get_xydata().astype(int).tolist()
    }
    assert marked == KINDS


NOT_TESTED = {
    "8 distinct examples, 20 needed": cued(8) * 5,
    "all examples have the same answers, which a head may write whatever the text": [
        (ids, ANSWER, ANSWER + 1) for ids, _, _ in cued(40)
    ],
}


@pytest.mark.parametrize("why", NOT_TESTED)
def test_effects_that_no_null_could_refuse_are_not_tested(tmp_path: Path, why: str) -> None:
    effects = hw.effects(PlantedWriters(), NOT_TESTED[why])
    assert f": not tested: {why}" in str(effects)
    assert set(effects.frame()["kind"]) == {"not tested"}
    assert effects.frame()[["answers", "p_adj"]].isna().all(axis=None)
    assert effects.found().empty
    for of_plot in (effects, replace(effects, rows=effects.rows.assign(total=np.nan))):
        drawn = of_plot.plot()
        assert [line.get_text() for line in drawn.get_legend().get_texts()] == ["not tested, 10"]
        assert not drawn.texts
    assert str(hw.HeadEffects.load(effects.save(tmp_path / "effects.csv"))) == str(effects)


ONE = ([5, 6], 7, 8)
WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no examples": ([], {}, ArgumentError, "0 examples"),
    "no list": ("text", {}, ArgumentError, "examples is 'text', a str"),
    "two parts": ([ONE, ([5], 6)], {}, ArgumentError, r"examples\[1\] is \(\[5\], 6\)"),
    "mixed": ([([5], 6, " b")], {}, ArgumentError, "the answers 6 and ' b'"),
    "below 0": ([([5], -6, 7)], {}, ArgumentError, r"is \(\[5\], -6, 7\)"),
    "beyond": ([([5], 6, 99)], {}, ArgumentError, r"0\] has the token id 99, and the model has 23"),
    "text beyond": ([([5, 23], 6, 7)], {}, ArgumentError, "has the token id 23, and the model has"),
    "no tokenizer": ([("a", " b", " c")], {}, ArgumentError, r"examples\[0\] is a text"),
    "same": ([([5], 6, 6)], {}, InputError, r"examples\[0\] has token 6 as both answers"),
    "no heads": ([ONE], {"heads": []}, ArgumentError, r"heads=\[\] names none of 8"),
    "no head": ([ONE], {"heads": "L7.H0"}, HeadError, r"no head L7\.H0"),
    "total": ([ONE], {"total": "median"}, ArgumentError, "total='median'"),
    "long": ([([5] * 41, 6, 7)], {}, InputError, "has 41 tokens, and MiniGPT reads 40"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    examples, options, error, words = WRONG[name]
    with pytest.raises(error, match=f"(effects|heads): .*{words}"):
        hw.effects(_made("ours"), examples, **options)


def test_logits_that_are_not_numbers_are_refused() -> None:
    model = _made("ours")
    nn.init.constant_(model.head.weight[7].detach(), float("nan"))
    with pytest.raises(ArgumentError, match="effects: MiniGPT has logits that are NaN"):
        hw.effects(model, [ONE])


def test_answers_that_do_not_differ_are_refused() -> None:
    from planted import IDS, TOKENIZER

    model = MiniGPT(MiniGPTConfig(len(IDS), 40, 20, 4, 2, 2))
    with pytest.raises(InputError, match="' w2' and ' w2 w3' after 'w1' do not differ"):
        hw.effects(model, [("w1", " w2", " w2 w3")], tokenizer=TOKENIZER)
    bare = Tokenizer.from_str(TOKENIZER.to_str())
    bare.post_processor = None  # no special token before the text
    with pytest.raises(InputError, match=r"examples\[0\] has an empty text\. Give"):
        hw.effects(model, [("", " w2", " w3")], tokenizer=bare)


class _Squared(nn.Module):
    """A model that changes what is added to its residual stream, or its logits."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = _made("ours"), where
        if where == "residual":
            self.inner.norm = nn.Sequential(_Square(), self.inner.norm)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.inner(input_ids)
        return logits - 5 if self.where == "logits" else logits[:, 0]


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def _t5() -> nn.Module:
    sizes = {"d_model": 24, "num_layers": 1, "num_heads": 4, "d_kv": 6, "vocab_size": 23}
    return _of("T5ForConditionalGeneration", **sizes)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two texts": (_t5, "T5ForConditionalGeneration reads two texts"),
    "a layer after the norm": (
        lambda: _of("BertLMHeadModel", **_SIZES, is_decoder=True),
        "what bert.encoder.layer.0.attention.self adds does not reach the logits of Bert",
    ),
    "shifted logits": (lambda: _Squared("logits"), "_Squared adds to its logits after"),
    "one logit": (lambda: _Squared("first"), r"logits \(1, 23\), for inputs \(1, "),
    "images": (
        lambda: CASES["BlipForConditionalGeneration"].make()[0],
        "BlipForConditionalGeneration reads pixel_values beside text, and does not run on text",
    ),
    "codebooks": (
        lambda: CASES["MusicgenForCausalLM"].make()[0],
        "MusicgenForCausalLM reads 2 codebooks, not text",
    ),
    "no logits": (lambda: zoo.make("Bert"), "BaseModelOutput.*, no logits, for inputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_exact_direct_effects_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=f"(effects|heads): .*{words}"):
        hw.effects(make().eval(), [ONE, ([5, 6, 7], 7, 8)])


def test_a_residual_stream_that_is_squared_is_refused() -> None:
    model = _made("ours")
    model.norm = nn.Sequential(_Square(), model.norm)
    with pytest.raises(
        UnsupportedError, match=r"MiniGPT add does not sum to its logits: [\d.]+ of"
    ):
        hw.effects(model, [ONE])
