"""Gradients in closed form, of tasks whose scores are linear in the parameters.

Letters: S runs, K steps, G groups of B examples in a step, N = G B, D parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gradherd.lab.tasks.task import Task, Tensors, augments


class LinearForm:
    """Closed-form gradients of a task whose scores are linear in the parameters.

    Seven operations per step, where autograd and vmap take eighty: such a model is all overhead.

    Args:
        task: Has a `score_gradient`.
        form: The result of its `linear_form` on the training examples.
    """

    def __init__(self, task: Task, form: tuple[Tensor, Tensor]) -> None:
        self.tensors, self._score_gradient = form, task.score_gradient

    def lookup(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (S, K, N, D) features and (S, K, N, 1) targets of (S, K, N) examples."""
        features, targets = self.tensors
        flat = indices.flatten()
        # Three times as fast as features[indices] on a CPU.
        found = features.index_select(0, flat).view(*indices.shape, -1)
        return found, targets.index_select(0, flat).view(*indices.shape, 1)

    def mean_gradient(
        self, parameters: Tensor, features: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (S, D) means of error x features over examples, and the (S, N, 1) errors.

        Args:
            parameters: (S, D).
            features: (S, N, D).
            targets: (S, N, 1).
        """
        columns = parameters.unsqueeze(2)
        error = self._score_gradient(torch.bmm(features, columns), targets)
        # beta=0 ignores `columns`: this is a product scaled by 1 / N in one operation.
        mean = torch.baddbmm(columns, features.mT, error, beta=0, alpha=1 / features.shape[1])
        return mean.squeeze(2), error

    def gradients(self, parameters: Tensor, examples: tuple[Tensor, ...]) -> Tensor:
        """Return (S, G, D) gradients of (S, D) parameters on (S, G, B) examples."""
        features, targets = examples
        scores = torch.bmm(features.flatten(1, 2), parameters.unsqueeze(2)).view(targets.shape)
        return (features * self._score_gradient(scores, targets).unsqueeze(-1)).mean(2)


def linear_form(
    task: Task, gradients: Callable[[Tensor, tuple[Tensor, ...]], Tensor], tensors: Tensors
) -> LinearForm | None:
    """Return the closed form of a task that has one; compare it with autograd's gradients first.

    Args:
        task: The task.
        gradients: The gradients of its loss.
        tensors: The training examples.
    """
    # Augmented examples change from epoch to epoch, which features computed once would miss.
    form = None if augments(task) else task.linear_form(*tensors)
    if form is None:
        return None
    linear = LinearForm(task, form)
    size, device = linear.tensors[0].shape[1], tensors[0].device
    flat = torch.linspace(-1, 1, 2 * size, device=device).view(2, size)
    sample = torch.arange(8, device=device).remainder(len(tensors[0])).view(2, 2, 2)
    found = linear.gradients(flat, tuple(tensor[sample] for tensor in linear.tensors))
    expected = gradients(flat, tuple(tensor[sample] for tensor in tensors))
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
        raise RuntimeError(
            "the task's linear_form() and score_gradient() differ from the gradients of its loss() "
            f"by up to {float((found - expected).abs().max()):.2g}: correct or remove them"
        )
    return linear
