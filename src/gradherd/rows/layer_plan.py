"""Which modules of a model have rows by a sink, and with which maps."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradherd.flat import FlatSpec
from gradherd.rows.batch_dims import BatchDims
from gradherd.rows.looped_modules import LoopedModule
from gradherd.rows.sink import MATRIX, SINGLE, VECTOR, SinkPool, SketchedLayer, tap_module
from gradherd.rows.sink_layers import (
    ChannelNorm,
    ConvLayer,
    DirectLayer,
    EmbeddingLayer,
    LastDimsNorm,
    LinearLayer,
    NormLayer,
    TappedAttention,
    TappedParameters,
)
from gradherd.rows.sink_maps import (
    MOST_BUCKETS,
    MOST_KEPT,
    FilterMap,
    MapSettings,
    MatrixMap,
    OuterMap,
    VectorMap,
    WholeMap,
)

log = logging.getLogger("gradherd")

WeightMaps = tuple[MatrixMap | WholeMap, MatrixMap | OuterMap | None]
"""Maps of a weight, for many positions and, if it is another one, for one."""

_CONVOLUTIONS: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_CHANNEL_NORMS = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RMS_NORMS = ("RMSNorm", "T5LayerNorm")
"""How classes of transformers end that compute what nn.RMSNorm does; the first batches check it."""


@dataclass(frozen=True)
class ParameterOwner:
    """A module that owns trainable parameters."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    """Trainable parameters by their local name."""


def parameter_owners(model: nn.Module) -> Iterator[ParameterOwner]:
    """Yield the modules whose calls determine the gradients of trainable parameters.

    Recurrent and attention layers use the parameters of their children without calling them, and
    so do modules with parametrizations. Parameter lists are used by the module that holds them.
    """
    seen: set[nn.Module] = set()
    owned: str | tuple[()] = ()  # how names begin inside a module that uses all parameters in it
    for name, module in model.named_modules(remove_duplicate=False):
        # A module in two places has one set of hooks; containers have no forward.
        if module in seen or name.startswith(owned) or isinstance(module, _CONTAINERS):
            continue
        seen.add(module)
        # Attention hands the weights of its out_proj to a function; hooks of out_proj never run.
        owns_all = isinstance(module, nn.RNNBase | nn.MultiheadAttention)
        if owns_all or hasattr(module, "parametrizations"):
            named, owned = dict(module.named_parameters()), f"{name}." if name else ""
        else:
            named = _own_parameters(module)
        trainable = {local: p for local, p in named.items() if p.requires_grad}
        if trainable:
            yield ParameterOwner(name, module, trainable)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module uses itself."""
    named = dict(module.named_parameters(recurse=False))
    # A weight that a child has as well is used there (the bias of BERT's decoder is registered
    # twice). A loop over this module would count that use once more.
    in_children: set[nn.Parameter] = set()
    for local, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            named.update(child.named_parameters(prefix=local))
        else:
            in_children.update(child.parameters())
    return {local: p for local, p in named.items() if p not in in_children}


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was tapped."""
    kind: type[nn.Module] = getattr(type(module), "plain_type", type(module))
    return kind


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DDP and torch.compile's wrapper."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def compiled_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules that are compiled; that of the model itself is empty."""
    for name, module in model.named_modules():
        wrapped = "_orig_mod" in module._modules
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            yield name


@dataclass(frozen=True)
class ParameterUse:
    """One map of a layer that uses a parameter, and where its rows are."""

    layer: SketchedLayer
    slot: int
    """Place among the layer's maps."""
    local: str = ""
    """The parameter's name in its layer's vector."""

    def columns(self, rows: Tensor) -> Tensor:
        """Return the parameter's columns (B, n) of the map's rows (B, N)."""
        return rows[:, self.layer.vector.parts[self.local]] if self.local else rows

    def project(self, grad: Tensor) -> Tensor:
        """Return the columns of a whole gradient."""
        if self.local:
            columns: Tensor = self.layer.vector.project(self.local, grad)
        else:
            grad = grad.flatten(1) if grad.dim() > 2 else grad
            columns = self.layer.maps[self.slot].project(grad)
        return columns

    def silence(self, arrived: Mapping[str, Tensor]) -> None:
        """Leave the parameter out of rows (B, N) that have arrived, and of all later ones."""
        one = self.layer.maps[self.slot]
        if not self.layer.is_whole:  # else left out where rows are put together
            for _, rows in arrived_rows([self], arrived):
                rows.zero_()
        if not isinstance(one, WholeMap):
            signs = one.signs[one.parts[self.local]] if self.local else one.signs
            # In place: a compiled model goes on as it is, with rows of zero.
            signs.zero_()
        if isinstance(self.layer, LoopedModule):
            self.layer.left_out.add(self.local)


def arrived_rows(
    uses: Iterable[ParameterUse], arrived: Mapping[str, Tensor]
) -> list[tuple[int, Tensor]]:
    """Return what has arrived of a parameter: the slot of each use, and its rows (B, n)."""
    keyed = ((use, use.layer.own_keys[use.slot]) for use in uses)
    return [(use.slot, use.columns(arrived[key])) for use, key in keyed if key in arrived]


class LayerPlan:
    """Taps all layers of a model, and hooks into the modules that are looped over."""

    def __init__(
        self, model: nn.Module, spec: FlatSpec, maps: MapSettings, pool: SinkPool, dims: BatchDims
    ) -> None:
        self.uses: dict[str, list[ParameterUse]] = {}
        """By the name of the parameter."""
        self.left_out: dict[str, str] = {}
        """Parameters without rows, with the reason."""
        self.untap: list[Callable[[], None]] = []
        """Take all taps away."""
        self.maps, self.pool = maps, pool
        self.model, self.dims = model, dims
        # By parameter, not by name: modules that share a weight know it under different names.
        trained = (p for p in model.parameters() if p.requires_grad)
        self.names = dict(zip(trained, spec.names, strict=True))
        owners = list(parameter_owners(model))
        counts = Counter(one for owner in owners for one in {*owner.parameters.values()})
        self.shared = {parameter for parameter, count in counts.items() if count > 1}
        """Parameters that several modules own: all of them must map them alike."""
        self._weights: dict[str, WeightMaps] = {}
        kinds = [
            (
                owner,
                layer_for(owner, pool, self.shared),
                # Exact rows leave gradients equal to the bit, so torch's own attention is looped
                # over.
                not maps.is_exact and is_plain_attention(owner, self.shared),
            )
            for owner in owners
        ]
        # A weight that is shared with a module without a sink has all its rows from elsewhere.
        elsewhere = {
            parameter
            for owner, layer, has_parts in kinds
            if layer is None and not has_parts
            for parameter in owner.parameters.values()
        }
        for owner, layer, has_parts in kinds:
            if has_parts:
                self._add_attention(owner)
            elif layer is not None and elsewhere.isdisjoint(owner.parameters.values()):
                self._fill(layer, owner.parameters)
                self.untap.append(tap_module(owner.module, layer))
            elif has_layers(owner) and not maps.is_exact:
                self._add_direct(owner)
            elif pool.is_sharded:
                why = "its module has no rule, and a sharded one cannot be looped over"
                self.left_out |= {self.names[one]: why for one in owner.parameters.values()}
            else:
                self._add_looped(owner)

    def _fill(
        self, layer: SketchedLayer, parameters: Mapping[str, nn.Parameter], prefix: str = ""
    ) -> None:
        """Give a layer its maps, and note the uses of its parameters."""
        names = {"weight": f"{prefix}weight", "bias": f"{prefix}bias"}
        own = {local: parameters[name] for local, name in names.items() if name in parameters}
        vector = dict(own) if isinstance(layer, NormLayer) else {}
        if "bias" in own:
            vector["bias"] = own["bias"]
        if "weight" in own and "weight" not in vector:
            name = self.names[own["weight"]]
            if name not in self._weights:  # the same for all layers that use it
                self._weights[name] = self._weight_maps(layer, own["weight"])
            layer.matrix, layer.single = self._weights[name]
            if prefix:  # attention: a sequence of one token is one position of many
                layer.single = None
            for slot in (MATRIX,) if layer.single is None else (MATRIX, SINGLE):
                self._note(own["weight"], ParameterUse(layer, slot))
        tail = prefix.removeprefix("out_proj.")
        layer.trained = (
            f"{tail}weight" if "weight" in own else "",
            f"{tail}bias" if "bias" in own else "",
        )
        self._add(layer, vector, self.maps)

    def _add(
        self, layer: SketchedLayer, vector: Mapping[str, nn.Parameter], maps: MapSettings
    ) -> None:
        """Take in a layer, with the parameters of its vector by their local names."""
        if vector:
            sizes = {local: parameter.numel() for local, parameter in vector.items()}
            layer.vector = VectorMap(sizes, self.names[next(iter(vector.values()))], maps)
        for local, parameter in vector.items():
            self._note(parameter, ParameterUse(layer, VECTOR, local))
        self.pool.layers.append(layer)

    def _weight_maps(self, layer: SketchedLayer, weight: nn.Parameter) -> WeightMaps:
        """Return the maps of a weight."""
        maps, name = self.maps, self.names[weight]
        if maps.is_exact:
            return WholeMap(tuple(weight.shape), maps), None
        shape = weight.shape[0], math.prod(weight.shape[1:])
        if isinstance(layer, ConvLayer):
            may_be_single = layer.may_be_single
            matrix: MatrixMap = FilterMap(tuple(weight.shape), name, maps)
        else:
            # The shorter side is kept. Tables of tokens are looked up, so their rows are projected.
            looks_up = isinstance(layer, EmbeddingLayer) or weight in self.shared
            may_be_single, keep = not looks_up, 1 if looks_up or shape[1] <= shape[0] else 0
            short, long = min(shape), min(max(shape), MOST_KEPT)
            if not looks_up and short <= maps.columns and short * long <= maps.size:
                keep = 1 - keep  # as in most heads: nothing is projected then
            matrix = MatrixMap(shape, name, maps, keep=keep)
        single: MatrixMap | OuterMap | None = None
        if may_be_single and matrix.columns < shape[1 - matrix.keep]:
            if math.prod(shape) > max(maps.size, MOST_BUCKETS):
                single = OuterMap(shape, name, maps)
            else:  # exact: nothing is projected
                whole = replace(maps, columns=max(shape))
                single = MatrixMap(shape, name, whole, keep=shape.index(min(shape)))
        return matrix, single

    def _note(self, parameter: nn.Parameter, use: ParameterUse) -> None:
        self.uses.setdefault(self.names[parameter], []).append(use)

    def _add_looped(self, owner: ParameterOwner) -> None:
        for name in compiled_modules(self.model):
            raise ValueError(
                f"module '{name}' is compiled, and hooks set after torch.compile are ignored: "
                "attach to the model before compiling it, use rows='sketch', or order whole batches"
            )
        kind = type(owner.module).__name__
        log.info("looped over, which is slow: %s (%s)", owner.name or "the model itself", kind)
        layer = LoopedModule(owner.name, owner.module, owner.parameters, self.pool, self.dims)
        self.untap.append(layer.remove)
        # Whole: modules may share parameters, whose rows have to be added before they are sketched.
        self._add(layer, owner.parameters, replace(self.maps, is_exact=True))

    def _add_attention(self, owner: ParameterOwner) -> None:
        layers = {}
        for prefix in ("in_proj_", "out_proj."):
            part = prefix[:-1]
            layers[part] = LinearLayer(f"{owner.name}.{part}" if owner.name else part, self.pool)
            self._fill(layers[part], owner.parameters, prefix)
        self.untap.append(tap_module(owner.module, layers, TappedAttention))

    def _add_direct(self, owner: ParameterOwner) -> None:
        """Expand what can be expanded of the parameters that a module with layers uses itself."""
        # A loop over such a module would run the backward of all in it, maybe of the whole model.
        layers: dict[str, DirectLayer] = {}
        for local, parameter in owner.parameters.items():
            # FSDP swaps the parameter for a shard, whose shape is another one.
            fits = parameter.dim() > 1 and parameter.shape[0] == 1 and "." not in local
            if not fits or parameter in self.shared or type(parameter) is not nn.Parameter:
                why = "its module uses it itself, in a way that is not followed"
                self.left_out[self.names[parameter]] = why
                continue
            layer = DirectLayer(self.names[parameter], self.pool)
            self._add(layer, {local: parameter}, self.maps)
            layers[local] = layer
        if layers:
            undo = tap_module(owner.module, layers, TappedParameters, tuple(layers))
            self.untap.append(undo)


def layer_for(
    owner: ParameterOwner, pool: SinkPool, shared: set[nn.Parameter]
) -> SketchedLayer | None:
    """Return the layer of a module, or None for modules that have none.

    `shared` are parameters that several modules own.
    """
    module, name, kind = owner.module, owner.name, plain_type(owner.module)
    # A parametrized weight is computed before each forward, from parameters of other names.
    named = dict(module.named_parameters(recurse=False))
    if not set(owner.parameters) <= set(named) <= {"weight", "bias"}:
        return None
    # A hook may compute the weight (spectral_norm); that of fully_shard only gathers it.
    computes = [hook for hook in module._forward_pre_hooks.values() if not _is_of_fsdp(hook)]
    if hasattr(module, "parametrizations") or computes:
        return None

    def is_a(*kinds: type[nn.Module]) -> bool:
        return any(issubclass(kind, one) and kind.forward is one.forward for one in kinds)

    if is_a(nn.Linear):
        return LinearLayer(name, pool)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return LinearLayer(name, pool, transposed=True)
    if is_a(*_CONVOLUTIONS):
        return ConvLayer(name, pool, module)
    # Embedding: the gradient of a token may depend on how often the batch has it.
    if is_a(nn.Embedding) and not module.scale_grad_by_freq:
        return EmbeddingLayer(name, pool, module.padding_idx)  # type: ignore[arg-type]
    if any(parameter in shared for parameter in owner.parameters.values()):
        return None
    if is_a(nn.LayerNorm):
        return LastDimsNorm(name, pool, module, rms=False)
    likeness = kind.__name__.endswith(_RMS_NORMS) and hasattr(module, "variance_epsilon")
    if is_a(nn.RMSNorm) or (likeness and set(owner.parameters) == {"weight"}):
        return LastDimsNorm(name, pool, module, rms=True)
    return ChannelNorm(name, pool, module) if is_a(*_CHANNEL_NORMS) else None


def _is_of_fsdp(hook: object) -> bool:
    """Return whether `fully_shard` has registered a hook, on a layer that is sharded by itself."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def has_layers(owner: ParameterOwner) -> bool:
    """Say whether a module contains layers with parameters that it does not use itself."""
    if isinstance(owner.module, nn.RNNBase | nn.MultiheadAttention):
        return False
    own = set(owner.parameters.values())
    own |= set(owner.module.parameters(recurse=False))
    return any(parameter not in own for parameter in owner.module.parameters())


def is_plain_attention(owner: ParameterOwner, shared: set[nn.Parameter]) -> bool:
    """Say whether a module is nn.MultiheadAttention with one weight for queries, keys, values."""
    module = owner.module
    if not isinstance(module, nn.MultiheadAttention) or hasattr(module, "parametrizations"):
        return False
    if plain_type(module).forward is not nn.MultiheadAttention.forward or module.add_zero_attn:
        return False
    if module.bias_k is not None or module.bias_v is not None:
        return False
    wanted = {"in_proj_weight", "out_proj.weight"}
    known = wanted | {"in_proj_bias", "out_proj.bias"}
    return wanted <= owner.parameters.keys() <= known and not (
        shared & set(owner.parameters.values())
    )
