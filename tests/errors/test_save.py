"""Folders that cannot be written or must not be read; existing files are unchanged."""

import json
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
from headwise.errors import ArgumentError, InputError, OutputError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig

IDS = torch.tensor([[9, 7, 12, 11]])


def _small() -> nn.Module:
    model = tiny_llama(hidden_size=12, num_attention_heads=3, num_key_value_heads=3)
    return prune(model, {0: [1]})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(_small(), tmp_path / "small")


def test_a_file_or_pipe_gets_no_progress_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(_small(), tmp_path / "small")
    load(tmp_path / "small")
    assert capfd.readouterr() == ("", "")


def test_a_class_unknown_to_transformers(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="MultiHeadAttention is not a class of transformers"):
        save(MultiHeadAttention(12, 4), tmp_path / "layer")
    assert not any(tmp_path.iterdir())


def test_a_subclass_of_ours(tmp_path: Path) -> None:
    subclass = type("Mine", (MiniGPT,), {})
    with pytest.raises(UnsupportedError, match="Mine is a subclass of MiniGPT, and load"):
        save(subclass(MiniGPTConfig(13, 8, 12, 4)), tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


def _cut(name: str, gone: Any, **options: Any) -> nn.Module:
    return prune(zoo.make(name), gone, **options)


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"format='tflite'\. Choose one of headwise, stock, padded"
    ):
        save(_small(), tmp_path / "small", format="tflite")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gone", "options", "format", "message"),
    [
        ("Llama", {0: [0, 1]}, {}, "stock", r"there are 2 in model\.layers\.0.*uniform=True"),
        (
            "Mistral", {0: [0, 1], 1: [2, 3]}, {"fold": "mean", "reference": [{"input_ids": IDS}]},
            "stock", r"o_proj\.bias is .* would be None.*Prune without fold \(at the command line",
        ),
        ("Bert", {0: [1], 1: [2]}, {}, "stock", r"of 3 heads.*\(24, 18\) and would be \(24, 24\)"),
        ("GPT2", {0: [1, 2], 1: [2, 3]}, {}, "stock", "a GPT2LMHeadModel of 2 heads.*would be"),
        ("Llama", {0: [1]}, {"expand": True}, "padded", "more kv heads than the 2 that"),
        (
            "Mistral", {0: [1, 3]}, {"fold": "mean", "reference": [{"input_ids": IDS}]}, "padded",
            r"no place.*o_proj\.bias is \(24,\) and would be None.*prune without fold",
        ),
    ],
)  # fmt: skip
def test_a_format_that_a_model_cannot_have(
    name: str, gone: Any, options: Any, format: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        save(_cut(name, gone, **options), tmp_path / "small", format=format)
    assert not any(tmp_path.iterdir())


@pytest.mark.full
def test_a_class_without_an_auto_class(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=3, vocab_size=13)
    small = prune(transformers.GPT2DoubleHeadsModel(config).eval(), {0: [1]})
    with pytest.raises(UnsupportedError, match=r"no AutoModel .* opens a GPT2DoubleHeadsModel"):
        save(small, tmp_path / "small", format="remote-code")


def test_a_mini_gpt_in_other_formats(tmp_path: Path) -> None:
    model = MiniGPT(MiniGPTConfig(6, 8, 12, 4, n_layers=2))
    with pytest.raises(UnsupportedError, match=r"no MiniGPT.*format='stock'"):
        save(model, tmp_path / "small", format="stock")


def test_an_existing_folder(saved: Path) -> None:
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


def test_an_interrupted_save_keeps_the_old_folder(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {path.name: path.read_bytes() for path in saved.iterdir()}

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place, name in ((_save, "check_fresh"), (_formats.json, "dumps")):
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
    with pytest.raises(OutputError, match="open right in a fresh process: off by"):
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
