"""What ranks do in test_untidy_loops.py; one group of ranks runs all of it."""

import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import gradherd as gh
from tests.attach import loops

COUNT, BATCH, EPOCHS = 32, 4, 3
CASES = [
    (where, rows, naming)
    for where in ("middle", "end")
    for rows in ("batch", "exact", "sketch of batches")
    for naming in ("named", "unnamed")
    if (where, naming) != ("end", "unnamed")
]


def every_case():
    """Return what each case found on this rank."""
    results = {case: uneven_skips(*case) for case in CASES}
    return results | {"unreadable": unreadable()}


def uneven_skips(where, rows, naming):
    """Rank 0 skips a batch in each epoch; both stop after as many steps.

    Returns:
        The orders, the true ones, and how often the log says that ranks differ.
    """
    settings = {"exact": gh.ExactRows(), "batch": "batch"}.get(rows, gh.SketchRows(size=256))
    dataset, net, apart = loops.Indexed(COUNT), loops.Model(), loops.Model()
    unit = 1 if rows == "exact" else BATCH
    sampler = gh.OrderedSampler(dataset, "cd-grab", batch_size=BATCH, unit=unit, seed=5)
    model = DDP(net)
    log = logging.getLogger("gradherd")
    logged, handler = [], logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    log.addHandler(handler)
    herd = gh.attach(model, order=sampler, rows=settings)

    def gradient(indices):
        loss = F.cross_entropy(apart(dataset.x[indices]), dataset.y[indices])
        grads = torch.autograd.grad(loss, list(apart.parameters()))
        return torch.cat([grad.flatten() for grad in grads])

    if rows.startswith("sketch"):
        gradient = _sketched(gradient, net)
    reference = loops.Reference(sampler, gradient)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    batches = len(loader)
    skipped = 1 if where == "middle" else batches - 2
    for epoch in range(EPOCHS):
        if naming == "named":
            sampler.set_epoch(epoch)
            reference.reach(epoch)
        version, taken = sampler.ordering.version, 0
        for number, (x, y, index) in enumerate(loader):
            if (dist.get_rank() == 0 and number == skipped) or taken == batches - 1:
                continue
            taken += 1
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            every = [torch.zeros_like(index) for _ in range(2)]
            dist.all_gather(every, index)
            reference.train(version, [one.tolist() for one in every])
    herd.finish()
    sampler.set_epoch(EPOCHS + 5)
    reference.reach(EPOCHS + 5)
    herd.detach()
    log.removeHandler(handler)
    found, wanted = (
        [order.tolist() for order in orders]
        for orders in (sampler.ordering.orders, reference.ordering.orders)
    )
    return found, wanted, sum("different batches" in line for line in logged)


def _sketched(gradient, net):
    from gradherd.flat import FlatSpec
    from gradherd.rows.sketch import CountSketch

    spec, settings = FlatSpec.of(net), gh.SketchRows(size=256)

    def sketch(indices):
        row, total = gradient(indices).float(), 0.0
        for offset, numel in zip(spec.offsets, spec.numels, strict=True):
            piece = row[offset : offset + numel]
            total = total + CountSketch(settings.size, settings.seed)(piece, offset=offset)
        return total

    return sketch


def unreadable():
    """Return the error of this rank, where rank 1 gives the model a part of its batch."""
    dataset = loops.Indexed(COUNT)
    model = DDP(loops.Model())
    sampler = gh.OrderedSampler(dataset, "cd-grab", batch_size=BATCH, unit=1, seed=5)
    herd = gh.attach(model, order=sampler, rows="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y, _ = next(iter(DataLoader(dataset, BATCH, sampler=sampler)))
    given = slice(1 if dist.get_rank() == 1 else 0, None)
    F.cross_entropy(model(x[given]), y[given]).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        herd.detach()
    return "no error"
