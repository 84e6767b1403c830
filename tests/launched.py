"""Programs under torchrun's variables, on ranks that have imported torch already.

torchrun itself starts an interpreter per rank and one for itself, and each imports torch. Tests
about what a program does on ranks need none of that; those about torchrun (a rank that dies and is
started again) start it.
"""

import contextlib
import io
import os
import runpy
import socket
import sys
import tempfile

import torch.distributed as dist

from gradherd.lab.ranks import run_ranks


def printed_under_torchrun(size: int, *words: object) -> str:
    """Run a program on ranks; return what they print to stdout, rank after rank.

    Args:
        size: Number of ranks.
        *words: A file and its arguments, or -m, a module and its arguments.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        return "".join(
            run_ranks(_program, size, [str(word) for word in words], port, os.getcwd(), folder)
        )


def _program(words: list[str], port: int, here: str, folder: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or a peer may still be connecting
    dist.destroy_process_group()  # the program makes its own
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    os.chdir(here)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{words} ended with {stop.code}") from stop
    if dist.is_initialized():  # a program may leave that to its end
        dist.barrier()
        dist.destroy_process_group()
    # Ranks end together, in a group.
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return printed.getvalue()
