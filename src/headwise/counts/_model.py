"""The sizes of the attention of a whole model."""

from dataclasses import dataclass

from headwise.counts._sizes import LayerSizes


@dataclass(frozen=True)
class ModelSizes:
    """A stack of equal attention layers.

    Attributes:
        all_parameters: Of the whole model; None where it is not known.
        source: Where the sizes stand.
    """

    name: str
    layer: LayerSizes
    n_layers: int
    all_parameters: int | None = None
    source: str = ""

    def parameters(self) -> int:
        """The parameters of all attention layers together."""
        return self.n_layers * sum(self.layer.parameters().values())

    def share(self) -> float | None:
        """The attention's part of the model's parameters, from 0 to 1; None if it is not known."""
        return None if self.all_parameters is None else self.parameters() / self.all_parameters

    def cache_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes that the keys and values of one token take in all layers."""
        return self.n_layers * self.layer.cache_bytes(dtype)
