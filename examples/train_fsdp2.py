"""Train a small GPT with fully_shard, in a learned order and with a sparse exchange of replicas.

torchrun --nproc-per-node 4 examples/train_fsdp2.py                  # sharded over four ranks
torchrun --nproc-per-node 4 examples/train_fsdp2.py --replicas 2     # two replicas of two shards
torchrun --nproc-per-node 4 examples/train_fsdp2.py --checkpoint ck  # saves, and continues from it

The text is WikiText-2 (`gradherd data get wikitext-2`), or made up where it is not there.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.tasks.data_files import find_dataset

LENGTH, WIDTH, HEADS, BATCH = 64, 64, 4, 8


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, WIDTH) to (B, T, WIDTH)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """A transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map (B, T) bytes to (B, T, 256) logits of the next byte."""
        positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
        out: Tensor = self.head(
            self.norm(self.layers(self.bytes(text) + self.positions(positions)))
        )
        return out


def load_text(sequences: int) -> Tensor:
    """Return (sequences, LENGTH + 1) bytes."""
    try:
        text = find_dataset("wikitext-2", None).text("train.txt").encode()
    except Exception as error:  # not downloaded: anything with some structure will do
        print(f"no WikiText-2 ({error}); training on made-up text")
        text = b" ".join(b"%d plus %d is %d" % (n, n + 1, 2 * n + 1) for n in range(20_000))
    size = sequences * (LENGTH + 1)
    return torch.tensor(list(text[:size])).view(-1, LENGTH + 1)


def main() -> None:
    """Train and print the loss of each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model")
    parser.add_argument("--order", default="cd-grab", choices=list(gh.POLICIES))
    parser.add_argument("--density", type=float, default=0.05, help="share that replicas exchange")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and continue from")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    shape = (args.replicas, dist.get_world_size() // args.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = GPT().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # gradherd: a sampler, and attach. Replicas exchange sparsely; inside one FSDP averages.
    data = TensorDataset(load_text(args.sequences))
    sampler = gh.OrderedSampler(data, args.order, batch_size=BATCH, unit=BATCH, seed=0)
    sparse = {"sparsify": gh.ExDyna(args.density), "mesh": mesh} if args.replicas > 1 else {}
    herd = gh.attach(model, order=sampler, **sparse)

    # Complete ones only: DCP writes its metadata last.
    saved = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "herd": herd.stateful()}
        dcp.load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for (text,) in loader:
            text = text.to(device)
            logits = model(text[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach() / len(loader)
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}  loss {total / dist.get_world_size():.5f}")
        herd.finish()  # the next order is learned: it belongs into the checkpoint
        if args.checkpoint:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "herd": herd.stateful()}
            dcp.save(state, checkpoint_id=args.checkpoint / f"epoch-{epoch:04d}")
    if dist.get_rank() == 0:
        print({key: value for key, value in herd.metrics().items() if "bytes" in key})
    herd.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
