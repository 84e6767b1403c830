"""What the ranks of test_copies.py do."""

import copy
import io
import pickle

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import gradherd as gh
from tests.attach.attach_work import examples, network
from tests.attach.detach_work import CASES, attached, train


class Examples(torch.utils.data.Dataset):
    """Cannot be copied or pickled: whoever tries is found out."""

    def __init__(self):
        draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        self._x = torch.randn(24, 5, dtype=torch.float64, generator=draw)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self._x[index], index % 3

    def __reduce__(self):
        raise AssertionError("the data set is copied")


def saved(model):
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    return torch.load(data, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "averaged": lambda model: AveragedModel(model).module,
    "torch.save": saved,
}


def copies(name):
    """Return, for each kind of copy of DDP and its module, whether it is a model of its own."""
    unit, sparsify, options = CASES[name]
    data, found = Examples(), {}
    ddp = DDP(network(), **options)
    herd = attached(ddp, unit, sparsify, data)
    train(ddp, herd, data)
    before = herd.metrics()
    for kind, make in COPIES.items():
        for whole in (True, False):
            other = make(ddp if whole else ddp.module)
            gradient = train(other, None, data, steps=1)
            plain = DDP(network()) if whole else network()
            found[kind, whole] = torch.allclose(gradient, train(plain, None, data, steps=1))
            if whole:
                attached(other, unit, sparsify, data).detach()
    after = herd.metrics()
    same = all(before[key] == after[key] for key in before if not key.endswith("_seconds"))
    return found, same


def single_copies(unit):
    data, net = Examples(), network()
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
    herd = gh.attach(net, order=sampler)
    train(net, herd, data)
    return net, herd, data


def pickled_sampler(unit):
    data, net = examples(24), network()
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
    herd = gh.attach(net, order=sampler)
    train(net, herd, data, steps=3)
    herd.finish()
    # With the herd: a sampler does not keep it.
    return herd, sampler, pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)
