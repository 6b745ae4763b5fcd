"""`headwise group` writes what the library gives, and stock transformers loads it."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import headwise as hw
from command import headwise
from folders import write_llama

WORDS = ("<pad>", "<s>", "</s>", "I", "you", "he", "work", "works", "they")
TEXT = (
    "I work you work he works\nyou work they work he works\n"
    "they work he works I work\nhe works you work I work\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a text."""
    place = tmp_path_factory.mktemp("group")
    (place / "some.txt").write_text(TEXT, "utf-8")
    write_llama(
        place / "model", WORDS, hidden_size=24, num_attention_heads=4, num_key_value_heads=4
    )
    return place


def _group(place: Path, out: str, *more: object) -> tuple[int, str, str]:
    done = headwise("group", place / "model", "--kv-heads", 2, "-o", place / out, *more)
    return done.code, done.out, done.err


@pytest.mark.full
def test_the_command_groups_like_the_library(place: Path) -> None:
    method = "grouped"
    (place / method).mkdir()
    (place / method / "old").write_text("old")
    (place / method / "config.json").touch()
    code, out, err = _group(place, method, "--force")
    assert code == 0, err
    assert not (place / method / "old").exists()
    model, ids = hw.load(place / "model"), torch.tensor([[3, 4, 5, 4]])
    stock = transformers.AutoModelForCausalLM.from_pretrained(place / method)
    layers: list[hw.surgery.GroupedLayer] = []
    small = hw.group_heads(model, 2, on_layer=layers.append)
    with torch.no_grad():
        assert torch.equal(stock(input_ids=ids).logits, small(input_ids=ids).logits)
    assert not (place / method / "headwise.json").exists()
    assert [line for line in err.splitlines() if "self_attn" in line] == [*map(str, layers)]
    assert "model.layers.1.self_attn: kv heads 0" in err
    assert "cache_bytes of heads: 384 before, 192 after (-50.0%)" in out
    # 2 of 4 kv heads are removed in each of 2 layers: 6 keys and 6 values of 24 weights.
    weights = sum(x.numel() for x in model.parameters())
    assert f"parameters: {weights:,} before, {weights - 2 * 2 * 12 * 24:,} after" in out
    assert f"The grouped model is in {place / method}" in out


def _loss(model: torch.nn.Module, texts: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return sum(float(model(input_ids=x, labels=x).loss) for x in texts) / len(texts)


@pytest.mark.full
def test_a_text_is_the_reference_for_grouping(place: Path) -> None:
    code, out, err = _group(place, "fitted", "--text", place / "some.txt", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [layer["name"] for layer in result["layers"]] == [
        f"model.layers.{layer_index}.self_attn" for layer_index in (0, 1)
    ]
    assert result["costs"]["cache_bytes of heads"] == [384, 192]
    model, tokenizer = hw.load(place / "model"), hw.load_tokenizer(place / "fitted")
    reference = [dict(tokenizer(line, return_tensors="pt")) for line in TEXT.splitlines()[::2]]
    reference = [{"input_ids": batch["input_ids"]} for batch in reference]
    held_out = [tokenizer(x, return_tensors="pt")["input_ids"] for x in TEXT.splitlines()[1::2]]
    losses = [_loss(each, held_out) for each in (model, hw.load(place / "fitted"))]
    assert result["quality"]["nats per predicted token, mean over texts"] == pytest.approx(
        losses, rel=1e-4
    )
    small, loaded = hw.group_heads(model, 2, reference=reference), hw.load(place / "fitted")
    with torch.no_grad():
        expected = small(**reference[0]).logits
        torch.testing.assert_close(loaded(**reference[0]).logits, expected, rtol=1e-4, atol=1e-5)
