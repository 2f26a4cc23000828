"""Trains a tiny head in processes that are forked here, so that the libraries are read once. Run by test_trainer_runs.

``python training_processes.py FOLDER``: FOLDER holds ``data``. Writes ``killed`` (a run killed with SIGKILL at a random
moment), ``two`` and ``sharded`` (runs of two processes over gloo; in the second the target's layers are spread).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

from conftest import make_target

from specdec_hf.training.trainer import TrainConfig, train

HEAD = {"block_size": 3, "markov_rank": 8, "target_layer_ids": [0, 2], "num_hidden_layers": 1, "draft_vocab_size": 60}
LONG = {"max_steps": 60, "batch_size": 4, "save_steps": 7, "logging_steps": 1}
SHORT = {"max_steps": 5, "batch_size": 4, "save_steps": 100, "logging_steps": 1}


def config(folder: Path, output: str, **changes) -> TrainConfig:
    values = {"head": HEAD, "num_anchors": 6, "validation": 3, "seed": 3, "sample_slots": True, "use_cpu": True}
    return TrainConfig(data=str(folder / "data"), output=str(folder / output), **{**values, **changes})


def start(body) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def wait(*pids: int) -> None:
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        if status:
            sys.exit(f"a process ended with status {status}")


def killed(folder: Path) -> None:
    """Kill a run at a random moment after its first checkpoint began."""
    pid = start(lambda: train(make_target(), config(folder, "killed", **LONG)))
    while not list((folder / "killed").glob("checkpoint-*")):
        if os.waitpid(pid, os.WNOHANG)[0]:
            sys.exit("the run ended before its first checkpoint")
        time.sleep(0.01)
    time.sleep(random.random() * 0.4)  # the rest of the run takes longer than that on any machine
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def two_processes(folder: Path, output: str, **changes) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def body(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        train(
            make_target(), config(folder, output, **{**SHORT, "batch_size": 1, "gradient_accumulation": 2, **changes})
        )

    wait(start(lambda: body(0)), start(lambda: body(1)))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    killed(place)
    two_processes(place, "two")
    two_processes(place, "sharded", shard_target=True)
