"""From recorded calls to the terms of each parameter's rows.

Shapes: B examples.
"""

import copy
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from gradherd.flat import FlatSpec
from gradherd.rows.batch_dims import INPUT, BatchDims, Shapes, call_shapes
from gradherd.rows.call_recorder import CallRecorder
from gradherd.rows.forward_replay import ModuleCall, replay, tensor_leaves, tensor_versions
from gradherd.rows.layer_rules import UnbatchedError
from gradherd.rows.parameter_owners import ParameterOwner
from gradherd.rows.row_check import RowCheck, tolerance
from gradherd.rows.terms import DenseTerm, Term
from gradherd.rows.torch_names import current_backward

log = logging.getLogger("gradherd")


@dataclass
class ParameterTerms:
    """Rows as they are before averaging."""

    by_parameter: list[list[Term]]
    """One term for each use of a parameter."""
    tolerances: dict[int, float]
    """Relative error that the precision of each parameter's terms allows; for checks only."""
    unbatched: dict[str, str]
    """Names of parameters that are used without a batch dimension, with the reason."""


class EarlyRows(NamedTuple):
    """Rows of one use of a parameter, read when the gradient of the layer's output arrived."""

    parameter: int
    """Index of the parameter."""
    task: int
    """The backward (autograd's graph task) that the gradient came from."""
    examples: int
    """B, by the inputs of the model."""
    rows: Tensor
    """(B, N)."""


class TermReader:
    """Computes the terms of the calls that were recorded."""

    def __init__(
        self,
        model: nn.Module,
        owners: Iterable[ParameterOwner],
        spec: FlatSpec,
        check: RowCheck,
        batch_dim: int | None,
        *,
        like: Tensor,
        batch_size: int | None = None,
        sharded: bool = False,
    ) -> None:
        """Record the modules of `model` that own trainable parameters.

        Args:
            model: The model.
            owners: The modules whose parameters have rows.
            spec: Those parameters.
            check: Knows which backwards reached which parameter, and which are left out.
            batch_dim: Batch dimension of the model's inputs, if it is given.
            like: A tensor of the rows' dtype and device.
            batch_size: Examples in a full batch of the loader, if rows of checkpointed layers may
                be read while their gradients arrive.
            sharded: Whether modules hold shards of their parameters between passes.
        """
        owners = list(owners)
        self.owners = {o.name: o for o in owners if o.rule is not None or not sharded}
        # By parameter, not by name: modules that share a weight know it under different names.
        owned = {p for owner in owners for p in owner.parameters.values()}
        parameters = (p for p in model.parameters() if p in owned)
        self.index = {parameter: index for index, parameter in enumerate(parameters)}
        why = "its module has no rule, and a sharded one cannot be run again"
        replayed = (o for o in owners if o.name not in self.owners)
        names = (spec.names[self.index[p]] for o in replayed for p in o.parameters.values())
        check.leave_out(dict.fromkeys(names, why))  # before the hooks: it may refuse the model
        self.recorder = CallRecorder(
            model,
            self.owners.values(),
            self._replay_early,
            self._read_early,
            self._probe_early,
            sharded=sharded,
        )
        self.early: list[EarlyRows] = []
        """Rows read during the backward, in the order of the calls."""
        self.seconds = 0.0
        """Seconds spent on rows inside backwards."""
        self._like, self._batch_size = like, batch_size
        self._tolerances: dict[int, float] = {}  # of rows that were read early
        self._spec = spec
        self._check = check
        self._dims, self._sharded = BatchDims(batch_dim, sharded=sharded), sharded
        self._unfrozen: set[str] = set()
        # Rows of modules without a rule are known after the backward only.
        self._replayed_later = {
            self.index[p]
            for owner in self.owners.values()
            if owner.rule is None
            for p in owner.parameters.values()
        }

    def read(self, examples: int) -> ParameterTerms:
        """Return the terms of a batch of B examples."""
        terms = ParameterTerms([[] for _ in self._spec.names], dict(self._tolerances), {})
        with self.recorder.silent():
            for call, grads in self._probed_calls(examples):
                if grads:
                    self._add_terms(terms, call, grads, examples)
        return terms

    def clear(self) -> None:
        """Forget everything recorded."""
        self.recorder.clear()
        self.early.clear()
        self._tolerances.clear()

    def _read_early(self, call: ModuleCall, grad: Tensor) -> bool:
        """Read a layer's rows as its gradient arrives; say whether that was possible.

        Then its input and gradient are not held, so that activation checkpointing keeps its
        effect. On a batch that is checked, the rows are also added up.
        """
        started = time.perf_counter()
        with self.recorder.silent():
            done = self._try_early(call, grad)
        if not done and self._check.due:
            owner = self.owners[call.name]
            self._check.sums.incomplete |= {self.index[p] for p in owner.parameters.values()}
        self.seconds += time.perf_counter() - started
        return done

    def _try_early(self, call: ModuleCall, grad: Tensor) -> bool:
        if not (call.checkpointed and self._batch_size):
            return False
        owner, examples = self.owners[call.name], self._examples()
        wanted = self._wanted(owner)
        inputs = call.args[0] if call.args else next(iter(call.kwargs.values()))
        if examples is None or not self._dims.knows(call.name, INPUT, inputs.dim()):
            return False
        size = examples * sum(p.numel() for p in wanted.values())
        # The rows would take more memory than what they are made from.
        if size > inputs.numel() + grad.numel():
            return False
        try:
            named_terms = list(self._call_terms(owner, call, {0: grad}, examples))
        except UnbatchedError:
            return False  # the pop knows the number of examples, and names the module
        task = current_backward()
        for local, term in named_terms:
            if local not in owner.parameters:
                self._warn_of_unfrozen(owner, local)
            elif local in wanted:
                index = self.index[wanted[local]]
                self.early.append(EarlyRows(index, task, examples, term.dense()))
                if self._check.due:
                    sums, size = self._check.sums, self._spec.numels[index]
                    sums.incomplete |= {index} & self._replayed_later
                    sums.add(index, task, term, size, examples, self._like)
                    self._note_tolerance(self._tolerances, index, wanted[local], call, [grad])
        return True

    def _examples(self) -> int | None:
        """Return B by the model's inputs, which is a guess until rows are popped."""
        return self._dims.model_examples(self.recorder.last_shapes)

    def _probe_early(self, call: ModuleCall) -> None:
        """Find batch dimensions after a forward of the model, so that the backward knows them."""
        shapes = self.recorder.forward_shapes
        if self._batch_size is None or self._sharded or not self._dims.unknown(shapes):
            return
        # Of a short batch, one whose first dimension is not the batch, and one that contradicts
        # earlier ones, the pop decides: it knows the number of examples.
        if self._examples() == self._batch_size:
            with self.recorder.silent(), suppress(ValueError):
                self._dims.probe(call, self._batch_size, shapes, self.recorder.shapes_of)

    def _replay_early(self) -> None:
        """Replay at the end of a backward, before an optimizer can change the parameters.

        `optimizer.step(closure)` updates them right after the backward inside. The number of
        examples is a guess until rows are popped, so nothing is decided here: what cannot be
        replayed is replayed by the pop, which knows the number and raises.
        """
        started = time.perf_counter()
        examples = self._examples()
        if examples is None:
            return
        # On a copy: a guess must not decide on batch dimensions for good.
        dims, self._dims = self._dims, copy.deepcopy(self._dims)
        try:
            with self.recorder.silent():
                for call, grads in self._probed_calls(examples):
                    if grads and call.context is not None:
                        with suppress(UnbatchedError, RuntimeError):
                            self._replayed(call, grads, examples)
        except ValueError as error:
            log.debug("rows wait for the end of the step: %s", error)
        finally:
            self._dims = dims
            self.seconds += time.perf_counter() - started

    def _probed_calls(self, examples: int) -> list[tuple[ModuleCall, dict[int, Tensor]]]:
        """Return the calls with their gradients, after their batch dimensions were found."""
        calls = [(call, self._accumulated_grads(call)) for call in self.recorder.calls]
        whole, parts = self.recorder.model_calls, self.recorder.part_calls
        if not whole and not parts:
            return calls
        self._dims.by_parts = not whole
        if not whole and self._dims.given is None:
            named = ", ".join(dict.fromkeys(call.name for call in parts))
            raise ValueError(
                f"the loop calls parts of the attached model ({named}), not the model itself, so "
                "it is not known which dimension of their inputs holds the examples: call the "
                "model, or give ExactRows or SketchRows batch_dim=0 if it is the first one"
            )
        shapes: dict[str, list[Shapes]] = {}
        for call, grads in calls:
            # The gradients of outputs have the shapes of the outputs.
            of_call = call_shapes(call.args, call.kwargs, ())
            of_call |= {index: grad.shape for index, grad in grads.items()}
            shapes.setdefault(call.name, []).append(of_call)
        if self._dims.unknown(shapes):
            for model_call in whole or parts:
                self._dims.probe(model_call, examples, shapes, self.recorder.shapes_of)
        return calls

    def _accumulated_grads(self, call: ModuleCall) -> dict[int, Tensor]:
        """Add up a call's output gradients over the backwards that reached its parameters.

        `torch.autograd.grad(output, input)` passes by the outputs of layers as well, but gives
        their parameters no gradient.
        """
        owner = self.owners[call.name]
        tasks = {t for p in owner.parameters.values() for t in self._check.tasks[self.index[p]]}
        grads: dict[int, Tensor] = {}
        for (task, index), grad in call.grads.items():
            if task in tasks:
                grads[index] = grads[index] + grad if index in grads else grad
        return grads

    def _add_terms(
        self, terms: ParameterTerms, call: ModuleCall, grads: dict[int, Tensor], examples: int
    ) -> None:
        owner = self.owners[call.name]
        wanted = self._wanted(owner)
        if not wanted:
            return
        try:
            named_terms = list(self._call_terms(owner, call, grads, examples))
        except UnbatchedError as error:
            unbatched = (self._spec.names[self.index[p]] for p in wanted.values())
            terms.unbatched |= dict.fromkeys(unbatched, str(error))
            return
        for local, term in named_terms:
            if local not in owner.parameters:
                self._warn_of_unfrozen(owner, local)
            elif local in wanted:
                index = self.index[wanted[local]]
                terms.by_parameter[index].append(term)
                if self._check.due:
                    parameter = wanted[local]
                    self._note_tolerance(terms.tolerances, index, parameter, call, grads.values())

    def _note_tolerance(
        self,
        tolerances: dict[int, float],
        index: int,
        parameter: nn.Parameter,
        call: ModuleCall,
        grads: Iterable[Tensor],
    ) -> None:
        autocast = call.context.autocast_dtype if call.context else None
        inputs = tensor_leaves((call.args, call.kwargs))
        widest = tolerance((parameter, *inputs, *grads), autocast)
        tolerances[index] = max(widest, tolerances.get(index, 0.0))

    def _warn_of_unfrozen(self, owner: ParameterOwner, local: str) -> None:
        name = f"{owner.name}.{local}" if owner.name else local
        if name not in self._unfrozen:
            self._unfrozen.add(name)
            log.warning(
                "%s was unfrozen after its rows were set up, so they leave it out: attach again to "
                "include it",
                name,
            )

    def _wanted(self, owner: ParameterOwner) -> dict[str, nn.Parameter]:
        """Return a module's parameters that are not left out, by their local names."""
        return {
            local: parameter
            for local, parameter in owner.parameters.items()
            if self._spec.names[self.index[parameter]] not in self._check.left_out
        }

    def _call_terms(
        self, owner: ParameterOwner, call: ModuleCall, grads: dict[int, Tensor], examples: int
    ) -> Iterable[tuple[str, Term]]:
        if owner.rule is None:
            return self._replayed(call, grads, examples).items()
        # Called with a keyword: layers have one argument, whatever its name.
        inputs = call.args[0] if call.args else next(iter(call.kwargs.values()))
        if (
            "weight" in owner.parameters
            and tensor_versions((call.args, call.kwargs)) != call.versions
        ):
            raise RuntimeError(
                f"an input of module '{call.name}' was changed in place after its backward, before "
                "its rows were read: give the model a copy (clone()) of a buffer that is reused"
            )
        batch = self._dims.of(call.name, call.module, INPUT, examples, inputs.dim())
        return owner.rule(call.module, inputs, grads[0], batch, call.statistics)

    def _replayed(
        self, call: ModuleCall, grads: dict[int, Tensor], examples: int
    ) -> dict[str, DenseTerm]:
        """Return the terms of a module without a rule, which are computed once."""
        wanted = self._wanted(self.owners[call.name])
        key = (examples, *wanted, *call.grads)
        if call.replayed is None or call.replayed[0] != key:
            dims = {}
            for index, grad in grads.items():
                batch = self._dims.of(call.name, call.module, index, examples, grad.dim())
                dims[index] = batch.find(grad.shape)
            call.replayed = (key, replay(call, grads, dims, wanted, examples))
        return call.replayed[1]
