"""Local steps: their settings, and the outer optimizer that moves the shared weights.

Workers take H steps each on their own, then exchange what these changed instead of every gradient:
Douillard et al., "DiLoCo", arXiv:2311.08105. The difference goes through the same exchange as
gradients, with error feedback: all coordinates in one bit by default, because what hurts is how
long a change waits, not how exactly it arrives. A method that selects coordinates makes it
SparseLoCo (Sarfi et al., arXiv:2508.15706).

Letters: D coordinates, R workers, B elements of buffers.
"""

import math
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.checks import check_choice, check_in, check_whole
from gradherd.comm.script import AllGather, AllToAll, Script
from gradherd.sparsify.basics import Dense
from gradherd.sparsify.message_sizes import GROUP, ValueFormat, fits_one_round
from gradherd.sparsify.selector import Selector
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.value_sums import sum_in_order

ONE_BIT_SAVES = 2 * 32 / (2 * (1 + 16 / GROUP))
"""How many times fewer bytes one bit takes than float32, both ways, with a level for each group."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Take steps alone, then exchange the difference: `attach(net, optimizer=opt, local=...)`.

    Without arguments: four steps, then all coordinates in one bit each way, for 120 times fewer
    bytes than a dense exchange of every step. `fewer` asks for another factor:

    >>> LocalSteps()
    LocalSteps(every=4, method=Dense(density=1.0), values='int1', ...)
    >>> LocalSteps(fewer=240).every, LocalSteps(fewer=240).outer_momentum
    (8, 0.5)

    Multiply AdamW's learning rate for dense training by `lr_factor(workers)`.
    """

    every: int = None  # type: ignore[assignment]  # 4, unless `fewer` says otherwise
    """H, the steps of the optimizer between two exchanges: 4."""
    method: Selector = field(default_factory=Dense)
    """What selects coordinates of the difference; a name is that method with its defaults."""
    values: ValueFormat = "int1"
    """How values are sent, as in `Sparsify`; what rounding takes stays in the residual."""
    decay: float = 1.0
    """Factor of the residual at each exchange. 1 loses nothing, and is right if all coordinates are
    sent. If a method selects few, some have waited long and fit the weights less: try 0.95."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; 1 without momentum averages the workers' weights."""
    outer_momentum: float = None  # type: ignore[assignment]  # by the length of a phase
    """Momentum of the outer step, Nesterov's: 1 - sqrt(2 / every) if all coordinates are sent, so
    0.29 with four steps; else 0. DiLoCo has 0.9 with an `outer_lr` of 0.7."""
    keep_residual: bool = None  # type: ignore[assignment]  # if rounding alone makes residuals
    """Whether a worker goes on with what rounding took from its difference, where all coordinates
    are sent. It alone has learned that, so it stays in its own weights until it is sent: long runs
    end better by it. In a few hundred steps of SGD, False with `outer_momentum=0` can be better.
    What a method has not selected waits too long for it: workers would drift apart."""
    overlap: bool = False
    """Whether the exchange runs in a thread beside the next steps: through a group of its own, and
    on a GPU on a stream of its own. Where gloo exchanges what a GPU computes, residuals and shared
    weights are in CPU memory. Call `sync()` or `detach()` before `destroy_process_group()`: nccl
    may kill a process whose group is destroyed under an exchange."""
    delay: int | None = None
    """With `overlap`: after how many steps the result is applied; None is half of `every`. It is a
    fixed number, so that a resumed run has the same bits."""
    dense_below: int = 256
    """Parameters with fewer elements than this are always sent whole."""
    fewer: InitVar[float | None] = None
    """At least how many times fewer bytes than a dense exchange in float32, from 16 to 1,000. Only
    what one bit is sent of is counted: parameters below `dense_below` take 16 bits an element, and
    buffers 32, which is 3 % more for a ResNet-18 on 8 ranks (`fewer=500` sends 498 times fewer). It
    sets `every`."""

    def __post_init__(self, fewer: float | None) -> None:
        every: Any = self.every
        if fewer is not None:
            check_in("[16, 1000]", fewer=fewer)
            for name, untouched in {"every": None, "method": Dense(), "values": "int1"}.items():
                if getattr(self, name) != untouched:
                    raise ValueError(f"fewer goes with its own {name}, so give one of both")
            every = max(2, math.ceil(fewer / ONE_BIT_SAVES))
        object.__setattr__(self, "every", 4 if every is None else every)
        # Checked there: the method, its name, `values` and `dense_below`.
        object.__setattr__(self, "method", self.sent.method)
        check_whole("every", self.every, 1)
        check_in("[0, 1]", decay=self.decay)
        check_in("(0, inf)", outer_lr=self.outer_lr)
        momentum: Any = self.outer_momentum
        if momentum is None:
            # Measured at 2, 4, 8 and 16 steps, together with the rate of `lr_factor`.
            all_sent = isinstance(self.method, Dense)
            momentum = 1 - math.sqrt(min(1.0, 2 / self.every)) if all_sent else 0.0
            object.__setattr__(self, "outer_momentum", momentum)
        check_in("[0, 1)", outer_momentum=self.outer_momentum)
        rounds_all = isinstance(self.method, Dense) and self.values != "fp32"
        keep: Any = self.keep_residual
        if keep is None:
            object.__setattr__(self, "keep_residual", rounds_all)
        check_choice("keep_residual", self.keep_residual, True, False)
        if self.keep_residual and not rounds_all:
            raise ValueError(
                "keep_residual goes with a method that sends all coordinates in few bits: others "
                f"leave residuals that wait too long, got {self.method} in {self.values}"
            )
        check_choice("overlap", self.overlap, True, False)
        if self.delay is not None and not self.overlap:
            raise ValueError(f"delay goes with overlap=True, got {self.delay} without")
        if self.delay is not None and not (
            type(self.delay) is int and 1 <= self.delay <= self.every
        ):
            raise ValueError(
                f"delay must be an integer in [1, every = {self.every}], got {self.delay!r}"
            )

    def lr_factor(self, workers: int, optimizer: Literal["adamw", "sgd"] = "adamw") -> float:
        """Return what to multiply the learning rate of dense training by.

        A worker's own gradient is noisier than the mean of all, so AdamW's second moment is larger
        and its steps are shorter: the rate wants the square root of the number of workers. Outer
        momentum then makes each change 1 / (1 - outer_momentum) times as large, which the rate
        takes back; SGD does not need that up to five steps. It fits a GPT-2 of 11 M parameters
        with 8 workers; one of 32 M wanted less than the rate of dense training
        (docs/few_bytes.md), so try that, too.

        >>> round(LocalSteps().lr_factor(8), 2), round(LocalSteps(every=16).lr_factor(8), 2)
        (2.0, 1.0)
        >>> LocalSteps().lr_factor(8, "sgd"), LocalSteps(every=8).lr_factor(8, "sgd")
        (1.0, 0.5)
        """
        check_choice("optimizer", optimizer, "adamw", "sgd")
        if optimizer == "sgd":
            # Measured at 4, 5, 16 and 19 steps.
            return 1.0 if self.every <= 5 else 1 - self.outer_momentum
        return math.sqrt(workers) * (1 - self.outer_momentum)

    @property
    def sent(self) -> Sparsify:
        """How a difference is sent."""
        return Sparsify(method=self.method, values=self.values, dense_below=self.dense_below)

    @property
    def steps_until_applied(self) -> int:
        """Steps between the start of an exchange and the use of its result."""
        if not self.overlap:
            return 0
        return max(1, self.every // 2) if self.delay is None else self.delay


class OuterOptimizer:
    """The weights that all workers share, and the SGD step that moves them.

    The mean of the differences takes the place of the gradient. All workers compute the same step
    from the same bits, so the shared weights are never sent.

    >>> outer = OuterOptimizer(LocalSteps(outer_momentum=0), torch.tensor([1.0, 2.0]))
    >>> outer.step(torch.tensor([0.0, 0.5]))
    >>> outer.shared
    tensor([1.0000, 1.5000])
    """

    def __init__(self, settings: LocalSteps, shared: Tensor) -> None:
        self._settings = settings
        self.shared = shared
        self.momentum = torch.zeros_like(shared) if settings.outer_momentum else None

    def step(self, mean: Tensor) -> None:
        """Move the shared weights against the (D,) mean of (weights before - weights after)."""
        settings, direction = self._settings, mean
        if self.momentum is not None:
            # As torch.optim.SGD does it. Coordinates that were not sent keep moving, too.
            self.momentum.mul_(settings.outer_momentum).add_(mean)
            direction = mean.add(self.momentum, alpha=settings.outer_momentum)
        self.shared.add_(direction, alpha=-settings.outer_lr)


def average_buffers(own: Tensor, ranks: int) -> Script[Tensor]:
    """Return the (B,) mean of all ranks' buffers, with the same bits on all of them.

    Each rank averages a slice for all: a gather of everything would send R / 2 times as much.
    """
    if fits_one_round(own.numel() * own.element_size(), ranks):
        rows: Tensor = yield AllGather(own)
        return mean_of_buffers(rows)
    slices = F.pad(own, (0, -len(own) % ranks)).view(ranks, -1)
    received: Tensor = yield AllToAll(slices)
    means: Tensor = yield AllGather(mean_of_buffers(received))
    return means.view(-1)[: len(own)]


def mean_of_buffers(rows: Tensor) -> Tensor:
    """Return the (B,) mean of (R, B) buffers; those that are equal everywhere keep their bits.

    >>> mean_of_buffers(torch.tensor([[1.0, -torch.inf], [2.0, -torch.inf]]))
    tensor([1.5000,   -inf])
    """
    # Constants, such as masks, must not change: three equal numbers need not have their own bits
    # as mean.
    return torch.where((rows == rows[0]).all(0), rows[0], sum_in_order(rows) / len(rows))
