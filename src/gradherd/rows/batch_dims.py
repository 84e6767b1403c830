"""Which dimension of each tensor is the batch: found by running the model with one more example.

Sizes alone do not tell. With as many positions as examples, a table of positions looked up once
for all examples looks like a batch, and its rows would even add up to the gradient. But if the
model runs on B + 1 examples, exactly the dimensions that hold examples grow.

Shapes: B examples.
"""

import copy
import dataclasses
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from gradherd.rows.sink import INPUT, Shapes, SinkPool

log = logging.getLogger("gradherd")

Calls = list[tuple[str, Shapes]]
"""Shapes in the calls of modules, behind their names."""


def call_shapes(args: Any, kwargs: Any, outputs: Any) -> Shapes:
    """Return the shapes of a call's first input and of all its outputs."""
    shapes = {index: out.shape for index, out in enumerate(tensor_leaves(outputs))}
    if inputs := tensor_leaves((args, kwargs)):
        shapes[INPUT] = inputs[0].shape
    return shapes


class BatchDims:
    """Finds the batch dimension of the model's inputs and of every module's tensors."""

    def __init__(
        self,
        model: nn.Module,
        pool: SinkPool,
        *,
        batch_size: int | None = None,
    ) -> None:
        """Begin without any dimension; the layers of `pool` are told theirs.

        `batch_size` is that of a full batch of the loader, if it is known.
        """
        self._model, self._pool, self._batch_size = model, pool, batch_size
        self._probed: set[tuple[int, ...]] = set()
        self._model_dim: int | None = None
        self._guessed = False  # whether only the size of a batch speaks for that dimension so far
        # By module, output (or INPUT) and number of dimensions; None without a batch dimension.
        self._known: dict[tuple[str, int, int], int | None] = {}

    @property
    def model_dim(self) -> int:
        """Batch dimension of the model's inputs, as far as it is known."""
        return self._model_dim if self._model_dim is not None else self._pool.given_dim or 0

    def of_output(self, name: str, index: int, shape: torch.Size) -> int | None:
        """Return the dimension of a module's output that holds the examples; None without one."""
        if (name, index, len(shape)) in self._known:
            return self._known[name, index, len(shape)]
        # Sizes decide, and what they leave open has no rows.
        given, batch = self._pool.given_dim, self._pool.batch_now()
        if batch is None:  # a part of the model is called by itself
            return given if given is not None and given < len(shape) else None
        fits = [dim for dim, size in enumerate(shape) if size == batch]
        if given in fits:
            return given
        # (1, T) is broadcast over the examples; T may still equal their number.
        return fits[0] if len(fits) == 1 and (fits[0] == 0 or shape[0] != 1) else None

    def look_at(self, args: Any, kwargs: Any) -> int | None:
        """Return the examples of a batch that the model is about to take; None without tensors.

        Finds batch dimensions if the kind of its inputs is new.
        """
        shapes = [tensor.shape for tensor in tensor_leaves((args, kwargs)) if tensor.dim()]
        if shapes:
            self._expect(shapes[0])
        examples = self._examples(shapes)
        # Once for every number of dimensions: other paths may come with other inputs.
        kind = tuple(map(len, shapes))
        if kind not in self._probed and examples is not None:
            with torch.no_grad(), _eagerly(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model is about to run, and will warn itself
                self._probe(map_tensors(Tensor.detach, (args, kwargs)), examples)
            self._probed.add(kind)
            examples = self._examples(shapes)  # what was guessed may be known now
        return examples

    def _examples(self, shapes: Sequence[torch.Size]) -> int | None:
        """Return B as the shapes of the model's own inputs have it, or None without tensors."""
        dim = self.model_dim
        # The first tensor that has the dimension: masks and scalars may come with the inputs.
        return next((shape[dim] for shape in shapes if len(shape) > dim), None)

    def _expect(self, shape: torch.Size) -> None:
        """Decide on the batch dimension of the model's inputs from the size of a loader's batch."""
        unknown = self._pool.given_dim is None and self._model_dim is None
        if unknown and self._batch_size is not None:
            # The batch is the first or the second dimension in all layouts that torch's layers
            # know.
            fits = [dim for dim, size in enumerate(shape[:2]) if size == self._batch_size]
            self._model_dim = fits[0] if fits else None
            # A short batch may have as many features as a whole one has examples.
            self._guessed = self._model_dim == 1

    def _probe(self, given: Any, examples: int) -> None:
        """Run the model as it is and with one more example, and note which dimensions grow."""
        pool = self._pool
        pool.shares = False
        try:
            calls, outputs = self._run(given, examples)
        except Exception as error:
            if pool.is_sharded:  # parameters may have stayed gathered
                raise
            # It needs gradients, say. Then sizes decide which dimensions hold examples.
            log.debug("the model cannot be run without gradients: %s", error)
            return
        # Inputs that only look like a batch, such as a square mask, make the model fail.
        for skip_square in (False, True):
            try:
                more = self._one_more(given, examples, skip_square)
                larger_calls, larger = self._run(more, examples + 1)
            except Exception as error:
                if pool.is_sharded:  # parameters may have stayed gathered, and go stale
                    raise RuntimeError(
                        "rows of single examples need a run of the model with one more example, "
                        f"which failed ({error}): order whole batches (unit=batch_size)"
                    ) from error
                continue
            self._guessed = False
            self._learn(examples, calls, larger_calls)
            pool.shares = self._can_share((given, more), (outputs, larger), examples)
            return
        if self._guessed:  # The model takes no more of what only looked like examples.
            self._guessed, self._model_dim = False, 0
            self._probe(given, next(t.shape[0] for t in tensor_leaves(given) if t.dim()))

    def _run(self, given: Any, examples: int) -> tuple[Calls, Any]:
        """Run the model; return the shapes in its layers, and its outputs.

        Without a trace: random states and buffers stay as they are.
        """
        pool, model = self._pool, self._model
        devices = {p.device.index for p in model.parameters() if p.is_cuda}
        # The model works on copies: writing the old values back would invalidate what autograd has
        # saved.
        copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
        # torch's transformers call their layers, also in evaluation without gradients.
        is_fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        pool.recorded, pool.batch = [], examples
        try:
            with torch.random.fork_rng(devices=list(devices)):
                outputs = functional_call(model, copies, *given)
            return pool.recorded, outputs
        finally:
            pool.recorded, pool.batch = None, None
            torch.backends.mha.set_fastpath_enabled(is_fast)

    def _one_more(self, given: Any, examples: int, skip_square: bool) -> Any:
        """Return arguments with the last example repeated."""
        dim = self.model_dim

        def extend(tensor: Tensor) -> Tensor:
            if tensor.dim() <= dim or tensor.shape[dim] != examples:
                return tensor
            if skip_square and tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]:
                return tensor
            # A copy of a real example, so that indices stay in range and masks stay valid.
            return torch.cat([tensor, tensor.narrow(dim, examples - 1, 1)], dim)

        return map_tensors(extend, given)

    def _can_share(self, given: Any, outputs: Any, examples: int) -> bool:
        """Say whether the model computes the same if examples get copies of what they share.

        Also with one more example: what takes positions for examples fails then.
        """
        self._pool.shares = True
        try:
            found = [self._run(one, examples + at)[1] for at, one in enumerate(given)]
        except Exception:  # whatever the model says to a tensor that is expanded
            return False
        finally:
            self._pool.shares = False
        return all(map(_alike, outputs, found))

    def _learn(self, examples: int, calls: Calls, larger: Calls) -> None:
        """Note which dimensions have grown, and tell the layers."""
        of_module: dict[str, list[Shapes]] = {}
        for name, shapes in calls:
            of_module.setdefault(name, []).append(shapes)
        votes: dict[tuple[str, int, int], set[int | None]] = {}
        for name, big_shapes in {(n, tuple(s.items())) for n, s in larger}:
            for index, big in big_shapes:
                key = (name, index, len(big))
                for shapes in of_module.get(name, ()):
                    small = shapes.get(index, torch.Size())
                    if len(small) == len(big):
                        # Every call of a module votes: one that is called twice may see a batch
                        # only once.
                        votes.setdefault(key, set()).update(_grown(small, big, examples))
        for key, dims in votes.items():
            if dims:
                # Uses with and without a batch cannot be told apart later: no batch dimension.
                self._known[key] = dims.pop() if len(dims) == 1 else None
        layers = {layer.name: layer for layer in self._pool.layers}
        for name, shapes in calls:
            layer, shape = layers[name], shapes.get(INPUT, torch.Size())
            key = (name, INPUT, len(shape))
            if key in self._known:
                dim = self._known[key]
                layer.ndim = len(shape)
                layer.dim = None if dim and layer.batch_is_first else dim
                layer.uses_single = layer.is_single(shape)


def _grown(small: torch.Size, big: torch.Size, examples: int) -> set[int | None]:
    """Return the dimension that grew by one example, None for no dimension, or nothing known."""
    changed = [dim for dim, (a, b) in enumerate(zip(small, big, strict=True)) if a != b]
    if not changed:
        # Nothing grew: the tensor is the same for every batch size.
        return {None}
    if len(changed) == 1 and small[changed[0]] == examples and big[changed[0]] == examples + 1:
        return {changed[0]}
    # Something else changed as well, such as a padded length: no vote.
    return set()


def _eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled parts of a model run as they are."""
    # torch 2.7 has it, too. Where nothing was compiled, the compiler need not be loaded.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


def _alike(one: Any, other: Any) -> bool:
    """Say whether two results of a model are the same."""
    pairs = list(zip(tensor_leaves(one), tensor_leaves(other), strict=True))
    return all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), 1e-2, 1e-3, equal_nan=True)
        for a, b in pairs
    )


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, always in the same order.

    Other objects are not searched: what they hold (such as the cache of a decoder) is seldom part
    of a loss.
    """
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif _is_dataclass_instance(leaf):
            # Unless it is registered, torch takes a dataclass for a leaf.
            tensors += tensor_leaves([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return tensors


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same containers with `function` applied to each of their `tensor_leaves`."""
    # A function of this module: one defined here that calls itself would hold what it is given
    # until Python looks for cycles.
    return tree_map(functools.partial(_map_leaf, function), tree)


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if _is_dataclass_instance(leaf):
        result = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            # Not replace(), which would run __post_init__ again; not setattr(), which a frozen
            # dataclass refuses.
            value = map_tensors(function, getattr(leaf, field.name))
            object.__setattr__(result, field.name, value)
        return result
    return leaf


def _is_dataclass_instance(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
