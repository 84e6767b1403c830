"""Settings of local steps, without torch: commands read them before anything heavy is imported."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from gradherd.comm.checks import check_choice, check_in, check_whole
from gradherd.comm.message_sizes import VALUE_FORMATS, ValueFormat


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Take steps alone, then exchange the difference: `attach(net, optimizer=opt, local=...)`.

    Workers take `every` steps each on their own, then average what these changed instead of every
    gradient (Douillard et al., "DiLoCo", arXiv:2311.08105). All coordinates travel, in one bit each
    way: what hurts is how long a change waits, not how exactly it arrives. That is 30 times `every`
    fewer bytes than an all-reduce of every step in float32.

    >>> LocalSteps()
    LocalSteps(every=4, values='int1', outer_lr=1.0, outer_momentum=0.29..., ...)

    Multiply AdamW's learning rate for dense training by `lr_factor(workers)`.
    """

    every: int = 4
    """H, the steps of the optimizer between two exchanges."""
    values: ValueFormat = "int1"
    """How each coordinate is sent; what rounding takes is sent later."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; 1 without momentum averages the workers' weights."""
    outer_momentum: float = None  # type: ignore[assignment]  # by the length of a phase
    """Nesterov momentum of the outer step: 1 - sqrt(2 / every), so 0.29 with four steps. DiLoCo has
    0.9 with an `outer_lr` of 0.7."""
    keep_residual: bool = None  # type: ignore[assignment]  # unless values are sent exactly
    """Keep the unsent residual in the worker's own weights; improves long runs. In a few hundred
    steps of SGD, False with `outer_momentum=0` can be better."""
    overlap: bool = False
    """Run the exchange in a thread beside the next steps, and apply its result after half a phase:
    through a group of its own, and on a GPU on a stream of its own. Where gloo exchanges what a GPU
    computes, shared weights are in CPU memory. Call `sync()` or `detach()` before
    `destroy_process_group()`: nccl may kill a process whose group is destroyed in an exchange."""
    dense_below: int = 256
    """Parameters with fewer elements than this are sent exactly, as buffers are."""

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1)
        check_choice("values", self.values, *VALUE_FORMATS)
        check_in("(0, inf)", outer_lr=self.outer_lr)
        momentum: Any = self.outer_momentum
        if momentum is None:
            # Measured at 2, 4, 8 and 16 steps, together with the rate of `lr_factor`.
            object.__setattr__(self, "outer_momentum", 1 - math.sqrt(min(1.0, 2 / self.every)))
        check_in("[0, 1)", outer_momentum=self.outer_momentum)
        rounds, keep = self.values != "fp32", self.keep_residual  # type: Any, Any
        if keep is None:
            object.__setattr__(self, "keep_residual", rounds)
        check_choice("keep_residual", self.keep_residual, True, False)
        if self.keep_residual and not rounds:
            raise ValueError("keep_residual needs values of few bits: fp32 leaves no residual")
        check_choice("overlap", self.overlap, True, False)
        check_whole("dense_below", self.dense_below, 0)

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
    def steps_until_applied(self) -> int:
        """Steps between the start of an exchange and the use of its result."""
        return max(1, self.every // 2) if self.overlap else 0
