"""Without the packages of the extras, the core works, and each error names the extra to install."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headwise.errors import MissingPackageError
from studies import make_study

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = {
    "hf": ("huggingface_hub", "pillow", "scipy", "tokenizers", "transformers"),
    "cli": ("rich", "typer"),
    "report": ("jinja2", "scipy"),
    "plot": ("matplotlib",),
}
# Blocks packages as if they were not installed.
BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
CORE = """
import numpy as np, tempfile, torch
import headwise as hw
from headwise.lab import MiniGPT, MiniGPTConfig
from pathlib import Path

hw.progress(False)  # a slow machine would print it
torch.manual_seed(0)
layer, x = hw.MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
assert layer(x, mask=hw.masks.causal()).shape == (2, 5, 12)
q = np.random.default_rng(0).normal(size=(2, 3, 5, 7))
reference = hw.reference.attention(q, q, q)
tensor = torch.from_numpy(q)
np.testing.assert_allclose(hw.attend(tensor, tensor, tensor), reference, rtol=1e-9)
with hw.observe(torch.nn.Sequential(layer), hw.Request.of(["entropy"])) as watch:
    layer(x)
table = watch.table()
assert len(table.frame()) == 3
with tempfile.TemporaryDirectory() as folder:
    for ending in ("parquet", "csv", "json"):
        table.save(Path(folder) / f"table.{ending}")
    loaded = hw.HeadTable.load(Path(folder) / "table.parquet")
    model = MiniGPT(MiniGPTConfig(7, context=8, d_model=6, n_heads=2, n_layers=1))
    hw.save(model, Path(folder) / "mini")
    hw.load(Path(folder) / "mini")
assert loaded.frame().equals(table.frame())
"""
DOORS = """
import contextlib, io
def message(call):
    try:
        call()
    except hw.errors.MissingPackageError as error:
        return str(error)
    raise AssertionError("no error")

assert "[hf]" in message(lambda: hw.load("no/model"))
assert "[hf]" in message(lambda: hw.load_tokenizer("no/model"))
assert "[hf]" in message(hw.register_attention)
assert "[hf]" in message(lambda: __import__("headwise.lab").lab.make_tokenizer(["a"]))
assert "[plot]" in message(lambda: table.plot("entropy"))
from headwise.cli import main
told = io.StringIO()
with contextlib.redirect_stderr(told):
    try:
        main(["explain"])
    except SystemExit as end:
        assert end.code == 2
assert "[cli]" in told.getvalue(), told.getvalue()
"""


def _run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_core_works_without_any_extra_and_errors_name_the_extra() -> None:
    names = sorted({name for packages in EXTRAS.values() for name in packages})
    _run(BLOCK.format(names=names) + CORE + DOORS)


@pytest.mark.full
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_core_works_without_each_extra(extra: str) -> None:
    _run(BLOCK.format(names=EXTRAS[extra]) + CORE)


@pytest.mark.parametrize("package", ["jinja2", "scipy"])
def test_a_page_without_its_packages_names_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}.*headwise\[report\]"):
        make_study().report(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_extras_hold_these_packages() -> None:
    extras = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        declared = {line.partition(">=")[0].replace("-", "_") for line in extras[extra]}
        assert declared == set(packages)
    assert extras["all"] == [f"headwise[{','.join(EXTRAS)}]"]
