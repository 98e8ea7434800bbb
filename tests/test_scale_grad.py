"What the page cannot run: real processes, sharded tensors, every compiler, every dtype, and a GPU where there is one."
import math
from functools import partial
import pytest
import torch
from estimators import FLOATS, Calls, back, generator, kept, same, slow_after
from processes import spawn
from torch.nn.utils.parametrize import register_parametrization
from shok_nb.engine.random import uniform_like
from shok_nb.estimators.gradient import normalize_grad, quantize_grad, scale_grad

SEED = torch.tensor(7)                    # outside, as a literal inside compiled code keeps Inductor busy for ever
def few_bits(x): return quantize_grad(x, 3, seed=SEED)

def slope_of(f, g): return back(f, torch.zeros_like(g), g=g)[1]

def three_bits(g):
    "The eight levels that `few_bits` makes of a gradient, one scale per sample."
    m = g.abs().amax(tuple(range(g.ndim > 1, g.ndim)), keepdim=True) if g.ndim else g.abs()
    v = g/torch.where(m == 0, 1., m)*3.5 + .5
    return (v.floor() + (v-v.floor() > uniform_like(g, seed=SEED)) - .5)/3.5*m

def together(rank, world):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel
    out,world_group = {},dist.group.WORLD
    g = torch.tensor([[1., 2., 3.], [-8., 4., 1.]])[rank]
    shared = partial(normalize_grad, group=world_group)
    out['shared'] = slope_of(shared, g).tolist()
    out['shared dim'] = slope_of(lambda x: shared(x, dim=0), torch.stack([g, g*0], 1)).tolist()
    out['empty rank'] = slope_of(shared, g[:3*rank]).tolist()          # rank 0 has nothing
    out['nan rank'] = str(slope_of(shared, torch.where(g == -8., math.nan, g)).tolist())
    out['compiled'] = slope_of(torch.compile(shared, backend='aot_eager'), g).tolist()
    for name,group in (('own', None), ('ddp', world_group)):
        model = torch.nn.Linear(2, 1, bias=False)
        register_parametrization(model, 'weight', Calls(partial(normalize_grad, group=group)))
        parallel = DistributedDataParallel(model)
        parallel(torch.tensor([[1., 0.], [0., 100.]])[rank]).backward()
        out[name] = model.parametrizations.weight.original.grad[0].tolist()
    whole = torch.randn(4, 3, generator=generator())
    for p in (Shard(0), Shard(1), Replicate()):
        mesh = torch.distributed.init_device_mesh('cpu', (world,))
        ways = normalize_grad,lambda x: normalize_grad(x, dim=0),lambda x: scale_grad(x, .5),few_bits
        for i,f in enumerate(ways):
            leaf = distribute_tensor(torch.zeros(4, 3), mesh, [p]).requires_grad_()
            f(leaf).backward(distribute_tensor(whole, mesh, [p]))
            out[f'dtensor {p} {i}'] = torch.allclose(leaf.grad.full_tensor(), slope_of(f, whole))
    return out

@pytest.mark.slow
def test_two_processes():
    a,b = spawn(together, 2)
    assert (a['shared'], b['shared']) == ([1/8, 2/8, 3/8], [-1., .5, 1/8]) == (a['compiled'], b['compiled'])
    assert b['shared dim'] == [[-1., 0.], [.5, 0.], [1/8, 0.]]
    assert (a['empty rank'], b['empty rank']) == ([], [-1., .5, 1/8])
    assert (a['nan rank'], b['nan rank']) == ('[0.0, 0.0, 0.0]', '[nan, 0.0, 0.0]')
    assert a['own'] == b['own'] == [.5, .5]
    assert a['ddp'] == b['ddp'] == pytest.approx([.005, .5])
    assert all(v for k,v in a.items() if k.startswith('dtensor')), a

EACH = pytest.mark.parametrize('f, scale', [
    (lambda x: scale_grad(x, -.3), lambda g: g*-.3),
    (normalize_grad, lambda g: g/g.abs().max()),
    (few_bits, three_bits),
], ids=['scale', 'normalize', 'quantize'])

@EACH
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_every_layout_and_dtype(f, scale, dtype):
    "The value is a view of x; the gradient is one float32 operation, rounded once."
    x = torch.randn(4, 3, 5, 6, generator=generator()).to(dtype)
    last,few = x.to(memory_format=torch.channels_last),x[:1].expand(4, 3, 5, 6)
    for t in (x, x[0, 0, 0, 0], x[:0], x.transpose(0, 3), x[..., ::2], last, few):
        y = f(t)
        assert same(y, t) and y.data_ptr() == t.data_ptr() and y.stride() == t.stride()
        if not t.numel(): continue
        wide = t.double() if dtype == torch.float64 else t.float()
        assert same(slope_of(f, t), scale(wide).to(dtype))

@pytest.mark.parametrize('f', [lambda x: scale_grad(x, .5), normalize_grad, quantize_grad])
def test_nested(f):
    "A ragged batch, which torch cannot view, is copied; a gradient of ones is its own largest magnitude."
    x = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged, requires_grad=True)
    y = f(x)
    assert torch.equal(y.values(), x.values())
    g = torch.autograd.grad(y.values().sum(), x)[0].values()
    assert torch.equal(g, torch.full_like(g, g[0])) and g[0] in (.5, 1.)

@EACH
@pytest.mark.parametrize('backend', slow_after(['aot_eager', 'eager', 'inductor']))
@pytest.mark.slow
def test_compiled(f, scale, backend):
    leaf,g = torch.randn(7, generator=generator()).requires_grad_(),torch.randn(7, generator=generator(1))
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    y = compiled(leaf)
    assert y.data_ptr() == leaf.data_ptr() and torch.allclose(torch.autograd.grad(y, leaf, g)[0], scale(g))
    y = torch.compile(lambda x: torch.relu(f(x*2)), backend=backend, fullgraph=True)(leaf)
    assert torch.allclose(torch.autograd.grad(y, leaf, g)[0], scale(g*(leaf > 0))*2)
    with torch.no_grad(): assert torch.equal(compiled(leaf), leaf)
    assert torch.equal(compiled(leaf.detach()), leaf)                                          # evaluation

@pytest.mark.slow
@EACH
@pytest.mark.parametrize('compiled', [False, True])
def test_changed_in_place(f, scale, compiled):
    """A change of the view in place never passes for one of a copy: an error where
    gradients are recorded, else it is in `x` too."""
    run = torch.compile(f, backend='aot_eager', fullgraph=True) if compiled else f
    x = torch.randn(7, generator=generator())
    for leaf in (x.clone().requires_grad_(), x.clone().requires_grad_()*1):
        with pytest.raises(RuntimeError, match='view'): run(leaf).add_(1.)
    with torch.no_grad():
        run(x).zero_()
        assert (x == 0).all()

@EACH
def test_exported_and_traced(f, scale):
    x = torch.randn(3, generator=generator())
    for model,times in ((Calls(f), 1), (Calls(lambda x: f(x)*2), 2)):
        exported = torch.export.export(model, (x,)).module()
        assert torch.equal(exported(x), x*times)
        assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), x*times)
        assert not any('autograd' in str(n.target) for n in exported.graph.nodes)

def test_scale_grad_transforms():
    "Linear in the gradient: the Jacobian is the factor in every mode, also where the product with x would overflow."
    x = torch.tensor([.3, -0., 3e4, math.inf]).half()
    for factor in (10., torch.tensor(10.), torch.tensor([10.]*4)):
        f = lambda x: scale_grad(x, factor)
        assert torch.equal(torch.func.jacrev(f)(x[:4].clamp(max=6e4)), torch.eye(4).half()*10)
        assert same(torch.func.jvp(f, (x,), (torch.ones_like(x),))[0], x)
        assert same(torch.func.vmap(lambda x: scale_grad(x, 10.))(x[None])[0], x)
    w = torch.randn(5, dtype=torch.float64, generator=generator()).requires_grad_()
    h = lambda w: (scale_grad(w, .5)**3).sum()
    g, = torch.autograd.grad(h(w), w, create_graph=True)
    assert torch.allclose(torch.autograd.grad(g.sum(), w)[0], .5*.5*6*w)

def test_quantize_grad_samples():
    """A sample's overflow is not hidden and stays its own; `dim` and seeds go with
    `vmap`, and noise is of the backward pass."""
    g = torch.tensor([[1., -4., 2.], [math.inf, 1., 2.], [math.nan, 1., 2.], [0., 0., 0.]])
    got = slope_of(few_bits, g)
    assert same(got[:1], slope_of(few_bits, g[:1])) and not got[1:3].isfinite().any() and (got[3] == 0).all()
    x,seeds = torch.randn(5, 40, generator=generator()),torch.arange(5)
    grad = torch.func.grad(lambda x, s: (quantize_grad(x, 2, dim=0, seed=s)*x.detach()).sum())
    assert torch.equal(torch.vmap(grad)(x, seeds), torch.stack([grad(a, s) for a,s in zip(x, seeds)]))
    with pytest.raises(RuntimeError, match='randomness'):
        torch.vmap(torch.func.grad(lambda x: (quantize_grad(x)*x.detach()).sum()))(x)
    for make in (lambda: dict(generator=generator(1)), lambda: torch.manual_seed(1) and {}):
        with torch.random.fork_rng(devices=[]):
            a,b = (slope_of(lambda x: quantize_grad(x, 2, **make()), x) for _ in range(2))
            assert torch.equal(a, b) and not torch.equal(a, slope_of(lambda x: quantize_grad(x, 2), x))
    w = x.double().requires_grad_()
    first, = torch.autograd.grad(few_bits(w).square().sum(), w, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), w)[0], torch.full_like(w, 2.))          # that of the mean
    assert [t.numel() for t in kept(lambda: (few_bits(w), normalize_grad(w)))] == [1]         # the seed

@pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU here')
@EACH
def test_cuda_graph(f, scale):
    x,g = torch.randn(64, device='cuda').requires_grad_(),torch.randn(64, device='cuda')
    side = torch.cuda.Stream()
    with torch.cuda.stream(side): torch.autograd.grad(f(x), x, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out, = torch.autograd.grad(f(x), x, g)
    g.copy_(torch.randn(64, device='cuda')*100)
    graph.replay()
    assert torch.allclose(out, scale(g))

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('factor', [.1, -1/3, 1e30, 1+2**-12, 0.])
def test_halves_are_rounded_once(dtype, factor):
    "Every number of the dtype, in a whole vector and beside one: the product of float32, rounded."
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    scaled = partial(scale_grad, factor=factor)
    for g in (every, every[:-9]): assert same(slope_of(scaled, g), (g.float()*factor).to(dtype))

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_by_a_number_as_by_a_tensor(dtype):
    """Over all dims of a gradient on a CPU the largest is a number of Python's. Bits and zeros' signs are those of
    tensors, which a tuple of dims asks for: every magnitude, what is not finite, the least number, expanded, turned."""
    inf,nan = math.inf,math.nan
    few = [[0., -0.], [nan, 1.], [inf, 1.], [-inf, 2.], [nan, -inf], [torch.finfo(dtype).tiny/2, 0.], [-3., 2.]]
    gs = [torch.randn(5, 7, generator=generator()).mul(10.**e).to(dtype) for e in (-44, -38, -6, 0, 4, 30, 37)]
    gs += [torch.tensor([row], dtype=dtype) for row in few]
    gs += [gs[3].mT, gs[3][:1, :1].expand(3, 4), gs[3][::2, 1:]]
    for g in gs:
        for eps in (0., 1e-50, 1e-6, 1.):
            number,tensor = (slope_of(partial(normalize_grad, dim=dim, eps=eps), g) for dim in (None, (0, 1)))
            assert same(number, tensor) and torch.equal(number.signbit(), tensor.signbit())
