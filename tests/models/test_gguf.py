"""GGUF files: opened as the model that they hold, however its weights are stored, or refused."""

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_exports import _model, _tokenizer

import headwise as hw
from command import headwise
from folders import quantize_gguf
from headwise.errors import InputError, MissingPackageError

TEXTS = ["abba cab", "  babe\n", "ab é 12 ab"]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"


def _written(folder: Path, name: str = "Llama", **changes: Any) -> tuple[Any, Any, Path]:
    model, tokenizer = _model(name, vocab_size=320, **changes), _tokenizer("byte level")
    tokenizer.chat_template = TEMPLATE
    saved = hw.save(model, folder / "saved", format="gguf", tokenizer=tokenizer)
    return model, tokenizer, saved / "model.gguf"


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_a_file_opens_as_the_model_that_it_holds(name: str, tmp_path: Path) -> None:
    """Also by its folder; with its tokenizer and chat template."""
    # Transformers does not read the width of Qwen3's heads, which is 128 in all of them.
    model, tokenizer, path = _written(
        tmp_path, name, **{"head_dim": 128} if name == "Qwen3" else {}
    )
    ids = torch.tensor([[3, 26, 1, 7, 0]])
    for source in (path, str(path.parent)):
        opened: Any = hw.load(source)
        assert type(opened) is type(model)
        assert opened.state_dict().keys() == model.state_dict().keys()
        with torch.no_grad():
            torch.testing.assert_close(opened(ids).logits, model(ids).logits)
        again = hw.load_tokenizer(source)
        assert (again.bos_token, again.unk_token) == ("<s>", "<unk>")
        assert again(TEXTS).input_ids == tokenizer(TEXTS).input_ids
        chat = [{"role": "user", "content": "abba"}]
        assert again.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert hw.load(path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "file_type"), [("Q4_1", 3), ("Q5_0", 8), ("F32", 0)])
def test_quantized_weights_become_floats_that_tables_name(
    kind: str, file_type: int, tmp_path: Path
) -> None:
    """Pruned and saved, they are still told by name, and the file's own values are kept."""
    _, tokenizer, path = _written(tmp_path)
    path = quantize_gguf(path, path.with_name(f"{kind}.gguf"), kind, file_type)
    model: Any = hw.load(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    up = stored["blk.1.ffn_up.weight"]
    found = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    np.testing.assert_array_equal(found, gguf.dequantize(up.data, up.tensor_type))
    # In a checkpoint that opens fast, and with fewer heads.
    small = hw.save(hw.prune(model, ["L1.H2", "L1.H3"]), tmp_path / "small", tokenizer=tokenizer)
    for opened in (model, hw.load(small)):
        with hw.observe(opened) as watch, torch.no_grad():
            opened(torch.tensor([[3, 26, 1]]))
        described = repr(watch.table()).splitlines()[0]
        assert described.endswith(f" from {kind}" if kind != "F32" else watch.table().model)
    study = hw.study(model, TEXTS, tokenizer=tokenizer)
    assert study.model["class"] == "LlamaForCausalLM" + (f" from {kind}" if kind != "F32" else "")


@pytest.mark.full
def test_commands_read_a_file(tmp_path: Path) -> None:
    """Its tokenizer goes with the pruned model; what lies beside it does not."""
    _, tokenizer, path = _written(tmp_path)
    _tokenizer("words").save_pretrained(path.parent)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    scores, small = tmp_path / "scores.csv", tmp_path / "small"
    for line in (
        ("importance", path, "--text", tmp_path / "texts.txt", "--out", scores),
        ("prune", path, "--by", scores, "--remove", "0.4", "--out", small),
        ("compare", path, small, "--text", tmp_path / "texts.txt", "--out", tmp_path / "c.csv"),
    ):
        done = headwise(*line)
        assert done.code == 0, done.err
    assert hw.load(small).num_parameters() < hw.load(path).num_parameters()
    assert hw.load_tokenizer(small)(TEXTS).input_ids == tokenizer(TEXTS).input_ids


def test_what_lies_beside_a_file_is_not_read(tmp_path: Path) -> None:
    _, tokenizer, path = _written(tmp_path)
    _tokenizer("words").save_pretrained(path.parent)
    assert hw.load_tokenizer(path)(TEXTS).input_ids == tokenizer(TEXTS).input_ids
    adapter = path.with_name("adapter_config.json")
    adapter.write_text('{"peft_type": "LORA", "base_model_name_or_path": "mine/other"}')
    with pytest.raises(InputError, match=r"adapter_config.json, an adapter .* of 'mine/other'"):
        hw.load(path)


def test_a_file_that_is_not_there_or_one_of_several(tmp_path: Path) -> None:
    _, _, path = _written(tmp_path)
    shutil.copy(path, path.with_name("other.gguf"))
    for opened in (hw.load, hw.load_tokenizer):
        with pytest.raises(InputError, match=r"several models: model.gguf, other.gguf\. Give one"):
            opened(path.parent)
        with pytest.raises(InputError, match=r"mine.gguf is not a file"):
            opened(tmp_path / "mine.gguf")


def _field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _with(*fields: bytes) -> Callable[[bytes], bytes]:
    """A file with these fields before its own."""

    def edit(data: bytes) -> bytes:
        version, tensors, count = struct.unpack_from("<IQQ", data, 4)
        head = struct.pack("<IQQ", version, tensors, count + len(fields))
        inserted = b"".join(fields)
        # The tensors follow the next multiple of 32.
        assert not len(inserted) % 32, len(inserted) % 32
        return data[:4] + head + inserted + data[24:]

    return edit


def _number(key: str, value: int) -> Callable[[bytes], bytes]:
    """The file with another number for a key."""

    def edit(data: bytes) -> bytes:
        at = data.index(_text(key)) + 8 + len(key) + 4
        return data[:at] + struct.pack("<I", value) + data[at + 4 :]

    return edit


def _same_place(data: bytes) -> bytes:
    """Every tensor begins where the first one does."""
    for part in (b"ffn_gate", b"ffn_up", b"ffn_down", b"attn_q", b"attn_k", b"attn_v"):
        for found in re.finditer(rb"blk\.\d\." + part + rb"\.weight", data):
            dims = struct.unpack_from("<I", data, found.end())[0]
            at = found.end() + 4 + 8 * dims + 4
            data = data[:at] + struct.pack("<Q", 0) + data[at + 8 :]
    return data[: len(data) // 2]


def _list(entries: int, kind: int, content: bytes) -> bytes:
    return struct.pack("<IQ", kind, entries) + content


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", r"is not a whole GGUF file \("),
    "no magic": (lambda data: b"PK" + data, r"does not start with the GGUF magic bytes"),
    "cut": (lambda data: data[:900], r"is not a whole GGUF file \(unpack_from requires"),
    "cut in the weights": (lambda data: data[:-40_000], r"claim [\d,]+ bytes of [\d,]+\)"),
    "one place": (_same_place, r"its tensors claim [\d,]+ bytes of [\d,]+\)"),
    "endless list": (
        _with(_field("xxxxxxxx", 9, _list(2**60, 0, b""))),
        r"is not a whole GGUF file \(",
    ),
    "list of lists": (
        _with(_field("xxxxxxxx", 9, _list(1, 9, _list(0, 0, bytes(20))))),
        r"an array of type 9",
    ),
    "long list": (
        _with(_field("xxxxxxxx", 9, _list(2**23, 0, bytes(2**23)))),
        r"its lists have 8,38\d,\d+ entries",
    ),
    "layers": (_number("llama.block_count", 2**31), r"block_count=2147483648, but the weight"),
    "heads": (_number("llama.attention.head_count", 2**31), r"head_count=2147483648, but"),
    "width": (_number("llama.embedding_length", 2**22), r"weights, but its files hold [\d,]+ in"),
    "more layers": (_number("llama.block_count", 5), r"lacks 18 weights of LlamaForCausalLM"),
    "no heads": (_number("llama.attention.head_count", 0), r"cannot be opened \("),
    "unknown": (
        lambda data: data.replace(_text("llama"), _text("clipp")),
        r"the architecture 'clipp', which transformers does not read\. It reads bloom, .* llama,",
    ),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _written(tmp_path_factory.mktemp("gguf"))[2].read_bytes()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_does_not_hold_what_it_claims(case: str, file: bytes, tmp_path: Path) -> None:
    edit, says = HOSTILE[case]
    (tmp_path / "model.gguf").write_bytes(edit(file))
    with pytest.raises(InputError, match=rf"^load: .*model.gguf.*{says}"):
        hw.load(tmp_path)


def test_sizes_that_transformers_does_not_read(tmp_path: Path) -> None:
    path = _written(tmp_path, "Qwen3", head_dim=16)[2]
    with pytest.raises(InputError, match=r"^load: .*other sizes than transformers takes from its"):
        hw.load(path)


@pytest.mark.parametrize("call", [hw.load, hw.load_tokenizer])
def test_a_part_of_a_file(call: Any, file: bytes, tmp_path: Path) -> None:
    parts = _field("split.count", 4, struct.pack("<I", 3))
    filler = _field("x" * (-(len(parts) + 16) % 32), 4, bytes(4))
    (tmp_path / "model.gguf").write_bytes(_with(parts, filler)(file))
    with pytest.raises(InputError, match=r"model.gguf is one of 3 parts.*llama-gguf-split --merge"):
        call(tmp_path)


def test_a_file_without_a_vocabulary(tmp_path: Path) -> None:
    folder = hw.save(_model("Llama"), tmp_path / "saved", format="gguf")
    assert hw.load(folder).num_parameters() > 0
    with pytest.raises(InputError, match=r"^load_tokenizer: .*model.gguf has no tokenizer that"):
        hw.load_tokenizer(folder)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_packages_that_reading_needs(
    package: str, file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(file)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package} is not installed.*\[gguf\]"):
        hw.load(tmp_path)
