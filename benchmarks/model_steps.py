"""Time whole training steps of well-known models with rows, next to the plain step.

    python benchmarks/model_steps.py resnet50 --device cuda --cases batch,two-sided
    python benchmarks/model_steps.py gpt2-124m --device cuda --compile default

Every case trains the same model on the same batch with the same optimizer; only what is attached
differs. A case takes turns with the plain loop every few steps, and ratios of neighbours count: a
machine that slows down for a while slows down both.

Fidelity is the correlation between the centred inner products of rows and the exact ones: what
balancing decides by. It is measured after a few steps on inputs with some structure, since the
gradients of pure noise have hardly any inner products to preserve. Nor have those of a batch that
was learned by heart, as it is after the steps of all cases: so it has a training of its own.

Shapes: B examples.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradherd.hooks.attach import attach
from gradherd.hooks.herd import Herd
from gradherd.hooks.row_sources import ExampleRowSource
from gradherd.lab.bench.bench_rows import mlp
from gradherd.lab.bench.timing import peak_memory
from gradherd.lab.tasks.images import lenet
from gradherd.lab.tasks.registry import import_file
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.capture import Capture
from gradherd.rows.layer_choice import CHOSEN_AFTER
from gradherd.rows.settings import ROW_SETTINGS

_TASKS = Path(__file__).parents[1] / "studies" / "tasks"
resnet18 = import_file(_TASKS / "resnet18.py", "benchmark").resnet18
_WARMUP = CHOSEN_AFTER + 6  # steps: the first ones check rows, and then layers are chosen
_BLOCK = 4  # steps in a turn
_TURNS = 6  # blocks of each loop in a repeat
_BATCHES = 64  # in an epoch
_TRAINED = CHOSEN_AFTER + 4  # steps before fidelity is measured
_CLASSES = 10


@dataclass(frozen=True)
class BenchModel:
    """A model, its batch, and how it is trained."""

    make: Callable[[], nn.Module]
    batch: int
    inputs: tuple[int, ...]
    """Shape of one example."""
    tokens: int = 0
    """Size of the vocabulary of a language model; 0 for images."""
    half: bool = True
    """Whether a GPU trains in bfloat16."""


def _torchvision(name: str) -> nn.Module:
    import torchvision  # type: ignore[import-not-found, import-untyped, unused-ignore]

    model: nn.Module = getattr(torchvision.models, name)(num_classes=_CLASSES)
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # No dropout: fidelity compares the same function twice.
    model: nn.Module = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=16,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


MODELS = {
    "mlp": BenchModel(lambda: mlp(2_000_000), 256, (784,), half=False),
    "lenet": BenchModel(lambda: lenet(3), 128, (3, 32, 32), half=False),
    "resnet18": BenchModel(resnet18, 128, (3, 32, 32), half=False),
    "resnet50": BenchModel(lambda: _torchvision("resnet50"), 64, (3, 224, 224)),
    "vit-b16": BenchModel(lambda: _torchvision("vit_b_16"), 64, (3, 224, 224)),
    "gpt2-124m": BenchModel(_gpt2, 8, (512,), tokens=50_257),
    "llama-160m": BenchModel(_llama, 8, (512,), tokens=32_000),
}
"""Models by name. resnet50 and vit-b16 need torchvision, the last two need transformers."""
COMPILE_MODES = ("default", "reduce-overhead")
"""Modes of torch.compile that steps can be measured in."""


_WHOLE = {"batch": "auto", "batch-exact": "batch"}
"""Cases that order whole batches, with the rows they attach: what users get, and exact rows."""
CASES = (*ROW_SETTINGS, *(case for case in _WHOLE if case not in ROW_SETTINGS))
"""Rows that can be measured."""


class ModelTraining:
    """A training loop on one batch that stays on the device."""

    def __init__(
        self, name: str, batch: int | None, device: torch.device, compiled: str | None = None
    ) -> None:
        self.settings, self._compiled = MODELS[name], compiled
        self.batch = batch or self.settings.batch
        self.device = device
        torch.manual_seed(0)
        self.model = self.settings.make().to(device)
        self.inputs, self.targets = self._data()
        if self.settings.tokens:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=1e-4
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.herd: Herd | None = None
        self._indices: Iterator[Any] = iter(())

    def _data(self) -> tuple[Tensor, Tensor]:
        shape = self.settings.inputs
        if self.settings.tokens:
            # Half the tokens as frequent as in English (Zipf's law), the other half a few words
            # that an example repeats, as texts do.
            ranks = torch.arange(self.settings.tokens) + 2.7
            common = torch.multinomial(1 / ranks, self.batch * shape[0], replacement=True)
            words = torch.randint(self.settings.tokens, (self.batch, 40))
            own = words.gather(1, torch.randint(40, (self.batch, *shape)))
            tokens = torch.where(torch.rand(self.batch, *shape) < 0.5, own, common.view_as(own))
            return tokens.to(self.device), tokens.to(self.device)
        classes = torch.randint(_CLASSES, (self.batch,))
        prototypes = torch.randn(_CLASSES, *shape)
        images = prototypes[classes] + torch.randn(self.batch, *shape)
        return images.to(self.device), classes.to(self.device)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of some examples."""
        with torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.settings.half and self.device.type == "cuda",
        ):
            if not self.settings.tokens:
                return F.cross_entropy(self.model(inputs), targets)
            # Not the model's own loss, which logs, and so breaks its graph.
            logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())

    def attach(self, rows: str) -> None:
        """Order examples by these rows; "plain" attaches nothing."""
        if self._compiled is not None:
            compiled: Any = torch.compile(self.model, fullgraph=True, mode=self._compiled)
            self.model = compiled
        data = TensorDataset(torch.arange(_BATCHES * self.batch))
        if rows == "plain":  # Its loader shuffles, so that every case pays for a loader.
            self._indices = _endless(DataLoader(data, batch_size=self.batch, shuffle=True))
            return
        unit = self.batch if rows in _WHOLE else 1
        sampler = OrderedSampler(data, "grab", batch_size=self.batch, unit=unit)
        self.herd = attach(self.model, order=sampler, rows=_WHOLE.get(rows, rows))
        loader = DataLoader(data, batch_size=self.batch, sampler=sampler)
        self._indices = _endless(loader)

    def detach(self) -> None:
        """Leave the model as it was."""
        if self.herd is not None:
            self.herd.detach()
        self.herd, self._indices = None, iter(())

    def timed(self, count: int) -> float:
        """Return the seconds that one of `count` steps takes."""
        begin = time.perf_counter()
        self.steps(count)
        return (time.perf_counter() - begin) / count

    def steps(self, count: int) -> None:
        """Train for `count` steps."""
        for _ in range(count):
            next(self._indices, None)  # which examples they are does not matter here
            self.optimizer.zero_grad()
            self.loss(self.inputs, self.targets).backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def peak_bytes(
    name: str, case: str, batch: int | None, device: torch.device, compiled: str | None
) -> int | None:
    """Return the peak memory of a training: model, optimizer, what ordering keeps, and steps."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    training: ModelTraining | None = None

    def train() -> None:
        nonlocal training
        training = ModelTraining(name, batch, device, compiled)
        training.attach(case)
        training.steps(_WARMUP)

    peak = peak_memory(train, device)
    assert training is not None
    training.detach()
    return peak


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def bench_models(
    name: str,
    cases: tuple[str, ...],
    device: torch.device,
    *,
    batch: int | None = None,
    repeats: int = 3,
    fidelity: bool = True,
    compiled: str | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure a training step in every case.

    Args:
        name: A key of `MODELS`.
        cases: Names of rows; "plain" is measured in any case.
        device: Where to train.
        batch: Examples in a batch; None takes the model's own.
        repeats: Medians of some turns of each case; their median counts.
        fidelity: Whether to compare rows with exact ones.
        compiled: Mode of torch.compile, in which all cases run; None runs them as they are.
        progress: Called after each repeat of a case, and once before.

    Returns:
        A row for each case; `peak_bytes` is the peak of a step, model and optimizer included.
    """
    cases = ("plain", *(case for case in cases if case != "plain"))
    peaks = {case: peak_bytes(name, case, batch, device, compiled) for case in cases}
    training = ModelTraining(name, batch, device, compiled)
    training.attach("plain")
    training.steps(_WARMUP)
    times: dict[str, list[float]] = {case: [] for case in cases}
    ratios: dict[str, list[float]] = {"plain": [1.0] * repeats}
    progress()
    for case in cases[1:]:
        attached = ModelTraining(name, batch, device, compiled)
        attached.attach(case)
        attached.steps(_WARMUP)
        ratios[case] = []
        for _ in range(repeats):
            turns = [(training.timed(_BLOCK), attached.timed(_BLOCK)) for _ in range(_TURNS)]
            times["plain"] += (plain for plain, _ in turns)
            times[case] += (own for _, own in turns)
            ratios[case].append(statistics.median(own / plain for plain, own in turns))
            progress()
        attached.detach()
        del attached
    if len(cases) == 1:
        times["plain"] = [training.timed(_BLOCK) for _ in range(repeats)]
    training.detach()
    correlations: dict[str, float] = {}
    if fidelity:
        correlations = _fidelities(lambda: ModelTraining(name, batch, device), cases)
    plain = statistics.median(times["plain"])
    return [
        {
            "case": case,
            "model": name,
            "compiled": compiled,
            "workers": 1,
            "dim": sum(p.numel() for p in training.model.parameters()),
            "batch": training.batch,
            "seconds": statistics.median(times[case]),
            "bytes": 0,
            "peak_bytes": peaks[case],
            "memory_ratio": _ratio(peaks[case], peaks["plain"]),
            "ratio": statistics.median(ratios[case]),
            "ratios": ratios[case],
            "ceiling_seconds": plain,
            "fidelity": correlations.get(case),
        }
        for case in cases
    ]


def _ratio(own: int | None, other: int | None) -> float | None:
    return own / other if own and other else None


def _fidelities(make: Callable[[], ModelTraining], cases: tuple[str, ...]) -> dict[str, float]:
    """Return the fidelity of each kind of rows for single examples, each after a training."""
    result: dict[str, float] = {}
    for case in cases:
        settings = ROW_SETTINGS.get(case)
        if settings is None or case == "batch":
            continue
        training = make()
        source = ExampleRowSource(training.model, settings, 1, training.batch)  # type: ignore[arg-type]
        for _ in range(_TRAINED):
            training.steps(1)
            source.take(training.batch, 1.0)
        training.model.zero_grad()
        training.loss(training.inputs, training.targets).backward()
        rows = source.take(training.batch, 1.0).double()
        source.remove_hooks()
        result[case] = correlation(rows @ rows.T, exact_gram(training))
    return result


def exact_gram(training: ModelTraining) -> Tensor:
    """Return the inner products of all examples' gradients: (B, B)."""
    coupled = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in training.model.modules())
    training.model.zero_grad()
    if coupled:  # A single example has no batch statistics.
        capture = Capture(training.model)
        training.loss(training.inputs, training.targets).backward()
        rows = capture.pop_rows(training.batch)
        capture.remove_hooks()
        return (rows @ rows.T).double()
    grads = []
    for inputs, targets in zip(training.inputs.split(1), training.targets.split(1), strict=True):
        training.model.zero_grad()
        training.loss(inputs, targets).backward()
        flat = [p.grad.flatten() for p in training.model.parameters() if p.grad is not None]
        grads.append(torch.cat(flat))
    stacked = torch.stack(grads)
    return (stacked @ stacked.T).double()


def correlation(gram: Tensor, exact: Tensor) -> float:
    """Return the correlation of centred inner products between different examples.

    >>> eye = torch.eye(4) + torch.ones(4, 4).triu()
    >>> round(correlation(2 * eye, eye), 6)
    1.0
    """
    examples = len(gram)
    centre = torch.eye(examples, dtype=gram.dtype, device=gram.device) - 1 / examples
    upper = torch.triu_indices(examples, examples, 1)
    pairs = [(centre @ one @ centre)[upper[0], upper[1]] for one in (gram, exact)]
    value = float(torch.corrcoef(torch.stack(pairs))[0, 1])
    return value if math.isfinite(value) else 0.0


def main() -> None:
    """Measure and print what `gradherd bench --json` would: the bench, the device and its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--cases", default="batch,sketch,two-sided", help=", ".join(CASES))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", choices=COMPILE_MODES)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    cases = tuple(args.cases.split(","))
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases must be some of {', '.join(CASES)}, got {', '.join(unknown)}")
    rows = bench_models(
        args.model,
        cases,
        torch.device(args.device),
        batch=args.batch,
        repeats=args.repeats,
        compiled=args.compile,
    )
    print(json.dumps({"bench": "rows", "device": args.device, "rows": rows}))


if __name__ == "__main__":
    main()
