"""Bad input to a command: one clear line, exit code 2, no traceback, nothing written."""

from pathlib import Path

import pytest

from command import headwise

GOOD = "I work , you work\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, which the command must leave as it was."""
    (tmp_path / "good.txt").write_text(GOOD, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(place: Path, *arguments: object) -> str:
    """The one line of a command that fails and leaves everything as it was."""
    before = sorted(place.rglob("*"))
    done = headwise(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert sorted(place.rglob("*")) == before
    return done.err


@pytest.mark.parametrize(
    ("arguments", "tells"),
    [
        (("report", "--text", "good.txt"), "--text is for a MODEL"),
        (("report", "--device", "cpu"), "--device is for a MODEL"),
        (("report", "--max-texts", "3"), "--max-texts is for a MODEL"),
        (("report", "./any"), "./any needs texts to read"),
        (("report", "--no-roles"), "--no-roles is for a MODEL, and none is named"),
        (
            ("report", "./any", "--text", "good.txt", "--lab-folder", "lab"),
            "--lab-folder lab is for the Mini-GPT, not for ./any",
        ),
        (
            ("observe", "./any", "--text", "good.txt", "--json", "--device", "abacus"),
            "--device: 'abacus' cannot be used here",
        ),
        (
            ("observe", "./any", "--text", "good.txt", "--json", "--device", "cuda:99"),
            "--device: 'cuda:99' cannot be used here",
        ),
        (
            ("observe", "./any", "--text", "good.txt", "--statistics", "entropie"),
            "no statistic 'entropie'",
        ),
        (("observe", "./any"), "'--text'"),
        (("observe",), "'MODEL'"),
        (("observe", "./any", "--text", "good.txt", "--max-tokens", "1"), "equal to 2"),
        (("train", "--steps", "many"), "'--steps'"),
        (("train", "--widgets", "3"), "--widgets"),
        (("unearth",), "unearth"),
        (("explain", "--weights", "no.json"), "no.json"),
    ],
)
def test_impossible_arguments(place: Path, arguments: tuple[str, ...], tells: str) -> None:
    assert tells in refused(place, *arguments)


@pytest.mark.parametrize(
    ("flags", "tells"),
    [
        (("--d-model", "30"), "d_model=30 is not a multiple of n_heads=4. Give a multi"),
        (("--heads", "4", "--kv-heads", "3"), "n_heads=4 is not a multiple of n_kv_heads=3. Give"),
        (("--kv-heads", "0"), "n_heads=4 is not a multiple of n_kv_heads=0."),
        (("--steps", "0"), "steps is 0. Give 1 or more."),
        (("--context", "5"), "context is 5. Give 33 or more."),
        (("--layers", "0"), "n_layers is 0. Give a positive number."),
        (
            ("--d-model", "100000"),
            "d_model=100000, n_layers=3, mlp_ratio=2, context=40 give 240,004,000,000",
        ),
        (("--out", "good.txt"), "good.txt cannot be written"),
    ],
)
def test_impossible_training_sizes_and_folders(
    place: Path, flags: tuple[str, ...], tells: str
) -> None:
    line = refused(place, "train", *flags)
    assert tells in line
    assert flags[0] in line or flags[0] == "--out"


def test_training_does_not_overwrite_a_model_of_other_origin(place: Path) -> None:
    (place / "theirs").mkdir()
    (place / "theirs" / "model.safetensors").write_bytes(b"precious")
    for command in (("train", "--out"), ("report", "--lab-folder")):
        line = refused(place, *command, "theirs")
        assert "theirs holds model.safetensors, which would be overwritten" in line
    assert (place / "theirs" / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize("facts", ["{", "{}", '{"settings": {"wings": 2}}'])
def test_facts_that_cannot_be_read(place: Path, facts: str) -> None:
    (place / "lab").mkdir()
    (place / "lab" / "training.json").write_text(facts, "utf-8")
    assert "lab/training.json" in refused(place, "report", "--lab-folder", "lab")


def test_a_terminal_without_unicode(place: Path) -> None:
    done = headwise("report", "./Größe", encoding="ascii")
    assert done.err == "report: ./Gr\\xf6\\xdfe needs texts to read. Add --text FILE.\n"


def test_control_characters_in_a_name_are_escaped(place: Path) -> None:
    line = refused(place, "report", "./\x1b[31m[bold]\nred\u202e", "--text", "good.txt")
    assert "\x1b" not in line
    assert "\u202e" not in line
    assert "[bold]" in line
