"""Signs of whole batches, computed beside the training loop from this rank's columns.

Shapes: R ranks, C columns of this rank.
"""

from torch import Tensor

from gradherd.attach.transports import StepComparison
from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.ordering.batch_claims import BatchClaim
from gradherd.ordering.coordination import BackgroundThread, observe_slices
from gradherd.ordering.sampler import OrderedSampler


class SliceSigner:
    """Has the sampler learn from one batch of all workers after the other, in a thread."""

    def __init__(self, sampler: OrderedSampler, world: World) -> None:
        """Make the thread and its group. All ranks must do so at the same point."""
        self._sampler = sampler
        # A group of its own for the thread: ranks reach its collectives at different points of
        # their training step, so on the model's group they could be matched with the wrong ones.
        self._side = world.side_channel()
        self._thread = BackgroundThread("gradherd-signs")
        self._in_step = StepComparison(sampler)
        self.bytes = 0
        """Bytes that this rank has sent for signs."""

    def submit(self, rows: Tensor, claim: BatchClaim | None, loss_scale: float) -> None:
        """Start to sign a batch, after the one before it is done.

        Args:
            rows: (R, C) columns of every worker's gradient. They are changed, and must stay as they
                are until the next but one batch.
            claim: The units that the gradient belongs to; None if it counts for nothing.
            loss_scale: What the loss was multiplied by (GradScaler).
        """
        # Running sums outlive a change of the scale, so rows must not depend on it.
        if loss_scale != 1:
            rows.div_(loss_scale)

        def sign() -> None:
            # Here, not in the training loop, which never waits for a message of this size. A last
            # unit without a partner is not signed, so nobody would notice that it is not finite.
            last = claim is not None and claim.step + claim.units == self._sampler.ordering.length
            finite = not last or bool(rows.sum().isfinite())
            found = self._in_step.compare(claim, self._side, finite=finite)
            if not found.same or not found.finite:
                self._in_step.pass_over(claim, found)
            elif claim is not None:
                script = observe_slices(self._sampler, rows, first=claim.step)
                self.bytes += run(script, self._side).bytes

        self._thread.submit(sign)

    def wait(self) -> None:
        """Return when the signs of all batches are computed."""
        self._thread.wait()

    def close(self) -> None:
        """Give back the thread and its group."""
        self._thread.close()
        self._side.close_side_channel()
