"""Every estimator under every torch transform.

The reference is the eager gradient, which `test_reference.py` checks against mpmath and `test_contract.py` against
finite differences. Bounds: 1e-5 of the largest slope in float32, since the composite and the compiled forms may round
differently from the eager one; values of hard estimators are equal bit for bit."""
import copy
import math
import pickle
from functools import partial
import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
from estimators import (
    KINDS,
    Calls,
    X,
    batched,
    compiled,
    exported,
    generator,
    grouped,
    leaves,
    lumped,
    near,
    older,
    on_grid,
    same,
    seeded,
    side_by_side,
    slope,
    slopes,
    some_quickly,
    through_onnx,
    variants,
    with_knobs,
)
from shok_nb.catalog import catalog

ONE = torch.ones_like(X)
all_variants = pytest.mark.parametrize('r, f', variants())

def summed(f): return lambda x: f(x).sum()
def backward(f):
    leaf = X.clone().requires_grad_()
    f(leaf).sum().backward()
    return leaf.grad
def dual(f):
    with forward_ad.dual_level(): return forward_ad.unpack_dual(f(forward_ad.make_dual(X, ONE))).tangent

TRANSFORMS = {                                    # but those of the laws: grad, vmap of it, jvp, recomputation
    'vmap':          lambda f: slope(torch.vmap(f), X),
    'grad of vmap':  lambda f: torch.func.grad(summed(torch.vmap(f)))(X),
    'linearize':     lambda f: torch.func.linearize(f, X)[1](ONE),
    'jacfwd':        lambda f: torch.func.jacfwd(f)(X).diagonal(),
    'jacrev':        lambda f: torch.func.jacrev(f)(X).diagonal(),
    'dual numbers':  dual,
    'functional vjp': lambda f: torch.autograd.functional.vjp(f, X, ONE)[1],
    'batched grads': lambda f: batched(f, X),
    'jit.trace':     lambda f: slope(torch.jit.trace(lambda x: f(x), (X,)), X),
    'reentrant checkpoint': lambda f: backward(lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=True)),
    'autocast':      lambda f: slope(torch.autocast('cpu', torch.bfloat16)(f), X),
    'deepcopy':      lambda f: slope(copy.deepcopy(f), X),
    'pickle':        lambda f: slope(pickle.loads(pickle.dumps(f)), X),
}

FORWARD = 'linearize','jacfwd','dual numbers'
def refused(r):
    "A gradient that is not linear in the incoming one has no forward mode and no compiled transform: it must say so."
    return pytest.raises(Exception, match=f'{r.name}: a gradient that depends on the incoming one')

# of those that take noise, what the laws leave out
WITH_NOISE = 'jacfwd','jacrev','jit.trace','deepcopy','pickle','autocast'
DERIVED = [pytest.param(p.id, *p.values, t, id=f'{p.id}-{t}') for t in TRANSFORMS for p in variants() + seeded()
    if t in WITH_NOISE or not p.values[0].random]

# One of each kind in `make test`, and what no kind is like; of those that take noise one with slope 1 and one without
ALONE = 'round_ste','cubic_round','trust_round','soft_round_inverse','sine_round','cosine_round'
QUICK = [*KINDS, *[p.id for p in variants(lambda r: r.name in ALONE)], 'stochastic_round', 'noisy_soft_round']

@lumped(DERIVED, lambda variant, *_: variant, QUICK)
@pytest.mark.slow
def test_eager_transform(variant, r, f, transform):
    want = slope(f, X)
    if not r.linear and transform in FORWARD:
        with refused(r): TRANSFORMS[transform](f)
        return
    assert torch.allclose(TRANSFORMS[transform](f), want, atol=1e-5*want.abs().max(), rtol=0)

@pytest.mark.parametrize('r, f', variants() + seeded())
def test_values_under_transforms(r, f):
    "The same value, also at infinity, nan and -0, whichever way the gradient is written."
    x = torch.cat([X, torch.tensor([math.inf, -math.inf, math.nan, 3e38, -8388609.])])
    each = torch.vmap(f)
    ways = [lambda x: each(x[None])[0] if r.random else each(x), torch.jit.trace(lambda x: f(x), (x,))]
    ways += [lambda x: torch.func.vjp(f, x)[0], torch.inference_mode(f), torch.no_grad(f)]
    if r.linear: ways.append(lambda x: torch.func.jvp(f, (x,), (x,))[0])
    for w in ways: assert (same if on_grid(r, f) else near)(w(x), f(x))

def check_compiled(r, f, values, slopes, x):
    "Values to 8 ulp (bit for bit on the grid), slopes to 1e-5 of the largest; infinity, nan and -0 included."
    want = slope(f, x)
    assert torch.allclose(slopes, want, atol=1e-5*want[:len(X)].abs().max(), rtol=0, equal_nan=True), r.name
    assert (same if on_grid(r, f) else near)(values, f(x)), r.name
    assert torch.equal(values[:len(X)].signbit(), f(X).signbit()), r.name

WIDE = torch.cat([X, torch.tensor([math.inf, -math.inf, math.nan, 3e38])])

def check_group(group, backend):
    n = len(group)
    g = compiled(side_by_side([f for _,f in group]), backend)
    values = g(*[WIDE.clone() for _ in range(n)])
    xs = leaves(WIDE, n)
    ys = g(*xs)
    found = torch.autograd.grad([y.sum() for y in ys], xs)
    for (r, f),v,y,s in zip(group, values, ys, found, strict=True):
        check_compiled(r, f, v, s, WIDE)
        check_compiled(r, f, y.detach(), s, WIDE)

@pytest.mark.slow
@grouped(quick=1)
def test_compiled(group):
    "The whole of torch.compile but the code generation, on which see below."
    check_group(group, 'aot_eager')

@grouped(n=4, quick=0)
def test_inductor(group):
    "With the code generated, by a compiler of C++, and run."
    check_group(group, 'inductor')

INNER = {
    'grad':         lambda f: torch.func.grad(summed(f)),
    'vmap of grad': lambda f: torch.vmap(torch.func.grad(f)),
    'jvp':          lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]}

def check_transform(group, inner, backend):
    n,fs = len(group),[f for _,f in group]
    if inner == 'vmap': got = slopes(compiled(side_by_side([torch.vmap(f) for f in fs]), backend), X, n)
    else: got = compiled(side_by_side([INNER[inner](f) for f in fs]), backend)(*[X.clone() for _ in range(n)])
    for (r, f),g in zip(group, got):
        want = slope(f, X)
        assert torch.allclose(g, want, atol=1e-5*want.abs().max(), rtol=0), r.name

@pytest.mark.slow
@pytest.mark.parametrize('inner', ['vmap of grad', 'jvp', 'grad'])
@grouped(variants(lambda r: r.linear))
def test_compiled_transform(group, inner):
    check_transform(group, inner, 'aot_eager')

@pytest.mark.parametrize('inner', INNER)
@pytest.mark.parametrize('r, f', variants(lambda r: not r.linear))
def test_compiled_transform_refused(r, f, inner):
    "Up to torch 2.10 Dynamo says in words of its own that an exception was met."
    with pytest.raises(Exception) if older('2.11') else refused(r): compiled(INNER[inner](f), 'aot_eager')(X)

@pytest.mark.parametrize('inner', (*INNER, 'vmap'))
@grouped([p for p in variants(lambda r: r.linear) if p.id in KINDS], quick=0)
def test_inductor_transform(group, inner):
    """The derivative taken inside the compiled function, or a batched function differentiated outside of it, for a row
    of each kind: the graphs are those of `test_compiled_transform`, and the code generator sees the same operations."""
    check_transform(group, inner, 'inductor')

@pytest.mark.slow
@grouped()
def test_dynamic_shapes(group):
    "At most two graphs for any number of sizes."
    counter = torch._dynamo.testing.CompileCounter()
    g = compiled(side_by_side([f for _,f in group]), counter)
    for n in (5, 6, 7, 13):
        for (r, f),y in zip(group, g(*[X[:n].clone() for _ in group])): assert near(y, f(X[:n])), r.name
    assert counter.frame_count <= 2

TWICE = with_knobs(lambda r, f, k: k.learns and k.name in ('alpha', 'amplitude', 'rho', 'o') and f is r.f)
TWICE += [pytest.param(*p.values, None, id=p.id) for p in variants(only=lambda r, f: f is r.f) + seeded()]

def check_two(group, **how):
    """Formulas that read pi and other numbers, twice in a graph, with a gradient, also of a knob: with `dynamic=True`
    Dynamo makes an input of each float of a module, which the second Function of a graph may not take."""
    knobs = [None if k is None else torch.tensor(k.default, requires_grad=True) for *_,k in group]
    learned = [v for v in knobs if v is not None]
    def of(f, k, v): return lambda x: f(f(2*x) if v is None else f(2*x, **{k.name: v}))
    def all_of(*xs): return tuple(of(f, k, v)(x) for (_,f,k),v,x in zip(group, knobs, xs, strict=True))
    g = compiled(all_of, **how)
    for n in (5, 9):
        xs = leaves(X[:n], len(group))
        (ys,us),(zs,ws) = ((y, torch.autograd.grad([v.sum() for v in y], xs+learned)) for y in (g(*xs), all_of(*xs)))
        for (r,f,_),y,z in zip(group, ys, zs, strict=True): assert (same if on_grid(r, f) else near)(y, z), r.name
        for u,w in zip(us, ws, strict=True):
            assert torch.allclose(u, w, rtol=1e-4, atol=1e-5*w.abs().max(), equal_nan=True)

@pytest.mark.slow
@grouped(TWICE)
def test_two_in_a_graph_of_any_size(group): check_two(group, dynamic=True)

@pytest.mark.slow
@grouped([p for p in TWICE if p.id in ('soft_round-alpha', 'arctan_spike-alpha')])
def test_two_in_a_graph_of_sizes_met(group):
    "Without `dynamic=True` numbers stay numbers, and what changes is the size."
    check_two(group)

@pytest.mark.parametrize('r, f', variants(lambda r: r.linear) + seeded())
def test_second_derivatives(r, f):
    """The hessian by two reverse passes, by forward over reverse, and by
    differentiating the slope numerically (h = 1e-6), with the same noise."""
    x = torch.tensor([-1.3, -.3, .2, .77, 1.7, -1+1e-3, -.5-1e-3, .5+1e-3, 2-1e-3], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    first, = torch.autograd.grad((f(leaf)*leaf).sum(), leaf, create_graph=True)     # f + x f', so that it has a graph
    second, = torch.autograd.grad(first.sum(), leaf)
    curvature = second - 2*slope(f, x)
    numeric = x*(slope(f, x+1e-6)-slope(f, x-1e-6))/2e-6
    assert torch.allclose(curvature, numeric, atol=1e-6)
    assert (curvature.abs().max() > .1) == (numeric.abs().max() > .1)
    hessian = torch.func.hessian(lambda x: (f(x)*x).sum())(x)
    assert torch.allclose(hessian.diagonal(), second, atol=1e-9)

@pytest.mark.parametrize('r, f', some_quickly(variants(), *QUICK))
def test_export(r, f):
    "torch.export keeps the value."
    for g in (f, partial(f, step=.5))[:1+r.grid]: assert near(exported(g, X).module()(X), g(X))

def exported_ops(f): return [n.target for n in exported(f, X).graph.nodes if n.op == 'call_function']

@pytest.mark.parametrize('r, f', variants(only=on_grid))
def test_export_is_bare(r, f):
    "A hard estimator leaves no trace of its gradient (`torch.round` is one node)."
    ops = exported_ops(f)
    assert torch.ops.aten.detach.default not in ops
    if r.grid and r.name not in ('clipped_round', 'trust_round'):
        assert torch.ops.aten.detach.default not in exported_ops(partial(f, step=.5))
    if r.name == 'round_ste' and not getattr(f, 'keywords', {}) or getattr(f, 'keywords', {}).get('hard'):
        assert ops == [torch.ops.aten.round.default]

@pytest.mark.slow
@grouped(quick=1)
def test_onnx(group):
    "The dynamo exporter, run by ONNX Runtime."
    xs = tuple(X.clone() for _ in group)
    ys = through_onnx(Calls(side_by_side([f for _,f in group])), xs, xs)
    for (r, f),y in zip(group, ys, strict=True): assert torch.allclose(y, f(X), atol=1e-6), r.name

@all_variants
def test_autocast_keeps_dtype(r, f):
    for x in (X, X.bfloat16()):
        with torch.autocast('cpu', torch.bfloat16): inside = f(x)
        assert same(inside, f(x)) and inside.dtype == x.dtype

@pytest.mark.parametrize('r, f', variants() + seeded())
def test_meta_and_fake(r, f):
    from torch._subclasses.fake_tensor import FakeTensorMode
    y = f(torch.empty(3, 4, device='meta', dtype=torch.bfloat16))
    assert y.shape == (3, 4) and y.dtype == torch.bfloat16 and y.is_meta
    with FakeTensorMode(allow_non_fake_inputs=True):                        # a seed
        x = torch.empty(3, 4, requires_grad=True)
        f(x).sum().backward()
        assert x.grad.shape == (3, 4)

@all_variants
def test_threads_share_nothing(r, f):
    from concurrent.futures import ThreadPoolExecutor
    xs = [torch.randn(1000, generator=generator(i)) for i in range(8)]
    with ThreadPoolExecutor(4) as pool: got = list(pool.map(partial(slope, f), xs))
    assert all(same(g, slope(f, x)) for g,x in zip(got, xs))

NUMBERED = [r for r in catalog if r.knobs and not r.random and not isinstance(r.knobs[0].default, int)]
knobbed = pytest.mark.parametrize('r', NUMBERED, ids=lambda r: r.name)

@knobbed
def test_knob_tensor_equals_number(r):
    "A 0-d tensor, on whichever path it takes, is the number; a column of them is a row per value."
    for k in r.knobs:
        values = [v for v in (k.lo, k.default, k.hi, k.soft, k.hard) if v is not None]
        rows = torch.stack([r.f(X, **{k.name: v}) for v in values])
        column = torch.tensor(values)[:, None]
        assert near(r.f(X, **{k.name: column}), rows)
        for v in values:
            number,wide = {k.name: v},{k.name: torch.tensor(v, dtype=torch.float64)}
            learning = {k.name: torch.tensor(v, requires_grad=True)}
            assert near(r.f(X, **{k.name: torch.tensor(v)}), r.f(X, **number))
            assert near(r.f(X, **wide), r.f(X, **number))
            assert near(r.f(X, **learning).detach(), r.f(X, **number))
            want = slope(r.f, X, **number)
            assert torch.allclose(slope(r.f, X, **learning), want, atol=1e-5*want.abs().max(), rtol=0)
        if r.smooth: assert r.f(X, **{k.name: column}, hard=True).shape == rows.shape

@pytest.mark.slow
@pytest.mark.parametrize('r', some_quickly([pytest.param(r, id=r.name) for r in NUMBERED], *QUICK))
def test_knob_gradient(r):
    """Where the slope is the derivative, gradcheck in float64 for a shared knob, one per channel, and with the step and
    offset; the same in pieces."""
    x = torch.tensor([[-1.3, -.2, .31], [.55, 1.7, 2.9]], dtype=torch.float64, requires_grad=True)
    for k in r.knobs:
        f = lambda x, v: r.f(x, **{k.name: v})
        if not k.learns:
            y = f(x, torch.tensor(k.default, dtype=x.dtype, requires_grad=True))
            assert torch.equal(y, f(x, k.default))
            continue
        for shape in ((), (3,), (2, 1))*r.exact_slope:
            v = torch.full(shape, k.default, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(f, (x, v), check_forward_ad=True)
            assert torch.autograd.gradgradcheck(f, (x, v))
        v = torch.tensor(k.default, requires_grad=True)
        def grad(f, x): return torch.autograd.grad(f(x, v).sum(), v)[0]
        big = torch.randn(200_000, generator=generator())*3
        parts = sum(grad(f, b).double() for b in big.split(10_000))
        whole = grad(f, big).double()                     # a float32 sum of 2e5 terms of either sign
        assert torch.allclose(whole, parts, rtol=1e-3, atol=1e-3)

LEARNED = with_knobs(lambda r, f, k: isinstance(k.default, float) and f is r.f)
LEARNED.sort(key=lambda p: p.values[0].name not in KINDS)

@pytest.mark.slow
@grouped([p for p in LEARNED if p.values[2].learns])
def test_knob_gradient_compiled(group):
    vs = [torch.tensor(k.default, requires_grad=True) for *_,k in group]
    def f(x, *vs): return [g(x, **{k.name: v}) for (_,g,k),v in zip(group, vs)]
    def grads(f): return torch.autograd.grad([y.sum() for y in f(X, *vs)], vs)
    for got,want in zip(grads(compiled(f, 'aot_eager')), grads(f)):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)

@pytest.mark.slow
@grouped(LEARNED)
def test_annealing_recompiles_nothing(group):
    """A buffer that changes: one graph. A Python float that changes: two, then it is symbolic. (A third where it meets
    the end of what it may be, which is checked apart.)"""
    values = [torch.linspace(k.default, k.hi, 6).tolist()[:-1] for *_,k in group]
    for make,most in ((torch.tensor, 1), (float, 2)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        g = compiled(lambda x, vs: [f(x, **{k.name: v}) for (_,f,k),v in zip(group, vs)], counter)
        for vs in zip(*values):
            for (_,f,k),v,y in zip(group, vs, g(X, [make(v) for v in vs])): assert near(y, f(X, **{k.name: v}))
        assert counter.frame_count <= most

def learn(fs, wrap=lambda g: g):
    "Gradients to the input, a step per row and an offset per column, of each of `fs`, all in one `wrap`ped function."
    grids = [leaves(torch.tensor([[-1.3, -.2, .31], [.55, 1.7, 2.9]]), 1) + leaves(torch.tensor([[.3], [.7]]), 1)
        + leaves(torch.tensor([.1, -.2, .4]), 1) for _ in fs]
    def g(grids): return [f(x, step=step, offset=offset) for f,(x, step, offset) in zip(fs, grids)]
    flat = [t for grid in grids for t in grid]
    found = torch.autograd.grad(sum(y.square().sum() for y in wrap(g)(grids)), flat)
    return [found[i:i+3] for i in range(0, len(found), 3)]

def check_learned_grid(group, backend):
    fs = [f for _,f in group]
    for (r, f),got,want in zip(group, learn(fs, lambda g: compiled(g, backend)), learn(fs)):
        for a,b in zip(got, want): assert torch.allclose(a, b, atol=1e-4), r.name

@pytest.mark.slow
@grouped(variants(lambda r: r.grid))
def test_learned_grid_compiled(group):
    "A step and an offset that learn, per channel: compiled equals eager."
    check_learned_grid(group, 'aot_eager')
    halves = [partial(f, step=.5) for _,f in group]
    got = compiled(side_by_side(halves), 'aot_eager')(*[X.clone() for _ in group])
    for (r, _),f,y in zip(group, halves, got): assert near(y, f(X)), r.name

@grouped([p for p in variants(lambda r: r.grid) if p.id in ('round_ste', 'soft_round', 'clipped_round')], quick=0)
def test_learned_grid_inductor(group):
    "The same with the code generated and run: a line, a closed form, ends."
    check_learned_grid(group, 'inductor')
