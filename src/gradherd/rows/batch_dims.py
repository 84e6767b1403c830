"""Which dimension of each tensor is the batch: found by running the model with one more example.

Sizes alone do not tell. With as many positions as examples, a table of positions looked up once
for all examples looks like a batch, and its rows would even add up to the gradient. But if the
model runs on B + 1 examples, exactly the dimensions that hold examples grow.

Shapes: B examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradherd.rows.forward_replay import ModuleCall, map_tensors, tensor_leaves

INPUT = -1
"""Stands for a module's input where outputs are numbered from 0."""

Shapes = dict[int, torch.Size]
"""Shapes of a module's input and outputs in one call."""
ShapeRunner = Callable[[ModuleCall, Any, Any], list[tuple[str, Shapes]]]


def call_shapes(args: Any, kwargs: Any, outputs: Any) -> Shapes:
    """Return the shapes of a call's first input and of all its outputs."""
    shapes = {index: out.shape for index, out in enumerate(tensor_leaves(outputs))}
    if inputs := tensor_leaves((args, kwargs)):
        shapes[INPUT] = inputs[0].shape
    return shapes


@dataclass
class BatchDims:
    """Remembers the batch dimension of the model's inputs and of every module's tensors."""

    given: int | None = None
    """The user's setting for all tensors of the model."""
    sharded: bool = False
    """Whether modules hold shards of their parameters between passes (FSDP)."""
    batch_size: int | None = None
    """Examples in a full batch of the loader, if they are known."""
    _probed: set[tuple[int, ...]] = field(default_factory=set)
    _model_dim: int | None = None
    _guessed: bool = False
    """Whether only the size of a batch speaks for that dimension so far."""
    _known: dict[tuple[str, int, int], int | None] = field(default_factory=dict)
    """By module, output (or INPUT) and number of dimensions; None without a batch dimension."""

    def find(
        self, name: str, index: int, shape: torch.Size, candidates: int, batch: int | None
    ) -> int | None:
        """Return the dimension of a module's tensor that holds the examples; None without one.

        Args:
            name: Of the module.
            index: Of its output, or INPUT.
            shape: Of the tensor.
            candidates: How many of its first dimensions may hold them.
            batch: Examples of the forward that runs; None where a part of the model is called by
                itself.
        """
        if self.knows(name, index, len(shape)):
            dim = self.dim_of(name, index, len(shape))
            return dim if dim is not None and dim < candidates else None
        # Sizes decide, and what they leave open has no rows.
        if batch is not None:
            fits = [dim for dim in range(candidates) if shape[dim] == batch]
            if self.given in fits:
                return self.given
            # (1, T) is broadcast over the examples; T may still equal their number.
            return fits[0] if len(fits) == 1 and (fits[0] == 0 or shape[0] != 1) else None
        # Indices (T,) may be positions, looked up once for all examples.
        least = 2 if index == INPUT else 1
        is_given = self.given is not None and self.given < candidates and len(shape) >= least
        return self.given if is_given else None

    def look_at(self, args: Any, kwargs: Any, probe: Callable[[Any, Any, int], None]) -> int | None:
        """Return the examples of a batch that the model is about to take; None without tensors.

        Args:
            args: The model's arguments.
            kwargs: The same.
            probe: Called with both and the number of examples if their kind is new; finds batch
                dimensions by `probe`.
        """
        leaves = [tensor for tensor in tensor_leaves((args, kwargs)) if tensor.dim()]
        shapes = tuple(tensor.shape for tensor in leaves)
        if leaves and self.batch_size is not None:
            self.expect(leaves[0].shape, self.batch_size)
        examples = self.model_examples(shapes)
        # Once for every number of dimensions: other paths may come with other inputs.
        kind = tuple(map(len, shapes))
        if kind not in self._probed and examples is not None:
            probe(args, kwargs, examples)
            self._probed.add(kind)
            examples = self.model_examples(shapes)  # what was guessed may be known now
        return examples

    @property
    def model_dim(self) -> int:
        """Batch dimension of the model's inputs, as far as it is known."""
        return self._model_dim if self._model_dim is not None else self.given or 0

    def model_examples(self, shapes: Sequence[torch.Size]) -> int | None:
        """Return B as the shapes of the model's own inputs have it, or None without tensors."""
        dim = self.model_dim
        # The first tensor that has the dimension: masks and scalars may come with the inputs.
        return next((shape[dim] for shape in shapes if len(shape) > dim), None)

    def expect(self, shape: torch.Size, examples: int) -> None:
        """Decide on the batch dimension of the model's inputs from the size of a loader's batch."""
        if self.given is None and self._model_dim is None:
            # The batch is the first or the second dimension in all layouts that torch's layers
            # know.
            fits = [dim for dim, size in enumerate(shape[:2]) if size == examples]
            self._model_dim = fits[0] if fits else None
            # A short batch may have as many features as a whole one has examples.
            self._guessed = self._model_dim == 1

    def knows(self, name: str, index: int, ndim: int) -> bool:
        """Say whether the batch dimension of a module's input or output was found."""
        return (name, index, ndim) in self._known

    def dim_of(self, name: str, index: int, ndim: int) -> int | None:
        """Return the batch dimension that was found; None if there is none or it is unknown."""
        return self._known.get((name, index, ndim))

    def probe(
        self, call: ModuleCall, examples: int, calls: Mapping[str, list[Shapes]], run: ShapeRunner
    ) -> None:
        """Run the model with one more example and note which dimensions grow.

        Args:
            call: A call of the model itself.
            examples: B.
            calls: Shapes of the modules' calls in this batch, by module.
            run: Runs the model again with other arguments and returns the shapes in its modules.
        """
        for skip_square in (False, True):
            try:
                # Inputs that only look like a batch, such as a square mask, make the model fail.
                args, kwargs = self.one_more(call, examples, skip_square)
                probed = run(call, args, kwargs)
            except Exception as error:
                if self.sharded:  # parameters may have stayed gathered, and go stale
                    raise RuntimeError(
                        "rows of single examples need a run of the model with one more example, "
                        f"which failed ({error}): order whole batches (unit=batch_size)"
                    ) from error
                continue
            self._learn(examples, calls, probed)
            self._guessed = False
            return
        if self._guessed:  # The model takes no more of what only looked like examples.
            shape = next(t.shape for t in tensor_leaves((call.args, call.kwargs)) if t.dim())
            self._guessed, self._model_dim = False, 0
            self.probe(call, shape[0], calls, run)

    def one_more(self, call: ModuleCall, examples: int, skip_square: bool) -> Any:
        """Return the arguments of a call with the last example repeated."""
        dim = self.model_dim

        def extend(tensor: Tensor) -> Tensor:
            if tensor.dim() <= dim or tensor.shape[dim] != examples:
                return tensor
            if skip_square and tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]:
                return tensor
            # A copy of a real example, so that indices stay in range and masks stay valid.
            return torch.cat([tensor, tensor.narrow(dim, examples - 1, 1)], dim)

        return map_tensors(extend, (call.args, call.kwargs))

    def _learn(
        self,
        examples: int,
        calls: Mapping[str, list[Shapes]],
        probed: list[tuple[str, Shapes]],
    ) -> None:
        votes: dict[tuple[str, int, int], set[int | None]] = {}
        for name, larger in {(n, tuple(s.items())) for n, s in probed}:
            for index, big in larger:
                key = (name, index, len(big))
                for shapes in calls.get(name, ()):
                    small = shapes.get(index, torch.Size())
                    if len(small) == len(big):
                        # Every call of a module votes: one that is called twice may see a batch
                        # only once.
                        votes.setdefault(key, set()).update(_grown(small, big, examples))
        for key, dims in votes.items():
            if dims:
                # Uses with and without a batch cannot be told apart later: no batch dimension.
                self._known[key] = dims.pop() if len(dims) == 1 else None


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
