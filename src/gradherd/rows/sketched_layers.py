"""The layers of a model that have two-sided sketches, and their places in the table."""

from collections.abc import Mapping

from torch import Tensor, nn

from gradherd.rows.batch_dims import INPUT, BatchDims
from gradherd.rows.broadcast_uses import DirectSketch
from gradherd.rows.column_table import KnownUse, Slot, lay_out
from gradherd.rows.flat import FlatSpec
from gradherd.rows.layer_rules import BatchDim
from gradherd.rows.layer_sketches import EmbeddingSketch, LayerSketch, LinearSketch
from gradherd.rows.layer_use import SavedInput
from gradherd.rows.norm_sketches import NormSketch, make_layer_sketch
from gradherd.rows.parameter_owners import ParameterOwner, parameter_owners
from gradherd.rows.projected_weight import SketchPlan


class SketchedLayer:
    """One module with its sketch, the indices of its parameters and its slots."""

    def __init__(
        self,
        owner: ParameterOwner,
        sketch: LayerSketch,
        index: dict[str, int],
        inside: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            owner: The module.
            sketch: Computes its columns.
            index: Indices of its trainable parameters, by the names that the sketch uses.
            inside: For a projection inside an attention module, the batch dimension of that
                module's input; None for layers that are modules themselves.
        """
        self.name, self.module, self.sketch, self.index = owner.name, owner.module, sketch, index
        self.inside = inside
        self.slots: dict[str, Slot] = {}
        self.probed_dims = -1
        """Number of dimensions of an input whose batch dimension was looked for."""
        self.known: KnownUse | None = None
        """The last use that kernels served."""
        self.saved_input = SavedInput()
        self.is_norm = isinstance(sketch, NormSketch)
        self.is_table = isinstance(sketch, EmbeddingSketch)
        self.is_direct = isinstance(sketch, DirectSketch)
        self._batches: dict[tuple[int, int, int], BatchDim] = {}

    def batch(self, examples: int, dim: int, ndim: int) -> BatchDim:
        """Return where the examples of an input are; remembered, since it hardly changes."""
        key = (examples, dim, ndim)
        if key not in self._batches:
            label = self.name or type(self.module).__name__
            self._batches[key] = BatchDim(examples, label, dim, dim, is_known=True)
        return self._batches[key]


def sketched_layers(
    model: nn.Module, spec: FlatSpec, plan: SketchPlan
) -> tuple[list[SketchedLayer], list[ParameterOwner], int, int]:
    """Return the layers with sketches, the other modules, the table's width and exact part."""
    # By parameter, not by name: modules that share a weight know it under different names.
    trained = (p for p in model.parameters() if p.requires_grad)
    index = {parameter: at for at, parameter in enumerate(trained)}
    owners = list(parameter_owners(model))
    uses: dict[nn.Parameter, int] = {}
    for owner in owners:
        for parameter in owner.parameters.values():
            # A weight with several uses must be projected alike in all of them.
            uses[parameter] = uses.get(parameter, 0) + 1
    layers: list[SketchedLayer] = []
    others: list[ParameterOwner] = []
    for owner in owners:
        names = {local: spec.names[index[p]] for local, p in owner.parameters.items()}
        weight = owner.parameters.get("weight")
        shared = weight is not None and uses[weight] > 1
        if is_plain_attention(owner, uses):
            layers += _attention_layers(owner, names, index, plan)
            continue
        sketch = make_layer_sketch(owner.module, names, plan, shared=shared)
        if sketch is None and has_layers(owner):
            # Running such a module again would run all that is in it, maybe the whole model.
            for local, parameter in owner.parameters.items():
                direct = DirectSketch(local, names[local], plan)
                layers.append(SketchedLayer(owner, direct, {local: index[parameter]}))
        elif sketch is None:
            others.append(owner)
        else:
            own = {local: index[p] for local, p in owner.parameters.items()}
            layers.append(SketchedLayer(owner, sketch, own))
    width, exact = _assign_slots(layers)
    return layers, others, width, exact


def has_layers(owner: ParameterOwner) -> bool:
    """Say whether a module contains parameters besides those that it uses itself."""
    own = set(owner.parameters.values())
    return any(parameter not in own for parameter in owner.module.parameters())


def unbatched_reason(layer: SketchedLayer, inputs: Tensor, dims: BatchDims) -> str:
    """Say why a layer's parameters have no gradients of single examples."""
    if dims.knows(layer.name, INPUT, inputs.dim()):
        return f"its input of shape {tuple(inputs.shape)} has no dimension for examples"
    return "which dimension holds the examples is not known: call the model itself, not its parts"


def is_plain_attention(owner: ParameterOwner, uses: Mapping[nn.Parameter, int]) -> bool:
    """Say whether a module is nn.MultiheadAttention with one weight for queries, keys, values."""
    module = owner.module
    if not isinstance(module, nn.MultiheadAttention) or hasattr(module, "parametrizations"):
        return False
    if type(module).forward is not nn.MultiheadAttention.forward:
        return False
    wanted = {"in_proj_weight", "out_proj.weight"}
    known = wanted | {"in_proj_bias", "out_proj.bias"}
    return wanted <= owner.parameters.keys() <= known and all(
        uses[parameter] == 1 for parameter in owner.parameters.values()
    )


def _attention_layers(
    owner: ParameterOwner,
    names: Mapping[str, str],
    index: Mapping[nn.Parameter, int],
    plan: SketchPlan,
) -> list[SketchedLayer]:
    """Return the two projections of an attention module as linear layers."""
    module = owner.module
    assert isinstance(module, nn.MultiheadAttention)
    layers = []
    for prefix in ("in_proj_", "out_proj."):
        locals_ = {
            local: f"{prefix}{local}"
            for local in ("weight", "bias")
            if f"{prefix}{local}" in owner.parameters
        }
        own = {local: names[whole] for local, whole in locals_.items()}
        shape = owner.parameters[f"{prefix}weight"].shape
        sketch = LinearSketch(shape, own, plan, shared=True, one_bias=True)
        indices = {local: index[owner.parameters[whole]] for local, whole in locals_.items()}
        layers.append(SketchedLayer(owner, sketch, indices, 0 if module.batch_first else 1))
    return layers


def _assign_slots(layers: list[SketchedLayer]) -> tuple[int, int]:
    """Give each layer its slots; modules that share a weight share its slot."""
    widths: dict[tuple[int, str], tuple[int, bool]] = {}
    keys: list[dict[str, tuple[int, str]]] = []
    for layer in layers:
        own = {slot: (layer.index.get(slot, id(layer)), slot) for slot in layer.sketch.widths}
        keys.append(own)
        widths |= {own[slot]: width for slot, width in layer.sketch.widths.items()}
    slots, width, exact = lay_out(widths.values())
    by_key = dict(zip(widths, slots, strict=True))
    for layer, own in zip(layers, keys, strict=True):
        layer.slots = {slot: by_key[key] for slot, key in own.items()}
    return width, exact
