"Gloo processes: an estimator on a DTensor, sharded or replicated, gives what it gives on the whole tensor."
import traceback
import pytest
import torch
from estimators import SEED, generator, near, on_grid, same, seeded, slope, variants
from processes import spawn
from shok_nb.engine.random import uniform_like


def whole(): return torch.randn(7, 5, 3, generator=generator())*3
def sums(x): return [p.values[1](x).double().sum().item() for p in seeded()]

def work(rank, world):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    failed,x = [],whole()
    def noise(d):
        with CommDebugMode() as comm: u = uniform_like(d, seed=SEED)
        return not comm.get_total_counts() and same(u.full_tensor(), uniform_like(x, seed=SEED))
    def rounds(d, r, f):
        leaf = d.detach().requires_grad_()
        y = f(leaf)
        y.sum().backward()
        if r.random:
            with pytest.raises(TypeError, match='use seed='): r.f(d, generator=generator())
        alike = same if on_grid(r, f) else near
        steep = near(leaf.grad.full_tensor(), slope(f, x), ulps=64 if r.random else 8)
        return steep and alike(y.full_tensor().detach(), f(x))
    line = [Shard(0)],[Shard(1)],[Replicate()]
    square = [Shard(0), Shard(1)],[Shard(1), Shard(1)],[Replicate(), Shard(2)]
    meshes = [(torch.distributed.init_device_mesh('cpu', (world,)), line)]
    if world > 2: meshes.append((torch.distributed.init_device_mesh('cpu', (2, world//2)), square))
    for mesh,places in ((m, p) for m,ps in meshes for p in ps):
        d = distribute_tensor(x, mesh, places)
        if not noise(d): failed.append(('uniform_like', str(places)))
        for p in variants() + seeded():
            try: said = '' if rounds(d, *p.values) else 'differs'
            except Exception: said = traceback.format_exc()[-600:]
            if said: failed.append((p.id, str(places), said))
    return failed,sums(x)

@pytest.mark.slow
@pytest.mark.parametrize('world', (2, 4))
def test_ranks_and_shardings(world):
    """In every sharding the noise is that of one process too, and finding it sends nothing. Its gradients agree to 64
    units in the last place: a shard of another size takes torch's scalar code, and a steep sigmoid magnifies the
    difference."""
    for failed,found in spawn(work, world): assert not failed and found == sums(whole()), failed
