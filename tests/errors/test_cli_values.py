"""Values that no command can use: one clear line that names option and value, no traceback."""

import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from command import headwise
from folders import write_llama

WORDS = ("<pad>", "<bos>", "<eos>", "one", "two", "three")

# A correct command line of every command; all its files exist.
RIGHT: dict[str, tuple[str, ...]] = {
    "report": ("model", "--text", "good.txt", "--out", "page.html"),
    "observe": ("model", "--text", "good.txt", "--out", "table.csv"),
    "roles": ("model", "--text", "good.txt", "--out", "roles.csv"),
    "importance": ("model", "--text", "good.txt", "--out", "scores.csv"),
    "prune": ("model", "--by", "by.csv", "--remove", "0.3", "--out", "small"),
    "train": ("--out", "lab"),
    "explain": (),
}
SHARED = ("report", "observe", "roles", "importance", "prune")
# MODEL stands for the argument, in the place of the first one.
FILES = {
    "report": ("MODEL", "--device", "--text", "--out", "--lab-folder"),
    "observe": ("MODEL", "--device", "--text", "--out"),
    "roles": ("MODEL", "--device", "--text", "--out", "--conllu", "--coref", "--spans"),
    "importance": ("MODEL", "--device", "--text", "--pairs", "--out"),
    "prune": ("MODEL", "--device", "--by", "--out", "--text", "--pairs"),
    "train": ("--out",),
}
NUMBERS = dict.fromkeys(SHARED, ("--seed", "--max-texts", "--max-tokens")) | {
    "prune": ("--remove", "--within", "--rate", "--recover", "--seed", "--max-texts",
              "--max-tokens"),
    "importance": ("--rounds", "--seed", "--max-texts", "--max-tokens"),
    "train": (
        "--steps", "--layers", "--heads", "--kv-heads", "--d-model", "--mlp-ratio", "--context",
        "--seed",
    ),
}  # fmt: skip
SEEDS = dict.fromkeys((*SHARED, "train"), ("--seed",))
DEVICES = dict.fromkeys(SHARED[:4], ("--device",))
TEXTS = {"": "is empty", " ": "is empty", "a\0b": "NUL", "caf\udce9": "not valid UTF-8"}
NO_NUMBERS = ("nan", "inf", "-inf", "-1", "x", "1e400")
NO_DEVICES = ("meta", "cuda:7", "nonsense", "mkldnn", "hpu", "cpu:-1")
NO_MODELS = ("-", "~", "~someone", "two words", "no\\model", "a/b/c", "--", "*")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_llama(folder, WORDS, hidden_size=12, num_attention_heads=3)
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Path:
    """A folder to work in, which the command must leave as it was."""
    (tmp_path / "good.txt").write_text("one two three\ntwo one\n", "utf-8")
    (tmp_path / "spans.jsonl").write_text('{"text": "one \\ud800 two"}\n', "ascii")
    (tmp_path / "by.csv").write_text("head\n", "utf-8")
    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pairs(commands: Collection[str], values: Iterable[str]) -> list[tuple[str, str]]:
    """The first command with every value, the others with one: all share the same checks."""
    values = [*values]
    return [
        (command, value)
        for number, command in enumerate(commands)
        for value in (values if number == 0 else [values[number % len(values)]])
    ]


def refused(place: Path, *arguments: str) -> str:
    """The one line of a command that fails and leaves everything as it was."""
    before = sorted(place.rglob("*"))
    done = headwise(*arguments)
    assert (done.code, done.out) == (2, ""), arguments
    assert re.fullmatch(r"\S[^\n]*\.\n", done.err), (arguments, done.err)
    assert "Traceback" not in done.err
    assert sorted(place.rglob("*")) == before, arguments
    return done.err


def replaced(command: str, option: str, value: str) -> tuple[str, ...]:
    """The correct command line with another value for one option."""
    right = [*RIGHT[command]]
    if option == "MODEL":
        right[0] = value
    elif option in right:
        right[right.index(option) + 1] = value
    else:
        right += [option, value]
    needs = ("--recover", "1", "--text", "good.txt") if option == "--rate" else ()
    return (command, *right, *needs)


@pytest.mark.parametrize(("command", "options", "value", "why"), [
    *((command, FILES[command], value, TEXTS[value]) for command, value in pairs(FILES, TEXTS)),
    *(("train", ("--prompt",), value, TEXTS[value]) for value in ("a\0b", "caf\udce9")),
    *((c, NUMBERS[c], value, "1e400|inf" if value == "1e400" else value)
      for c, value in pairs(NUMBERS, NO_NUMBERS)),
    *((c, SEEDS[c], value, value) for c, value in pairs(SEEDS, ["9" * 23, "4294967296"])),
    *((c, DEVICES[c], value, f"--device: '{value}' cannot be used here")
      for c, value in pairs(DEVICES, NO_DEVICES)),
])  # fmt: skip
def test_an_unusable_value_is_reported_with_its_option(
    place: Path, command: str, options: tuple[str, ...], value: str, why: str
) -> None:
    for option in options:
        line = refused(place, *replaced(command, option, value))
        assert option in line
        assert re.search(why, line), line


@pytest.mark.parametrize(("command", "value"), pairs(SHARED, NO_MODELS))
def test_an_argument_that_is_no_model(place: Path, command: str, value: str) -> None:
    if command == "prune":
        (place / "by.csv").unlink()  # scores are read before a model
    line = refused(place, command, "--", value) if value == "--" else refused(
        place, command, value, *RIGHT[command][1:]
    )  # fmt: skip
    assert value in line or command == "prune"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cache model --text good.txt --keep 7", "--keep: cache_plan: keep=7.0. Give a share"),
        ("cache model --text good.txt --sinks 4 --window 999", "window=999 keep all"),
        (
            "train --kv-heads 3 --out lab",
            "--kv-heads: MiniGPTConfig: n_heads=4 is not a multiple of n_kv_heads=3. ",
        ),
        ("train --context 5 --out lab", "context is 5. Give 33 or more."),
        ("train --d-model 100000 --out lab", "mlp_ratio=2, context=40 give 240,004,000,000 weig"),
        ("train --heads 3 --out lab", "d_model=128 is not a multiple of n_heads=3. "),
        ("train --steps -1 --out lab", "--steps: TrainSettings: steps is -1. "),
        ("train --out lab --prompt 'I frobnicate'", "does not know the word 'frobnicate'"),
        (f"train --out lab --prompt '{'I ' * 40}'", "has 41 tokens but the context holds 40"),
        ("look model words --target x", "target='x' alone is for an encoder-decoder"),
        ("look model good.txt", "good.txt is a file, and TEXT is the sentence itself. "),
        ("roles model --spans spans.jsonl", "spans.jsonl, line 1: "),
        ("roles model --spans spans.jsonl --nulls none", "surrogate"),
    ],
)
def test_errors_of_the_library_follow_the_options_that_they_name(
    place: Path, line: str, message: str
) -> None:
    assert message in refused(place, *shlex.split(line))
