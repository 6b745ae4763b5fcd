"""The key/value cache of incremental decoding: each new token costs one row of attention."""

from jaxtyping import Float
from torch import Tensor, cat

from headwise.errors import ShapeError

KeysValues = tuple[Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S Dv"]]


class KVCache:
    """The keys and values that one layer has computed so far, for one batch of texts."""

    def __init__(self) -> None:
        self._cached: KeysValues | None = None

    def __len__(self) -> int:
        """The number of tokens."""
        return 0 if self._cached is None else self._cached[0].shape[2]

    def joined(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> KeysValues:
        """All keys and values up to those of further tokens, which are not stored yet.

        Raises:
            ShapeError: sizes, dtype or device differ from those of the cached tensors.
        """
        if self._cached is None:
            return k, v
        for name, old, new in zip("kv", self._cached, (k, v), strict=True):
            kinds = [(x.shape[:2], x.shape[3], x.dtype, x.device) for x in (old, new)]
            if kinds[0] != kinds[1]:
                raise ShapeError(
                    f"KVCache: {name} {tuple(new.shape)} of {new.dtype} on {new.device} after "
                    f"{tuple(old.shape)} of {old.dtype} on {old.device}. Keep batch, heads, width, "
                    f"dtype and device; a cache belongs to one layer and batch."
                )
        old_k, old_v = self._cached
        return cat((old_k, k), 2), cat((old_v, v), 2)

    def store(self, k: Float[Tensor, "B Hkv S D"], v: Float[Tensor, "B Hkv S Dv"]) -> None:
        """Keep what `joined` returned."""
        self._cached = k, v
