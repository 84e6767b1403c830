"""The Trainer on two ranks with signs that come late: python -m tests.integrations.late_run FOLDER.

Signs of whole batches are computed beside the training loop. Here those of the last batch of an
epoch are still on their way when the next epoch begins, and no log waits for them.
"""

import sys
import time

import torch
import torch.distributed as dist

from gradherd.comm.background_thread import BackgroundThread
from tests.integrations import transformers_run
from tests.integrations.task import EPOCHS, STEPS, STOP, plans


def main(folder: str) -> None:
    torch.set_num_threads(1)
    submit, arguments = BackgroundThread.submit, transformers_run.arguments

    def submit_late(self, job):
        submit(self, lambda: (time.sleep(0.1), job()))

    BackgroundThread.submit = submit_late
    transformers_run.arguments = lambda *args, **options: arguments(
        *args, **options | {"logging_steps": 1000}
    )
    dist.init_process_group("gloo")
    whole, first, rest = [transformers_run.train(plan) for plan in plans(folder)[:3]]
    assert (len(first.batches), len(rest.batches)) == (STOP, EPOCHS * STEPS - STOP)
    assert first.batches + rest.batches == whole.batches
    assert torch.equal(rest.weights, whole.weights)
    dist.destroy_process_group()
    print("resumed")


if __name__ == "__main__":
    main(*sys.argv[1:])
