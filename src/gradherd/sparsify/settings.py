"""How a sparsifier is run: everything besides which coordinates it selects."""

import warnings
from dataclasses import dataclass, fields
from typing import Any

from gradherd.comm.checks import check_choice, check_in, check_whole
from gradherd.comm.message_sizes import VALUE_BITS, VALUE_FORMATS, ValueFormat
from gradherd.sparsify.registry import SPARSIFIERS, setting_names
from gradherd.sparsify.selector import Selector


@dataclass(frozen=True, kw_only=True)
class Sparsify:
    """A sparsifier and how it is run: `attach(model, sparsify=Sparsify(method=ExDyna(1e-3)))`.

    >>> Sparsify(method="topk", values="bf16").method
    TopK(density=0.01)
    """

    method: Selector
    """What selects coordinates; a name from SPARSIFIERS is that method with its defaults."""
    values: ValueFormat = "fp32"
    """How values are sent: as the residuals are (fp32, or fp64 for a model of doubles), as bf16, or
    in 4, 2 or 1 bits (int4, int2, int1) with levels for every 256 of them. Small parameters are
    then sent as bf16. The rounding error stays in the residual."""
    dense_below: int = 256
    """Parameters with fewer elements than this are always sent whole."""
    momentum: float = 0.0
    """Momentum correction of Deep Gradient Compression (arXiv:1712.01887, section 3.2); the
    optimizer must then have no momentum of its own."""
    clip: float | None = None
    """Largest norm of a worker's own gradient; a larger one is scaled down before it joins the
    residual (local clipping, section 3.2 of the same paper). Clipping what arrives would take away
    from it for good: it holds the gradients of many steps. None does not clip."""
    warmup_steps: int = 0
    """Over this many steps the density falls exponentially to that of the method."""
    warmup_from: float = 0.25
    """Density of the first warm-up step (that of the same paper, section 3.3)."""

    def __post_init__(self) -> None:
        # Through `object`, because the dataclass is frozen.
        if isinstance(self.method, str):
            object.__setattr__(self, "method", SPARSIFIERS.build(self.method))
        if isinstance(self.method, type) or not hasattr(self.method, "agree"):
            raise ValueError(
                f"method must be a sparsifier such as ExDyna(density=1e-3) or its name, "
                f"got {self.method!r}"
            )
        check_choice("values", self.values, *VALUE_FORMATS)
        # A method of one's own need not inherit from `Selector`.
        if self.values in VALUE_BITS and getattr(self.method, "sends_all", False):
            raise ValueError(
                f"{self.method} sends all coordinates, got values={self.values!r}: send them in "
                "few bits by attach(..., local=gh.LocalSteps(every=1))"
            )
        if self.values != "fp32" and getattr(self.method, "sums_values", False):
            warnings.warn(
                f"values={self.values!r} has no effect on {type(self.method).__name__}: it sums "
                "values while they are exchanged",
                stacklevel=3,  # The line that calls Sparsify(), past the generated __init__.
            )
        check_whole("dense_below", self.dense_below, 0)
        check_whole("warmup_steps", self.warmup_steps, 0)
        check_in("[0, 1)", momentum=self.momentum)
        check_in("(0, 1]", warmup_from=self.warmup_from)
        if self.clip is not None:
            check_in("(0, inf)", clip=self.clip)
        if self.warmup_steps and self.warmup_from <= self.method.density:
            warnings.warn(
                f"a warm-up from {self.warmup_from} has no effect: the density is "
                f"{self.method.density}",
                stacklevel=3,
            )

    def density(self, step: int) -> float:
        """Return the density of a step.

        >>> settings = Sparsify(method="exdyna", warmup_steps=4, warmup_from=0.1)
        >>> [round(settings.density(step), 5) for step in (0, 2, 4, 100)]
        [0.1, 0.03162, 0.01, 0.01]
        """
        last = self.method.density
        if step >= self.warmup_steps or self.warmup_from <= last:
            return last
        return float(self.warmup_from * (last / self.warmup_from) ** (step / self.warmup_steps))


def make_settings(name: str, density: float | None = None, /, **settings: Any) -> Sparsify:
    """Build `Sparsify` from a method's name and settings, of the method and of the exchange.

    Args:
        name: A key of `SPARSIFIERS`.
        density: Share of the coordinates to send; None is the method's default.
        **settings: The method's own settings, see `setting_names`, and fields of `Sparsify`.

    Raises:
        ValueError: The name or a setting is unknown, or a value is out of range.

    >>> settings = make_settings("exdyna", 0.01, blocks=64, momentum=0.9)
    >>> settings.method.blocks, settings.momentum
    (64, 0.9)
    """
    method, own = SPARSIFIERS.find(name), setting_names(name)
    known = [field.name for field in fields(Sparsify) if field.name != "method"]
    for setting in settings:
        if setting not in own and setting not in known:
            more = f"known are {', '.join(own)}" if own else "it has none but its density"
            raise ValueError(
                f"unknown setting {setting!r} of {name}; {more}; every method can be run with "
                f"{', '.join(known)}"
            )
    exchange = {key: settings.pop(key) for key in known if key in settings}
    given = settings if density is None else {"density": density, **settings}
    try:
        return Sparsify(method=method(**given), **exchange)
    except TypeError as error:  # Checks compare values, which fails for a str and a number, say.
        raise ValueError(f"{name} cannot be run with {given | exchange}: {error}") from None
