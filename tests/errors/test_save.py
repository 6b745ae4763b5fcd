"""Folders that cannot be written or must not be read; existing files are unchanged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from torch import nn

from folders import tiny_llama
from headwise import MultiHeadAttention, load, prune, save
from headwise.checkpoints import _formats, _save
from headwise.checkpoints._manifest import apply_changes, differences_of
from headwise.errors import ArgumentError, HeadwiseError, InputError, OutputError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig

IDS = torch.tensor([[9, 7, 12, 11]])


def _small() -> nn.Module:
    model = tiny_llama(hidden_size=12, num_attention_heads=3, num_key_value_heads=3)
    return prune(model, {0: [1]})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(_small(), tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "small")


def test_a_file_or_pipe_gets_no_progress_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(save(_small(), tmp_path / "small"))
    assert capfd.readouterr() == ("", "")


def _cut(name: str, gone: Any, **options: Any) -> nn.Module:
    return prune(zoo.make(name), gone, **options)


def _two_heads() -> nn.Module:
    config = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=3, vocab_size=13)
    return prune(transformers.GPT2DoubleHeadsModel(config).eval(), {0: [1]})


MINI = MiniGPTConfig(13, 8, 12, 4)
MEAN: dict[str, Any] = {"fold": "mean", "reference": [{"input_ids": IDS}]}


@pytest.mark.parametrize(("make", "format", "kind", "message"), [
    (_small, "tflite", ArgumentError, r"format='tflite'\. Choose one of headwise, stock, padded"),
    (lambda: MultiHeadAttention(12, 4), "headwise", UnsupportedError,
     "MultiHeadAttention is not a class of transformers"),
    (lambda: type("Mine", (MiniGPT,), {})(MINI), "headwise", UnsupportedError,
     "Mine is a subclass of MiniGPT, and load"),
    (lambda: MiniGPT(MINI), "stock", UnsupportedError, r"no MiniGPT.*format='stock'"),
    (lambda: _cut("Llama", {0: [0, 1]}), "stock", UnsupportedError,
     r"there are 2 in model\.layers\.0.*uniform=True"),
    (lambda: _cut("Mistral", {0: [0, 1], 1: [2, 3]}, **MEAN), "stock", UnsupportedError,
     r"o_proj\.bias is .* would be None.*Prune without fold \(at the command line"),
    (lambda: _cut("Bert", {0: [1], 1: [2]}), "stock", UnsupportedError,
     r"of 3 heads.*\(24, 18\) and would be \(24, 24\)"),
    (lambda: _cut("GPT2", {0: [1, 2], 1: [2, 3]}), "stock", UnsupportedError,
     "a GPT2LMHeadModel of 2 heads.*would be"),
    (lambda: _cut("Llama", {0: [1]}, expand=True), "padded", UnsupportedError,
     "more kv heads than the 2 that"),
    (lambda: _cut("Mistral", {0: [1, 3]}, **MEAN), "padded", UnsupportedError,
     r"no place.*o_proj\.bias is \(24,\) and would be None.*prune without fold"),
    pytest.param(_two_heads, "remote-code", UnsupportedError,
                 r"no AutoModel .* opens a GPT2DoubleHeadsModel", marks=pytest.mark.full),
])  # fmt: skip
def test_what_cannot_be_saved(
    make: Callable[[], nn.Module], format: Any, kind: type[HeadwiseError], message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = make()
    with pytest.raises(kind, match=message):
        save(model, tmp_path / "small", format=format)
    assert not any(tmp_path.iterdir())


def _content(folder: Path) -> dict[Path, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def test_a_file_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(OutputError, match="file is a file"):
        save(_small(), path, force=True)
    assert path.read_text() == "mine"


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def _full(self: Path, target: Path, rename: Any = Path.rename) -> Path:
    if self.name == "new":
        raise OSError("no space")
    return rename(self, target)


@pytest.mark.parametrize(("place", "name", "stop", "force", "kind", "message"), [
    (_save, "check_fresh", _interrupted, False, OutputError, r"small exists.*force=True"),
    (_save, "check_fresh", _interrupted, True, KeyboardInterrupt, None),
    (_formats.json, "dumps", _interrupted, True, KeyboardInterrupt, None),
    (Path, "rename", _full, True, OSError, "no space"),
])  # fmt: skip
def test_a_save_that_fails_keeps_the_old_folder(
    place: Any, name: str, stop: Any, force: bool, kind: type[BaseException], message: str | None,
    saved: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before, small = _content(saved.parent), _small()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, stop)
        with pytest.raises(kind, match=message):
            save(small, saved, force=force)
    assert _content(saved.parent) == before


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
def test_a_folder_whose_output_differs_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _small()
    write = model.save_pretrained

    def lossy(folder: Path) -> None:
        kept = model.lm_head.weight.detach().clone()
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
            write(folder)
            model.lm_head.weight.copy_(kept)

    monkeypatch.setattr(model, "save_pretrained", lossy)
    with pytest.raises(OutputError, match=r"files do not open right in a fresh process \(off by"):
        save(model, tmp_path / "small")
    assert not any(tmp_path.iterdir())


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda x: x.update(architecture="os"), "names the class 'os'"),
    (lambda x: x.update(architecture="LlamaConfig"), "names the class 'LlamaConfig'"),
    (lambda x: x.update(architecture=7), "names the class 7"),
    (lambda x: x.pop("tensors"), "lacks tensors or counts"),
    (lambda x: x.update(counts=[]), "lacks tensors or counts"),
    (lambda x: x["tensors"].update(a=[0]), r"gives a the shape \[0\]"),
    (lambda x: x["tensors"].update({"lm_head.what": [3]}), "changes the weight lm_head.what"),
    (lambda x: x["tensors"].update({"no.weight": [3]}), "changes the module no, "),
    (lambda x: x["counts"].update({"no": {"num_heads": 2}}), "changes the module no, "),
    (lambda x: x["counts"].update({"model": {"forward": 2}}), "sets 'forward' of model to 2"),
    (lambda x: x["counts"].update({"model": {"num_heads": "2"}}), "'num_heads' of model to '2'"),
    (lambda x: x["counts"].update({"model": 2}), "sets None of model to 2"),
    (lambda x: x.update(heads={"model": [4, 4]}), r"gives model the heads \[4, 4\]"),
    (lambda x: x.update(heads={"model": [4, 1, 1]}), r"gives model the heads \[4, 1, 1\]"),
    (lambda x: x.update(heads={"model": [4]}), r"gives model the heads \[4\]"),
    (lambda x: x.update(heads=[4]), r"gives None the heads \[4\]"),
    (lambda x: x.update(heads={"no": [4, 1]}), "changes the module no, "),
    (lambda x: x.update(format="other/1"), "has the format 'other/1'"),
])  # fmt: skip
def test_a_foreign_manifest(saved: Path, spoil: Spoil, message: str) -> None:
    path = saved / "headwise.json"
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load(saved)


@pytest.mark.parametrize("name", ["num_attention_heads", "all_head_size"])
@pytest.mark.parametrize("count", [7, 2**40])
def test_counts_that_the_weights_do_not_have(name: str, count: int) -> None:
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 13}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16)
    small = prune(transformers.BertModel(config).eval(), {0: [1]})
    changes = json.loads(json.dumps(differences_of(small)))
    apply_changes(transformers.BertModel(config), changes)
    changes["counts"]["encoder.layer.0.attention.self"][name] = count
    with pytest.raises(InputError, match=rf"sets {name} of encoder.*self to {count} from (4|12)"):
        apply_changes(transformers.BertModel(config), changes)


def test_truncated_weights(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        InputError, match=r"small has weights that are broken or cut short .*\. Copy or save it"
    ):
        load(saved)


def test_a_pruned_model_saved_by_transformers(tmp_path: Path) -> None:
    prune(zoo.make("Llama"), {0: [0, 1]}).save_pretrained(tmp_path / "theirs")
    with pytest.raises(InputError, match=r"weights have other sizes .* written by headwise\.save"):
        load(tmp_path / "theirs")
