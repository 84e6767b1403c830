"""How a sparsifier is run, apart from what it chooses."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from gradherd.sparsify.gtopk import GTopK
from gradherd.sparsify.selector import SPARSIFIERS, Selector

_AROUND = ("values", "dense_below", "momentum", "warmup_steps", "warmup_from")
"""Settings of `Sparsify` that a file can hold."""


@dataclass(frozen=True, kw_only=True)
class Sparsify:
    """A method and what goes with it: `attach(model, sparsify=Sparsify(method=ExDyna(1e-3), ...))`.

    >>> Sparsify(method="topk", values="bf16").method
    TopK(density=0.001)
    """

    method: Selector
    """What chooses; a name from SPARSIFIERS is that method with its defaults."""
    values: Literal["fp32", "bf16"] = "fp32"
    """How values travel: as they are kept (fp32, or fp64 for a model of doubles), or as bf16; what
    that rounds away stays in the residual."""
    dense_below: int = 256
    """Parameters with fewer numbers than this travel whole, at every step."""
    momentum: float = 0.0
    """Correct for momentum as in Deep Gradient Compression: give the optimizer none of its own."""
    warmup_steps: int = 0
    """Over so many steps the density falls, by equal factors, to that of the method."""
    warmup_from: float = 0.25
    """Density of the first of them."""
    learning_rate: Callable[[], float] | None = None
    """Tell the learning rate of a step, to keep residuals in units of parameters: what was kept
    is then released with the rate it was computed with. By default they are gradients."""

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", make_sparsifier(self.method))
        if isinstance(self.method, type) or not hasattr(self.method, "settle"):
            raise ValueError(
                f"method must be one such as ExDyna(density=1e-3), or its name, got {self.method!r}"
            )
        if self.values not in ("fp32", "bf16"):
            raise ValueError(f"values must be fp32 or bf16, got {self.values!r}")
        if self.values == "bf16" and isinstance(self.method, GTopK):
            warnings.warn(
                "values='bf16' has no effect on gtopk: it adds values up on their way",
                stacklevel=3,
            )
        for name in ("dense_below", "warmup_steps"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if self.dense_below < 0:
            raise ValueError(f"dense_below must be at least 0, got {self.dense_below}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if not 0 < self.warmup_from <= 1:
            raise ValueError(f"warmup_from must be in (0, 1], got {self.warmup_from}")
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
        [0.1, 0.01, 0.001, 0.001]
        """
        last = self.method.density
        if step >= self.warmup_steps or self.warmup_from <= last:
            return last
        return float(self.warmup_from * (last / self.warmup_from) ** (step / self.warmup_steps))


def make_settings(name: str, density: float | None = None, /, **settings: Any) -> Sparsify:
    """Return the method of that name, with settings of its own and of how it is run.

    >>> made = make_settings("exdyna", 0.01, blocks=64, momentum=0.9)
    >>> made.method.blocks, made.momentum
    (64, 0.9)
    """
    around = {one: settings.pop(one) for one in _AROUND if one in settings}
    method = make_sparsifier(name, density, **settings)
    try:
        return Sparsify(method=method, **around)
    except TypeError as error:  # It compared a word with a number, say.
        raise ValueError(f"{name} cannot be run with {around}: {error}") from None


def make_sparsifier(name: str, density: float | None = None, /, **settings: Any) -> Selector:
    """Return the method of that name, with settings of its own.

    >>> make_sparsifier("exdyna", 0.01, blocks=64)
    ExDyna(density=0.01, threshold='consensus', capacity=1.05, balance='recut', blocks=64, \
memory=0.9, rotate=True)
    """
    if name not in SPARSIFIERS:
        raise ValueError(f"unknown sparsifier {name!r}; known are {', '.join(SPARSIFIERS)}")
    made: Any = SPARSIFIERS[name]
    known = [field.name for field in fields(made) if field.name != "density"]
    for one in settings:
        if one not in known:
            more = f"known are {', '.join(known)}" if known else "it has none but its density"
            every = f"every method can be run with {', '.join(_AROUND)}"
            raise ValueError(f"unknown setting {one!r} of {name}; {more}; {every}")
    given = settings if density is None else {"density": density, **settings}
    try:
        method: Selector = made(**given)
    except TypeError as error:  # It compared a word with a number, say.
        raise ValueError(f"{name} cannot have {given}: {error}") from None
    return method
