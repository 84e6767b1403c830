"""Many virtual runs of a model side by side: seeds, orders and learning rates of one study.

The maths of `virtual_trainer`, but gradients come from other kernels, so results differ in their
last bits, and orders may diverge after a while where a sign depends on those bits. Sketched rows
are as accurate, but use another hash: here the whole gradient is available and is sketched at once.
`stack_runs` says which runs are stacked, that is, trained so.

Letters: S runs, s of them whose orders need rows, R workers, B examples of a worker in a step, U
units of them, G groups, T steps, D parameters, k elements of a row.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradherd.comm.sliced_mean import mean_bytes
from gradherd.flat import FlatSpec
from gradherd.lab.tasks.task import Split, Task, Tensors, new_model
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import can_track_prefix_sums, herding_bound
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.stacked_step import StackedStep
from gradherd.lab.train.trainer import (
    EpochCounters,
    Evaluation,
    StepCallback,
    Trainer,
    evaluate,
)
from gradherd.lab.train.virtual_trainer import (
    VirtualCoordination,
    epoch_indices,
    make_ordering,
    row_settings,
)
from gradherd.ordering.coordination import finite_batches
from gradherd.ordering.registry import make_policy
from gradherd.rows.capture import Capture
from gradherd.rows.settings import RowSettings, SketchRows, TwoSidedRows
from gradherd.rows.sketch import CountSketch

# Beyond this many parameters a step is bound by arithmetic, not by launches: stacking is no faster.
_MAX_SIZE = {"cpu": 100_000, "cuda": 20_000_000}
# Gradients of all groups in a step of a stack, in elements.
_MAX_GRADIENTS = {"cpu": 1 << 24, "cuda": 1 << 29}
# Activations that autograd saves in a step of a stack, in elements. A GPU needs about twice as much
# temporarily, and beyond this size arithmetic dominates as well.
_MAX_SAVED = 1 << 30
# On a CPU, parameters of all runs of a stack: their averaged gradients of an epoch are stored.
_MAX_PARAMETERS = 1 << 20
# Examples on which a task's loss is probed.
_SAMPLES = 16
# With so few groups, or elements of their gradients, a run that needs none of them costs little
# beside those that do.
_FEW_GROUPS, _FEW_ELEMENTS = 8, 1024


def why_not_stackable(config: RunConfig, model: nn.Module) -> str | None:
    """Return why runs like this one cannot be stacked; None if they can.

    `why_not_mean_loss` sees what draws random numbers, and statistics that span a batch.
    """
    if config.local_steps is not None:
        return "each of its workers has weights of its own"
    if config.autocast is not None:
        return "its precision is mixed"
    if config.density is not None:
        return "what its workers send is selected worker by worker"
    size, device = FlatSpec.of(model).size, config.device.partition(":")[0]
    if size > _MAX_SIZE[device]:
        return f"{size:,} parameters are too many"
    # Buffers carry state from batch to batch, and stacked runs have one template model.
    if any(True for _ in model.buffers()):
        return "it has buffers"
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return "some of its parameters are not trained"
    for module in model.modules():
        # vmap could batch a layer that is unrolled over time, but that is slower: a step of an
        # LSTM of width 32 on an H200 takes 1.23 ms in cuDNN, and 8.3 ms unrolled for three runs.
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return f"vmap has no rule for its recurrent layer ({type(module).__name__})"
    return None


def why_not_mean_loss(task: Task, model: nn.Module, tensors: Sequence[Tensor]) -> str | None:
    """Return why the loss of a batch is not the mean over its examples; None if it is.

    Stacked runs derive the gradients of workers and units from one pass over all their examples:
    with a loss that weights examples relative to each other, or draws random numbers, the gradients
    would differ.

    Args:
        task: The task; its loss is called on a few examples.
        model: A model of it; a perturbed copy is used.
        tensors: The training examples.
    """
    sample, model = _sample_indices(tensors), copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Perturbed: a newly initialised model may give every example the same loss.
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        try:
            # A task may be a user's own, so the property is tested, not declared.
            whole = task.loss(model, *(tensor[sample] for tensor in tensors))
            if not whole.requires_grad:
                return "its loss has no gradient"  # A stack would train on zeros in silence.
            each = [task.loss(model, *(tensor[at : at + 1] for tensor in tensors)) for at in sample]
            mean = torch.stack(each).mean()
            # Sums in another order differ in the last bits.
            same = bool(torch.isclose(whole, mean, rtol=1e-4, atol=1e-6))
        except Exception as error:  # The evaluation before training says what is wrong.
            return f"its loss fails: {type(error).__name__}: {error}"
    if same:
        return None
    return f"the loss of {len(sample)} examples is {whole:.6g}, the mean of their losses {mean:.6g}"


def _sample_indices(tensors: Sequence[Tensor]) -> Tensor:
    """Return the indices of a few examples, spaced evenly: adjacent ones may be alike."""
    indices: Tensor = torch.linspace(0, len(tensors[0]) - 1, _SAMPLES).long().unique()
    return indices


def saved_per_example(task: Task, model: nn.Module, tensors: Sequence[Tensor]) -> int:
    """Return how many elements autograd saves per example for the backward pass.

    For a language model these are mostly the logits over the vocabulary: many more than parameters.
    """
    model = copy.deepcopy(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    sample, saved = _sample_indices(tensors), 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        # Weights are saved as well, but they are shared by all examples.
        saved += 0 if tensor.data_ptr() in own else tensor.numel()
        return tensor

    with torch.random.fork_rng(devices=[]), saved_tensors_hooks(count, lambda tensor: tensor):
        try:
            task.loss(model, *(tensor[sample] for tensor in tensors))
        except Exception:  # `why_not_mean_loss` reports it, and such a run is trained alone.
            return 0
    return saved // len(sample)


def stack_runs(configs: Sequence[RunConfig], model: nn.Module, saved: int = 0) -> list[list[int]]:
    """Return the indices of runs that are stacked together, and of each other run alone.

    The runs of a stack differ in order, seed and learning rate; those whose orders need rows come
    last.

    Args:
        configs: The runs.
        model: A model of their task.
        saved: Result of `saved_per_example`; 0 if memory is no concern.
    """
    size = FlatSpec.of(model).size
    alike: dict[str, list[int]] = {}
    alone: list[list[int]] = []
    needs_rows = [make_policy(config.order).needs_rows for config in configs]
    for at, config in enumerate(configs):
        if why_not_stackable(config, model) is not None:
            alone.append([at])
            continue
        # What is left must be equal for one graph to serve all runs of a stack.
        # Examples that were transformed at random are those of a seed.
        seed = config.seed if config.augment else 0
        shared = dataclasses.replace(config, order="d-rr", seed=seed, lr=1.0)
        units = _units(config)
        # With many units, orders that need no rows would pay for those that do.
        few = units <= _FEW_GROUPS or units * size <= _FEW_ELEMENTS
        alike.setdefault(f"{shared} {few or needs_rows[at]}", []).append(at)
    stacks = []
    for indices in alike.values():
        indices.sort(key=needs_rows.__getitem__)
        first = configs[indices[0]]
        groups = _units(first) if needs_rows[indices[-1]] else 1
        device = first.device.partition(":")[0]
        # Memory decides how many runs fit; the rest form the next stack.
        most = max(1, _MAX_GRADIENTS[device] // (groups * size))
        if device == "cpu":
            most = min(most, max(8, _MAX_PARAMETERS // size))
        elif saved:
            most = min(most, max(1, _MAX_SAVED // (saved * first.workers * first.batch_size)))
        stacks += [indices[at : at + most] for at in range(0, len(indices), most)]
    return [*stacks, *alone]


def _units(config: RunConfig) -> int:
    """Return how many gradients a step computes for orders that need rows."""
    return config.workers * (config.batch_size // config.unit)


# Rows are buffered and passed to the orders together, up to this many steps and elements.
_MAX_STEPS, _MAX_ELEMENTS, _MAX_GPU_ELEMENTS = 512, 8_000_000, 1 << 30
# Steps of a call on the CPU, and steps of an epoch from which building so large a graph takes less
# time than it saves.
_STEPS_PER_CALL, _MANY_STEPS = 16, 2000


class StackedTrainer(Trainer):
    """Trains S runs of R workers each; settings may differ as `stack_runs` allows."""

    def __init__(self, configs: Sequence[RunConfig], task: Task, split: Split) -> None:
        """Build a model of each run; runs whose orders need rows come last."""
        # Stacks of augmented runs have one seed.
        super().__init__(configs[0], task, split)
        self._configs, first, initial = list(configs), configs[0], []
        for config in self._configs:
            # Each run starts from the weights that it would have alone.
            torch.manual_seed(config.seed)
            self.model = new_model(task).to(self._device)
            initial.append(nn.utils.parameters_to_vector(self.model.parameters()).detach())
        self._parameters = torch.stack(initial)
        size = self._size = self._parameters.shape[1]
        pairs = [make_ordering(config, len(split.train[0])) for config in self._configs]
        self.sharding, self.orderings = pairs[0][0], [ordering for _, ordering in pairs]
        needs_rows = [ordering.policy.needs_rows for ordering in self.orderings]
        assert needs_rows == sorted(needs_rows)
        self._first_with_rows = without = needs_rows.count(False)
        # Orders of a stack that need rows read them alike.
        rows = row_settings(self._configs[-1], size) if needs_rows[-1] else None
        self._coordination = [
            VirtualCoordination(ordering, first.workers, rows if needs else None, size)
            for ordering, needs in zip(self.orderings, needs_rows, strict=True)
        ]
        sketch = make_sketch(rows, task, self.model, self._split.train)
        self._columns = size if sketch is None else sketch(self._parameters[:1]).shape[1]
        self._rows = torch.empty(0)  # (s, T, G, k) of the steps that were not observed yet
        # Closes over these two, not `self`: a step that refers back to its trainer would keep its
        # memory until the garbage collector runs.
        self._step = StackedStep(
            task,
            self.model,
            self._examples.tensors,
            FunctionalOptimizer(first),
            self._parameters,
            lambda grads: grads[without:] if sketch is None else sketch(grads[without:]),
        )
        # Whole batches on several workers: the gradients that are averaged are the rows.
        self._gradients_are_rows = (
            first.unit == first.batch_size and first.workers > 1 and sketch is None
        )
        self._batch_order_bytes = [
            batch_order_bytes(config, len(split.train[0]))
            if needs and self._gradients_are_rows
            else 0
            for config, needs in zip(self._configs, needs_rows, strict=True)
        ]
        steps = -(-self.sharding.length * first.unit // first.batch_size)
        self._tracks_prefix_sums = can_track_prefix_sums(steps, size)

    @torch.inference_mode()
    def train_epoch(self, number: int, on_step: StepCallback) -> list[EpochCounters]:
        """Train one epoch of all runs."""
        config, runs = self._configs[0], len(self._configs)
        counters = [EpochCounters() for _ in self._configs]
        begin = time.perf_counter()
        self._examples.begin_epoch(number)
        batches = self._indices().split(config.batch_size, dim=2)
        # All of an epoch at once: on a GPU each copy from the host would delay the step.
        count = len(batches)
        # Runs of a stack have one schedule: rates are computed once for each base rate.
        bases = {one.lr: one for one in self._configs}
        rates = {
            lr: torch.tensor([one.lr_at(number, at, count) for at in range(count)])
            for lr, one in bases.items()
        }
        lrs = torch.stack([rates[one.lr] for one in self._configs], dim=1).unsqueeze(2)
        lrs = lrs.to(self._parameters.device)
        # (T, S, D)
        means = self._parameters.new_empty(
            (count if self._tracks_prefix_sums else 0, *self._parameters.shape)
        )
        sent_before = [one.bytes for one in self._coordination]
        data_seconds = time.perf_counter() - begin
        buffered, capacity = 0, self._buffered_steps(batches[0].shape[2])
        done, at_once = 0, 1
        if count >= _MANY_STEPS and not self._parameters.is_cuda:
            at_once = _STEPS_PER_CALL
        while done < count:
            # The last batch may be shorter, so it never shares a call or a buffer with others.
            fits = min(capacity - buffered, count - 1 - done) >= at_once
            span = slice(done, done + (at_once if fits else 1))
            together = torch.stack(batches[span])
            # The largest group that still gives every row: fewer groups are less work.
            group = config.unit if self._first_with_rows < runs else together[0, 0].numel()
            rows, mean = self._step(lrs[span], together.view(len(together), runs, -1, group))
            if self._tracks_prefix_sums:
                means[span] = mean
            shape = (rows.shape[1], capacity, *rows.shape[2:])
            if self._rows.shape != shape:
                self._rows = rows.new_empty(shape)
            self._rows[:, buffered : buffered + len(rows)].copy_(rows.transpose(0, 1))
            buffered, done = buffered + len(rows), span.stop
            if buffered == capacity or done >= count - 1:
                self._observe(buffered, counters)
                on_step(buffered * runs)
                buffered = 0
        for coordination, own in zip(self._coordination, counters, strict=True):
            since = time.perf_counter()
            coordination.end_epoch()
            own.ordering_seconds += time.perf_counter() - since
        examples = config.batch_size * config.workers
        for at, own in enumerate(counters if len(means) else ()):
            own.herding_bound = herding_bound(means[:, at], examples)
        seconds = time.perf_counter() - begin
        # Measured per run; everything else happens for all runs at once.
        separate = sum(own.ordering_seconds for own in counters)
        for at, own in enumerate(counters):
            own.steps = count
            # Time that the runs spent together is divided evenly.
            own.seconds = (seconds - separate) / runs + own.ordering_seconds
            own.data_seconds = data_seconds / runs
            own.ordering_bytes = self._coordination[at].bytes - sent_before[at]
            # Counted in advance: these rows are observed directly, without the exchange that would
            # count them.
            own.ordering_bytes += self._batch_order_bytes[at]
            own.bytes = own.ordering_bytes + count * mean_bytes(self._size, config.workers)
        return counters

    def _indices(self) -> Tensor:
        """Return (S, R, L) the examples of all runs in the order of this epoch."""
        each = [epoch_indices(self.sharding, ordering) for ordering in self.orderings]
        return torch.stack(each).to(self._parameters.device)

    def _buffered_steps(self, examples: int) -> int:
        """Return how many steps of rows are buffered."""
        units = self._configs[0].workers * max(1, examples // self._configs[0].unit)
        most = _MAX_GPU_ELEMENTS if self._parameters.is_cuda else _MAX_ELEMENTS
        elements = (len(self._configs) - self._first_with_rows) * self._columns * units
        # At least one step, even if its rows alone are over the limit.
        return max(1, min(_MAX_STEPS, most // max(1, elements)))

    def _observe(self, steps: int, counters: list[EpochCounters]) -> None:
        """Pass the buffered rows of `steps` steps to the orders."""
        workers = self._configs[0].workers
        for at, stored in enumerate(self._rows[:, :steps], self._first_with_rows):
            begin = time.perf_counter()
            rows = stored.unflatten(1, (workers, -1)).transpose(1, 2)  # (T, U, R, k)
            sizes = [rows.shape[1]] * steps
            rows = rows.flatten(0, 1)
            if self._gradients_are_rows:
                self.orderings[at].observe(rows, finite_batches(rows, sizes))
            else:
                self._coordination[at].gather(rows.transpose(0, 1), sizes)
            counters[at].ordering_seconds += time.perf_counter() - begin

    def evaluate(self) -> list[Evaluation]:
        """Evaluate the models one after the other."""
        evaluations = []
        for flat in self._parameters:
            nn.utils.vector_to_parameters(flat, self.model.parameters())
            evaluations.append(evaluate(self._configs[0], self._task, self.model, self._split))
        return evaluations


def make_sketch(
    rows: RowSettings | None, task: Task, model: nn.Module, tensors: Tensors
) -> Callable[[Tensor], Tensor] | None:
    """Return what makes rows of (..., D) gradients; None if they are the rows."""
    if isinstance(rows, SketchRows):
        return CountSketch(rows.size, rows.seed)
    if not isinstance(rows, TwoSidedRows):
        return None
    model = copy.deepcopy(model)
    capture = Capture(model, rows)
    # Whether a layer has one position per example is known from a batch.
    task.loss(model, *(tensor[:2] for tensor in tensors)).backward()
    capture.pop_rows(2)
    matrix = capture.matrix()  # (D, k)
    return lambda grads: grads @ matrix


def batch_order_bytes(config: RunConfig, examples: int) -> int:
    """Return the bytes that ordering sends in an epoch where whole batches are rows.

    Counted on rows of one element: what is sent are inner products, whatever the rows' length.
    """
    _, ordering = make_ordering(config, examples)
    coordination = VirtualCoordination(ordering, config.workers)
    rows = torch.zeros(config.workers, 1)
    for _ in range(ordering.length):
        coordination.exchange(rows)
    return coordination.bytes
