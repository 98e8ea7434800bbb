"""Training in few bits on two gloo processes: as on one where the whole batch is the same, and the same again."""
import io
from functools import partial
import pytest
import torch
from estimators import equal, generator
from processes import spawn
from torch import nn
from torch.utils.checkpoint import checkpoint
import shok_nb as R

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('ranks')]       # in the process that has both started
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=.1)
DRAWN = 'nvfp4','quartet_ii'

class Part(nn.Module):
    "Two layers that may be computed again in backward."
    def __init__(self, again=None):
        super().__init__()
        self.up,self.down,self.again = nn.Linear(32, 64),nn.Linear(64, 32),again
    def both(self, x): return x + self.down(torch.relu(self.up(x)))
    def forward(self, x):
        if self.again is None: return self.both(x)
        return checkpoint(self.both, x, use_reentrant=self.again)

def net(again=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Part(again), Part(again))

def data(): return torch.randn(64, 32, generator=generator()).requires_grad_()     # 32 of each process: a block of MX

def held(model): return [getattr(p, 'full_tensor', lambda p=p: p)().detach().clone() for p in model.parameters()]

def near(a, b): return all(torch.allclose(s, t, rtol=1e-4, atol=1e-6) for s,t in zip(a, b, strict=True))

def train(model, opt, x, steps=2):
    for _ in range(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return held(model)

def alone(model): return model

def ddp(model): return nn.parallel.DistributedDataParallel(model)

def fsdp(model):
    "Each layer that is first, and each part, by itself."
    from torch.distributed.fsdp import fully_shard
    for m in model: fully_shard(m)
    return fully_shard(model)

def tensor_parallel(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = torch.distributed.init_device_mesh('cpu', (2,))
    for part in model[1:]: parallelize_module(part, mesh, dict(up=ColwiseParallel(), down=RowwiseParallel()))
    return model

WAYS = dict(ddp=ddp, fsdp=fsdp, tensor_parallel=tensor_parallel)

def made(recipe, way, again=None, first=True, rank=0, **stored):
    "A model in low precision and spread, in either order, with its optimizer."
    model = net(again)
    if first: R.low_precision_(model, recipe, rank=rank)
    spread = way(model)
    if not first: R.low_precision_(spread, recipe, rank=rank)
    return spread,R.RoundedOptimizer(spread.parameters(), ADAMW, seed=5, **stored)

STORED = dict(format='bfloat16', states=torch.bfloat16)

def alike(rank, world):
    "Where each process has the same batch: what one process gets, bit for bit, however it is computed."
    wrong = []
    for recipe in DRAWN:
        want = train(*made(recipe, alone, **STORED), data())
        for name,way in WAYS.items():
            runs = (None, True), (None, False), (False, True), (True, True)
            for again,first in runs if recipe == 'nvfp4' else runs[:1]:
                if name == 'tensor_parallel' and again: continue           # torch's own re-entrant one takes no DTensor
                if not equal(want, train(*made(recipe, way, again, first, **STORED), data())):
                    wrong.append((recipe, name, again, first))
    return wrong

def parts(rank, world):
    "Half of the batch each, with blocks that lie within it: near one process with all. Draws differ by `rank` alone."
    wrong,x = [],data().detach().chunk(world)[rank].requires_grad_()
    for recipe in ('mxfp8', 'mxfp4', 'bfloat16'):
        want = train(*made(recipe, alone), data(), 1)
        for name in ('ddp', 'fsdp'):
            if not near(want, train(*made(recipe, WAYS[name]), x, 1)): wrong.append((recipe, name))
    runs = [train(*made('mxfp4_stochastic', way, rank=own), x) for way in (ddp, fsdp) for own in (0, rank)]
    if not equal(runs[0], runs[2]) or not equal(runs[1], runs[3]) or equal(runs[0], runs[1]): wrong.append('rank')
    return wrong,[p.double().sum().item() for run in runs for p in run]

def resumed(rank, world):
    "Through a file of each process, and through the state dicts of torch.distributed.checkpoint: bit for bit."
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    wrong = []
    for name in ('ddp', 'fsdp', 'tensor_parallel'):
        model,opt = made('nvfp4', WAYS[name], **STORED)
        train(model, opt, data())
        file = io.BytesIO()
        torch.save((model.state_dict(), opt.state_dict()), file)
        kept = io.BytesIO()
        torch.save(get_state_dict(model, opt), kept)
        want = train(model, opt, data())
        other,again = made('nvfp4', WAYS[name], **STORED)
        file.seek(0)
        state,of_opt = torch.load(file, weights_only=False)
        other.load_state_dict(state)
        again.load_state_dict(of_opt)
        if not equal(want, train(other, again, data())): wrong.append(name)
        other,again = made('nvfp4', WAYS[name], **STORED)
        kept.seek(0)
        state,of_opt = torch.load(kept, weights_only=False)
        set_state_dict(other, again, model_state_dict=state, optim_state_dict=of_opt)
        if not equal(want, train(other, again, data())): wrong.append((name, 'set_state_dict'))
    return wrong

def removed(rank, world):
    "The layers of torch again, still spread: the same as a model that was never rounded."
    wrong = []
    for name,way in WAYS.items():
        model,opt = made('mxfp8', way)
        R.nn.remove_rounding_(model)
        kinds = {type(m).__name__ for m in model.modules()}
        plain = way(net())
        wanted = train(plain, R.RoundedOptimizer(plain.parameters(), ADAMW), data())
        if any('Rounded' in k for k in kinds) or not equal(wanted, train(model, opt, data())): wrong.append(name)
        if {type(m).__name__ for m in plain.modules()} != kinds: wrong.append((name, kinds))
    return wrong

def sharded_batch(rank, world):
    "A DTensor cut along the batch: its noise is that of the whole, so the numbers are too."
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    mesh,wrong = torch.distributed.init_device_mesh('cpu', (world,)),[]
    for recipe in (*DRAWN, 'luq'):
        for placement in (Shard(0), Replicate()):
            def gradients(spread):
                torch.manual_seed(0)
                layer = nn.Linear(32, 48)
                x = data()
                R.low_precision_(layer, recipe)
                if spread: layer,x = distribute_module(layer, mesh),distribute_tensor(x, mesh, [placement])
                return [getattr(t, 'full_tensor', lambda t=t: t)() for t in
                    torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])]
            if not near(gradients(False), gradients(True)): wrong.append((recipe, str(placement)))
    return wrong

def optimizers(rank, world):
    "Shards of every size, an empty one too: the step of one process, and no other memory."
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh,wrong = torch.distributed.init_device_mesh('cpu', (world,)),[]
    makes = dict(adamw=ADAMW, sgd=partial(torch.optim.SGD, lr=.1, momentum=.9), foreach=partial(ADAMW, foreach=True))
    for name,make in makes.items():
        for kw in (dict(), STORED, dict(states=torch.bfloat16, at_once=20)):
            def run(spread, dtype):
                def put(t): return distribute_tensor(t, mesh, [Shard(0)]) if spread else t
                g = generator()
                params = [nn.Parameter(put(torch.randn(s, generator=g).to(dtype))) for s in ((7, 4), (1, 3), (6,))]
                opt = R.RoundedOptimizer(params, make, seed=3, **kw)
                at = [getattr(p, '_local_tensor', p).data_ptr() for p in params]
                for _ in range(3):
                    for p in params: p.grad = put(torch.randn(p.shape, generator=g).to(dtype))
                    grads = [p.grad for p in params]
                    opt.step()
                    assert all(p.grad is g for p,g in zip(params, grads))
                assert at == [getattr(p, '_local_tensor', p).data_ptr() for p in params]
                return [getattr(p, 'full_tensor', lambda p=p: p)().detach() for p in params]
            for dtype in (torch.bfloat16, torch.float32):
                if not equal(run(False, dtype), run(True, dtype)): wrong.append((name, str(kw), dtype))
    return wrong

def mixed(rank, world):
    "Two calls before backward, in mixed precision, and a DDP that sends its buffers: all run, ranks agree."
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    x,sums = data(),[]
    for recipe in ('mxfp8', 'nvfp4'):
        model,opt = made(recipe, ddp)
        (model(x)+model(2*x)).square().mean().backward()
        opt.step()
        sums += held(model)
        model = net()
        R.low_precision_(model, recipe)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        sums += train(model, R.RoundedOptimizer(model.parameters(), ADAMW), x)
    return [s.double().sum().item() for s in sums]

def refused(rank, world):
    "What cannot work says so, and changes nothing."
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    mesh = torch.distributed.init_device_mesh('cpu', (world,))
    def told(f):
        with pytest.raises(ValueError) as e: f()
        return str(e.value)
    conv = nn.Conv2d(8, 8, 3)
    R.low_precision_(conv, 'mxfp8')
    x = distribute_tensor(torch.randn(4, 8, 5, 5), mesh, [Shard(0)])
    first = nn.Sequential(nn.MultiheadAttention(32, 4), nn.Linear(32, 32))
    fully_shard(first)
    later = nn.Sequential(nn.MultiheadAttention(32, 4), nn.Linear(32, 32))
    R.low_precision_(later, 'mxfp8')
    fully_shard(later)
    said = [told(lambda: distribute_module(conv, mesh)(x)), told(lambda: R.low_precision_(first, 'mxfp8')),
        told(lambda: R.nn.remove_rounding_(later))]
    return said,type(first[1]) is nn.Linear,'Rounded' in type(later[1]).__name__

WORKS = alike, parts, resumed, removed, sharded_batch, optimizers, mixed, refused

def work(rank, world): return {f.__name__: f(rank, world) for f in WORKS}

@pytest.fixture(scope='module')
def found(): return spawn(work, 2)

@pytest.mark.parametrize('name', ['alike', 'resumed', 'removed', 'sharded_batch', 'optimizers'])
def test_as_one_process(found, name):
    for one in found: assert one[name] == []

def test_parts_of_a_batch(found):
    one,other = (f['parts'] for f in found)
    assert one == other and one[0] == []

def test_ranks_agree(found):
    assert found[0]['mixed'] == found[1]['mixed']

def test_what_is_refused(found):
    wanted = ('RoundedConv2d: a convolution needs whole tensors, got a DTensor with (Shard(dim=0),); use',
        'low_precision_: the attention 0 is sharded already; call low_precision_ before fully_shard',
        'remove_rounding_: an attention whose layers are sharded')
    for said,plain,rounded in (f['refused'] for f in found):
        assert plain and rounded and all(s.startswith(w) for s,w in zip(said, wanted, strict=True)), said
