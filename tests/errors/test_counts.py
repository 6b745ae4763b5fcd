"""What `headwise count` refuses: sizes that do not fit together, and files without them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from command import headwise
from headwise import prune, save
from headwise.counts import layer_sizes, read_config
from headwise.errors import ArgumentError, HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig

GOOD = {
    "model_type": "bert",
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
}


def config(folder: Path, **changes: Any) -> Path:
    """Write a valid file with these fields changed; fields set to ... are left out."""
    fields = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    path = folder / "config.json"
    path.write_text(json.dumps(fields), "utf-8")
    return path


# Sizes.


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"n_heads": 0}, ArgumentError, "n_heads=0, biases=''"),
        ({"n_heads": 3, "biases": "QX"}, ArgumentError, "n_heads=3, biases='QX'"),
        ({"n_heads": 5}, ShapeError, "d_model=12 is not a multiple of n_heads=5"),
        ({"n_heads": 3, "head_dim": -2}, ArgumentError, "head_dim=-2"),
        ({"n_heads": 3, "n_kv_heads": 0}, ArgumentError, "n_kv_heads=0"),
        (
            {"n_heads": 6, "n_kv_heads": 4},
            ShapeError,
            "n_heads=6 is not a multiple of n_kv_heads=4",
        ),
    ],
)
def test_sizes_that_do_not_fit_together(
    sizes: dict[str, Any], error: type[HeadwiseError], message: str
):
    with pytest.raises(error, match=message):
        layer_sizes(12, **sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"queries": 0}, "0 queries and 0 keys, 0 of them cached"),
        ({"queries": 2, "cached": -1}, "2 queries and 1 keys, -1 of them cached"),
        ({"queries": 2, "keys": 3, "cached": 4}, "2 queries and 3 keys, 4 of them cached"),
    ],
)
def test_impossible_texts(text: dict[str, int], message: str):
    with pytest.raises(ArgumentError, match=message):
        layer_sizes(12, 3).multiply_adds(**text)


def test_an_unknown_dtype():
    with pytest.raises(ArgumentError, match=r"'int3' is unknown\. Give float64, float32"):
        layer_sizes(12, 3).cache_bytes("int3")


# Files.


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(InputError, match=f"{tmp_path} has no config.json"):
        read_config(tmp_path)
    with pytest.raises(InputError, match=r"none\.json cannot be read \(No such file"):
        read_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON (Expecting value"),
        (b"[" * 100_000, "is not JSON (maximum recursion"),
        (b'{"a": "\xff"}', "is not JSON (byte 7 is 0xff, which is not UTF-8)"),
        (b"[768, 12]", "holds [768, 12]"),
    ],
    ids=["empty", "deep", "latin", "list"],
)
def test_files_that_hold_something_else(content: bytes, message: str, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "has none of hidden_size, n_embd, d_model, dim"),
        ({"num_attention_heads": None}, "has none of num_attention_heads, n_head"),
        ({"num_hidden_layers": ...}, "has none of num_hidden_layers, n_layer"),
        ({"hidden_size": "768"}, "has hidden_size='768'"),
        ({"num_attention_heads": 0}, "has num_attention_heads=0"),
        ({"num_key_value_heads": 1.5}, "has num_key_value_heads=1.5"),
        ({"head_dim": True}, "has head_dim=True"),
        ({"model_type": "vit", "qkv_bias": "yes"}, "has qkv_bias='yes'. Use true or false"),
    ],
)  # fmt: skip
def test_files_without_usable_sizes(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_config(config(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "new"}, "has model_type=new, a family whose projections are unknown"),
        ({"model_type": ...}, "has model_type=None"),
        ({"model_type": ["bert"]}, "has model_type=['bert']"),
        ({"kv_lora_rank": 512}, "has kv_lora_rank=512: its keys and values come from a latent"),
        ({"is_encoder_decoder": True}, "has is_encoder_decoder=True: it has an encoder"),
        ({"num_hidden_groups": 1}, "has num_hidden_groups=1: its layers share their weights"),
        ({"add_cross_attention": True}, "has add_cross_attention=True: it has attention to an enc"),
        ({"pruned_heads": {"0": [1]}}, "has pruned_heads={'0': [1]}: heads were removed from some"),
        ({"num_attention_heads": [4, 8]}, "has num_attention_heads=[4, 8], so its layers differ"),
        ({"layer_types": ["full_attention", "mamba"]}, "layers of the kind mamba"),
        ({"layer_types": 5}, "layers of the kind 5"),
        ({"layers_block_type": ["linear_attention"]}, "layers of the kind linear_attention"),
    ],
)
def test_models_whose_layers_differ(changes: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        read_config(config(tmp_path, **changes))


def test_sizes_of_a_file_that_do_not_fit_together(tmp_path: Path):
    with pytest.raises(
        ShapeError, match=r"config\.json has sizes that do not fit: d_model=12 is not a multiple"
    ):
        read_config(config(tmp_path, num_attention_heads=5))


@pytest.mark.parametrize(
    "name", ["headwise.json", pytest.param("config.json", marks=pytest.mark.full)]
)
def test_a_model_pruned_by_headwise(name: str, tmp_path: Path):
    model = MiniGPT(MiniGPTConfig(4, d_model=12, n_heads=3, n_layers=2))
    folder = tmp_path / "small"
    save(prune(model, {0: [1]}), folder)
    message = "has cut="
    if name == "config.json":
        config(folder)
        message = "has a headwise.json beside it"
    with pytest.raises(UnsupportedError, match=message):
        read_config(folder / name)


# The command.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "count: nowhere is neither a file or folder nor a known model"),
        (["gpt2", "--heads", 4, "--no-out-proj"], "gpt2 has its own sizes, which --heads "
                                                  "--no-out-proj would change"),
        (["--layers", 3], "--layers alone does not describe a layer. Add --d-model and --heads"),
        (["--heads", 3], "--heads alone does not describe a layer. Add --d-model."),
        (["--d-model", 12, "--heads", 5], "Here d_model= is --d-model, n_heads= is --heads."),
        (["--d-model", 12, "--heads", 4, "--kv-heads", 3], "n_heads=4 is not a multiple"),
        (["gpt2", "--tokens", 0], "Invalid value for '--tokens'"),
        (["gpt2", "--keys", 3, "--cached", 4], "3 keys, 4 of them cached"),
        (["gpt2", "--dtype", "int4"], "'int4' is not one of"),
    ],
)  # fmt: skip
def test_the_command_prints_one_line(arguments: list[object], message: str):
    done = headwise("count", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err
