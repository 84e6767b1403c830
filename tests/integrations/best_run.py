"""The Trainer takes local steps on two ranks and keeps its best model.

Run by python -m tests.integrations.best_run FOLDER: what is evaluated, saved and left after
`train()` are weights that all ranks share.
"""

import sys
from pathlib import Path
from typing import ClassVar

import safetensors.torch
import torch
import torch.distributed as dist

import gradherd as gh
from gradherd.integrations.transformers import GradherdTrainer
from tests.integrations.task import Points
from tests.integrations.transformers_run import arguments, build


class Evaluated(GradherdTrainer):
    """Notes the weights that are evaluated."""

    seen: ClassVar[list[torch.Tensor]] = []

    def evaluation_loop(self, *args, **kwargs):
        self.seen.append(flat(self.model))
        return super().evaluation_loop(*args, **kwargs)


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def shared(weights):
    """Return whether both ranks have the same bits."""
    both = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(both, weights)
    return torch.equal(*both)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = dict(eval_strategy="steps", save_strategy="steps", eval_steps=4, save_steps=4)
    for best in (True, False):
        Evaluated.seen = []
        args = arguments(folder, load_best_model_at_end=best, **steps)
        local = {"local": gh.LocalSteps(every=5, dense_below=16), "eval_dataset": Points()}
        trainer = build(args, local, kind=Evaluated)
        trainer.train()
        assert len(Evaluated.seen) >= 4 and all(map(shared, Evaluated.seen))
        assert shared(flat(trainer.model)), "equal weights are left"
        if best:
            file = Path(trainer.state.best_model_checkpoint) / "model.safetensors"
            saved = safetensors.torch.load_file(file)
            for name, own in trainer.model.state_dict().items():
                assert torch.equal(own, saved[name]), "the best model is left as it was saved"
    dist.destroy_process_group()
    print("shared")


if __name__ == "__main__":
    main(*sys.argv[1:])
