"""What `load` and `load_tokenizer` refuse: pickles, files elsewhere, code, adapters."""

import json
import os
import pickle
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub as hub
import pytest
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers.integrations import hub_kernels

from folders import write_llama
from headwise._tensors import read_tensors, write_tensors
from headwise.checkpoints import _folder_checks, load, load_tokenizer
from headwise.corpora import Grammar
from headwise.errors import InputError, OutputError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save

WORDS = ("<unk>", "<s>", "</s>", "cats", "sleep")
INDEX = "model.safetensors.index.json"


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_llama(path, WORDS, hidden_size=8, num_attention_heads=2)
    return path


@pytest.fixture
def cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as `mine/llama` in the cache of the hub: a folder of links."""
    commit, top = "0" * 39 + "1", tmp_path / "hub" / "models--mine--llama"
    snapshot = top / "snapshots" / commit
    for directory in (snapshot, top / "refs", top / "blobs"):
        directory.mkdir(parents=True)
    (top / "refs" / "main").write_text(commit)
    for path in folder.iterdir():
        path.rename(top / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.fixture(params=["folder", "cached"])
def model(request: pytest.FixtureRequest) -> tuple[Path, str | Path]:
    """A folder, and what opens it."""
    folder = request.getfixturevalue(request.param)
    return folder, "mine/llama" if request.param == "cached" else folder


# What a test does to the folder before it is opened.


def _config(folder: Path, file: str = "config.json", **entries: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def _shard(folder: Path, first: str, *, where: str = "") -> None:
    """Split the weights into two files, and call the first of them by this name in the index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    (folder / "model.safetensors").unlink()
    path = folder / (where or first)
    path.parent.mkdir(exist_ok=True)
    save_file({n: weights[n] for n in names[:3]}, path, {"format": "pt"})
    save_file({n: weights[n] for n in names[3:]}, folder / "b.safetensors", {"format": "pt"})
    names_of = {n: first if position < 3 else "b.safetensors" for position, n in enumerate(names)}
    index = {"metadata": {"total_size": 1}, "weight_map": names_of}
    (folder / INDEX).write_text(json.dumps(index))


def _shard_named(folder: Path, name: Any) -> None:
    _shard(folder, "a.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= {"model.norm.weight": name}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / str(name)).write_bytes(pickle.dumps(Trap(folder / "mark")))


def _index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "b.safetensors").write_bytes(b"")
    (folder / INDEX).write_text(json.dumps(index))


def _named(folder: Path, name: Any) -> None:
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(folder / "mark")))
    _config(folder, transformers_weights=name)


def _adapter(folder: Path) -> None:
    named = {"peft_type": "LORA", "base_model_name_or_path": "mine/other"}
    (folder / "adapter_config.json").write_text(json.dumps(named))


ELSEWHERE = r"index\.json names '.*\.safetensors', which is not in that folder"
KERNEL = r"config\.json has {}, a kernel whose code .* Remove "
REFUSED: list[tuple[Callable[..., object], dict[str, Any], Callable[[Any], object], str]] = [
    *((_shard_named, {"name": name}, load, rf"index\.json names '{name}', which is not a \.safe")
      for name in ("a.bin", "a.safetensors.bin", 3)),
    *((_shard, {"first": name, "where": "../other.safetensors"}, load, ELSEWHERE)
      for name in ("../other.safetensors", "/other.safetensors", r"C:\other.safetensors")),
    *((_index, {"index": index}, load, r"index\.json has no weight_map")
      for index in ({}, {"weight_map": {}}, [3])),
    (_named, {"name": "adapter_model.bin"}, load,
     r"config\.json names 'adapter_model\.bin', which is not a \.safetensors"),
    (_named, {"name": "../model.safetensors"}, load, r"names '\.\./model\.safetensors', which is "),
    (_named, {"name": ["a"]}, load, r"names \['a'\], which is not a \.safetensors"),
    (_config, {"attn_implementation": "mine/kernel@main:f"}, load,
     KERNEL.format("attn_implementation='mine/kernel@main:f'") + "attn_implementation"),
    (_config, {"text_config": {"_attn_implementation": {"": "sdpa", "vision": "a/b"}}}, load,
     KERNEL.format("_attn_implementation='a/b'") + "_attn_implementation"),
    (_config, {"experts_implementation": "a/b"}, load, KERNEL.format("experts.*='a/b'")),
    (_config, {"attn_implementation": "flash_attention_2"}, load, KERNEL.format(".*='flash.*2'")),
    (_adapter, {}, load, r"holds adapter_config\.json, an adapter \('LORA'\) of 'mine/other', "
     "which load does not apply. .*merge_and_unload"),
    (_config, {"num_hidden_layers": 10**9}, load, "num_hidden_layers=1000000000, but the weight f"),
    (_config, {"vision": {"depths": [2, 10**9, 2]}}, load, "has depths=1000000000, but the weight"),
    (_config, {"intermediate_size": 10**9}, load, r"describes a model of [\d,]+ weights, but its"),
    *((_config, {"file": file, "tokenizer_class": name}, load_tokenizer,
       rf"{file} has tokenizer_class='{name}', which is not a tokenizer")
      for file, name in (("tokenizer_config.json", "AutoModel"), ("config.json", "pipeline"))),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "given", "read", "message"), REFUSED)
def test_what_is_unsafe_is_refused(
    model: tuple[Path, str | Path], spoil: Callable[..., object], given: dict[str, Any],
    read: Callable[[Any], object], message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", pytest.fail)
    monkeypatch.setattr(_folder_checks, "find_spec", lambda name: name)  # of `kernels`
    folder, source = model
    spoil(folder, **given)
    with pytest.raises(InputError, match=message):
        read(source)
    assert not (folder / "mark").exists()


def _linked(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.resolve().rename(folder.parent / "blob")
    path.unlink(missing_ok=True)
    path.symlink_to(folder.parent / "blob")


def _renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    _config(folder, transformers_weights="mine.safetensors")


UNUSED = "version https://git-lfs.github.com/spec/v1"
OPENED: dict[str, Callable[[Path], object]] = {
    "shards": partial(_shard, first="sub/a.safetensors"),
    "links": _linked,
    "weights named by the configuration": _renamed,
    "an unused index": lambda folder: (folder / INDEX).write_text('{"weight_map": {"w": "../a"}}'),
    "an unused file": lambda folder: (folder / "consolidated.safetensors").write_text(UNUSED),
    "an attention of transformers": partial(_config, attn_implementation="eager"),
    "no attention": partial(_config, attn_implementation=None),
}


@pytest.mark.parametrize("case", OPENED)
def test_what_is_safe_is_opened(model: tuple[Path, str | Path], case: str) -> None:
    folder, source = model
    before = load(source)
    OPENED[case](folder)
    after: Any = load(source)
    assert after.config._attn_implementation == ("eager" if case.startswith("an att") else "sdpa")
    for x, y in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(x, y)


def test_code_beside_the_weights_is_not_run(folder: Path) -> None:
    mark = folder / "mark"
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (folder / "custom_generate").mkdir()
    for name in ("modeling_mine.py", "tokenization_mine.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    names = {"AutoConfig": "modeling_mine.C", "AutoModelForCausalLM": "modeling_mine.M"}
    _config(folder, auto_map=names)
    _config(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization.T"]})
    assert isinstance(load(folder), transformers.LlamaForCausalLM)
    assert load_tokenizer(folder)("cats sleep")["input_ids"] == [3, 4]
    assert not mark.exists()


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for path in {*folder.iterdir()} - {folder / "config.json", folder / "model.safetensors"}:
        path.unlink()
    with pytest.raises(InputError, match=r"model has no tokenizer that can be opened \(no file"):
        load_tokenizer(folder)


def test_links_of_the_cache_are_relative(cached: Path) -> None:
    assert os.readlink(cached / "config.json") == "../../blobs/config.json"
    assert load_tokenizer("mine/llama")("cats sleep")["input_ids"] == [3, 4]
    assert isinstance(load(cached), transformers.LlamaForCausalLM)


# A configuration of a far larger model than its weights is refused before memory is used.


def _mini_gpt(folder: Path) -> Path:
    tokenizer = make_tokenizer(Grammar().vocabulary)
    config = MiniGPTConfig(len(Grammar().vocabulary), context=7, d_model=6, n_heads=2)
    return save(MiniGPT(config), folder, tokenizer=tokenizer) / "headwise.json"


def _llama(folder: Path) -> Path:
    write_llama(folder, WORDS, hidden_size=8, num_attention_heads=2)
    return folder / "config.json"


def _gpt2(folder: Path) -> Path:
    config = transformers.GPT2Config(vocab_size=13, n_positions=20, n_embd=8, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
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
    (_gpt2, ("n_positions",), 10**8, r"a model of [\d,]+ weights"),
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


# A hub that cannot be reached, or does not have the name, is reported at once.


ANSWER = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(("error", "message"), [
    (OSError("Name or service not known"), r"\(Name or service not known\)"),
    (RepositoryNotFoundError("404 no such thing", response=ANSWER), r"\(404 no such thing\)"),
    # To a hub that is busy its client asks again; that is offline in tests, with its own error.
    (HfHubHTTPError("503 come back", response=ANSWER), ""),
])  # fmt: skip
def test_an_unreachable_name_is_refused_after_one_request(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def ask(url: str, **_: object) -> None:
        requests.append(url)
        raise error

    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    with pytest.raises(InputError, match=f"bert-bose is neither a folder nor a .*{message}"):
        load("bert-bose")
    assert len(requests) == 1


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


def test_headers_whose_length_begins_like_a_pickle_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    lengths = [n for n in range(70, 70_000) if n.to_bytes(8, "little").startswith(STARTS)]
    # Every length with these two bytes is below 2¹⁶, or has the same two again above it.
    lengths += [n + (k << 16) for n in lengths[:4] for k in (1, 2, 5)]
    assert len(lengths) >= 16
    for length in lengths:
        _write(path, length)
        assert read_tensors(path)["w"].tolist() == [1, 2, 3]


def _cut_short(path: Path) -> None:
    _write(path, 640)
    path.write_bytes(path.read_bytes()[:-1])


def _pickle(path: Path, protocol: int, content: object) -> None:
    path.write_bytes(pickle.dumps(content, protocol))


@pytest.mark.parametrize(("write", "message"), [
    (_cut_short, "is not a complete safetensors file"),
    *((partial(_pickle, protocol=protocol, content=content), "is a pickle, .* can run code")
      for protocol in (2, 3, 4, 5) for content in ({}, "x" * 600)),
    *((partial(torch.save, {"w": torch.zeros(3)}, _use_new_zipfile_serialization=zipped),
       "is a pickle, .* can run code") for zipped in (True, False)),
])  # fmt: skip
def test_what_is_no_safetensors_file(
    write: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    with pytest.raises(InputError, match=rf"model\.safetensors {message}"):
        read_tensors(path)


def test_a_folder_that_takes_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot take the weights .*Free some space"):
        write_tensors({"w": torch.zeros(3)}, tmp_path / "nowhere" / "model.safetensors")
