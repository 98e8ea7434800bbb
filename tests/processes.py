"Several gloo processes on this machine, for the tests of what crosses them."
import os
import socket
import torch
import torch.multiprocessing as mp


def join_group(rank, world, port):
    "Make this process number `rank` of `world`."
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), GLOO_SOCKET_IFNAME='lo')
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', rank=rank, world_size=world)

def spawn(work, world):
    """Run `work(rank, world, port, queue)` in `world` fresh processes; what each put into
    the queue, by its first item, the rank."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    queue = mp.get_context('spawn').Queue()
    running = mp.spawn(work, (world, port, queue), world, join=False)
    got = sorted((queue.get(timeout=300) for _ in range(world)), key=lambda g: g[0])
    while not running.join(): pass
    return got
