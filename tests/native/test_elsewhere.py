"""The native kernel on ARM under emulation, and under a memory checker."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src" / "headwise" / "kernels" / "native" / "source"
# The same flags as in CMakeLists.txt.
FLAGS = ("-std=gnu++20", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
CROSS = "aarch64-linux-gnu-g++"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SOURCE.is_dir(), reason="the kernel's sources are not installed"),
]


def _needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if not shutil.which(tool)]
    return pytest.mark.skipif(bool(missing), reason=f"there is no {', '.join(missing)}")


def _build(into: Path, compiler: str, *flags: str) -> str:
    files = [str(HERE / "driver.cpp"), str(SOURCE / "kernel.cpp"), "-o", str(into)]
    command = [compiler, *FLAGS, "-fopenmp", f"-I{SOURCE}", *flags, *files]
    subprocess.run(command, check=True, capture_output=True)
    return str(into)


def _run(*command: str) -> list[tuple[str, np.ndarray]]:
    """The numbers that a driver prints, by name."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    results: list[tuple[str, np.ndarray]] = []
    for block in re.findall(r"((?:^(\w+) .*\n)(?:^\2 .*\n)*)", done.stdout, re.MULTILINE):
        lines, name = block
        results.append((name, np.array(lines.replace(name, "").split(), dtype=float)))
    return results


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    flags = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    return _build(tmp_path_factory.mktemp("plain") / "driver", "g++", *flags)


@_needs("g++", CROSS, "qemu-aarch64")
def test_arm_computes_the_same_numbers(plain: str, tmp_path: Path) -> None:
    libraries = f"/usr/{CROSS.removesuffix('-g++')}"
    emulated = ["qemu-aarch64", "-L", libraries, _build(tmp_path / "driver", CROSS)]
    on_host, on_arm = _run(plain), _run(*emulated)
    assert [name for name, _ in on_host] == [name for name, _ in on_arm]
    # Shares divide by sums near zero; half precision is rounded in its last place.
    close = {"class": 1e-4, "bfloat16": 2.0**-7, "half": 2.0**-10}
    for (name, expected), (_, actual) in zip(on_host, on_arm, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=close.get(name, 1e-5), atol=1e-5)


@_needs("g++", "valgrind")
def test_no_uninitialised_byte_is_read(plain: str) -> None:
    watched = _run("valgrind", "--quiet", "--error-exitcode=9", plain)
    for (name, expected), (_, actual) in zip(_run(plain), watched, strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=name)


@_needs("g++", "cmake")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere there is but one build")
def test_an_old_compiler_skips_newer_instruction_sets(tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text('#!/bin/sh\ncase "$*" in *avx512bf16*) exit 1;; esac\nexec g++ "$@"\n')
    old.chmod(0o755)
    command = ["cmake", "-S", str(HERE.parents[1]), "-B", str(tmp_path / "build")]
    command.append(f"-DCMAKE_CXX_COMPILER={old}")
    subprocess.run(command, check=True, capture_output=True)
    listing = subprocess.run(
        ["cmake", "--build", str(tmp_path / "build"), "--target", "help"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert "avx2" in listing
    assert "avx512\n" in listing
    assert "avx512bf16" not in listing
