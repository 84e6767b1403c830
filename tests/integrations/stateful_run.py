"""torchdata's StatefulDataLoader, which saves its own position, in the plain DDP loop."""

from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integrations import plain_run
from tests.integrations.task import Plan, Trace

NAME, PACKAGE, TORCHRUN = "torchdata StatefulDataLoader", "torchdata", True


def train(plan: Plan) -> Trace:
    return plain_run.train(plan, StatefulDataLoader)


WRONG = plain_run.WRONG
