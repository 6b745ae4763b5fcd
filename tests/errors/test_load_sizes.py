"""A configuration of a far larger model than its weights is refused before memory is used."""

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import headwise as hw
from headwise._size_limits import StoredSize, limit_model_size
from headwise.corpora import Grammar
from headwise.errors import InputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save
from headwise.layer import MultiHeadAttention
from headwise.models import load
from headwise.models.checkpoints import write_layer

SIZES = {"num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"vocab_size": 13, "hidden_size": 8, "max_position_embeddings": 20}
# The most memory a refused model may use beyond a tiny one, in bytes.
SPARE = 2**28
HUGE = [20_000, 2**31, 10**9, 10**30]


def _mini_gpt(folder: Path) -> Path:
    tokenizer = make_tokenizer(Grammar().vocabulary)
    config = MiniGPTConfig(len(Grammar().vocabulary), context=7, d_model=6, n_heads=2)
    return save(MiniGPT(config), tokenizer, folder) / "headwise.json"


def _layer(folder: Path) -> Path:
    folder.mkdir()
    write_layer(MultiHeadAttention(8, 2), folder)
    return folder / "headwise.json"


def _llama(folder: Path) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder / "config.json"


def _gpt2(folder: Path) -> Path:
    config = transformers.GPT2Config(vocab_size=13, n_positions=20, n_embd=8, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder / "config.json"


def _bert(folder: Path) -> Path:
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    return folder / "config.json"


def _smaller(folder: Path) -> Path:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    hw.save(hw.prune(model, (0, 1)), folder, format="headwise")
    return folder / "headwise.json"


WRITERS = {
    "bert": _bert, "gpt2": _gpt2, "layer": _layer, "llama": _llama, "mini": _mini_gpt,
    "smaller": _smaller,
}  # fmt: skip


def _numbers(content: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of numbers in a JSON file that are neither tokens nor flags."""
    if type(content) is int:
        return [where]
    entries: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        entries = [(key, x) for key, x in content.items() if not key.endswith("token_id")]
    elif isinstance(content, list):
        entries = list(enumerate(content))
    return [place for key, x in entries for place in _numbers(x, (*where, key))]


def _set(path: Path, where: tuple[Any, ...], value: Any) -> None:
    whole = json.loads(path.read_text("utf-8"))
    content = whole
    for key in where[:-1]:
        content = content[key]
    content[where[-1]] = value
    path.write_text(json.dumps(whole), "utf-8")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind that has been loaded once."""
    folder = tmp_path_factory.mktemp("whole")
    paths = {name: write(folder / name) for name, write in WRITERS.items()}
    for path in paths.values():
        load(path.parent)
    return paths


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_number_in_a_configuration_allocates_memory(
    whole: dict[str, Path], data: st.DataObject
) -> None:
    path = whole[data.draw(st.sampled_from(sorted(whole)))]
    text = path.read_text("utf-8")
    where = data.draw(st.sampled_from(_numbers(json.loads(text))))
    before = _peak()
    try:
        _set(path, where, data.draw(st.sampled_from(HUGE)))
        load(path.parent)
    except InputError as error:
        assert str(error).startswith("load: ")  # noqa: PT017
    finally:
        path.write_text(text, "utf-8")
    assert _peak() - before < SPARE, where


@pytest.mark.parametrize(
    ("write", "where", "value", "says"),
    [
        (
            _mini_gpt,
            ("config", "d_model"),
            20_000,
            r"more than [\d,]+ parameters, but its weight f",
        ),
        (_mini_gpt, ("config", "n_layers"), 10**9, r"more than [\d,]+ modules"),
        (_mini_gpt, ("config", "context"), 10**12, r"more than [\d,]+ parameters"),
        (_layer, ("config", "d_model"), 20_000, r"out_proj\.weight is \(8, 8\) but its sizes"),
        (_layer, ("config", "head_dim"), 10**7, r"more than [\d,]+ parameters"),
        (_llama, ("vocab_size",), 10**8, r"more than [\d,]+ parameters"),
        (_llama, ("num_hidden_layers",), 10**9, r"config\.json has num_hidden_layers=1000000000"),
        (_llama, ("num_hidden_layers",), 5000, r"has num_hidden_layers=5000|more than [\d,]+ modu"),
        (_gpt2, ("n_positions",), 10**8, r"more than [\d,]+ parameters"),
        (_bert, ("intermediate_size",), 10**9, r"more than [\d,]+ parameters"),
    ],
)
def test_a_far_larger_model_is_refused_by_name(
    write: Callable[[Path], Path], where: tuple[str, ...], value: int, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model")
    _set(path, where, value)
    with pytest.raises(InputError, match=says):
        load(tmp_path / "model")


def test_lists_of_a_configuration_are_counted_too(tmp_path: Path) -> None:
    path = _bert(tmp_path / "model")
    content = json.loads(path.read_text()) | {"vision": {"depths": [2, 10**9, 2]}}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="has depths=1000000000, but the weight files hold"):
        load(tmp_path / "model")


@pytest.mark.full
@pytest.mark.parametrize("name", ["mini", "llama"])
def test_a_fresh_process_takes_little_memory(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "model")
    code = (
        "import resource, sys; from headwise.models import load\n"
        "from headwise.errors import InputError\n"
        "import transformers.models.llama.modeling_llama\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load(sys.argv[1])\n"
        "except InputError: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    _set(path, ("config", "d_model") if name == "mini" else ("hidden_size",), 20_000)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path.parent)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * 1024 < SPARE


# The limit itself.


def test_the_limit_leaves_no_hook() -> None:
    stored = StoredSize(1, 1)
    with pytest.raises(InputError, match="of here describes"), limit_model_size(stored, "here"):
        nn.Linear(2**13, 2**13, device="meta")
    assert nn.Linear(2**13, 2**13, device="meta").in_features == 2**13


def test_buffers_are_counted_in_bytes() -> None:
    mask = torch.empty(2**15, 2**15, dtype=torch.bool, device="meta")
    says = r"more than 536,870,976 bytes of buffers, but its weight files hold 1 weights in 1 tens"
    with pytest.raises(InputError, match=says), limit_model_size(StoredSize(1, 1), "here"):
        nn.Module().register_buffer("mask", mask)


def test_other_threads_are_not_limited() -> None:
    layers: list[nn.Module] = []
    with limit_model_size(StoredSize(1, 1), "here"):
        thread = threading.Thread(
            target=lambda: layers.append(nn.Linear(2**13, 2**13, device="meta"))
        )
        thread.start()
        thread.join()
    assert len(layers) == 1


def test_a_replaced_weight_counts_once() -> None:
    layer = nn.Linear(2**11, 2**11, device="meta")
    with limit_model_size(StoredSize(1, 1), "here"):
        for _ in range(9):
            layer.weight = nn.Parameter(torch.empty(2**11, 2**11, device="meta"))
    assert layer.weight.is_meta
