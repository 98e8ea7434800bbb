"Two gloo processes: an estimator on a DTensor, sharded or replicated, gives what it gives on the whole tensor."
import traceback
import pytest
import torch
from processes import join_group, spawn


def work(rank, world, port, queue):
    import torch.distributed as dist
    from estimators import generator, near, slope, variants
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    failed = []
    join_group(rank, world, port)
    try:
        mesh = init_device_mesh('cpu', (world,))
        x = torch.randn(6, 5, generator=generator())*3
        for p in variants():
            r,f = p.values
            for placement in (Shard(0), Shard(1), Replicate()):
                try:
                    leaf = distribute_tensor(x, mesh, [placement]).requires_grad_()
                    y = f(leaf)
                    y.sum().backward()
                    well = near(y.full_tensor().detach(), f(x)) and near(leaf.grad.full_tensor(), slope(f, x))
                    if not well: failed.append((p.id, str(placement), 'differs'))
                except Exception: failed.append((p.id, str(placement), traceback.format_exc()[-400:]))
    finally: dist.destroy_process_group()
    queue.put((rank, failed))

@pytest.mark.slow
def test_dtensor():
    got = dict(spawn(work, 2))
    assert got == {0: [], 1: []}
