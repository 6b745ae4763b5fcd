"""What `load` and `load_tokenizer` refuse: pickles, files elsewhere, code, adapters."""

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub as hub
import pytest
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from folders import write_llama
from headwise._tensors import read_tensors, write_tensors
from headwise.checkpoints import load, load_tokenizer
from headwise.corpora import Grammar
from headwise.errors import InputError, OutputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save

WORDS = ("<unk>", "<s>", "</s>", "cats", "sleep")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_llama(path, WORDS, hidden_size=8, num_attention_heads=2)
    return path


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    with pytest.raises(InputError, match=r"model has no tokenizer that can be opened \(no file"):
        load_tokenizer(folder)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def _config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def _shard(folder: Path, first: str, *, where: Path | None = None) -> None:
    """Split the weights into two files, and call the first of them by this name in the index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    (folder / "model.safetensors").unlink()
    save_file({n: weights[n] for n in names[:3]}, where or folder / first, {"format": "pt"})
    save_file({n: weights[n] for n in names[3:]}, folder / "b.safetensors", {"format": "pt"})
    names_of = {n: first if position < 3 else "b.safetensors" for position, n in enumerate(names)}
    index = {"metadata": {"total_size": 1}, "weight_map": names_of}
    (folder / INDEX).write_text(json.dumps(index))


def _refused(folder: Path, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(folder)


# Shards.


def test_shards_in_the_folder_are_read(folder: Path) -> None:
    before = load(folder)
    (folder / "sub").mkdir()
    _shard(folder, "sub/a.safetensors")
    after = load(folder)
    for x, y in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "a.safetensors.bin", "a", "", 3, None])
def test_a_shard_that_is_no_safetensors_file(folder: Path, name: Any) -> None:
    mark = folder / "mark"
    _shard(folder, "a.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {"model.norm.weight": name}
    (folder / INDEX).write_text(json.dumps(index))
    if isinstance(name, str) and name:
        (folder / name).write_bytes(pickle.dumps(Trap(mark)))
    _refused(folder, rf"index\.json names .*{name!s}.*, which is not a \.safetensors file")
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["up", "absolute", "round", "windows"])
def test_a_shard_outside_the_folder(folder: Path, tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "other.safetensors"
    names = {"up": "../other.safetensors", "absolute": str(elsewhere)}
    names |= {"round": "../model/b.safetensors", "windows": r"C:\other.safetensors"}
    _shard(folder, names[kind], where=elsewhere)
    _refused(folder, r"index\.json names '.*\.safetensors', which is not in that folder")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, [3]])
def test_an_index_without_names(folder: Path, index: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "b.safetensors").write_bytes(b"")
    (folder / INDEX).write_text(json.dumps(index))
    _refused(folder, r"index\.json has no weight_map")


def test_an_unused_index_is_not_checked(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "../pytorch_model.bin"}}))
    assert load(folder) is not None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapter_model.bin", r"names 'adapter_model\.bin', which is not a \.safetensors"),
        ("../model.safetensors", r"names '\.\./model\.safetensors', which is not in"),
        (["a"], r"names \['a'\], which is not a \.safetensors"),
    ],
)
def test_weight_files_named_by_the_configuration(folder: Path, name: Any, says: str) -> None:
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(folder / "mark")))
    _config(folder, transformers_weights=name)
    _refused(folder, rf"config\.json {says}")
    assert not (folder / "mark").exists()


def test_weight_files_named_by_the_configuration_are_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    _config(folder, transformers_weights="mine.safetensors")
    assert load(folder) is not None


def test_an_unused_broken_file_is_not_checked(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert load(folder) is not None


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert load(folder) is not None


# Code.


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("name", ["kernels-community/flash-attn2", "mine/kernel@main:f", "a/b"])
def test_kernels_of_the_hub(
    folder: Path, key: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", pytest.fail)
    _config(folder, **{key: name})
    _refused(folder, rf"config\.json has {key}='{name}', a kernel whose code .* Remove {key}")
    _config(folder, **{key: "eager", "text_config": {key: {"": "sdpa", "vision": name}}})
    _refused(folder, rf"config\.json has {key}='{name}', a kernel whose code")


def test_expert_kernels_of_the_hub(folder: Path) -> None:
    _config(folder, experts_implementation="mine/kernel")
    _refused(folder, r"has experts_implementation='mine/kernel', a kernel whose code")


@pytest.mark.parametrize("name", ["eager", "sdpa", None])
def test_attention_of_transformers_is_allowed(folder: Path, name: str | None) -> None:
    _config(folder, attn_implementation=name)
    model: Any = load(folder)
    assert model.config._attn_implementation == (name or "sdpa")


def test_flash_attention_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.checkpoints._folder_checks.find_spec", lambda name: name)
    _config(folder, attn_implementation="flash_attention_2")
    _refused(folder, r"attn_implementation='flash_attention_2', a kernel whose code")


def test_code_beside_the_weights_is_not_run(folder: Path) -> None:
    mark = folder / "mark"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (folder / "custom_generate").mkdir()
    for name in ("modeling_mine.py", "tokenization_mine.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    names = {"AutoConfig": "modeling_mine.C", "AutoModelForCausalLM": "modeling_mine.M"}
    _config(folder, auto_map=names)
    path = folder / "tokenizer_config.json"
    tokens = {"auto_map": {"AutoTokenizer": [None, "tokenization_mine.T"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | tokens))
    assert isinstance(load(folder), transformers.LlamaForCausalLM)
    assert load_tokenizer(folder)("cats sleep")["input_ids"] == [3, 4]
    assert not mark.exists()


@pytest.mark.parametrize("name", ["AutoModel", "LlamaForCausalLM", "RagRetriever", "pipeline"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_an_unknown_tokenizer_class(folder: Path, name: str, file: str) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    with pytest.raises(InputError, match=rf"{file} has tokenizer_class='{name}', which is not a "):
        load_tokenizer(folder)


# Adapters.


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in peft
def test_adapters_are_named_and_not_applied(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    adapted: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(folder)
    _refused(folder, r"holds adapter_config\.json, an adapter \(.*LORA.*\) of '.*merge_and_unload")
    (folder / "adapter_config.json").unlink()
    assert load(folder) is not None


# The hub cache: a folder of links.


@pytest.fixture
def cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as `mine/llama` in the cache of the hub."""
    commit, top = "0" * 39 + "1", tmp_path / "hub" / "models--mine--llama"
    snapshot = top / "snapshots" / commit
    for directory in (snapshot, top / "refs", top / "blobs"):
        directory.mkdir(parents=True)
    (top / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        path.rename(top / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_model_in_the_cache_is_opened(cached: Path) -> None:
    assert os.readlink(cached / "config.json") == "../../blobs/config.json"
    assert isinstance(load("mine/llama"), transformers.LlamaForCausalLM)
    assert load_tokenizer("mine/llama")("cats sleep")["input_ids"] == [3, 4]
    assert isinstance(load(cached), transformers.LlamaForCausalLM)


def test_shards_in_the_cache_are_read(cached: Path) -> None:
    _shard(cached, "a.safetensors")
    assert isinstance(load("mine/llama"), transformers.LlamaForCausalLM)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"attn_implementation": "a/b"}, "has attn_implementation='a/b', a kernel whose code"),
        ({"transformers_weights": "adapter_model.bin"}, "'adapter_model.bin', which is not a "),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but the weight files hold"),
        ({"intermediate_size": 10**9}, r"mine/llama describes a model of [\d,]+ weights"),
    ],
)
def test_a_model_in_the_cache_is_checked(cached: Path, entries: dict[str, Any], says: str) -> None:
    _config(cached, **entries)
    with pytest.raises(InputError, match=says):
        load("mine/llama")


def test_an_index_in_the_cache_is_checked(cached: Path) -> None:
    _shard(cached, "a.bin")
    with pytest.raises(InputError, match=r"names 'a\.bin', which is not a \.safetensors file"):
        load("mine/llama")


def test_adapters_and_tokenizers_in_the_cache_are_checked(cached: Path) -> None:
    _config(cached, tokenizer_class="AutoModel")
    with pytest.raises(InputError, match="tokenizer_class='AutoModel', which is not a tokenizer"):
        load_tokenizer("mine/llama")
    (cached / "adapter_config.json").write_text('{"base_model_name_or_path": "mine/other"}')
    with pytest.raises(InputError, match=r"an adapter \(None\) of 'mine/other', which load does"):
        load("mine/llama")


# A configuration of a far larger model than its weights is refused before memory is used.


SIZES = {"num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"vocab_size": 13, "hidden_size": 8, "max_position_embeddings": 20}


def _mini_gpt(folder: Path) -> Path:
    tokenizer = make_tokenizer(Grammar().vocabulary)
    config = MiniGPTConfig(len(Grammar().vocabulary), context=7, d_model=6, n_heads=2)
    return save(MiniGPT(config), folder, tokenizer=tokenizer) / "headwise.json"


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


def _set(path: Path, where: tuple[Any, ...], value: Any) -> None:
    whole = json.loads(path.read_text("utf-8"))
    content = whole
    for key in where[:-1]:
        content = content[key]
    content[where[-1]] = value
    path.write_text(json.dumps(whole), "utf-8")


@pytest.mark.parametrize(("write", "where", "value", "says"), [
    (_mini_gpt, ("config", "d_model"), 20_000, r"block.* in .* is \(.*6\) but"),
    (_mini_gpt, ("config", "n_layers"), 10**9, r"n_layers=1000000000, but .* \d+ tensors"),
    (_llama, ("vocab_size",), 10**8, r"a model of [\d,]+ weights, but its files hold"),
    (_llama, ("num_hidden_layers",), 10**9, r"config\.json has num_hidden_layers=1000000000"),
    (_gpt2, ("n_positions",), 10**8, r"a model of [\d,]+ weights"),
    (_bert, ("intermediate_size",), 10**9, r"a model of [\d,]+ weights"),
])  # fmt: skip
def test_a_far_larger_model_is_refused_before_memory_is_taken(
    write: Callable[[Path], Path], where: tuple[str, ...], value: int, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model")
    _set(path, where, value)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=says):
        load(tmp_path / "model")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_lists_of_a_configuration_are_counted_too(tmp_path: Path) -> None:
    path = _bert(tmp_path / "model")
    content = json.loads(path.read_text()) | {"vision": {"depths": [2, 10**9, 2]}}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="has depths=1000000000, but the weight files hold"):
        load(tmp_path / "model")


# A hub that cannot be reached, or does not have the name, is reported at once.


ANSWER = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Name or service not known"), r"bert-bose is neither.*Name or service not known"),
        (RepositoryNotFoundError("404 no such thing", response=ANSWER), "bert-bose.*404 no"),
    ],
)
def test_an_unreachable_name_is_refused_after_one_request(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def ask(url: str, **_: object) -> None:
        requests.append(url)
        raise error

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    with pytest.raises(InputError, match=message):
        load("bert-bose")
    assert len(requests) == 1


def test_a_busy_hub_is_left_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise HfHubHTTPError("503 come back", response=ANSWER)

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", busy)
    # The client itself is offline in tests, and raises its own error.
    with pytest.raises(InputError, match=r"bert-bose is neither a folder nor a reachable hub"):
        load("bert-bose")


def test_offline_no_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)
    monkeypatch.setattr(hub, "get_hf_file_metadata", pytest.fail)
    with pytest.raises(InputError, match="bert-bose is neither"):
        load("bert-bose")


# A safetensors file is distinguished from a pickle by its header, not its first bytes.


# The first bytes of a pickle of protocol 2 to 5, as the length of a header.
STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# b"PK\x03\x04" is a header of 67 MB, which no model has.


def _write(path: Path, length: int) -> None:
    """A file of one tensor whose header has this length."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}).encode()
    path.write_bytes(length.to_bytes(8, "little") + header.ljust(length) + b"\1\2\3")


def _lengths() -> list[int]:
    return [n for n in range(70, 70_000) if n.to_bytes(8, "little").startswith(STARTS)]


def test_headers_whose_length_begins_like_a_pickle_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    lengths = _lengths()
    # Every length with these two bytes is below 2¹⁶, or has the same two again above it.
    lengths += [n + (k << 16) for n in lengths[:4] for k in (1, 2, 5)]
    assert len(lengths) >= 4
    for length in lengths:
        _write(path, length)
        assert read_tensors(path)["w"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_files_we_write_with_such_a_header_are_read(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for n in range(length):
        write_tensors({"w": torch.arange(3.0)}, path, {"about": "x" * n})
        size = int.from_bytes(path.read_bytes()[:8], "little")
        if size >= length:
            break
    assert size == length
    assert path.read_bytes().startswith(length.to_bytes(2, "little"))
    assert read_tensors(path)["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("length", [640, 1280])
def test_a_truncated_file_is_no_pickle(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _write(path, length)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors is not a complete safetensors file"):
        read_tensors(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("content", [{}, [], {"w": [0.0]}, "x" * 600])
def test_a_pickle_is_reported_as_one(protocol: int, content: object, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(InputError, match=r"model\.safetensors is a pickle, .* can run code"):
        read_tensors(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_are_reported_as_pickles(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=r"model\.safetensors is a pickle, .* can run code"):
        read_tensors(path)


def test_a_folder_that_takes_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot take the weights .*Free some space"):
        write_tensors({"w": torch.zeros(3)}, tmp_path / "nowhere" / "model.safetensors")
