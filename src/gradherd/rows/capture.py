"""Exact rows of a model, read off the user's own backward.

The outputs of every module that owns parameters pass through a `_ModuleTap`, an autograd Function
that changes nothing of them. Its backward is given the gradients of the outputs and what was saved
of the inputs, and computes at once what the module adds to the rows: by the rule of its layer type,
or by running the module again. What a tap holds until then autograd has saved, as for any layer, so
checkpointing, offloading and a retained graph work as they do.

Shapes: B examples, D elements of all trainable parameters.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradherd.flat import FlatSpec
from gradherd.rows.batch_dims import INPUT, BatchDims, Shapes, call_shapes
from gradherd.rows.exact_rows import DenseTerm, FactoredRows, Term, at_least_float32
from gradherd.rows.forward_replay import (
    ForwardContext,
    ModuleCall,
    UncopiedHook,
    detach_all,
    map_tensors,
    repeat_forward,
    replay,
    skip_on_replay,
    tensor_leaves,
)
from gradherd.rows.layer_rules import leading_dims, statistics_of
from gradherd.rows.parameter_owners import (
    ParameterOwner,
    parameter_owners,
    refuse_compiled,
    unwrap_model,
)
from gradherd.rows.row_check import Registrar, RowCheck, tolerance
from gradherd.rows.torch_names import current_backward

log = logging.getLogger("gradherd")

Reduction = Literal["mean", "sum"]


class _ModuleTap(torch.autograd.Function):
    """Passes on a module's outputs; in the backward, tells of their gradients."""

    @staticmethod
    def forward(ctx: Any, arrived: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the first `count` tensors; save the others, and hand them to `arrived`."""
        ctx.arrived = arrived
        ctx.save_for_backward(*tensors[count:])
        ctx.set_materialize_grads(False)  # outputs that are not used have no gradient
        # Not views: those that a Function makes may not be changed in place, as ReLU does it.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients as they are."""
        saved = ctx.arrived(ctx, grads)
        return None, None, *grads, *(None for _ in range(saved))


@dataclass(frozen=True)
class _Use:
    """One forward of a module, as far as it is not saved by autograd."""

    owner: ParameterOwner
    wanted: dict[str, nn.Parameter]
    """Parameters whose rows are wanted, by their local names."""
    outputs: tuple[int, ...]
    """Positions of the outputs that are tapped."""
    call: ModuleCall | None
    """How to run a module without a rule again; its tensors are empty and their values saved."""
    shapes: dict[int, torch.Size]
    """Of these outputs by their position; of the INPUT of a module with a rule."""
    dims: dict[int, int | None]
    """Batch dimensions of the same; None without one."""

    @property
    def examples(self) -> int | None:
        """B; None if it is not the same everywhere."""
        sizes = {self.shapes[i][dim] for i, dim in self.dims.items() if dim is not None}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def label(self) -> str:
        """The module's name for errors; the model itself has none."""
        return self.owner.name or type(self.owner.module).__name__


class _Found(NamedTuple):
    """What one use of a parameter adds to the rows in one backward."""

    parameter: int
    """Index of the parameter."""
    task: int
    """The backward (autograd's graph task)."""
    use: _Use
    term: Term | None
    """None if it has no batch dimension."""


class Capture:
    """Read per-example gradients off a model's ordinary backward.

    Call `pop_rows` after `backward()`. Rows leave out parameters that are frozen when the capture
    is created. They also leave out parameters without gradients of single examples; on the first
    batches and now and then `RowCheck` finds those whose rows do not add up to their gradient.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> capture = Capture(model)
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean().backward()
    >>> capture.pop_rows(2).dense()
    tensor([[1., 2.],
            [3., 4.]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_dim: int | None = None,
        strict: bool = False,
        batch_size: int | None = None,
        sharded: Registrar | None = None,
        owners: Sequence[ParameterOwner] | None = None,
    ) -> None:
        """Register the hooks.

        Args:
            model: Any module, or one wrapped in DDP.
            batch_dim: Batch dimension of the model's inputs; None takes the first, or that of the
                size `batch_size`. Give 1 for time-major models whose number of time steps may equal
                the batch size.
            strict: Raise where a parameter would be left out.
            batch_size: Examples in a full batch of the loader, if they are known.
            sharded: For a model whose modules hold shards of their parameters between passes
                (FSDP): hooks the gradients of whole parameters. Rows leave out modules without a
                rule: those are run again, for which their parameters would have to be gathered.
            owners: Read the parameters of these modules only; None reads all.
        """
        refuse_compiled(model)
        model = unwrap_model(model)
        if owners is None:
            owners = list(parameter_owners(model))
        # A set of tensors by identity: tied weights appear in several owners, but once in a row.
        owned = {p for owner in owners for p in owner.parameters.values()}
        self.spec = FlatSpec.of(model, owned)
        self._model = model
        parameters = [p for p in model.parameters() if p in owned]
        # By parameter, not by name: modules that share a weight know it under different names.
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._check = RowCheck(self.spec, parameters, strict=strict, register=sharded)
        # Fixes dtype and device of the rows, also for a batch without any gradient.
        self._like = torch.empty(0)
        if parameters:
            first = parameters[0]  # not new_empty: a shard's would be a DTensor
            self._like = at_least_float32(torch.empty(0, dtype=first.dtype, device=first.device))
        self._dims = BatchDims(batch_dim, sharded=sharded is not None, batch_size=batch_size)
        # Examples of the forward that runs, None outside of forwards, and of the last one.
        self._batch: int | None = None
        self._last_batch: int | None = None
        self._silent = False
        self._shapes: list[tuple[str, Shapes]] | None = None
        self._contexts: dict[str, ForwardContext] = {}
        self._found: list[_Found] = []
        self._tolerances: dict[int, float] = {}
        self._failures: dict[str, str] | None = None  # of the batch that waits, once checked
        self._task = -1
        self._began: Callable[[], None] = lambda: None
        self._differentiated = False  # whether a backward was run with create_graph=True
        self._unfrozen: set[str] = set()
        self._seconds = 0.0
        self._handles: list[Any] = [
            # In front of FSDP's own hook: the model is run inside.
            model.register_forward_pre_hook(
                UncopiedHook(self._before_model), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(UncopiedHook(self._after_model), always_call=True),
        ]
        unread = {
            self.spec.names[self._index[p]]
            for owner in owners
            if owner.rule is None and sharded is not None
            for p in owner.parameters.values()
        }
        for owner in owners:
            if owner.rule is not None or sharded is None:
                self._register(owner)
        why = "its module has no rule, and a sharded one cannot be run again"
        try:
            self._check.leave_out(dict.fromkeys(sorted(unread), why))
        except RuntimeError:
            self.remove_hooks()
            raise

    def _register(self, owner: ParameterOwner) -> None:
        if owner.rule is None:
            hook = UncopiedHook(partial(self._before_forward, owner))
            self._handles.append(owner.module.register_forward_pre_hook(hook, prepend=True))
        # Before all other hooks: those may change the output, and rows are about the forward.
        after = UncopiedHook(partial(self._after_forward, owner))
        self._handles.append(
            owner.module.register_forward_hook(after, prepend=True, with_kwargs=True)
        )

    # What happens in a forward.

    @skip_on_replay
    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self._silent:
            return
        self._batch = self._last_batch = self._dims.look_at(args, kwargs, self._probe)

    def _after_model(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if not self._silent:
            self._batch = None

    def _probe(self, args: Any, kwargs: Any, examples: int) -> None:
        """Find batch dimensions: run the model as it is and with one more example."""
        args, kwargs = detach_all((args, kwargs))
        call = ModuleCall(self._model, args, kwargs, ForwardContext.save(self._model))
        with self._silently(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model is about to run, and will warn itself
            calls: dict[str, list[Shapes]] = {}
            try:
                for name, shapes in self._shapes_of(call, args, kwargs):
                    calls.setdefault(name, []).append(shapes)
            except Exception as error:
                if self._dims.sharded:  # parameters may have stayed gathered
                    raise
                # It needs gradients, say. Then sizes decide which dimensions hold examples.
                log.debug("the model cannot be run without gradients: %s", error)
                return
            self._dims.probe(call, examples, calls, self._shapes_of)

    def _shapes_of(self, call: ModuleCall, args: Any, kwargs: Any) -> list[tuple[str, Shapes]]:
        """Run the model with other arguments; return the shapes in its modules."""
        shapes: list[tuple[str, Shapes]] = []
        self._shapes = shapes
        try:
            # Sharded modules gather their parameters in hooks of their own, so those must run.
            outputs = repeat_forward(call, args, kwargs, hooks=self._dims.sharded)
        finally:
            self._shapes = None
        # The model itself was not called as a module, so its own hooks have not run.
        return [*shapes, ("", call_shapes(args, kwargs, outputs))]

    @skip_on_replay
    def _before_forward(self, owner: ParameterOwner, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not self._silent:
            self._contexts[owner.name] = ForwardContext.save(module)

    def _after_forward(
        self,
        owner: ParameterOwner,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> Any:
        if self._shapes is not None:
            self._shapes.append((owner.name, call_shapes(args, kwargs, outputs)))
            return None
        # No backward follows: evaluation, or the first forward of a reentrant checkpoint, which
        # runs again with gradients enabled.
        if not torch.is_grad_enabled() or self._silent:
            return None
        if isinstance(outputs, tuple) and any(isinstance(out, PackedSequence) for out in outputs):
            raise ValueError(
                f"module '{owner.name}' got a PackedSequence, in which examples are interleaved: "
                "pad the sequences instead, or order whole batches"
            )
        leaves = tensor_leaves(outputs)
        tapped = tuple(index for index, out in enumerate(leaves) if out.requires_grad)
        wanted = self._wanted(owner)
        if not tapped or not wanted:
            return None
        given = tuple(leaves[index] for index in tapped)
        call, shapes = None, dict(zip(tapped, (out.shape for out in given), strict=True))
        if owner.rule is None:
            bare, named = map_tensors(lambda one: one.new_empty(0), (args, kwargs))
            call = ModuleCall(module, bare, named, self._contexts.pop(owner.name))
            # Detached: references to the graph would keep the activations of layers below alive.
            given += tuple(one.detach() for one in tensor_leaves((args, kwargs)))
        else:
            # The input comes first, whatever its name.
            inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
            shapes = {INPUT: inputs.shape}
            # What a bias needs is the gradient alone; the input may be changed then.
            held = inputs.detach() if "weight" in wanted else self._like
            given += (held, *statistics_of(module))
        use = _Use(owner, wanted, tapped, call, shapes, self._find_dims(owner, shapes))
        passed = iter(_ModuleTap.apply(partial(self._arrived, use), len(tapped), *given))  # type: ignore[no-untyped-call]
        return map_tensors(lambda out: next(passed) if out.requires_grad else out, outputs)

    def _wanted(self, owner: ParameterOwner) -> dict[str, nn.Parameter]:
        """Return a module's parameters that have rows now, by their local names."""
        if owner.rule is not None:
            for local, parameter in owner.module.named_parameters(recurse=False):
                if parameter.requires_grad and local not in owner.parameters:
                    self._warn_of_unfrozen(f"{owner.name}.{local}" if owner.name else local)
        return {
            local: parameter
            for local, parameter in owner.parameters.items()
            if parameter.requires_grad and not self._check.is_left_out(self._index[parameter])
        }

    def _warn_of_unfrozen(self, name: str) -> None:
        if name not in self._unfrozen:
            self._unfrozen.add(name)
            log.warning(
                "%s was unfrozen after its rows were set up, so they leave it out: attach again to "
                "include it",
                name,
            )

    def _find_dims(
        self, owner: ParameterOwner, shapes: dict[int, torch.Size]
    ) -> dict[int, int | None]:
        """Return the batch dimensions of a module's outputs, or of its INPUT, by its shapes."""
        batch, dims = self._batch_now(), {}
        for index, shape in shapes.items():
            leading = leading_dims(owner.module, len(shape)) if index == INPUT else len(shape)
            dims[index] = self._dims.find(owner.name, index, shape, leading, batch)
        return dims

    def _batch_now(self) -> int | None:
        """Return the examples of the forward that runs; None outside of forwards."""
        if self._batch is None and current_backward() != -1:
            return self._last_batch  # a checkpoint runs a block again
        return self._batch

    # What happens in a backward.

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._began = began

    def _arrived(self, use: _Use, ctx: Any, grads: tuple[Tensor | None, ...]) -> int:
        """Compute what a use adds to the rows; return how many tensors were saved for it."""
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise RuntimeError(
                f"an input of module '{use.label}' was changed in place after its forward, so rows "
                "of single examples cannot be read: replace the in-place operation by its plain "
                "form"
            ) from error
        started = time.perf_counter()
        task = current_backward()
        if task != self._task:
            self._task = task
            self._began()
        self._differentiated |= torch.is_grad_enabled()
        came = {
            index: grad.detach()
            for index, grad in zip(use.outputs, grads, strict=True)
            if grad is not None
        }
        with self._silently():
            for local, term in self._terms_of(use, came, saved):
                index = self._index[use.wanted[local]]
                self._found.append(_Found(index, task, use, term))
                if self._check.due:
                    autocast = use.call.context.autocast_dtype if use.call else None
                    seen = (use.wanted[local], *saved, *came.values())
                    widest = max(tolerance(seen, autocast), self._tolerances.get(index, 0.0))
                    self._tolerances[index] = widest
        self._seconds += time.perf_counter() - started
        return len(saved)

    def _terms_of(
        self, use: _Use, grads: dict[int, Tensor], saved: tuple[Tensor, ...]
    ) -> Iterator[tuple[str, Term | None]]:
        """Yield the terms of the wanted parameters, None for those without a batch dimension."""
        used, examples = (INPUT,) if use.call is None else tuple(grads), use.examples
        dims = {index: dim for index in used if (dim := use.dims[index]) is not None}
        owner, names = use.owner, use.wanted
        if examples is None or len(dims) < len(used):
            yield from ((local, None) for local in names)
        elif owner.rule is not None:
            inputs, *statistics = saved
            (grad,) = grads.values()
            yield from owner.rule(owner.module, inputs, grad, dims[INPUT], names, *statistics)
        else:
            assert use.call is not None
            tensors = iter(saved)
            args, kwargs = map_tensors(lambda _: next(tensors), (use.call.args, use.call.kwargs))
            call = replace(use.call, args=args, kwargs=kwargs)
            rows = replay(call, grads, dims, list(names.values()), examples)
            for local, row in zip(names, rows, strict=True):
                yield local, DenseTerm(at_least_float32(row))

    @contextmanager
    def _silently(self) -> Iterator[None]:
        """Tap nothing inside: modules run again to compute rows."""
        before, self._silent = self._silent, True
        try:
            # Half precision is for the model; rows keep theirs, also in a backward under autocast.
            with torch.no_grad(), torch.autocast(self._like.device.type, enabled=False):
                yield
        finally:
            self._silent = before

    # What the rows of a batch are.

    @property
    def waiting(self) -> bool:
        """Whether a backward has reached a parameter since the last pop."""
        return self._check.reached

    @property
    def seconds_in_backward(self) -> float:
        """Seconds spent on rows inside backwards so far."""
        return self._seconds

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
        scale = row_scale(examples, reduction, loss_scale)
        try:
            if self._failures is None and (mask := self.check_bitmask(examples)) is not None:
                self.leave_out(mask)
            terms, unbatched = self._read(examples)
            # Not in step with other ranks, which follow with the next check.
            self._check.leave_out(unbatched)
        finally:
            self.clear()
            self._check.next_batch(self._model.training)
        left_out = self._check.left_out
        of_names = zip(self.spec.names, terms, strict=True)
        kept = tuple(() if name in left_out else tuple(uses) for name, uses in of_names)
        return FactoredRows(self.spec, kept, examples, scale, self._like)

    def _read(self, examples: int) -> tuple[list[list[Term]], dict[str, str]]:
        """Return the terms of each parameter, and the parameters without a batch dimension."""
        terms: list[list[Term]] = [[] for _ in self.spec.names]
        unbatched: dict[str, str] = {}
        for index, task, use, term in self._found:
            # `torch.autograd.grad(output, input)` passes by the outputs of layers as well, but
            # gives their parameters no gradient.
            if task not in self._check.tasks[index]:
                continue
            if term is None:
                shape = tuple(next(iter(use.shapes.values())))
                unbatched[self.spec.names[index]] = (
                    f"module '{use.label}' sees a tensor of shape {shape}, of which no "
                    f"dimension holds the {examples} examples of the batch"
                )
            elif use.examples != examples:
                raise RuntimeError(
                    f"the model was given {use.examples} examples, but the batch has {examples}: "
                    "one batch of the loader is one forward"
                )
            else:
                terms[index].append(term)
        if unbatched and self._last_batch is None and self._dims.given is None:
            called = ", ".join(dict.fromkeys(use.owner.name for _, _, use, _ in self._found))
            raise ValueError(
                f"the loop calls parts of the attached model ({called}), not the model itself, so "
                "it is not known which dimension of their inputs holds the examples: call the "
                "model, or give ExactRows or SketchRows batch_dim=0 if it is the first one"
            )
        return terms, unbatched

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
        try:
            terms, unbatched = self._read(examples)
        except Exception:
            self.clear()  # otherwise the same error would come at every step
            raise
        hint = "the loss contains gradients (create_graph=True)" if self._differentiated else ""
        self._failures = self._check.failures(terms, self._tolerances, self._like, hint)
        self._failures |= unbatched
        return self._check.mask(self._failures)

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters whose byte in `mask` is not 0, from the rows that wait on.

        Raises:
            RuntimeError: In strict mode, or if more than half of the elements are left out.
        """
        chosen = [name for name, byte in zip(self.spec.names, mask.tolist(), strict=True) if byte]
        failures = self._failures or {}
        try:
            self._check.leave_out({name: failures.get(name, "on another rank") for name in chosen})
        except RuntimeError:
            self.clear()
            raise

    def ignored(self) -> AbstractContextManager[None]:
        """Return a context in which forwards are not recorded, as those of another search."""
        return self._silently()

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first, such as after loading a state."""
        self._check.restart()

    def clear(self) -> None:
        """Forget everything recorded."""
        self._found, self._tolerances, self._failures = [], {}, None
        self._differentiated = False
        self._check.clear()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._contexts.clear()
        self._check.remove_hooks()
        self.clear()


def row_scale(examples: int, reduction: str, loss_scale: float) -> float:
    """Return the factor from what a backward gives to the gradients of single examples."""
    if examples < 1:
        raise ValueError(f"examples must be at least 1, got {examples}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if not loss_scale > 0:
        raise ValueError(f"loss_scale must be positive, got {loss_scale}")
    # A mean divides the loss of each example by B; its own gradient is B times what arrived.
    return (examples if reduction == "mean" else 1) / loss_scale
