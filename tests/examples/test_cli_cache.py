"""`headwise cache`, from the weights of a tiny model to a plan and a pattern of DuoAttention."""

import json
from pathlib import Path

import numpy as np
import pytest

import headwise as hw
from command import headwise
from folders import write_llama

WORDS = ("<pad>", "<s>", "</s>", *"abcdefghijklmnop")
TEXT = "\n".join(" ".join(WORDS[3 + (i * j) % 16] for i in range(30)) for j in (3, 5, 7)) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, WORDS, hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    return folder


def test_the_plan_equals_that_of_the_library(folder: Path, tmp_path: Path) -> None:
    text, out, pattern = tmp_path / "a.txt", tmp_path / "plan.json", tmp_path / "pattern"
    text.write_text(TEXT, "utf-8")
    done = headwise(
        "cache", folder, "--text", text, "--keep", 0.5, "--window", 5, "-o", out,
        "--duo-attention", pattern, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    plan = hw.CachePlan.load(out)
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    expected = hw.cache_plan(model, TEXT.splitlines(), tokenizer=tokenizer, keep=0.5, window=5)
    assert plan.windows == expected.windows
    assert plan.measured == pytest.approx(expected.measured)
    assert "2 of 4 kv heads keep all tokens, the others 4 first and 5 last ones" in done.err
    assert f"loss of this cache: {plan.measured['loss of this cache']:.4g}" in done.err
    kept = plan.nbytes(1024)
    assert f"cache of 1,024 tokens: {1024 * 4 * 32:,} bytes before, {kept:,} after" in done.err
    assert [row["name"] for row in json.loads(done.out)] == plan.frame()["name"].tolist()
    for keep in (None, 0.5):
        other = hw.load_duo_attention(pattern, keep)
        assert (other.windows, other.sinks) == (plan.windows, plan.sinks)
    table = np.loadtxt(pattern / "full_attention_heads.tsv", delimiter="\t")
    is_full = np.array([[w is None for w in layer] for layer in plan.windows.values()])
    np.testing.assert_array_equal(table >= 0.5, is_full)
    settings = json.loads((pattern / "config.json").read_text("utf-8"))
    assert settings == {"sink_size": 4, "recent_size": 5}


def test_without_a_text_spans_that_occur_twice_are_read(folder: Path) -> None:
    done = headwise(
        "cache", folder, "--window", 4, "--max-texts", 2, "--max-tokens", 40, "--bytes", 10_000
    )
    assert done.code == 0, done.err
    assert "bytes=10000 by half-gate of the loss lm" in done.err
    assert "L1.KV1" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "5,x"], "Invalid value for '--window': '5,x'"),
        (["--keep", 0.5, "--loss", 1], "--keep and --loss are both given"),
        (["-o", "plan.txt"], "plan.txt does not end in .json"),
    ],
)
def test_bad_options(folder: Path, arguments: list[object], message: str) -> None:
    done = headwise("cache", folder, "--max-texts", 1, "--max-tokens", 40, *arguments)
    assert done.code == 2
    assert message in done.err
