"""The suite's training in Lightning with ModelParallelStrategy: the model is sharded by FSDP2."""

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import gradherd as gh
from gradherd.integrations.lightning import GradherdCallback
from tests.integrations import lightning_run
from tests.integrations.conformance import LOCAL, SPARSE
from tests.integrations.task import Plan, Trace

NAME, PACKAGE, TORCHRUN = "Lightning, FSDP2", "lightning", True
# One dimension of shards: there are no replicas to exchange between.
REFUSED = (SPARSE, LOCAL)
REDUCES_EACH = True  # Lightning has FSDP2 reduce every batch of a step


class ShardedLit(lightning_run.Lit):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.inner.net[0], mesh=mesh)
        fully_shard(self.inner, mesh=mesh)


def strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )


def train(plan: Plan) -> Trace:
    return lightning_run.train(plan, ShardedLit, strategy=strategy())


def attempt(**options):
    callback = GradherdCallback(**options)
    quiet = dict(max_epochs=1, logger=False, enable_checkpointing=False)
    lightning_run.trainer(callback, strategy=strategy(), **quiet).fit(ShardedLit())


WRONG = {
    "sparsify": lambda: attempt(sparsify=gh.ExDyna(density=0.1)),
    "local steps": lambda: attempt(local=gh.LocalSteps()),
}
