"""`headwise prune` keeps a SentenceTransformer whole."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from command import headwise
from headwise.checkpoints import _save, source_files
from headwise.errors import InputError
from sentence_models import TEXTS, open_sentence_model, write_sentence_model

KEPT = {
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "LICENSE",
    "config_sentence_transformers.json", "modules.json", "sentence_bert_config.json",
    "3_Normalize/config.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
LEFT = ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "openvino/openvino_model.bin",
        "README.md", "model.safetensors.index.json", "modeling_own.py", "notes.txt")  # fmt: skip


def _write(place: Path, **options: Any) -> Path:
    folder = place / "model"
    write_sentence_model(folder, **options)
    for name in (*LEFT, "LICENSE"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name, "utf-8")
    return folder


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_prune_keeps_pooling_normalisation_and_length(tmp_path: Path) -> None:
    folder, out = _write(tmp_path), tmp_path / "small"
    (tmp_path / "some.txt").write_text("\n".join(TEXTS), "utf-8")
    scores = tmp_path / "scores.parquet"
    done = headwise("importance", folder, "--text", tmp_path / "some.txt", "-o", scores)
    assert done.code == 0, done.err
    done = headwise("prune", folder, "--by", scores, "-o", tmp_path / "own", "--remove", 0.4)
    assert f'SentenceTransformer("{tmp_path / "own"}", trust_remote_code=True)' in done.out
    options = ("--remove", 0.4, "--format", "padded", "--json")
    done = headwise("prune", folder, "--by", scores, "-o", out, *options)
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    removed = facts["removed"]
    assert (facts["format"], *facts["MiB"]) == ("padded", *sorted(facts["MiB"], reverse=True))
    assert min(facts["seconds"]) > 0
    full, small = open_sentence_model(folder), open_sentence_model(out)
    with hw.ablate(full, removed):
        expected = full.encode(TEXTS)
    np.testing.assert_allclose(small.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(small.encode(TEXTS), axis=1), 1, rtol=1e-6)
    assert small.max_seq_length == full.max_seq_length == 6
    assert small.prompts == full.prompts
    assert _files(out) == KEPT | {"config.json", "model.safetensors"}
    for name in KEPT:
        assert (out / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("format", ["headwise", None])
def test_other_formats_keep_pooling_normalisation_and_length(format: Any, tmp_path: Path) -> None:
    folder = _write(tmp_path)
    small = hw.prune(hw.load(folder), {0: [1]})
    out = hw.save(small, tmp_path / "small", format=format, source=folder)
    assert ("modeling_headwise.py" in _files(out)) == (format is None)  # the default opens whole
    assert _files(out) >= KEPT
    assert not _files(out) & set(LEFT)


def test_without_sentence_transformers_files_are_kept_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _write(tmp_path)
    small = hw.prune(hw.load(folder), {0: [1]})
    monkeypatch.setattr(_save, "check_encoding", lambda *_: pytest.fail("it was compared"))
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    out = hw.save(small, tmp_path / "small", format="padded", source=folder)
    assert _files(out) == KEPT | {"config.json", "model.safetensors"}


def test_files_of_the_hub_cache_are_links(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    folder.rename(blobs)
    for name in _files(blobs):
        (snapshot / name).parent.mkdir(exist_ok=True)
        os.symlink(blobs / name, snapshot / name)
    assert set(source_files(snapshot)) == KEPT


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    (tmp_path / "secret.json").write_text("{}", "utf-8")
    (folder / "added_tokens.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InputError, match=r"added_tokens\.json .* leads out .*secret\.json"):
        source_files(folder)


def _spoil(folder: Path, **changes: str) -> None:
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    modules[2] |= changes
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")


def test_unknown_modules_are_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    for changes, message in (
        ({"path": "../elsewhere"}, r"names the folder '\.\./elsewhere'"),
        (
            {"path": f"../{folder.name}/2_Dense"},
            r"names the folder '\.\./",
        ),  # it would be copied there
        ({"path": "/etc"}, "names the folder '/etc'"),
        ({"path": "2_Dense", "type": "own.Dense"}, r"names the module 'own\.Dense'"),
    ):
        _spoil(folder, **changes)
        with pytest.raises(InputError, match=message):
            source_files(folder)
    _spoil(folder, type="sentence_transformers.models.Dense")
    weights = folder / "2_Dense" / "model.safetensors"
    weights.rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"2_Dense/pytorch_model\.bin is a pickle"):
        source_files(folder)


@pytest.mark.parametrize(
    "content",
    ["{", "[7]", '{"a": 1}', "[" * 10**5, '[{"path": ""}]', r'[{"path": "\u0000", "type": ""}]'],
)
def test_modules_that_cannot_be_read(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content, "utf-8")
    with pytest.raises(InputError, match=r"modules\.json is not a list of modules"):
        source_files(tmp_path)


def test_a_missing_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="source='no/model' is neither a folder nor a reachable"):
        source_files("no/model")


def test_files_that_cannot_be_kept_are_refused_before_the_work(tmp_path: Path) -> None:
    folder = _write(tmp_path)
    _spoil(folder, type="own.Dense")
    scores = Path(__file__).parents[1] / "laws/golden/saved/scores.csv"
    done = headwise("prune", folder, "--by", scores, "--remove", 0.3, "-o", tmp_path / "small")
    assert done.code != 0
    assert "names the module 'own.Dense'" in done.err
