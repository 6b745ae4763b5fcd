"""`headwise cache`, from the weights of a tiny model to a plan."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

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
    text, out = tmp_path / "a.txt", tmp_path / "plan.json"
    text.write_text(TEXT, "utf-8")
    done = headwise("cache", folder, "--text", text, "--window", 5, "-o", out, "--json")
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


def test_without_a_text_spans_that_occur_twice_are_read(folder: Path) -> None:
    done = headwise(
        "cache", folder, "--window", 4, "--max-texts", 2, "--max-tokens", 40, "--bytes", 10_000
    )
    assert done.code == 0, done.err
    assert "bytes=10000 by half-gate of the loss lm" in done.err
    assert "L1.KV1" in done.out


def test_a_plan_runs_beside_the_full_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.caching._compare._PART", 3)  # of the 4 tokens in the second half
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    plan = hw.cache_plan(model, full={0: [1]}, sinks=1, window=3)
    plan.save(tmp_path / "plan.json")
    text = " ".join(TEXT.split()[:37])
    (tmp_path / "prompt.txt").write_text(text.replace(" ", "\n\n", 3), "utf-8")
    done = headwise(
        "cache", folder, "--plan", tmp_path / "plan.json", "--prompt", tmp_path / "prompt.txt",
        "--max-tokens", 8,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "1 of 4 kv heads keeps all tokens" in done.err
    header, *rows = done.out.splitlines()
    assert header.split() == ["loss", "bytes", "tokens_per_second"]
    ids = torch.tensor([tokenizer(text)["input_ids"][:8]])
    full = hw.cache_plan(model, full={0: [0, 1], 1: [0, 1]})
    stock = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, cache=stock)
    held = [sum(x.keys.nbytes + x.values.nbytes for x in stock.layers), plan.nbytes(8)]
    names = ("full cache", "this plan")
    for row, name, cached, kept in zip(rows, names, (full, plan), held, strict=True):
        loss, nbytes, speed = row.removeprefix(name).split()
        with torch.no_grad(), cached.cache(model) as cache:
            logits = [model(input_ids=half, cache=cache).logits for half in ids.split(4, dim=1)]
        assert int(nbytes.replace(",", "")) == kept
        expected = F.cross_entropy(torch.cat(logits, 1)[0, 3:-1], ids[0, 4:])
        assert float(loss) == pytest.approx(float(expected), abs=6e-3)
        assert float(speed) > 0
