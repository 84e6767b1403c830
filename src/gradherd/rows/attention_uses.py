"""The linear projections inside nn.MultiheadAttention.

Attention hands its weights to a function instead of calling layers, so hooks of modules see neither
the input nor the output of its projections. While the forward of an attention module runs, calls of
`torch.nn.functional.linear` with its weights are noted, as a hook of a layer would.

Shapes: T positions, B examples, E features.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradherd.rows.forward_replay import UncopiedHook, skip_on_replay
from gradherd.rows.layer_use import hold_input
from gradherd.rows.sketched_layers import SketchedLayer

if TYPE_CHECKING:
    from gradherd.rows.layer_watcher import LayerWatcher


def hook_attention(
    layers: Sequence[SketchedLayer], watcher: "LayerWatcher"
) -> list[RemovableHandle]:
    """Hook the attention modules whose projections have sketches.

    Args:
        layers: All sketched layers; those with `inside` belong to attention modules.
        watcher: Watches projections, with input (T, B, E) or (T * B, E) and output (T, B, E') or
            (T * B, E').
    """
    by_module: dict[nn.Module, list[SketchedLayer]] = {}
    for layer in layers:
        if layer.inside is not None:
            by_module.setdefault(layer.module, []).append(layer)
    handles: list[RemovableHandle] = []
    for module, own in by_module.items():
        hooks = _AttentionHooks(module, own, watcher)
        handles.append(
            module.register_forward_pre_hook(UncopiedHook(hooks.before), with_kwargs=True)
        )
        handles.append(
            module.register_forward_hook(
                # Also after an exception, or the function would stay replaced.
                UncopiedHook(hooks.after),
                with_kwargs=True,
                always_call=True,
            )
        )
    return handles


class _AttentionHooks:
    """Notes the projections of one attention module."""

    def __init__(
        self,
        module: nn.Module,
        layers: list[SketchedLayer],
        watcher: "LayerWatcher",
    ) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        self._layers = dict(
            zip((module.in_proj_weight, module.out_proj.weight), layers, strict=True)
        )
        self._first, self._watcher = layers[0], watcher
        self._original: Callable[..., Tensor] | None = None
        self._examples = 0

    @skip_on_replay
    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Replace F.linear."""
        query = args[0] if args else kwargs["query"]
        # Two dimensions are one example without a batch; a replacement that is active already
        # belongs to an outer call.
        if not torch.is_grad_enabled() or query.dim() != 3 or self._original is not None:
            return
        assert isinstance(module, nn.MultiheadAttention)
        self._examples = query.shape[0 if module.batch_first else 1]
        # Replaced for this forward only: torch's attention looks the function up in its module at
        # each call.
        self._original = F.linear
        F.linear = self._linear  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        """Restore F.linear."""
        if self._original is not None:
            F.linear, self._original = self._original, None
        if outputs is None:
            return
        layer, watcher = self._first, self._watcher
        # The usual case, as for other layers: there is nothing to find out.
        if not args or args[0].dim() != layer.probed_dims or watcher.looks_closer(layer.name):
            watcher.after_forward(layer, module, args, kwargs, outputs[0])

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert self._original is not None
        # Computed first and returned as it is: the model must not notice.
        output = self._original(inputs, weight, bias)
        layer, pad = self._layers.get(weight), (0, 0)
        # Queries, keys and values may come apart, each with a view of the packed weight.
        if layer is None and (whole := weight._base) is not None:
            layer = self._layers.get(whole)
            # Then one use has a part of the outputs.
            first = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
            pad = (first, len(whole) - first - len(weight))
        if layer is not None and (node := output.grad_fn) is not None:
            shape = None if inputs.dim() == 3 else (-1, self._examples, inputs.shape[-1])
            hold_input(self._watcher, layer, inputs, output, node, pad, shape)
        return output
