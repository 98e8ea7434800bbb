"Several gloo processes on this machine, for the tests of what crosses them."
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
import torch


def member(work, rank, world, port):
    "What `work` finds in process number `rank` of `world`."
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), GLOO_SOCKET_IFNAME='lo')
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', rank=rank, world_size=world)
    try: return work(rank, world)
    finally: torch.distributed.destroy_process_group()

def spawn(work, world):
    "What `work(rank, world)` finds in each of `world` fresh processes, in their order; raises what one of them raises."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    with ProcessPoolExecutor(world, get_context('spawn')) as pool:          # each waits for the others to begin
        return [*pool.map(member, repeat(work), range(world), repeat(world), repeat(port))]
