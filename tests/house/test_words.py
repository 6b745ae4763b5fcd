"""Words that have no place in a tracked file."""

import re

from house.source import tracked_texts

# Written in parts, so that this file does not hold what it looks for.
FORBIDDEN = (
    r"(?<![\w.])/(?:wo" + r"rk|t" + r"mp|ro" + r"ot|ho" + r"me)/",  # a place on one machine
    r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    r"#\s*type:\s*ig" + r"nore(?!\[)",  # without its code it hides too much
    r"#\s*no" + r"qa(?!:)",
    r"^(?:<{7}|>{7}) ",  # a conflict left over
)


def test_no_tracked_file_holds_a_forbidden_word() -> None:
    found = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if any(re.search(pattern, line) for pattern in FORBIDDEN)
    ]
    assert not found, "\n".join(found)
