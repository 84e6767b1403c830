"""A small training on the slow network: how long until the loss is low enough?

Scikit-learn's digits, a multi-layer perceptron of 301,066 parameters, SGD with momentum. Every
epoch ends with the loss over all data, which is not part of the time.
"""

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.comm.collectives import all_reduce

_HIDDEN, _BATCH, _RATE = 512, 16, 0.02


class Digits:
    """One training, from the start."""

    def __init__(self, job: dict[str, Any]) -> None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        self.data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
        torch.manual_seed(job["seed"])
        layers = (nn.Linear(64, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU())
        self.model = DDP(nn.Sequential(*layers, nn.Linear(_HIDDEN, 10)))
        if job["exchange"] == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        methods = {"topk": gh.TopK, "exdyna": gh.ExDyna}
        sparse = methods.get(job["exchange"])
        self.sampler = gh.OrderedSampler(
            self.data, job["order"], batch_size=_BATCH, unit=_BATCH, seed=job["seed"]
        )
        method = None if sparse is None else sparse(density=job["density"])
        self.herd = gh.attach(self.model, order=self.sampler, sparsify=method)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE, momentum=0.9)
        self.loader = DataLoader(self.data, batch_size=_BATCH, sampler=self.sampler)

    def epoch(self, number: int, world: gh.World) -> float:
        """Train for an epoch, and return the seconds it took."""
        self.sampler.set_epoch(number)
        all_reduce(torch.zeros(1), world)
        begin = time.perf_counter()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        all_reduce(torch.zeros(1), world)
        return time.perf_counter() - begin

    def loss(self) -> float:
        """Return the mean loss over all data; the same on all ranks."""
        with torch.no_grad():
            x, y = self.data.tensors
            return float(nn.functional.cross_entropy(self.model.module(x), y))


def train(job: dict[str, Any], world: gh.World) -> dict[str, Any]:
    """Train until the loss is low enough, or for as many epochs as allowed."""
    training = Digits(job)
    seconds, losses = [], [training.loss()]
    while losses[-1] > job["target"] and len(seconds) < job["epochs"]:
        seconds.append(training.epoch(len(seconds), world))
        losses.append(training.loss())
    training.herd.detach()
    return {
        "epochs": len(seconds),
        "seconds": sum(seconds),
        "losses": losses,
        "reached": losses[-1] <= job["target"],
    }
