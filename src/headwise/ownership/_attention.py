"""The attentions of a model, each with the output projection that mixes its heads."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from headwise.capture import AttentionCall, Site, capture_calls
from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.models import Hooks, check_weights, is_sharded, run_uncompiled
from headwise.ownership._model_runs import example_input, run
from headwise.tables import Head, HeadsLike, resolve_heads

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
_NO_PROJECTION = (
    "heads: {} has no output projection that is a plain linear layer. "
    "Merge adapters and unpack quantized weights first."
)


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
    when packed by quantization, or if this process has a part of the weight only.
    """
    above = site.name.rpartition(".")[0]
    candidates = [(site.name, name) for name in _NAMES]
    candidates += [(above, name) for name in _NAMES_ABOVE]
    for parts in candidates:
        name = ".".join(part for part in parts if part)
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue
        if is_sharded(getattr(module, "weight", None)) or not is_linear(module):
            return None
        projection = OutputProjection(name, module, site.n_heads)
        return (
            projection if projection.weight.shape[projection.in_axis] % site.n_heads == 0 else None
        )
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


@dataclass(frozen=True)
class Attention:
    """An attention of a model, with its output projection.

    Attributes:
        site: Where it is, and how many heads it has.
        module: The module that computes the attention.
        projection: The output projection that mixes its heads; None if a bare parameter does.
        nth: Which call of the module in one pass it is, if layers share their weights.
        rows: In how many rows it attended in the pass that found it; more than there are texts
            if windows or frames of a text are rows of their own.
    """

    site: Site
    module: nn.Module
    projection: OutputProjection | None
    nth: int
    rows: int = field(default=1, compare=False)

    @property
    def output(self) -> OutputProjection:
        """The output projection, for whatever needs its weights."""
        if self.projection is None:
            raise UnsupportedError(_NO_PROJECTION.format(self.site.name))
        return self.projection

    @property
    def around(self) -> str:
        """The name of the smallest module with both the attention and its output projection."""
        pairs = zip(self.site.name.split("."), self.output.name.split("."), strict=False)
        return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def called(self) -> bool:
        """Whether the output projection is called as a module; torch's own layer never calls it."""
        return not isinstance(self.module, nn.MultiheadAttention)


def find_attentions(
    model: nn.Module, batch: Any = None, *, needs_projections: bool = True
) -> list[Attention]:
    """Find the attentions of a model by running it once.

    The model runs in evaluation mode, without gradients, and is not changed. The run also checks
    that each output projection receives the outputs of the heads unchanged.

    Args:
        model: Any model that `observe` can watch.
        batch: Its inputs: keyword arguments, a tuple of arguments, or a single argument. None
            generates a short example input.
        needs_projections: Whether an attention without an output projection that is a module,
            such as one whose `W_O` is a bare parameter, is refused.
    Raises:
        ArgumentError: no batch is given and none can be generated.
        UnsupportedError: no attention was captured, or the outputs of heads are changed before
            the output projection.
    """
    check_weights("heads", model, offloaded=True)
    batch = example_input(model) if batch is None else batch
    attentions = list[Attention]()
    # Heads that have not reached their output projection so far.
    unmixed: dict[Attention, Float[Tensor, "B T H Dv"]] = {}
    # The gate of our own layer may scale heads before the projection, which counts as theirs.
    ours = {id(m.attention) for m in model.modules() if isinstance(m, MultiHeadAttention)}

    def record(call: AttentionCall) -> None:
        site = active.site_of(call)
        output = output_projection(model, site)
        if output is None and needs_projections:
            raise UnsupportedError(_NO_PROJECTION.format(site.name))
        if any(known.site == site for known in attentions):
            raise UnsupportedError(
                f"heads: {site.name} attends several times in one pass, so edits of its heads "
                f"are ambiguous. Watch this model without editing its heads."
            )
        nth = sum(known.module is call.module for known in attentions)
        attention = Attention(site, call.module, output, nth, len(call.heads))
        attentions.append(attention)
        if output is not None and attention.called and id(call.module) not in ours:
            unmixed[attention] = call.heads.transpose(1, 2)

    def check_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor):
            return
        for attention, heads in list(unmixed.items()):
            receives = attention.output.module is module and args[0].numel() == heads.numel()
            if receives and args[0].reshape(heads.shape).equal(heads):
                del unmixed[attention]

    with run_uncompiled(), Hooks() as hooks:
        active = hooks.enter_context(capture_calls(model, record))
        for module in model.modules():
            # Before all other hooks, which may edit the heads.
            hooks.before(module, check_inputs, prepend=True)
        run(model, batch)
    if not attentions:
        raise UnsupportedError(
            f"heads: no attention was captured in {type(model).__name__}. Give a model "
            f"that headwise.observe can watch."
        )
    for attention in unmixed:
        raise UnsupportedError(
            f"heads: {attention.site.name} changes its heads before "
            f"{attention.output.name} mixes them, so they cannot be separated there. "
            f"Watch this model without editing its heads."
        )
    return attentions


def heads_of(attentions: Iterable[Attention]) -> list[Head]:
    """The address of every head, in the order in which the attentions run."""
    return [head for attention in attentions for head in attention.site.heads()]


def by_attention(heads: HeadsLike, attentions: list[Attention]) -> dict[Attention, list[int]]:
    """The chosen heads of each attention; attentions without any are left out."""
    by_layer = {(a.site.stack, a.site.layer): a for a in attentions}
    chosen: dict[Attention, list[int]] = {}
    for head in sorted(resolve_heads(heads, heads_of(attentions))):
        chosen.setdefault(by_layer[head.stack, head.layer], []).append(head.head)
    return chosen
