"""What makes it fast, as far as no clock is needed: pieces that are played from a tape, one fused kernel for each job, few
graphs, few Python calls, nothing kept that can be computed again. The bounds are counts; `bench` has the times."""
import gc, math, sys, threading, time, warnings
from functools import partial
import pytest, torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint
from estimators import FLOATS, generator, near, same, slope, variants
from shok_nb import core, dorefa, fake_quantize, fourier_round, pact, pieces, quantized_bits, round_ste, soft_round, stochastic_round
from shok_nb.catalog import catalog
from shok_nb.core import estimator
from shok_nb.random import uniform_like

all_variants = pytest.mark.parametrize('r, f', variants())
FUSE = pieces._fuse
EDGES = torch.tensor([0., -0., .5, -.5, 1.5, math.inf, -math.inf, math.nan, 1e10, -3e38])

def sample(n, dtype=torch.float32): return torch.cat([EDGES, torch.randn(n-len(EDGES), generator=generator())*3]).to(dtype)

def both(f, x, g):
    leaf = x.detach().requires_grad_()
    y = f(leaf)
    return y.detach(),torch.autograd.grad(y, leaf, g)[0]

# --- pieces
@pytest.fixture
def tapes(monkeypatch):
    "Pieces of 64 elements, nothing recorded yet, and a list of what became of each recording."
    made,plain = [],pieces._player
    def player(*args):
        made.append(plain(*args))
        return made[-1]
    monkeypatch.setattr(pieces, '_PIECE', 64)
    monkeypatch.setattr(pieces, '_player', player)
    monkeypatch.setattr(pieces, '_mine', pieces._Mine())
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)
    return made

def whole(f, *args):
    "The same without pieces or recordings."
    with pytest.MonkeyPatch.context() as m:
        m.setattr(pieces, '_PIECE', 1<<40)
        m.setattr(pieces, '_OFTEN', math.inf)
        m.setattr(pieces, '_mine', pieces._Mine())
        return f(*args)

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@all_variants
def test_tape(r, f, dtype, tapes):
    "Played for other pieces a recording gives what the operations themselves give, bit for bit; every recording can be played."
    x,g = sample(1000, dtype),torch.randn(1000, generator=generator()).to(dtype)
    for a,b in zip(both(f, x, g), whole(both, f, x, g)): assert same(a, b)
    if r.grid:
        for a,b in zip(both(partial(f, step=.3, offset=.1), x, g), whole(both, partial(f, step=.3, offset=.1), x, g)): assert same(a, b)
        assert tapes
    assert all(tapes)

@pytest.mark.parametrize('r', [r for r in catalog if r.knobs and r.knobs[0].learns and not r.random and not isinstance(r.knobs[0].default, int)], ids=lambda r: r.name)
def test_tape_with_knobs(r, tapes):
    "A knob for each row or column is cut with the tensor, and its gradient is the sum over all pieces: 1e-4, float32 sums in another order."
    x,g = torch.randn(40, 24, generator=generator())*2,torch.randn(40, 24, generator=generator(1))
    k = r.knobs[0]
    for shape in ((), (24,), (40, 1)):
        def grads():
            v = torch.full(shape, k.default, requires_grad=True)
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(r.f(leaf, **{k.name: v}), (leaf, v), g)
        (a, da),(b, db) = grads(),whole(grads)
        assert near(a, b) and torch.allclose(da, db, rtol=1e-4, atol=1e-4*g.abs().sum().item()/40)
    assert tapes

def stacked(v): return torch.stack([v, -v]).amax(0)
def changed(v): return v.clone().mul_(2)
def viewed(v): return (v*2).view(-1, 1).add(1).view(-1)
def chosen(v): return torch.where((v > 0) & (v < 1), v*3, (v > 0).to(v.dtype))
def counted(v): return ((v > 0).int() + (v > 1).int()).to(v.dtype)
def either(v): return ((v > 1) | (v < -1))*v
def flipped(v): return (~(v > 1)).to(v.dtype)
def inside(v): return ((v.abs() <= 2) & torch.isfinite(v)).to(v.dtype)
def squared(v): return v*v - (v*v).detach()*.5 + torch.full_like(v, 2.)
def shrunk(v): return torch.tanh(v).sub_(1).mul_(2)
def overwritten(v):
    w = v*2
    return w + w.clone().add_(w.sub_(1))
def through(v):
    with torch.enable_grad():
        w = v.detach().requires_grad_()
        return torch.autograd.grad((torch.tanh(w)*torch.sigmoid(w)).exp().sum(), w)[0]
def itself(v): return v
def constant(v): return torch.zeros_like(v)

@pytest.mark.parametrize('f', (stacked, changed, viewed, chosen, counted, either, flipped, inside, squared, shrunk, overwritten, through, itself, constant), ids=lambda f: f.__name__)
def test_tape_of_anything(f, tapes):
    "Whatever a page computes: played where that is possible, and right in any case. Autograd's saved tensors are new objects in old places."
    op,x = estimator(f.__name__, f, f, lambda v: v*1.),sample(1000)
    g = torch.randn(1000, generator=generator())
    for a,b in zip(both(op, x, g), whole(both, op, x, g)): assert same(a, b)
    assert tapes

@all_variants
def test_played_from_call_to_call(r, f, tapes, monkeypatch):
    "Small tensors, one call after another: each new input and gradient is looked at, also after calls with one tensor for both, in inference mode, or on the grid of the other zero."
    monkeypatch.setattr(pieces, '_PIECE', 1<<16)
    grids = [{}] + ([dict(step=.5, offset=o) for o in (0., -0., .1)] if r.grid else [])
    xs = [sample(n, d) for n in (64, 11) for d in (torch.float32, torch.bfloat16)]
    for i in range(12):
        for x in xs:
            y,g = (x if i == 0 else x.roll(i)*(1+i%2)),torch.randn(x.shape, generator=generator(i)).to(x.dtype)
            if i < 2: g = y
            for kw in grids:
                h = partial(f, **kw)
                if i == 3:
                    with torch.inference_mode(): h(y)
                if i in (2, 9, 11):
                    for a,b in zip(both(h, y, g), whole(both, h, y, g)): assert same(a, b)
                else: both(h, y, g)
    assert all(tapes)

@pytest.mark.parametrize('r', [r for r in catalog if r.knobs and r.knobs[0].learns and not r.random and not isinstance(r.knobs[0].default, int)], ids=lambda r: r.name)
def test_played_with_another_knob(r, tapes, monkeypatch):
    "A learning knob is read at each call; bit for bit, sums too, since a small tensor is one piece."
    monkeypatch.setattr(pieces, '_PIECE', 1<<16)
    k,x = r.knobs[0],torch.randn(4, 24, generator=generator())*2
    for i in range(12):
        def grads():
            v = torch.full((24,), k.default*(1-i/100), requires_grad=True)
            leaf = x.roll(i).requires_grad_()
            return torch.autograd.grad(r.f(leaf, **{k.name: v}), (leaf, v), x)
        for a,b in zip(grads(), whole(grads)): assert same(a, b)
    assert all(tapes)

@all_variants
def test_default_device_elsewhere(r, f):
    "Numbers and scratch are made where the tensor is, not where new tensors go by default; ten calls, so recordings too."
    x,g = sample(100),torch.randn(100, generator=generator())
    f = partial(f, seed=torch.tensor(3)) if r.random else f
    for kw in [{}] + [dict(step=.5)]*r.grid:
        h = partial(f, **kw)
        want = both(h, x, g)
        with torch.device('meta'): got = [both(h, x, g) for _ in range(10)][-1]
        for a,b in zip(got, want): assert same(a, b)

def test_threads_share_no_scratch():
    "Four threads at once, 200 calls each, get what one gets; with a scratch tensor in common none of them would."
    xs = [torch.randn(5000, generator=generator(i))*3 for i in range(4)]
    want,got = [soft_round(x) for x in xs],{}
    def work(i): got[i] = all(same(soft_round(xs[i]), want[i]) for _ in range(200))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert [got[i] for i in range(4)] == [True]*4

def test_recordings_are_bounded(monkeypatch):
    "A knob that never comes twice leaves no recording, and no more are kept than a thread may."
    monkeypatch.setattr(pieces, '_mine', pieces._Mine())
    monkeypatch.setattr(pieces, '_MANY', 5)
    x = torch.randn(100)
    for i in range(100): soft_round(x, 1+i/100)
    assert not pieces._mine.players and len(pieces._mine.uses) <= 8*5+1
    for n in range(20):
        for _ in range(pieces._OFTEN+1): assert same(soft_round(x[:n+1]), whole(soft_round, x[:n+1]))
    assert len(pieces._mine.players) == 5

@all_variants
def test_no_full_size_temporaries(r, f, monkeypatch):
    "Beyond the result, forward and backward hold a few pieces; but for the pull of `ewgs_round`, which is a second function."
    sys.path.insert(0, 'bench')
    from bench import Cpu
    monkeypatch.setattr(pieces, '_PIECE', 1<<9)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 1)
    x,g = torch.randn(1<<17, generator=generator()),torch.ones(1<<17)
    both(f, x, g)
    extra = r.name == 'ewgs_round'
    assert Cpu().peak(lambda: f(x)) <= (1.3+extra)*x.nbytes
    assert Cpu().peak(lambda: both(f, x, g)) <= (2.3+2*extra)*x.nbytes

# --- what is kept
@all_variants
def test_saved_when_compiled(r, f):
    "Compiled code keeps `x` at most, and nothing for a slope of 1: it works the rest out again."
    x,kept = torch.randn(1000, generator=generator()).requires_grad_(),[]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.compile(f, fullgraph=True, backend='aot_eager_decomp_partition')(x)
    size = sum(t.nbytes for t in {t.data_ptr(): t for t in kept}.values())
    assert size <= (0 if r.slope == '1' else x.nbytes) + 64

# --- one kernel for each job
def forget():
    for o in gc.get_objects():
        if type(o) is estimator: vars(o).get('fused', {}).clear()     # Dynamo makes one without its insides

@pytest.fixture
def fusing(monkeypatch):
    "`fusing(backend)`: as on a GPU, kernels are compiled from now on. Returns a list of the graphs."
    graphs,plain = [],pieces._fuse
    def start(backend='eager'):
        def count(gm, inputs):
            graphs.append(gm)
            return lookup_backend(backend)(gm, inputs)
        monkeypatch.setattr(core, '_fusible', lambda x: not torch.compiler.is_compiling())
        monkeypatch.setattr(core, '_fuse', lambda *args: plain(*args, backend=count))
        return graphs
    torch._dynamo.reset()
    forget()
    yield start
    forget()
    torch._dynamo.reset()

def check_fused(r, f, fusing, backend, dtypes=(torch.float32, torch.bfloat16), ulps=8):
    cases = [(partial(f, **kw), sample(n, d)) for kw in ({}, dict(step=.3, offset=.1))[:1+r.grid] for d in dtypes for n in (1000, 64, 11)]
    want = [both(g, x, torch.ones_like(x)) for g,x in cases]
    graphs = fusing(backend)
    for (g, x),(y, d) in zip(cases, want):
        a,b = both(g, x, torch.ones_like(x))
        assert near(a, y, ulps) and b.dtype == x.dtype and torch.allclose(b, d, atol=(1e-5 if x.dtype == torch.float32 else 1e-2)*d.nan_to_num(0., 0., 0.).abs().max(), rtol=0, equal_nan=True)
    return graphs

@all_variants
def test_fused(r, f, fusing):
    "Values to 8 ulp, slopes to 1e-5 of the largest (a unit in the last place for bfloat16). A graph forward and one backward for each dtype, whatever the size, and as many on a grid."
    assert len(check_fused(r, f, fusing, 'eager')) <= 4*(1+r.grid)

@pytest.mark.parametrize('f', (round_ste, soft_round, fourier_round), ids=lambda f: f.__name__)
def test_fused_inductor(f, fusing):
    "The same with the code generated and run."
    check_fused(next(r for r in catalog if r.f is f), f, fusing, 'inductor', (torch.float32,))

@pytest.mark.parametrize('r', [r for r in catalog if r.knobs and not r.random and not isinstance(r.knobs[0].default, int)], ids=lambda r: r.name)
def test_fused_knobs(r, fusing):
    "A new number is no new graph, nor is a 0-d tensor; a tensor of them is one more."
    k,x = r.knobs[0],sample(64)
    values = [k.default, k.lo+(k.hi-k.lo)*.3, k.lo+(k.hi-k.lo)*.7, torch.tensor(k.default), torch.full((64,), k.default)]
    want = [both(partial(r.f, **{k.name: v}), x, torch.ones_like(x)) for v in values]
    graphs,seen = fusing(),[]
    for v,(y, d) in zip(values, want):
        a,b = both(partial(r.f, **{k.name: v}), x, torch.ones_like(x))
        assert near(a, y) and torch.allclose(b, d, atol=1e-5*d.nan_to_num(0., 0., 0.).abs().max(), rtol=0, equal_nan=True)
        seen.append(len(graphs))
    assert seen[0] == seen[3] <= 2 and seen[4] <= 4

def test_fused_falls_back(fusing, monkeypatch):
    "Where no kernel can be made the plain operations run, and a warning says so once."
    x = sample(100)
    want = both(soft_round, x, torch.ones_like(x))
    fusing()
    def broken(gm, inputs): raise RuntimeError('no compiler here')
    monkeypatch.setattr(core, '_fuse', partial(FUSE, backend=broken))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for _ in range(3):
            for a,b in zip(both(soft_round, x, torch.ones_like(x)), want): assert same(a, b)
    assert sorted(str(w.message).partition(':')[0] for w in seen if 'unfused' in str(w.message)) == ['soft_round_value runs unfused', 'soft_round_vjp runs unfused']

def test_kernels_are_for_the_gpu():
    "On a CPU nothing is compiled behind anybody's back."
    both(soft_round, sample(1000), torch.ones(1000))
    assert not any(vars(o).get('fused') for o in gc.get_objects() if type(o) is estimator)

# --- the cost of a call
def calls(f, *args):
    "Python functions entered by `f(*args)`, its own frame not counted."
    n = 0
    def tracer(frame, event, arg):
        nonlocal n
        n += event == 'call'
    f(*args)
    sys.setprofile(tracer)
    try: f(*args)
    finally: sys.setprofile(None)
    return n-1

class Least(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return torch.round(x)
    @staticmethod
    def backward(ctx, g): return g

def test_calls_of_python():
    "Nothing on the way looks for what is not there: a call enters a handful of Python functions more than the least Function there is."
    x,leaf = torch.randn(1024),torch.randn(1024, requires_grad=True)
    assert calls(lambda: round_ste(x)) <= 12 and calls(lambda: round_ste(leaf)) <= max(calls(lambda: Least.apply(leaf)), 6) + 9    # 6, or all in C
    for _ in range(pieces._OFTEN): soft_round(leaf)
    assert calls(lambda: soft_round(leaf)) <= 48

@all_variants
def test_small_tensors_allocate_their_result(r, f):
    "From the ninth call on, and 64 bytes for what a number takes; but for a second function of `ewgs_round`."
    sys.path.insert(0, 'bench')
    from bench import Cpu
    x,g = torch.randn(1<<14, generator=generator()),torch.ones(1<<14)
    for _ in range(10): both(f, x, g)
    extra = r.name == 'ewgs_round'
    assert Cpu().peak(lambda: f(x)) <= x.nbytes + 64
    assert Cpu().peak(lambda: both(f, x, g)) <= (2+extra)*x.nbytes + 64

# --- what compiled code keeps on a CPU
def arguments(r):
    "Each row as it is, on a grid, and with a tensor of numbers for each knob, constant or learning."
    yield 'plain',{}
    if r.grid: yield 'step',dict(step=torch.full((24,), .3))
    for k in [k for k in r.knobs if not isinstance(k.default, int)]: yield k.name,{k.name: torch.full((24,), k.default)}
    for k in [k for k in r.knobs if k.learns and not isinstance(k.default, int)][:1]: yield f'{k.name} learns',{k.name: torch.full((24,), k.default, requires_grad=True)}
    if r.grid: yield 'step learns',dict(step=torch.full((24,), .3, requires_grad=True))

@pytest.mark.parametrize('f, kw', [pytest.param(r.f, kw, id=f'{r.name}-{name}') for r in catalog for name,kw in arguments(r)]
    + [pytest.param(f, kw, id=f'{f.__name__}-{"-".join(map(str, kw.values()))}') for f,kw in (*((fake_quantize, dict(scale=.1, gradient=g)) for g in ('saturated', 'clipped', 'ste')),
        (pact, dict(alpha=1.)), (dorefa, {}), (quantized_bits, dict(bits=1, gradient='saturated')))])
def test_no_bools_kept(f, kw):
    "Generated C++ is slow to read and write bools, so none the size of `x` is kept for backward."
    x,kept = torch.randn(40, 24, generator=generator()).requires_grad_(),[]
    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.compile(partial(f, **kw), fullgraph=True, backend='aot_eager_decomp_partition')(x)
    assert not [t for t in kept if t.dtype == torch.bool and t.numel() >= x.numel()]

def test_compiled_noise():
    """On a CPU a compiled graph draws a seed, not the numbers: reproducible, new on every call and for every draw, replayed
    when a checkpoint computes it again. Of 2^16 pairs a correlation of .02 is five standard deviations."""
    ops,x = [],torch.empty(1<<16)
    def look(gm, inputs):
        ops.extend(n.target for n in gm.graph.nodes)
        return gm.forward
    f = torch.compile(lambda x: torch.stack([uniform_like(x), uniform_like(x, draw=1), uniform_like(x)]), fullgraph=True, backend=look)
    torch.manual_seed(0)
    a,b = f(x),f(x)
    torch.manual_seed(0)
    assert torch.equal(f(x), a) and torch.corrcoef(torch.cat([a, b])).fill_diagonal_(0.).abs().max() < .02
    assert torch.randint in ops and torch.rand not in ops
    def block(x, w): return stochastic_round(x)*w
    g = torch.compile(lambda x, w: checkpoint(block, x, w, use_reentrant=False), fullgraph=True, backend='aot_eager_decomp_partition')
    w = torch.ones(1<<16, requires_grad=True)
    y = g(torch.randn(1<<16, generator=generator()).requires_grad_(), w)
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], y)

def test_long_series_compile():
    "Thirty terms make a graph in a time that grows with their number: unfolded, ten took a minute. 1e-4 is three times eager's own error."
    x,began = torch.randn(1000, generator=generator()).requires_grad_(),time.perf_counter()
    f = partial(fourier_round, terms=30)
    for a,b in zip(both(torch.compile(f, fullgraph=True), x, torch.ones_like(x)), both(f, x, torch.ones_like(x))): assert (a-b).abs().max() < 1e-4
    assert time.perf_counter()-began < 300
