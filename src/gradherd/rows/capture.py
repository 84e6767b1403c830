"""Hooks that note, during the user's own backward, what each example's gradient was.

The model computes what it computed before: hooks only keep references to tensors that
autograd holds anyway. A call of a module counts from the moment its output gradient arrives,
so passes without backward leave nothing behind.

Shapes: B examples, D trainable parameters, k numbers of a sketch.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from gradherd.rows.flat import FlatSpec
from gradherd.rows.layers import Batch, keep
from gradherd.rows.outer import Outer
from gradherd.rows.owners import Owner, bare, owners
from gradherd.rows.replay import Moment, Use, detached, moment, replay, versions
from gradherd.rows.rows import FactoredRows
from gradherd.rows.sketch import check_size, count_sketch
from gradherd.rows.terms import Term, full

Reduction = Literal["mean", "sum"]


class Capture:
    """Reads per-example gradients off a model's ordinary backward.

    Call `take` (or `sketch`) after `backward()` and before `optimizer.step()`. Parameters that
    are frozen when the capture is made have no part in the rows. A parameter that is used
    outside the forward of the module that owns it, or through a tensor without batch dimension
    (position embeddings looked up once for all examples), cannot be told apart by example.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> capture = Capture(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean().backward()
    >>> capture.take(2).dense()
    tensor([[1., 2.],
            [3., 4.]])
    """

    def __init__(self, model: nn.Module, *, batch_dim: int | None = None):
        """Set the hooks.

        Args:
            model: Any module, or one wrapped in DDP.
            batch_dim: Dimension of the examples, tried first in every tensor; None takes the
                first dimension that has as many entries as there are examples. Give 1 for
                time-major models whose number of time steps may equal the batch size.
        """
        model = bare(model)
        self.spec = FlatSpec.of(model)
        self._batch_dim = batch_dim
        self._owners = {owner.name: owner for owner in owners(model)}
        names = {p: name for name, p in model.named_parameters()}
        self._slots = {p: self.spec.names.index(names[p]) for p in _trainable(self._owners)}
        self._outer = _sketched_by_factors(self._owners, self._slots)
        parameters = list(self._slots)
        self._like = full(parameters[0].detach().new_empty(0)) if parameters else torch.empty(0)
        self._waiting: list[Use] = []
        self._moments: dict[str, Moment] = {}
        self._replaying = False
        self._handles: list[Any] = []
        for owner in self._owners.values():
            self._hook(owner)

    @property
    def uses(self) -> int:
        """Number of module calls whose gradients have arrived and were not taken yet."""
        return len(self._waiting)

    def take(
        self, examples: int, *, reduction: Reduction = "mean", loss_scale: float = 1.0
    ) -> FactoredRows:
        """Return the rows of everything recorded since the last take, and forget it.

        Several backwards before a take add up, as those of one loss would.

        Args:
            examples: B, the number of examples of the batch.
            reduction: How the loss joined the examples. "mean": rows are multiplied by B to be
                the gradients of single examples. "sum": they are as they are.
            loss_scale: What the loss was multiplied by (GradScaler); rows are divided by it.
        """
        scale = _row_scale(examples, reduction, loss_scale)
        terms = self._terms(examples)
        return FactoredRows(self.spec, terms, examples, scale, self._like)

    def sketch(
        self,
        examples: int,
        k: int,
        seed: int,
        *,
        reduction: Reduction = "mean",
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Return k numbers per example, (B, k), whose inner products are the rows' on average.

        Equal seeds give equal sketches on every rank. Takes, and forgets, like `take`.
        """
        check_size(k)
        scale = _row_scale(examples, reduction, loss_scale)
        total = self._like.new_zeros(examples, k)
        for slot, (name, terms) in enumerate(
            zip(self.spec.names, self._terms(examples), strict=True)
        ):
            for term in terms:
                if isinstance(term, Outer) and slot not in self._outer:
                    total += count_sketch(term.dense(), k, seed, name=name)
                else:
                    total += term.sketch(k, seed, name)
        return total.mul_(scale)

    def clear(self) -> None:
        """Forget everything recorded."""
        for use in self._waiting:
            # A kept graph may send gradients once more; they start a new record then.
            use.grads.clear()
        self._waiting.clear()

    def detach(self) -> None:
        """Remove the hooks and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._moments.clear()
        self.clear()

    def _hook(self, owner: Owner) -> None:
        if owner.rule is None:
            self._handles.append(
                owner.module.register_forward_pre_hook(partial(self._before, owner), prepend=True)
            )
        # First of all hooks: others may change the output, and rows are about the forward.
        self._handles.append(
            owner.module.register_forward_hook(
                partial(self._after, owner), prepend=True, with_kwargs=True
            )
        )

    def _before(self, owner: Owner, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not self._replaying:
            self._moments[owner.name] = moment(module)

    def _after(
        self, owner: Owner, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if not torch.is_grad_enabled() or self._replaying:
            return
        if isinstance(outputs, tuple) and any(isinstance(out, PackedSequence) for out in outputs):
            raise ValueError(
                f"module '{owner.name}' got a PackedSequence, in which examples are interleaved: "
                "pad the sequences instead, or order whole batches"
            )
        args, kwargs = detached((args, kwargs))
        then = self._moments.pop(owner.name, None)
        use = Use(owner.name, module, args, kwargs, then, keep(module), versions((args, kwargs)))
        for index, output in enumerate(tree_leaves(outputs)):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._arrive, use, index))

    def _arrive(self, use: Use, index: int, grad: Tensor) -> None:
        if not use.grads:
            self._waiting.append(use)
        before = use.grads.get(index)
        use.grads[index] = grad.detach() if before is None else before + grad.detach()

    def _terms(self, examples: int) -> tuple[tuple[Term, ...], ...]:
        """Turn what waits into terms, by parameter, and forget it."""
        slots: list[list[Term]] = [[] for _ in self.spec.names]
        self._replaying = True
        try:
            with torch.no_grad():
                for use in self._waiting:
                    owner = self._owners[use.name]
                    for local, term in self._use_terms(owner, use, examples):
                        slots[self._slots[owner.parameters[local]]].append(term)
        finally:
            self._replaying = False
            self.clear()
        return tuple(tuple(terms) for terms in slots)

    def _use_terms(self, owner: Owner, use: Use, examples: int) -> Iterator[tuple[str, Term]]:
        batch = Batch(examples, use.name or type(use.module).__name__, self._batch_dim)
        if owner.rule is None:
            yield from replay(use, owner.parameters, batch).items()
        else:
            inputs = use.args[0] if use.args else use.kwargs["input"]
            yield from owner.rule(use.module, inputs, use.grads[0], batch, use.kept)


def _trainable(found: dict[str, Owner]) -> Iterator[nn.Parameter]:
    for owner in found.values():
        yield from owner.parameters.values()


def _sketched_by_factors(found: dict[str, Owner], slots: dict[nn.Parameter, int]) -> set[int]:
    """Return the slots of parameters that only Linear and Embedding layers use.

    All uses of a parameter must be hashed alike, so a weight that other modules share is
    sketched entry by entry everywhere.
    """
    factored: set[int] = set()
    others: set[int] = set()
    for owner in found.values():
        kind = isinstance(owner.module, nn.Linear | nn.Embedding) and owner.rule is not None
        (factored if kind else others).update(slots[p] for p in owner.parameters.values())
    return factored - others


def _row_scale(examples: int, reduction: str, loss_scale: float) -> float:
    if examples < 1:
        raise ValueError(f"examples must be at least 1, got {examples}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not loss_scale > 0:
        raise ValueError(f"loss_scale must be positive, got {loss_scale}")
    return (examples if reduction == "mean" else 1) / loss_scale
