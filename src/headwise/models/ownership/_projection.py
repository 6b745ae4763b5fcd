"""The output projection of an attention, which mixes the outputs of its heads."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from headwise.models._sharded import is_sharded
from headwise.models.capture import Site

# Its usual names: beside the other projections or, in BERT and its relatives, one module above.
_NAMES = (
    "o_proj", "out_proj", "c_proj", "out_lin", "Wo", "o", "dense", "wo",
    "proj", "to_out.0", "to_out", "projection", "proj_out", "output_proj", "linear_out",
)  # fmt: skip
_NAMES_ABOVE = ("output.dense", "out_proj")

_BATCH_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


@dataclass(frozen=True)
class OutputProjection:
    """The linear map that mixes the outputs of the heads of one attention.

    Attributes:
        name: Its qualified name in the model.
        module: An `nn.Linear`, or a `Conv1D` of transformers, whose weight is transposed.
        n_heads: How many heads share its inputs, `v_head_dim` consecutive ones each.
    """

    name: str
    module: nn.Module
    n_heads: int

    @property
    def in_axis(self) -> int:
        """The axis of the weight that corresponds to its inputs."""
        return 0 if is_transposed(self.module) else 1

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module.get_parameter("weight")
        return weight

    @property
    def bias(self) -> Float[Tensor, " d_model"] | None:
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias

    @property
    def per_head(self) -> Float[Tensor, "H Dv d_model"]:
        """The weight per head: head `h` adds `heads_h @ per_head[h]` to the output.

        A view: writing into it changes the model.
        """
        weight = self.weight if self.in_axis == 0 else self.weight.T
        return weight.view(self.n_heads, -1, weight.shape[1])


def output_projection(model: nn.Module, site: Site) -> OutputProjection | None:
    """The output projection of a site, found by its name; None if there is none.

    Also None if the module computes more than a linear map of its weight, as under an adapter or
    when packed by quantisation, or if this process has a part of the weight only.
    """
    above = site.name.rpartition(".")[0]
    candidates = [(site.name, name) for name in _NAMES]
    candidates += [(above, name) for name in _NAMES_ABOVE]
    for parts in candidates:
        name = ".".join(part for part in parts if part)
        module = _submodule(model, name)
        if module is not None:
            is_whole = not is_sharded(getattr(module, "weight", None))
            fits = is_whole and is_linear(module) and _inputs(module) % site.n_heads == 0
            return OutputProjection(name, module, site.n_heads) if fits else None
    return None


def is_linear(module: nn.Module) -> bool:
    """Whether a module only multiplies by its weight and adds its bias."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
        return False
    if is_transposed(module):
        return True
    # Packed weights have another shape than the module says.
    return isinstance(module, nn.Linear) and weight.shape == (
        module.out_features,
        module.in_features,
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm, which may keep statistics of its channels."""
    return isinstance(module, _BATCH_NORMS)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is `[in, out]`, as in the Conv1D of transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _inputs(module: nn.Module) -> int:
    weight = module.get_parameter("weight")
    return int(weight.shape[0 if is_transposed(module) else 1])


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
