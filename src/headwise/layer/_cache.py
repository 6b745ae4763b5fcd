"""The key/value cache of incremental decoding: each new token costs one row of attention."""

from jaxtyping import Float
from torch import Tensor, cat

from headwise.errors import ArgumentError, ShapeError

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
            ShapeError: the sizes differ from those of the cached tensors.
            ArgumentError: dtype or device differ.
        """
        if self._cached is None:
            return k, v
        for name, old, new in zip("kv", self._cached, (k, v), strict=True):
            if (old.shape[:2], old.shape[3]) != (new.shape[:2], new.shape[3]):
                raise ShapeError(
                    f"KVCache: {name} {tuple(new.shape)} after {tuple(old.shape)}. "
                    f"Keep batch, heads and width; a cache belongs to one layer and batch."
                )
            if (old.dtype, old.device) != (new.dtype, new.device):
                raise ArgumentError(
                    f"KVCache: {name} {new.dtype} on {new.device} after {old.dtype} on "
                    f"{old.device}. Bring them to one dtype and device."
                )
        old_k, old_v = self._cached
        return cat((old_k, k), 2), cat((old_v, v), 2)

    def store(self, k: Float[Tensor, "B Hkv S D"], v: Float[Tensor, "B Hkv S Dv"]) -> None:
        """Keep what `joined` returned."""
        self._cached = k, v
