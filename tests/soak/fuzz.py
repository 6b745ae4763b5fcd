"""Give broken files to every loader, and count what happens.

Run as `python tests/soak/fuzz.py INPUTS RESULTS.json`, with `tests` on the path. A loader either
reads a file or raises a `HeadwiseError` that names it. It runs no code, opens no file elsewhere and
takes no memory far beyond the file's size.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from children import exit_status, start_child
from headwise.errors import HeadwiseError
from loaders import KINDS, SHARES, Loader
from mutations import mutations

# A table may take 64 MiB, and a model 64 MiB of weights and 512 MiB of buffers, whatever the file.
_SPARE_BYTES = 2**30
_SECONDS = 30
_CHUNK = 500
_PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.", "pty.")
_NETWORK = ("socket.connect", "socket.getaddrinfo", "urllib.")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Outcomes:
    """What happened to the inputs of a loader.

    Attributes:
        inputs: Distinct broken files.
        refused: Those that raised a `HeadwiseError` with the file's name.
        problems: Everything else that is not a usable object, with an input that shows it.
        megabytes: The largest growth of the process while it read some hundred of them.
    """

    inputs: int = 0
    loaded: int = 0
    refused: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    megabytes: float = 0.0

    def problem(self, description: str, content: bytes) -> None:
        self.problems.setdefault(description[:300], repr(content[:400]))


class Guard:
    """Records what a loader must not do: run code or programs, or open files elsewhere."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self.events: list[str] = []
        places = {sys.prefix, sys.base_prefix, *filter(None, sys.path)}
        self._readable = tuple(os.path.realpath(place) for place in places)
        self._readable += (str(Path(__file__).parents[2]), "/proc", "/sys", "/dev", "/usr", "/lib")
        sys.addaudithook(self._audit)

    @contextmanager
    def __call__(self, folder: Path) -> Iterator[None]:
        self._folder, self.events = os.path.realpath(folder), []
        try:
            yield
        finally:
            self._folder = None

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        folder = self._folder
        if folder is None:
            return
        if event.startswith((*_PROGRAMS, *_NETWORK)) or event == "pickle.find_class":
            self.events.append(f"{event} {arguments!r:.100}")
        elif event == "exec" and arguments[0].co_filename.startswith(folder):
            self.events.append(f"exec {arguments[0].co_filename}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = bool((arguments[2] or 0) & _WRITES)
            if not path.startswith((folder,) if writes else (folder, *self._readable)):
                self.events.append(f"open {path} {'to write' if writes else ''}")


class Fuzzer:
    """Feeds one loader with broken versions of its file."""

    def __init__(self, name: str, loader: Loader, guard: Guard, folder: Path) -> None:
        self.name, self._loader, self._guard, self._folder = name, loader, guard, folder
        self._whole = loader.path.read_bytes()
        self._digests: set[bytes] = set()
        self.outcomes = Outcomes()
        loader.use(loader.read(loader.path))  # before the file is broken

    @property
    def distinct(self) -> int:
        """The number of different broken versions so far."""
        return len(self._digests)

    def feed(self, inputs: int, seed: int) -> None:
        """Read this many broken versions; those that came before are left out."""
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        for content in mutations(self._whole, inputs, seed=crc32(self.name.encode()) + seed):
            digest = hashlib.blake2b(content, digest_size=8).digest()
            if digest not in self._digests:
                self._digests.add(digest)
                self._read(content)
        self.outcomes.megabytes = max(self.outcomes.megabytes, _memory("VmHWM") - before)
        self._loader.path.write_bytes(self._whole)

    def _read(self, content: bytes) -> None:
        outcomes, path = self.outcomes, self._loader.path
        path.write_bytes(content)
        outcomes.inputs += 1
        with self._guard(self._folder):
            try:
                self._loader.use(self._loader.read(path))
                outcomes.loaded += 1
            except HeadwiseError as error:
                outcomes.refused += 1
                if path.name not in str(error) and path.parent.name not in str(error):
                    outcomes.problem(f"no path in {error}", content)
            except BaseException as error:
                outcomes.problem(f"{type(error).__name__}: {error}", content)
                if isinstance(error, KeyboardInterrupt):
                    raise
        for event in self._guard.events:
            outcomes.problem(event, content)


def fuzz_kind(kind: str, folder: Path, inputs: int, guard: Guard) -> Iterator[Fuzzer]:
    """Feed every loader of a kind with its share of all inputs; yields after some hundred."""
    for name, loader in KINDS[kind](folder).items():
        fuzzer = Fuzzer(name, loader, guard, folder)
        share = -(-inputs * SHARES[kind] // 1000)
        for seed in range(0, 4 * share, _CHUNK):
            # Small files have few distinct broken versions: each chunk adds fewer.
            missing = share - fuzzer.distinct
            if missing <= 0:
                break
            fuzzer.feed(min(_CHUNK, missing + 1), seed)
            yield fuzzer


def _memory(name: str) -> float:
    """Megabytes of this process, from a field of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) / 1024


def _limit() -> None:
    """Let memory and time beyond the limits raise an error in this process."""
    limit = int(_memory("VmSize") * 2**20) + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {_SECONDS} s")

    signal.signal(signal.SIGALRM, late)


def _fuzz(kind: str, inputs: int, results: Path) -> None:
    guard = Guard()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for fuzzer in fuzz_kind(kind, Path(folder), inputs, guard):
            if not found:  # what is imported late has been imported
                _limit()
            found[fuzzer.name] = asdict(fuzzer.outcomes)
            results.write_text(json.dumps(found))
            signal.alarm(_SECONDS * _CHUNK)


def main(inputs: int, results: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    part = results.with_suffix(".part.json")
    for kind in sorted(KINDS, key=lambda kind: SHARES[kind]):
        part.write_text("{}")
        status = exit_status(start_child(partial(_fuzz, kind, inputs, part)))
        found |= json.loads(part.read_text())
        if status:
            found[f"{kind}, the process"] = asdict(Outcomes(problems={f"ended with {status}": ""}))
        results.write_text(json.dumps(found, indent=1))
    part.unlink()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
