"""Folders that cannot be written or must not be read; what stood there stays as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headwise import MultiHeadAttention, load, prune, save
from headwise.errors import InputError, OutputError, UnsupportedError
from headwise.surgery import _save


def _small() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=12, num_hidden_layers=2, num_attention_heads=3, vocab_size=13,
            intermediate_size=16, max_position_embeddings=16,
        )
    ).eval()  # fmt: skip
    return prune(model, {0: [1]})


@pytest.fixture
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_save, "check_fresh", lambda *_: None)


@pytest.fixture
def saved(tmp_path: Path, _trusted: None) -> Path:
    return save(_small(), tmp_path / "small")


def test_a_class_that_transformers_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="MultiHeadAttention is no class of transformers"):
        save(MultiHeadAttention(12, 4), tmp_path / "layer")
    assert not any(tmp_path.iterdir())


def test_what_stands_there(saved: Path) -> None:
    held = {path: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(OutputError, match=r"small exists.*force=True"):
        save(_small(), saved)
    assert {path: path.read_bytes() for path in saved.iterdir()} == held


def test_a_file_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(OutputError, match="file is a file"):
        save(_small(), path, force=True)
    assert path.read_text() == "mine"


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="small cannot be written"):
        save(_small(), tmp_path / "file" / "small")


def test_an_interrupted_save_leaves_what_stood_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {path.name: path.read_bytes() for path in saved.iterdir()}

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place, name in ((_save, "check_fresh"), (_save.json, "dumps")):
        small = _small()
        with monkeypatch.context() as patch:
            patch.setattr(place, name, stop)
            with pytest.raises(KeyboardInterrupt):
                save(small, saved, force=True)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == held
        assert [path.name for path in saved.parent.iterdir()] == ["small"]


def test_a_move_that_fails_puts_the_old_folder_back(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {path.name: path.read_bytes() for path in saved.iterdir()}
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        save(_small(), saved, force=True)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == held


def test_what_answers_something_else_is_not_left_there(
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
    with pytest.raises(OutputError, match="a fresh process says: off by"):
        save(model, tmp_path / "small")
    assert not any(tmp_path.iterdir())


Spoil = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda x: x.update(architecture="os"), "asks for the class 'os'"),
        (lambda x: x.update(architecture="LlamaConfig"), "asks for the class 'LlamaConfig'"),
        (lambda x: x.update(architecture=7), "asks for the class 7"),
        (lambda x: x.pop("tensors"), "lacks tensors or counts"),
        (lambda x: x.update(counts=[]), "lacks tensors or counts"),
        (lambda x: x["tensors"].update(a=[0]), r"gives a the shape \[0\]"),
        (lambda x: x["tensors"].update({"lm_head.what": [3]}), "no weight lm_head.what"),
        (lambda x: x["tensors"].update({"no.weight": [3]}), "no module no"),
        (lambda x: x["counts"].update({"no": {"num_heads": 2}}), "no module no"),
        (lambda x: x["counts"].update({"model": {"forward": 2}}), "sets 'forward' of model to 2"),
        (
            lambda x: x["counts"].update({"model": {"num_heads": "2"}}),
            "'num_heads' of model to '2'",
        ),
        (lambda x: x["counts"].update({"model": 2}), "sets None of model to 2"),
        (lambda x: x.update(format="other/1"), "has the format 'other/1'"),
    ],
)
def test_a_description_that_is_not_ours(saved: Path, spoil: Spoil, told: str) -> None:
    path = saved / "headwise.json"
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=told):
        load(saved)


def test_weights_that_are_not_whole(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"small cannot be opened"):
        load(saved)


def test_a_description_that_is_no_json(saved: Path) -> None:
    (saved / "headwise.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load(saved)
