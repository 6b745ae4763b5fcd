"""Broken files: seeded mutations of the bytes of a file, and of the values in its JSON.

The JSON is the whole text, one line of it, or the header of a safetensors file.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# Bytes that no reader expects in the middle of a file.
PIECES = (
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",  # a lone surrogate
    b"\\ud800",
    b"\r\n",
    b"\r",
    b"\t",
    b'"',
    b",",
    b"}",
    b"[" * 5000,
    b'{"a": ' * 5000,
    b'{"a": 1, "a": 2}',
    b"NaN",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"null",
    "٣".encode(),
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2, 0.5, 1e308, float("nan"), float("inf"), 10**30, 10**400, "", "x",
    "L0.H0", "L99999999999999999999.H0", "\0", "\ud800", [], [[]], {}, [None], ["x"], [1, 2, 3],
    {"x": 1}, {"": None}, "../outside", "/etc/passwd", "owner/name", "os.system", "__class__",
    [2**40, 2**40], [-1], 2**31, 2**62,
)  # fmt: skip


def mutations(content: bytes, n: int, seed: int) -> Iterator[bytes]:
    """This many broken versions of a file; JSON texts are also broken in their values."""
    rng = random.Random(seed)
    yield b""
    for number in range(n - 1):
        # Nested lists and objects, or lines of them.
        changed = _in_json(content, rng) if number % 2 else None
        yield changed if changed is not None else _in_bytes(content, rng)


def _in_bytes(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice((1, 1, 4, 30)))
        content = rng.choice(_CHANGES)(content, start, end, rng)
    return content


Change = Callable[[bytes, int, int, random.Random], bytes]
_CHANGES: tuple[Change, ...] = (
    lambda x, start, end, rng: x[:start],
    lambda x, start, end, rng: x[start:],
    lambda x, start, end, rng: x[:start] + x[end:],
    lambda x, start, end, rng: x[:end] + x[start:],
    lambda x, start, end, rng: x[:start] + rng.randbytes(end - start) + x[end:],
    lambda x, start, end, rng: x[:start] + bytes(end - start) + x[end:],
    lambda x, start, end, rng: x[:start] + rng.choice(PIECES) + x[end:],
    lambda x, start, end, rng: rng.choice(PIECES) + x,
    lambda x, start, end, rng: x + rng.choice(PIECES),
    lambda x, start, end, rng: x.replace(b"\n", b"\r\n"),
    lambda x, start, end, rng: (
        x[:start] + bytes(b ^ 1 << rng.randrange(8) for b in x[start:end]) + x[end:]
    ),
)  # fmt: skip


def _in_json(content: bytes, rng: random.Random) -> bytes | None:
    """A file with one value of its JSON changed; None for other files."""
    if content[8:9] == b"{":
        return _in_header(content, rng)
    try:
        return _dumped(_changed(json.loads(content), rng))
    except ValueError:
        pass
    lines = content.split(b"\n")
    row = 0 if lines[0].startswith(b"# {") else rng.randrange(len(lines))
    prefix = b"# " if lines[row].startswith(b"# ") else b""
    try:
        lines[row] = prefix + _dumped(_changed(json.loads(lines[row].removeprefix(prefix)), rng))
    except ValueError:
        return None
    return b"\n".join(lines)


def _in_header(content: bytes, rng: random.Random) -> bytes | None:
    """A safetensors file with one value of its header changed, and the length that belongs to it.

    Metadata holds texts, some of them JSON.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8:end])
    except ValueError:
        return None
    metadata = header.get("__metadata__") or {}
    if metadata and rng.random() < 0.5:
        name = rng.choice(sorted(metadata))
        changed = _in_json(metadata[name].encode(), rng) or _in_bytes(metadata[name].encode(), rng)
        metadata[name] = changed.decode("utf-8", "replace")
    else:
        header = _changed(header, rng)
    written = _dumped(header)
    return len(written).to_bytes(8, "little") + written + content[end:]


def _dumped(value: Any) -> bytes:
    return json.dumps(value, default=str).encode()


def _changed(value: Any, rng: random.Random) -> Any:
    """A value with one of its parts replaced, left out, doubled or wrapped."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice((rng.choice(VALUES), [value], {"x": value}))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, draw = rng.choice(keys), rng.random()
    if draw < 0.15:
        del value[key]
    elif draw < 0.25 and isinstance(value, list):
        value.append(value[key])
    elif draw < 0.25:
        value[rng.choice(("x", "", f"{key} "))] = value[key]
    else:
        value[key] = _changed(value[key], rng)
    return value
