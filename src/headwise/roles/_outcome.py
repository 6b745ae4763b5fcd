"""What came of each test: a role was found, was not found, or was not tested for lack of texts."""

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from headwise.roles._evidence import FEWEST_TEXTS

FOUND, NOT_FOUND = "found", "not found"
# A text counts only with a query, so that enough texts are enough queries too.
_NEEDED = f"{FEWEST_TEXTS} needed"


def outcomes(
    found: Bool[np.ndarray, " C"], p: Float[np.ndarray, " C"], texts: Float[np.ndarray, " C"]
) -> list[str]:
    """The outcome of each row of a table of roles.

    Args:
        p: The adjusted p; NaN where nothing was tested.
        texts: Held-out texts with at least one query for the role.
    Returns:
        `found`, `not found`, or `not tested: ` and what is missing.
    """
    return [
        untested(int(count)) if np.isnan(level) else FOUND if has else NOT_FOUND
        for has, level, count in zip(found, p, texts, strict=True)
    ]


def untested(texts: int) -> str:
    """Why a role was not tested: how many held-out texts have a query for it."""
    if not texts:
        return "not tested: no held-out text has a query for it"
    return f"not tested: {texts} held-out text{'' if texts == 1 else 's'}, {_NEEDED}"


def none_found(rows: pd.DataFrame) -> str:
    """What to say of heads of which no row is found: that none was, or that none was tested.

    Roles for which no text has a query are not mentioned.
    """
    by_role = rows.groupby("role", sort=False)
    tested = by_role["p_adj"].count() > 0
    texts = by_role["texts"].max()
    short = int(((texts > 0) & ~tested).sum())
    if not tested.any():
        return untested(0 if texts.empty else int(texts.max()))
    if not short:
        return "no role found"
    missing = untested(int(texts[~tested].max())).replace(": ", ": at most ")
    return f"no role found among {int(tested.sum())} tested; {short} {missing}"
