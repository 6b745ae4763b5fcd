"""Costs known from papers or computed by hand, and how the command prints them."""

import json
from pathlib import Path

import pytest

from command import headwise
from headwise.counts import PRESETS, ModelSizes, count, layer_sizes, read_config


def test_bert_base():
    bert = PRESETS["bert-base"]
    weights = bert.layer.weights()
    assert weights == dict.fromkeys("QKVO", 768**2)
    assert sum(weights.values()) == 2_359_296
    assert bert.n_layers * sum(weights.values()) == 28_311_552
    assert bert.parameters() == 28_311_552 + 12 * 4 * 768
    assert count(bert, 1)["model"]["share"] == pytest.approx(0.259, abs=0.0005)


def test_single_and_multi_head_by_the_textbook():
    d = 512  # Vaswani et al. 2017
    assert sum(layer_sizes(d, 1, out_proj=False).parameters().values()) == 3 * d**2
    assert sum(layer_sizes(d, 8).parameters().values()) == 4 * d**2
    assert sum(layer_sizes(d, 8, biases="QKVO").parameters().values()) == 4 * d**2 + 4 * d
    assert layer_sizes(d, 8).bias_weights() == dict.fromkeys("QKVO", 0)


def test_heads_of_any_width_and_shared_keys():
    sizes = layer_sizes(10, 6, 2, head_dim=7, biases="QV")
    assert sizes.weights() == {"Q": 10 * 42, "K": 10 * 14, "V": 10 * 14, "O": 42 * 10}
    assert sizes.bias_weights() == {"Q": 42, "K": 0, "V": 14, "O": 0}
    assert sizes.multiply_adds(5, 17) == {
        "Q": 5 * 420, "K": 17 * 140, "V": 17 * 140, "O": 5 * 420,
        "logits": 6 * 5 * 17 * 7, "mix": 6 * 5 * 17 * 7,
    }  # fmt: skip
    assert sizes.cache_bytes("float32") == 4 * 2 * (7 + 7)


def test_the_caches_of_llama():
    # 2 (keys, values) x 32 layers x 4096 x 2 bytes: half a MiB a token.
    assert PRESETS["llama-7b"].cache_bytes() == 512 * 1024
    # Ten times the parameters but a smaller cache: 8 key/value heads instead of 64.
    assert PRESETS["llama-2-70b"].cache_bytes() == 320 * 1024
    assert PRESETS["mistral-7b"].cache_bytes("float32") == 2 * 32 * 8 * 128 * 4


def test_a_model_of_text_and_images_is_counted_by_its_text(tmp_path: Path):
    inner = {"model_type": "llama", "hidden_size": 6, "num_attention_heads": 2,
             "num_hidden_layers": 5}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": inner}), "utf-8")
    read = read_config(path)
    assert (read.parameters(), read.source) == (5 * 4 * 36, f"{path}, its text_config alone")
    assert f"Sizes: {path}, its text_config alone\n" in headwise("count", tmp_path).out


def test_falcon_shares_one_key_head_unless_it_is_of_the_later_kind(tmp_path: Path):
    held = {"model_type": "falcon", "hidden_size": 12, "num_attention_heads": 6,
            "num_hidden_layers": 1, "num_kv_heads": 3, "multi_query": True}  # fmt: skip
    path = tmp_path / "config.json"
    for later, n_kv_heads in ((False, 1), (True, 3)):
        path.write_text(json.dumps(held | {"new_decoder_architecture": later}), "utf-8")
        assert read_config(path).layer.n_kv_heads == n_kv_heads


# The command.


def test_the_command_prints_what_is_counted():
    out = headwise("count", "bert-base", "--tokens", 512).out
    assert "bert-base: layers 12, d_model 768, heads 12, each of width 64\n" in out
    assert "2,359,296    3,072     28,311,552        36,864" in out
    assert "28,348,416 parameters together, 25.9% of the model's 109,482,240." in out
    assert f"{2 * 512**2 * 768 // 2:,}" in out  # logits of a layer
    assert "An encoder reads all tokens at once: there is no cache." in out
    assert "bytes" not in out
    out = headwise("count", "gpt2", "--tokens", 512).out
    assert "3,072 bytes per token and layer, 36,864 per token, 18,874,368 in all." in out


def test_no_number_is_cut_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch):
    wide = headwise("count", "llama-2-70b", "--tokens", 100_000).out
    monkeypatch.setenv("COLUMNS", "40")
    assert headwise("count", "llama-2-70b", "--tokens", 100_000).out == wide
    assert "…" not in wide
    assert max(map(len, wide.splitlines())) < 120


def test_a_layer_is_counted_without_a_model():
    out = headwise("count", "--d-model", 512, "--heads", 8, "--no-out-proj").out
    assert out.startswith("layers 1, d_model 512, heads 8, each of width 64\n")
    assert "786,432 parameters together.\n" in out
    assert "\n  O " not in out
    assert " x 1" not in out


def test_every_option_equals_its_python_argument():
    options = {"d-model": 10, "heads": 6, "kv-heads": 2, "head-dim": 7, "biases": "QV", "layers": 3,
               "tokens": 5, "keys": 17, "cached": 11, "dtype": "float32"}  # fmt: skip
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    sizes = layer_sizes(10, 6, 2, head_dim=7, biases="QV")
    counted = count(ModelSizes("", sizes, 3), 5, 17, cached=11, dtype="float32")
    assert json.loads(headwise("count", *arguments, "--json").out) == counted


def test_json_is_what_python_counts():
    facts = json.loads(headwise("count", "mistral-7b", "--tokens", 3, "--cached", 5, "--json").out)
    model = PRESETS["mistral-7b"]
    assert facts["layer"]["multiply_adds"] == model.layer.multiply_adds(3, cached=5)
    assert facts["layer"]["weights"] == model.layer.weights()
    assert facts["model"]["parameters"] == model.parameters()
    assert facts["model"]["flops"] == 2 * 32 * sum(
        model.layer.multiply_adds(3, 8, cached=5).values()
    )
    assert facts["text"] == {"queries": 3, "keys": 8, "cached": 5, "cache_bytes": 8 * 131_072}


def test_json_of_a_layer_has_no_share():
    facts = json.loads(headwise("count", "--d-model", 6, "--heads", 2, "--json").out)
    assert facts["model"]["share"] is None
    assert facts["model"]["all_parameters"] is None


def test_without_a_model_the_known_ones_are_listed():
    out = headwise("count").out
    assert all(f"\n  {name} " in out for name in PRESETS)
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])
    listed = json.loads(headwise("count", "--json").out)
    assert [facts["name"] for facts in listed] == list(PRESETS)


def test_a_file_and_its_folder_are_the_same(tmp_path: Path):
    held = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3}
    (tmp_path / "config.json").write_text(json.dumps(held), "utf-8")
    out = headwise("count", tmp_path).out
    assert out == headwise("count", tmp_path / "config.json").out
    assert out.startswith(f"{tmp_path.name}: layers 3, d_model 8")
    assert f"Sizes: {tmp_path / 'config.json'}\n" in out


@pytest.mark.parametrize("arguments", [[], ["gpt2"]])
def test_a_terminal_without_unicode_gets_what_it_can_show(arguments: list[str]):
    done = headwise("count", *arguments, encoding="ascii")
    assert (done.code, done.err) == (0, "")
    assert "gpt2" in done.out
