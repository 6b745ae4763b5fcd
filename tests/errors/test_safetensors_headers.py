"""A safetensors file is distinguished from a pickle by its header, not its first bytes."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from headwise._tensors import read_tensors, write_tensors
from headwise.errors import InputError, OutputError

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
