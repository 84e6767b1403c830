"""Lightning's ModelParallelStrategy: FSDP2, resumed in mid-epoch, beside the plain DDP loop."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from gradherd.integrations.lightning import GradherdCallback
from tests.integrations import plain_run
from tests.integrations.lightning_run import Lit, Log, trainer
from tests.integrations.task import EPOCHS, Plan, Trace, make_loader, plans, record_credits


class ShardedLit(Lit):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.inner.net[0], mesh=mesh)
        fully_shard(self.inner, mesh=mesh)


class Finish(GradherdCallback):
    """Notes the end of a training; its parameters are shards."""

    trace: Trace

    def on_train_end(self, trainer, pl_module) -> None:
        self.trace.batches = list(pl_module.inner.seen)
        self.trace.next_order = self.herd.sampler.indices()


def train(plan: Plan) -> Trace:
    trace, lit = Trace(), ShardedLit(make_loader())
    record_credits(trace, lit.inner)
    callback = Finish(**plan.options)
    callback.trace = trace
    folder = Path(plan.folder) / "checkpoint"
    saving = ModelCheckpoint(
        dirpath=folder, filename="last", every_n_train_steps=plan.stop or 10**6, save_top_k=-1
    )
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    options = dict(max_epochs=EPOCHS, max_steps=plan.stop or -1, strategy=strategy)
    own = trainer(callback, callbacks=[saving], logger=Log(trace), **options)
    own.fit(lit, ckpt_path=str(folder / "last.ckpt") if plan.resume else None)
    return trace


def main(folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    whole, first, rest = plans(folder)[:3]
    plain, straight, stopped, resumed = (
        plain_run.train(whole),
        train(whole),
        train(first),
        train(rest),
    )
    assert straight.batches == plain.batches and straight.next_order == plain.next_order
    assert stopped.batches + resumed.batches == straight.batches
    assert resumed.next_order == straight.next_order
    credits = straight.credits + stopped.credits + resumed.credits
    assert len(credits) == 2 * len(straight.batches) and all(a == b for a, b in credits)
    assert "herd/ordering_seconds" in straight.logged or dist.get_rank() > 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
