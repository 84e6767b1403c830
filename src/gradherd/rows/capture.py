"""Hooks that record each example's gradient during the user's own backward.

The model computes exactly what it computed before: the hooks only hold references to tensors that
autograd holds anyway. A module call counts from the moment its output gradient arrives, so
forwards without backward leave nothing behind.

Shapes: B examples, D elements of all trainable parameters, k elements of a sketch.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradherd.rows.batch_dims import INPUT, BatchDims, Shapes, call_shapes
from gradherd.rows.exact_rows import FactoredRows
from gradherd.rows.flat import FlatSpec
from gradherd.rows.forward_replay import (
    ForwardContext,
    ModuleCall,
    replay,
    skip_on_replay,
)
from gradherd.rows.layer_rules import UnbatchedError, save_statistics
from gradherd.rows.parameter_owners import ParameterOwner, parameter_owners, unwrap_model
from gradherd.rows.row_check import RowCheck, tolerance
from gradherd.rows.sketch import check_size, count_sketch
from gradherd.rows.tensor_tree import detach_all, map_tensors, tensor_leaves, tensor_versions
from gradherd.rows.terms import OuterTerm, Term, at_least_float32

log = logging.getLogger("gradherd")

Reduction = Literal["mean", "sum"]


@dataclass
class _Terms:
    """Rows as they are before averaging."""

    by_parameter: list[list[Term]]
    """One term for each use of a parameter."""
    tolerances: dict[int, float]
    """Relative error that the precision of each parameter's terms allows; for checks only."""
    unbatched: dict[str, str]
    """Names of parameters that are used without a batch dimension, with the reason."""


class Capture:
    """Read per-example gradients off a model's ordinary backward.

    Call `pop_rows` (or `pop_sketch`) after `backward()` and before `optimizer.step()`. Rows leave
    out parameters that are frozen when the capture is created. They also leave out parameters
    without gradients of single examples; on the first batches and now and then `RowCheck` finds
    those whose rows do not add up to their gradient.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> capture = Capture(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean().backward()
    >>> capture.pop_rows(2).dense()
    tensor([[1., 2.],
            [3., 4.]])
    """

    def __init__(self, model: nn.Module, *, batch_dim: int | None = None, strict: bool = False):
        """Register the hooks.

        Args:
            model: Any module, or one wrapped in DDP.
            batch_dim: Batch dimension of the model's inputs; None takes the first dimension that
                has as many entries as there are examples. Give 1 for time-major models whose
                number of time steps may equal the batch size.
            strict: Raise where a parameter would be left out.
        """
        model = unwrap_model(model)
        self.spec = FlatSpec.of(model)
        self._model = model
        self._dims = BatchDims(batch_dim)
        self._owners = {owner.name: owner for owner in parameter_owners(model)}
        # By parameter, not by name: modules that share a weight know it under different names.
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._index = {p: index for index, p in enumerate(parameters)}
        self._check = RowCheck(self.spec, parameters, strict=strict)
        self._factored = _only_outer_terms(self._owners, self._index)
        # Fixes dtype and device of the rows, also for a batch without any gradient.
        self._like = torch.empty(0)
        if parameters:
            self._like = at_least_float32(parameters[0].detach().new_empty(0))
        self._calls: list[ModuleCall] = []
        self._model_calls: list[ModuleCall] = []
        self._terms: _Terms | None = None
        self._failures: dict[str, str] = {}
        self._create_graph = False
        self._contexts: dict[str, ForwardContext] = {}
        self._replaying = False
        self._unfrozen: set[str] = set()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        ]
        for owner in self._owners.values():
            self._register(owner)

    @property
    def num_calls(self) -> int:
        """Number of module calls with gradients that have not been popped yet."""
        return len(self._calls)

    @property
    def waiting(self) -> bool:
        """Whether a backward has reached a parameter since the last pop."""
        return self._check.reached

    @property
    def left_out(self) -> dict[str, str]:
        """Names of the parameters that rows leave out, with the reason."""
        return dict(self._check.left_out)

    def pop_rows(
        self, examples: int, *, reduction: Reduction = "mean", loss_scale: float = 1.0
    ) -> FactoredRows:
        """Return the rows of everything recorded since the last pop, and forget it.

        Several backwards before a pop add up, as those of one loss would.

        Args:
            examples: B, the number of examples of the batch.
            reduction: How the loss reduces the examples. "mean": rows are multiplied by B, so
                that they are the gradients of single examples. "sum": they are left as they are.
            loss_scale: Factor that the loss was multiplied by (GradScaler); rows are divided by
                it.
        """
        scale = _row_scale(examples, reduction, loss_scale)
        terms = self._pop_terms(examples)
        return FactoredRows(self.spec, terms, examples, scale, self._like)

    def pop_sketch(
        self,
        examples: int,
        k: int,
        seed: int,
        *,
        reduction: Reduction = "mean",
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Return a sketch of each row, (B, k), that preserves inner products on average.

        Equal seeds give equal sketches on every rank. Forgets what was recorded, like `pop_rows`.
        """
        check_size(k)
        scale = _row_scale(examples, reduction, loss_scale)
        total = self._like.new_zeros(examples, k)
        terms_by_parameter = self._pop_terms(examples)
        for index, (name, terms) in enumerate(
            zip(self.spec.names, terms_by_parameter, strict=True)
        ):
            for term in terms:
                # The two sketches hash the weight differently and must not be added.
                if isinstance(term, OuterTerm) and index not in self._factored:
                    total += count_sketch(term.dense(), k, seed, name=name)
                else:
                    total += term.sketch(k, seed, name)
        return total.mul_(scale)

    def check_bitmask(self, examples: int) -> Tensor | None:
        """Check the rows that wait if a check is due.

        Ranks must leave out the same parameters. Each calls this before a pop, combines the masks
        of all ranks, and gives the result to `leave_out`. With one worker, a pop does so itself.

        Args:
            examples: B, the number of examples of the batch.

        Returns:
            A byte for each parameter, 1 if it has to be left out; None if no check is due.
        """
        if not self._check.due:
            return None
        terms = self._compute_terms(examples)
        self._terms = terms
        hint = "the loss contains gradients (create_graph=True)" if self._create_graph else ""
        self._failures = self._check.failures(
            terms.by_parameter, terms.tolerances, examples, self._like, hint
        )
        self._failures |= terms.unbatched
        return self._check.mask(self._failures)

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters whose byte in `mask` is not 0, from the rows that wait on.

        Raises:
            RuntimeError: In strict mode, or if more than half of the elements are left out.
        """
        chosen = [name for name, byte in zip(self.spec.names, mask.tolist(), strict=True) if byte]
        reasons = {name: self._failures.get(name, "on another rank") for name in chosen}
        try:
            self._check.leave_out(reasons)
        except RuntimeError:
            self.clear()
            raise

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first, such as after loading a state."""
        self._check.restart()

    def clear(self) -> None:
        """Forget everything recorded."""
        for call in self._calls:
            # A retained graph may run backward again; its gradients then start a new record.
            call.grads.clear()
        self._calls.clear()
        self._model_calls.clear()
        self._terms = None
        self._create_graph = False
        self._check.clear()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._contexts.clear()
        self._check.remove_hooks()
        self.clear()

    def _register(self, owner: ParameterOwner) -> None:
        if owner.rule is None:
            self._handles.append(
                owner.module.register_forward_pre_hook(
                    partial(self._before_forward, owner), prepend=True
                )
            )
        # Before all other hooks: those may change the output, and rows are about the forward.
        self._handles.append(
            owner.module.register_forward_hook(
                partial(self._after_forward, owner), prepend=True, with_kwargs=True
            )
        )

    @skip_on_replay
    def _before_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and self._check.due and not self._replaying:
            args, kwargs = detach_all((args, kwargs))
            context = ForwardContext.save(module)
            self._model_calls.append(ModuleCall("", module, args, kwargs, context, (), ()))

    @skip_on_replay
    def _before_forward(self, owner: ParameterOwner, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not self._replaying:
            self._contexts[owner.name] = ForwardContext.save(module)

    def _after_forward(
        self,
        owner: ParameterOwner,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> Any:
        if self._dims.recording is not None:
            self._dims.recording.append((owner.name, call_shapes(args, kwargs, outputs)))
            return None
        # No backward follows: evaluation, or the first forward of a reentrant checkpoint, which
        # runs again with gradients enabled.
        if not torch.is_grad_enabled() or self._replaying:
            return None
        if isinstance(outputs, tuple) and any(isinstance(out, PackedSequence) for out in outputs):
            raise ValueError(
                f"module '{owner.name}' got a PackedSequence, in which examples are interleaved: "
                "pad the sequences instead, or order whole batches"
            )
        # Detached: a reference to the graph would keep the activations of all layers below alive.
        args, kwargs = detach_all((args, kwargs))
        call = ModuleCall(
            owner.name,
            module,
            args,
            kwargs,
            context=self._contexts.pop(owner.name, None),
            statistics=save_statistics(module),
            versions=tensor_versions((args, kwargs)),
        )
        tensors = [out for out in tensor_leaves(outputs) if out.requires_grad]
        if owner.rule is None and len(tensors) > 1:
            return self._hook_aliases(call, outputs)
        # Hooks on tensors, because a module's full backward hook forbids in-place operations on
        # its outputs, such as ReLU(inplace=True).
        for index, output in enumerate(tensor_leaves(outputs)):
            if output.requires_grad:
                _hook_gradient(output, partial(self._on_grad, call, index))
        return None

    def _hook_aliases(self, call: ModuleCall, outputs: Any) -> Any:
        """Return aliases of a module's outputs that report their gradients.

        One output may be computed from another inside the module (LSTMCell), or appear twice. An
        alias gets what comes from outside only; a replay adds the rest.
        """
        count = 0

        def alias(output: Tensor) -> Tensor:
            nonlocal count
            index, count = count, count + 1
            if not output.requires_grad:
                return output
            inner = output.view_as(output)
            _hook_gradient(inner, partial(self._on_grad, call, index))
            # The user gets another one, whose hooks run before ours.
            return inner.view_as(inner)

        return map_tensors(alias, outputs)

    def _on_grad(self, call: ModuleCall, index: int, grad: Tensor | None) -> None:
        if grad is None:  # fused recurrent kernels report outputs that nothing uses
            return
        if not call.grads:
            self._calls.append(call)
        if torch.is_grad_enabled():
            self._create_graph = True
        # A retained graph may run backward several times before the rows are read: add up.
        key = (torch._C._current_graph_task_id(), index)
        before = call.grads.get(key)
        call.grads[key] = grad.detach() if before is None else before + grad.detach()

    def _pop_terms(self, examples: int) -> tuple[tuple[Term, ...], ...]:
        """Return the terms of each parameter, one per use, and forget the calls."""
        try:
            if self._terms is None and (mask := self.check_bitmask(examples)) is not None:
                self.leave_out(mask)
            terms = self._terms
            if terms is None:
                terms = self._compute_terms(examples)
                # Not in step with other ranks, which follow with the next check.
                self._check.leave_out(terms.unbatched)
        finally:
            self.clear()
            self._check.next_batch(self._model.training)
        left_out = self._check.left_out
        return tuple(
            () if name in left_out else tuple(uses)
            for name, uses in zip(self.spec.names, terms.by_parameter, strict=True)
        )

    def _compute_terms(self, examples: int) -> "_Terms":
        terms = _Terms([[] for _ in self.spec.names], {}, {})
        # A replay runs modules again; their calls must not be recorded.
        self._replaying = True
        try:
            with torch.no_grad():
                all_grads = [(call, self._accumulated_grads(call)) for call in self._calls]
                self._probe(all_grads, examples)
                for call, grads in all_grads:
                    if grads:
                        self._add_terms(terms, call, grads, examples)
        except Exception:
            self.clear()  # otherwise the same error would come at every step
            raise
        finally:
            self._replaying = False
        return terms

    def _probe(self, calls: list[tuple[ModuleCall, dict[int, Tensor]]], examples: int) -> None:
        """Find the batch dimensions of modules that have not been called like this before."""
        shapes: dict[str, list[Shapes]] = {}
        for call, grads in calls:
            # The gradients of outputs have the shapes of the outputs.
            of_call = call_shapes(call.args, call.kwargs, ())
            of_call |= {index: grad.shape for index, grad in grads.items()}
            shapes.setdefault(call.name, []).append(of_call)
        if self._model_calls and self._dims.unknown(shapes):
            for model_call in self._model_calls:
                self._dims.probe(model_call, examples, shapes)

    def _accumulated_grads(self, call: ModuleCall) -> dict[int, Tensor]:
        """Add up a call's output gradients over the backwards that reached its parameters.

        `torch.autograd.grad(output, input)` passes by the outputs of layers as well, but gives
        their parameters no gradient.
        """
        owner = self._owners[call.name]
        tasks = {t for p in owner.parameters.values() for t in self._check.tasks[self._index[p]]}
        grads: dict[int, Tensor] = {}
        for (task, index), grad in call.grads.items():
            if task in tasks:
                grads[index] = grads[index] + grad if index in grads else grad
        return grads

    def _add_terms(
        self, terms: _Terms, call: ModuleCall, grads: dict[int, Tensor], examples: int
    ) -> None:
        owner = self._owners[call.name]
        names = {local: self.spec.names[self._index[p]] for local, p in owner.parameters.items()}
        wanted = {
            local: parameter
            for local, parameter in owner.parameters.items()
            if names[local] not in self._check.left_out
        }
        if not wanted:
            return
        try:
            named_terms = list(self._call_terms(owner, wanted, call, grads, examples))
        except UnbatchedError as error:
            terms.unbatched |= {names[local]: str(error) for local in wanted}
            return
        for local, term in named_terms:
            if local not in owner.parameters:
                self._warn_of_unfrozen(owner, local)
            elif local in wanted:
                index = self._index[wanted[local]]
                terms.by_parameter[index].append(term)
                if self._check.due:
                    autocast = call.context.autocast_dtype if call.context else None
                    inputs = tensor_leaves((call.args, call.kwargs))
                    widest = tolerance((wanted[local], *inputs, *grads.values()), autocast)
                    terms.tolerances[index] = max(widest, terms.tolerances.get(index, 0.0))

    def _warn_of_unfrozen(self, owner: ParameterOwner, local: str) -> None:
        name = f"{owner.name}.{local}" if owner.name else local
        if name not in self._unfrozen:
            self._unfrozen.add(name)
            log.warning(
                "%s was unfrozen after its rows were set up, so they leave it out: attach again to "
                "include it",
                name,
            )

    def _call_terms(
        self,
        owner: ParameterOwner,
        parameters: dict[str, nn.Parameter],
        call: ModuleCall,
        grads: dict[int, Tensor],
        examples: int,
    ) -> Iterator[tuple[str, Term]]:
        if owner.rule is None:
            dims = {}
            for index, grad in grads.items():
                batch = self._dims.of(call.name, call.module, index, examples, grad.dim())
                dims[index] = batch.find(grad.shape)
            yield from replay(call, grads, dims, parameters, examples).items()
        else:
            # Called with a keyword: layers have one argument, whatever its name.
            inputs = call.args[0] if call.args else next(iter(call.kwargs.values()))
            batch = self._dims.of(call.name, call.module, INPUT, examples, inputs.dim())
            yield from owner.rule(call.module, inputs, grads[0], batch, call.statistics)


def _hook_gradient(tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call `hook` with the gradient of a tensor, after all hooks of the user's on it."""
    node, index = tensor.grad_fn, tensor.output_nr
    if node is None:
        tensor.register_hook(hook)
    else:
        # Hooks of a tensor run in the order in which they are set, but before those of its node.
        node.register_prehook(lambda grads: hook(grads[index]))


def _only_outer_terms(
    owners: dict[str, ParameterOwner], index: dict[nn.Parameter, int]
) -> set[int]:
    """Return the indices of parameters that only Linear and Embedding layers use.

    Their gradients are sketched from the factors. All uses of a parameter must be hashed alike, so
    a weight that other modules share is sketched element by element everywhere.
    """
    factored: set[int] = set()
    others: set[int] = set()
    for owner in owners.values():
        outer = isinstance(owner.module, nn.Linear | nn.Embedding) and owner.rule is not None
        (factored if outer else others).update(index[p] for p in owner.parameters.values())
    return factored - others


def _row_scale(examples: int, reduction: str, loss_scale: float) -> float:
    if examples < 1:
        raise ValueError(f"examples must be at least 1, got {examples}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not loss_scale > 0:
        raise ValueError(f"loss_scale must be positive, got {loss_scale}")
    # A mean divides the loss of each example by B; its own gradient is B times what arrived.
    return (examples if reduction == "mean" else 1) / loss_scale
