"""The floor itself, with estimators made here: what the pages above it take for granted. Values are chosen by hand:
exact in float32, or the bound says why not."""
import inspect
import math
from functools import partial
from itertools import permutations
import pytest
import torch
from estimators import FLOATS, HALVES, Calls, back, compiled, kept, near, same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.functional import jacobian
from shok_nb import clipped_round, soft_round
from shok_nb.catalog import catalog
from shok_nb.engine import core, parts, pieces
from shok_nb.engine.arguments import check_count, check_input, check_knob
from shok_nb.engine.core import estimator, straight_through
from shok_nb.engine.parts import (
    as_scalar,
    broadcast_with,
    by_mode,
    cached,
    finite,
    maths,
    name_of,
    nan_to_zero,
    pick,
    saturate,
    sign_of,
    worked_out_once,
)
from shok_nb.engine.staircases import staircase

INF,NAN = math.inf,math.nan
cubic = staircase('cubic', lambda q: q**3, lambda q: 3*q*q, odd=False)
gentle = staircase('gentle', lambda q, a: a*q, lambda q, a: a*torch.ones_like(q), odd=True, a=dict(hi=2.))
plain = estimator('plain', torch.round)
bent = estimator('bent', lambda v, a: a*v.abs(), lambda v, a: a*v.sign(), lambda v, a: a*v.abs(), near=False,
    a=dict(lo=1., open=True))
far = estimator('far', lambda v: v+5, lambda v: torch.ones_like(v), lambda v: v+5)            # lies about `near`
free = estimator('free', lambda v: v+5, lambda v: torch.ones_like(v), lambda v: v+5, near=False)

def leaf(v, dtype=torch.float32): return torch.tensor(v, dtype=dtype, requires_grad=True)
def grads(y, *leaves): return torch.autograd.grad(y.sum(), leaves)
def transformed(f): return lambda *args: torch.func.vmap(lambda _: f(*args))(torch.zeros(1))[0]
def pushed(f): return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[0]
def slopes(f, x):
    "Of backward, in a transform, of each element for itself, in forward mode."
    yield back(f, x)[1]
    yield torch.func.grad(lambda x: f(x).sum())(x)
    yield torch.func.vmap(torch.func.grad(f))(x)
    yield torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
WAYS = dict(eager=lambda f: f, vmap=transformed, jvp=pushed, compiled=compiled)
ways = pytest.mark.parametrize('way', WAYS.values(), ids=WAYS)

# --- values
@ways
@pytest.mark.parametrize('f', (plain, cubic, cubic.hard), ids=('plain', 'cubic', 'hard'))
def test_edges(f, way):
    "Infinity, nan and both zeros, whichever way the gradient is written."
    x = torch.tensor([INF, -INF, NAN, 0., -0., 2., -3.])
    assert same(way(f)(x), x)
    assert same(way(f)(torch.tensor([-.25, .25]))*0, torch.tensor([-0., 0.])) or f is cubic

@pytest.mark.slow
@ways
def test_staircase(way):
    "n + (x-n)³ and its slope, on both sides of n, in every way; hard rounds with that slope."
    x = torch.tensor([.25, -.25, 1.75, -1.5, 2.5, 7.])
    q = x-x.round()
    assert torch.equal(way(cubic)(x), x.round()+q**3)
    assert torch.equal(way(lambda x: cubic(x, hard=True))(x), x.round())
    assert torch.equal(way(lambda x: gentle(x, .5))(x), x.round()+.5*q)
    for g,want in ((cubic, 3*q*q), (cubic.hard, 3*q*q), (lambda x: gentle(x, .5), torch.full((6,), .5))):
        for got in (*slopes(g, x), back(compiled(g), x)[1]): assert torch.equal(got, want)

def test_slope_at_infinity():
    "0 for a curve, 1 for a straight-through slope, in every way."
    x = torch.tensor([INF, -INF])
    for f,want in ((cubic, 0.), (cubic.hard, 0.), (plain, 1.)):
        for got in slopes(f, x): assert got.tolist() == [want]*2

def test_knob_at_infinity():
    "The value there is no matter of the knob, in every way."
    x,a = torch.tensor([INF, -INF]),leaf(.5)
    assert grads(gentle(x, a), a)[0] == 0
    for v in x: assert torch.func.grad(lambda a: gentle(v, a))(a.detach()) == 0

@ways
@pytest.mark.parametrize('dtype', HALVES, ids=str)
@pytest.mark.slow
def test_half_precision(dtype, way):
    "Worked out in float32, rounded once, and given back in the dtype that came; on a grid of float32 too."
    x = torch.tensor([.3, 1.7, -2.6, 100.], dtype=dtype)
    for f in (plain, cubic):
        assert same(way(f)(x), f(x.float()).to(dtype))
        g = lambda x: f(x, step=.3, offset=.1)
        assert same(way(g)(x), g(x.float()).to(dtype))
    step = torch.tensor(.3)
    assert same(way(lambda x: plain(x, step=step))(x), plain(x.float(), step=step).to(dtype))

@pytest.mark.slow
@ways
def test_grid(way):
    "offset + step n: numbers, tensors, one of the two."
    x = torch.tensor([.3, .77, -2.6, .125])
    for step,offset in ((.5, 0.), (1., .25), (.5, .25), (2., -.5)):
        want = ((x-offset)/step).round()*step + offset
        assert torch.equal(way(lambda x: plain(x, step=step, offset=offset))(x), want)
        assert torch.equal(way(lambda x: plain(x, step=torch.tensor(step), offset=torch.tensor(offset)))(x), want)
        assert torch.equal(way(lambda x: plain(x, step=torch.full((4,), step)))(x), (x/step).round()*step)
        assert torch.equal(way(lambda x: plain(x, offset=torch.full((4,), offset)))(x), (x-offset).round()+offset)

def test_near_is_two_steps():
    "A value that `near` holds within two steps is cut there, to the digit; without it nothing is. No grid, no cut."
    x = torch.tensor([3., -3.])
    for step,offset in ((.5, 0.), (.5, .25), (torch.tensor(.5), 0.)):
        assert torch.equal(far(x, step=step, offset=offset), x+1)
        assert torch.equal(free(x, step=step, offset=offset), x+2.5)
    down = estimator('down', lambda v: v-5, None)
    assert torch.equal(down(x, step=.5), x-1)
    assert torch.equal(far(x), x+5)
    within = estimator('within', lambda v: v+1.75, None)
    assert torch.equal(within(x, step=.5), x+.875)
    huge = torch.tensor([3e38, -3e38])
    assert torch.equal(plain(huge, step=.3), plain(huge, step=torch.tensor(.3)))
    assert plain(huge, step=.3).isfinite().all()

def test_broadcast_of_a_knob():
    "A value of the knob's shape is a tensor of its own, not a view; x gets its own shape back, summed."
    x = leaf([[.25], [1.75]])
    step = torch.tensor([.5, 1., 2.])
    for f in (plain, cubic):
        y = f(x, step=step)
        assert y.shape == (2, 3) and grads(y, x)[0].shape == (2, 1)
        assert torch.equal(y.detach(), torch.stack([f(x[:, 0].detach(), step=s) for s in step.tolist()], 1))
    y = gentle(x.detach(), step, hard=True)
    assert y.shape == (2, 3) and y.stride() == (3, 1)
    y[0, 0] = 9.
    assert y[0, 1] == 0
    gx, = grads(plain(x, step=step), x)
    assert gx.flatten().tolist() == [3., 3.]

# --- gradients
@pytest.mark.slow
def test_grid_gradients():
    """Of a slope of 1: F(v)-v for the step, 0 for the offset; of a curve: F(v) - v F'(v)
    and 1-F'(v). By hand at eighths, exact."""
    x,v = [.75, -.5, 3.],torch.tensor([.75, -.5, 3.])/2
    q = v-v.round()
    kinds = (plain, v.round(), torch.ones(3)),(cubic, v.round()+q**3, 3*q*q),(cubic.hard, v.round(), 3*q*q)
    for f,value,slope in kinds:
        for weights in (torch.ones(3), torch.tensor([1., 2., -1.])):
            a,s,o = leaf(x),leaf(2.),leaf(0.)
            gx,gs,go = torch.autograd.grad(f(a, step=s, offset=o), (a, s, o), weights)
            assert torch.equal(gx, weights*slope)
            assert gs == (weights*(value-v*slope)).sum() and go == (weights*(1-slope)).sum()
            a,s,o = leaf(x),leaf(2.),leaf(0.)
            others = torch.autograd.grad(compiled(lambda a, s, o: f(a, step=s, offset=o))(a, s, o), (a, s, o), weights)
            assert all(torch.allclose(p, q, atol=1e-6) for p,q in zip(others, (gx, gs, go)))

@pytest.mark.parametrize('wanted',
    ([0], [1], [2], [0, 1], [0, 2], [1, 2], [3], [0, 3], [1, 3], [2, 3], [0, 1, 2, 3]), ids=str)
def test_only_what_is_wanted(wanted):
    "Of x, step, offset and a knob each gets its own gradient, whichever of the others do."
    values = [.75, -.5, 3.],.5,.25,.5
    def ask(which):
        ts = [leaf(v) if i in which else torch.tensor(v) for i,v in enumerate(values)]
        y = gentle(ts[0], ts[3], step=ts[1], offset=ts[2])
        return y.detach(),grads(y, *[ts[i] for i in which])
    (y,some),(z,every) = ask(wanted),ask([0, 1, 2, 3])
    assert torch.equal(y, z) and all(torch.equal(g, every[i]) for i,g in zip(wanted, some))
    x,s,o,a = map(torch.tensor, values)
    v = (x-o)/s
    q = v-v.round()
    want = torch.full((3,), .5),(v.round()+.5*q-.5*v).sum(),torch.tensor(1.5),(q*s).sum()
    assert all(torch.allclose(g, w, atol=1e-6) for g,w in zip(every, want))

def test_several_knobs_learn():
    "Each its own, by number and by tensor; one that does not learn has none."
    two = estimator('two', lambda v, a, b: a*v+b, lambda v, a, b: a+0*v, lambda v, a, b: a*v+b, near=False, a={}, b={})
    x = torch.tensor([1., 2., 4.])
    for learn in ('a', 'b', 'ab'):
        a,b = (torch.tensor(v, requires_grad=n in learn) for n,v in (('a', 3.), ('b', 5.)))
        got = grads(two(x, a, b, step=2.), *[t for t in (a, b) if t.requires_grad])
        assert [g.item() for g in got] == [{'a': 7., 'b': 6.}[n] for n in learn]
    a = leaf([1., 1., 1.])
    assert grads(two(x, a, 5., step=2.), a)[0].tolist() == [1., 2., 4.]

@pytest.mark.parametrize('f', (plain, cubic, cubic.hard), ids=('plain', 'cubic', 'hard'))
def test_step_at_infinity(f):
    "An infinite x teaches the step nothing, and the rest of the tensor still does."
    for at in ([INF, .75], [-INF, .75]):
        x,s = leaf(at),leaf(.5)
        with_it, = grads(f(x, step=s), s)
        alone = leaf(.5)
        assert with_it == grads(f(leaf([.75]), step=alone), alone)[0]

def test_clipped_step_at_infinity():
    "A value that is clipped there is what the step is multiplied by, and nothing else; a sum of many is finite."
    clip = estimator('clip', lambda v: v.clamp(-2, 3), lambda v: ((v >= -2) & (v <= 3)).to(v.dtype), near=False)
    for at,want in ((INF, 3.), (-INF, -2.), (100., 3.)):
        s = leaf(.5)
        assert grads(clip(torch.tensor([at]), step=s), s)[0] == want
    s = leaf(1.)
    many = clipped_round(torch.full((8,), INF), lower=-3e38, upper=3e38, step=s)
    assert grads(many, s)[0] == 8*torch.tensor(torch.finfo(torch.float32).max**.5)

def test_dtypes_of_gradients():
    "Each in the dtype of what it is for."
    for dtype in FLOATS:
        for knob in (torch.float32, torch.float64):
            x,s,a = leaf([.3, 1.7], dtype),leaf(.5, knob),leaf(.5, knob)
            y = gentle(x, a, step=s)
            assert y.dtype == dtype and [g.dtype for g in grads(y, x, s, a)] == [dtype, knob, knob]
            wanted = True, True, False, True
            with torch.no_grad(): asked = bent.backward(torch.ones_like(x), x, s, 0., a, needs=wanted)
            assert [g if g is None else g.dtype for g in asked] == [dtype, knob, None, knob]

def test_second_derivative():
    "Of a slope that depends on x, by a second backward with a graph, a third, and none where none is asked for."
    x = leaf([.25, 1.75])
    first, = torch.autograd.grad(cubic(x).sum(), x, create_graph=True)
    second, = torch.autograd.grad(first.sum(), x, create_graph=True)
    third, = torch.autograd.grad(second.sum(), x)
    q = torch.tensor([.25, -.25])
    assert torch.equal(first, 3*q*q) and torch.equal(second, 6*q) and torch.equal(third, torch.full((2,), 6.))
    again, = torch.autograd.grad(cubic(x).sum(), x)
    assert not again.requires_grad
    s = leaf(.5)
    gx,gs = torch.autograd.grad(cubic(x, step=s).sum(), (x, s), create_graph=True)
    assert gx.requires_grad and gs.requires_grad
    wide = tuple(leaf(v, torch.float64) for v in ([.3, 1.7], .5, 2.))
    assert torch.autograd.gradgradcheck(lambda x, s, a: bent(x, a, step=s), wide)

def saved(f):
    "The shapes that autograd keeps."
    return [tuple(t.shape) for t in kept(f)]

def test_what_is_kept():
    "x for a slope, x and tensor knobs where one learns, nothing for a slope of 1: also on a grid that does not learn."
    x,s = torch.zeros(4, requires_grad=True),torch.tensor(.5)
    assert saved(lambda: plain(x)) == saved(lambda: plain(x, step=.5)) == saved(lambda: plain(x, step=s)) == []
    assert saved(lambda: cubic(x)) == [(4,)]
    assert saved(lambda: plain(x, step=torch.ones(4))) == []
    for t in (x, x.detach()):                             # of a step its size, and for its sign itself if it has one
        assert sorted(saved(lambda: plain(t, step=leaf(.5)))) == [(), (4,)]
        assert sorted(saved(lambda: plain(t, step=leaf(-.5)))) == [(), (), (4,)]
    assert saved(lambda: plain(x.detach(), step=s)) == saved(lambda: cubic(x.detach())) == []
    with torch.no_grad(): assert not cubic(x).requires_grad and saved(lambda: cubic(x)) == []

def test_a_constant_knob_has_no_gradient():
    "A tensor that does not learn changes nothing but the value, on every path."
    s = torch.tensor(.5)
    for f in (plain, cubic):
        x = leaf([.3, 1.7])
        y = f(x, step=s)
        assert same(y, f(x, step=.5)) and y.requires_grad and not f(x.detach(), step=s).requires_grad
        assert torch.equal(grads(y, x)[0], grads(f(x, step=.5), x)[0])
    assert plain(torch.tensor([.3]), step=leaf(.5)).requires_grad

def test_tangents_of_the_grid():
    "Forward mode in the step and the offset is backward mode."
    x,grid = torch.tensor([.3, 1.7, -2.6]),(torch.tensor(.5), torch.tensor(.1))
    for f in (plain, cubic, cubic.hard):
        def on(s, o): return f(x, step=s, offset=o)
        forward = jacobian(on, grid, vectorize=True, strategy='forward-mode')
        for got,want in zip(forward, jacobian(on, grid)): assert torch.allclose(got, want, atol=1e-5)

def test_slope_of_a_transform_at_integers():
    "A curve whose slope is not 0 at integers keeps it there, with the value exact and the zero signed."
    x = torch.tensor([0., -0., 2., -3.])
    for w in WAYS.values(): assert same(w(lambda x: gentle(x, .5))(x), x)
    assert torch.func.vmap(torch.func.grad(lambda x: gentle(x, .5)))(x).tolist() == [.5]*4

def tensor_knobs(r):
    "Each pair of a row's knobs, step and offset among them, as name, value and whether it learns."
    knobs = [(k.name, float(k.default), k.learns) for k in r.knobs if not isinstance(k.default, int)]
    return [*permutations(knobs + [('step', .5, True), ('offset', .1, True)]*r.grid, 2)]

@pytest.mark.parametrize('r', [r for r in catalog if tensor_knobs(r) and not r.random], ids=lambda r: r.name)
def test_knobs_wider_than_x_that_broadcast_each_other(r):
    """Thirty values of one and seven of the other for a single x: gradients as of 210 values of each, summed; and as
    the transform has them. 1e-4, float32 sums in another order."""
    for hard in (False, True)[:1+r.smooth]:
        kw = dict(hard=True) if hard else {}
        for (a, va, la),(b, vb, lb) in tensor_knobs(r):
            def f(x, one, other): return r.f(x, **{a: one, b: other}, **kw)
            ts = torch.full((1,), .3),torch.full((30,), va),torch.full((7, 1), vb)
            learns = True,la,lb
            def grads_of(ts):
                given = [t.clone().requires_grad_(l) for t,l in zip(ts, learns)]
                return torch.autograd.grad(f(*given).sum(), [t for t in given if t.requires_grad])
            alone = grads_of([t.expand(7, 30) for t in ts])
            y,back = torch.func.vjp(f, *ts)
            transformed = [g for g,l in zip(back(torch.ones_like(y)), learns) if l]
            shapes = [t.shape for t,l in zip(ts, learns) if l]
            for got in (grads_of(ts), transformed):
                for g,shape,full in zip(got, shapes, alone, strict=True):
                    assert g.shape == shape and torch.allclose(g, full.sum_to_size(shape), rtol=1e-4, atol=1e-3), (a, b)

# --- straight_through, pick, maths
@pytest.mark.parametrize('way', (lambda f: f, transformed), ids=('eager', 'vmap'))
def test_straight_through(way):
    "The value bit for bit, wherever infinity and nan are, in a new tensor."
    hard = torch.tensor([1., -0., INF, -INF, INF, NAN, 2., 3., -INF])
    soft = torch.tensor([.5, 5., INF, -INF, 1., 1., INF, -INF, INF])
    y = way(straight_through)(hard, soft)
    assert same(y, hard) and y.data_ptr() not in (hard.data_ptr(), soft.data_ptr())
    t,h = soft.clone().requires_grad_(),hard.clone().requires_grad_()
    gh,gt = torch.autograd.grad(way(straight_through)(h, t), (h, t), torch.ones(9), allow_unused=True)
    assert gh is None or not gh.any()
    assert gt[[0, 1, 2, 3, 4, 5]].tolist() == [1.]*6

def test_straight_through_tangent():
    hard,soft = torch.tensor([1., INF, INF]),torch.tensor([.5, INF, 1.])
    y,t = torch.func.jvp(lambda s: straight_through(hard, s), (soft,), (torch.tensor([3., 5., 7.]),))
    assert same(y, hard) and t.tolist() == [3., 5., 7.]
    for bad in (soft[:2], soft.double()):
        with pytest.raises(ValueError, match='^straight_through: hard is .*make them alike'):
            straight_through(hard, bad)
    with pytest.raises(TypeError, match='^straight_through: hard must'): straight_through([1.], soft)
    with pytest.raises(TypeError, match='^straight_through: soft must'): straight_through(hard, [1.])

def test_pick():
    "A bool calls one, a tensor both."
    called = []
    def yes(v): called.append('yes'); return v+1
    def no(v): called.append('no'); return v-1
    v = torch.tensor([1., 2.])
    assert torch.equal(pick(True, yes, no, v), v+1) and called == ['yes']
    assert torch.equal(pick(False, yes, no, v), v-1) and called == ['yes', 'no']
    assert pick(torch.tensor([True, False]), yes, no, v).tolist() == [2., 1.] and called == ['yes', 'no']*2
    assert maths(2.) is math and maths(2) is math and maths(v) is torch

# --- arguments
def test_ranges():
    "Each knob's own, in order, open or closed, at its very ends."
    x = torch.zeros(2)
    assert torch.equal(gentle(x, 2.), x) and torch.equal(gentle(x, 0), x)
    for f,args,kw,arg,text in (
            (gentle.soft, (2.1,), {}, 'a', r'\[0, 2\]'),
            (gentle.soft, (-.1,), {}, 'a', r'\[0, 2\]'),
            (bent, (1.,), {}, 'a', r'\(1, inf\)'),
            (bent, (INF,), {}, 'a', r'\(1, inf\)'),
            (plain, (), dict(step=0.), 'step', r'\(0, inf\)'),
            (plain, (), dict(step=INF), 'step', r'\(0, inf\)'),
            (plain, (), dict(offset=-INF), 'offset', r'\(-inf, inf\)'),
            (plain, (), dict(offset=NAN), 'offset', r'\(-inf, inf\)')):
        with pytest.raises(ValueError, match=f'^{f.name}: {arg} must be in {text}, got'): f(x, *args, **kw)
    default = estimator('default', lambda v, a: v, None, a={})
    assert torch.equal(default(x, INF), x) and torch.equal(default(x, 0.), x)
    assert torch.equal(default(x, torch.tensor(-3.)), x)
    with pytest.raises(ValueError, match=r'\[0, inf\], got -1e-09'): default(x, -1e-9)

def test_check_knob():
    x = torch.zeros(2, 3)
    for k in (1., 1, torch.tensor(1.), torch.ones(3), torch.ones(2, 1), torch.ones(4, 1, 3), torch.ones(())):
        got = check_knob(k, x, 'f', 'k')
        assert got is k or type(k) is int and type(got) is float and got == 1.
    assert check_knob(0, x, 'f', 'k') == 0 and check_knob(INF, x, 'f', 'k') == INF
    assert check_knob(2, x, 'f', 'k', 2., 2.) == 2
    inside = dict(open=True)
    for k,kw in ((-1e-30, {}), (0., inside), (INF, inside), (NAN, {}), (3, dict(hi=2.)), (1.5, dict(lo=2.))):
        with pytest.raises(ValueError, match=r'^f: k must be in [\[(].*[\])], got'): check_knob(k, x, 'f', 'k', **kw)
    for k in (torch.ones(2), torch.ones(2, 2)):
        with pytest.raises(ValueError, match='^f: k of shape .* does not broadcast with x of shape'):
            check_knob(k, x, 'f', 'k')
    with pytest.raises(ValueError, match='^f: k is on meta and x on cpu'):
        check_knob(torch.ones((), device='meta'), x, 'f', 'k')
    with pytest.raises(ValueError, match='^f: k is on cpu and x on meta'):
        check_knob(torch.ones(3), x.to('meta'), 'f', 'k')
    cpu = torch.ones(())
    assert check_knob(cpu, x.to('meta'), 'f', 'k') is cpu
    for k in (True, False, 'a', None, 1j):
        with pytest.raises(TypeError, match='^f: k must be a number or a torch.Tensor, got'): check_knob(k, x, 'f', 'k')
    with pytest.raises(TypeError, match='^f: k must be float16'): check_knob(torch.tensor(1), x, 'f', 'k')

def test_check_count():
    assert check_count(0, 'f', 'k') == 0 and check_count(10**6, 'f', 'k') == 10**6
    assert check_count(5, 'f', 'k', 5, 5) == 5
    for k,args,text in ((-1, (), '>= 0'), (1, (2,), '>= 2'), (6, (0, 5), r'in \[0, 5\]'), (4, (5, 9), r'in \[5, 9\]')):
        with pytest.raises(ValueError, match=f'^f: k must be {text}, got {k}$'): check_count(k, 'f', 'k', *args)
    for k in (True, 1., '1', None, torch.tensor(1)):
        with pytest.raises(TypeError, match='^f: k must be an int, got'): check_count(k, 'f', 'k')

def test_check_input():
    class Mine(torch.Tensor): pass
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ones = torch.ones(2)
    for t in (ones, torch.nn.Parameter(ones), ones.as_subclass(Mine), ones.double(), nested):
        assert check_input(t, 'f') is t
    for args,arg in (((1., 'f'), 'x'), ((1., 'f', 'y'), 'y')):
        with pytest.raises(TypeError, match=f'^f: {arg} must be a torch.Tensor, got float'): check_input(*args)

# --- the parts
def test_a_learning_knob_without_a_plain_form():
    "The value of an estimator is a constant to whatever learns in it, on every path."
    held = estimator('held', lambda v, a: a*torch.round(v), None, near=False, a={})
    x = torch.tensor([.3, 1.7])
    assert torch.func.grad(lambda a: held(x, a).sum())(torch.tensor(2.)) == 0
    assert torch.func.jvp(lambda a: held(x, a), (torch.tensor(2.),), (torch.tensor(1.),))[1].tolist() == [0., 0.]
    assert torch.equal(torch.func.grad(lambda x: held(x, torch.tensor(2.)).sum())(x), torch.ones(2))

def test_a_slope_without_a_plain_form():
    "Every path multiplies by it, on any grid; infinity stays, and a knob that learns says what is missing."
    f = estimator('f', lambda v, k: v.round(), lambda v, k: 1-k*(v-v.round()).abs(), k=dict(default=1., lo=0.))
    x = torch.tensor([1., 1.25, -.4, 2.125, -3.])
    for kw in ({}, dict(k=.5), dict(step=.5, offset=.125)):
        g = partial(f, **kw)
        _,want = back(g, x, create_graph=True)
        assert want.unique().numel() > 2 and torch.equal(pushed(g)(x), g(x))
        for got in slopes(g, x): assert torch.equal(got, want)
        assert not torch.vmap(torch.func.grad(torch.func.grad(g)))(x).any()
    ends = torch.tensor([INF, -INF, -0.])
    assert str(torch.func.jvp(f, (ends,), (torch.ones(3),))[0]) == str(ends)
    with pytest.raises(RuntimeError, match='^f: no knob learns without `plain`, see `estimator`$'):
        f(x, torch.tensor(1., requires_grad=True)).sum().backward()

def test_scalar_sign_finite_spread():
    v = torch.tensor([INF, -INF, NAN, 2., -.5, 0., -0.])
    assert same(sign_of(v), torch.tensor([1., -1., NAN, 1., -1., 1., 1.]))
    assert nan_to_zero(v)[2] == 0 and torch.equal(nan_to_zero(v)[3:], v[3:]) and nan_to_zero(v).isnan().sum() == 0
    for f in (finite, torch.compile(finite, backend='eager')): assert torch.equal(f(v), v.nan_to_num())
    for dtype in FLOATS:
        k = torch.tensor(.1, dtype=torch.float64)
        assert as_scalar(k, v.to(dtype)).dtype == as_scalar(.1, v.to(dtype)).dtype == dtype
        assert as_scalar(.1, v.to(dtype)) == k.to(dtype)
        assert as_scalar(.1, v).shape == ()
    y = torch.zeros(3, 1)
    assert broadcast_with(y, 1., torch.ones(3, 1)) is y and broadcast_with(y) is y
    z = broadcast_with(y, torch.ones(4), 2.)
    assert z.shape == (3, 4) and z.is_contiguous()

def test_what_a_function_is_called():
    assert name_of(soft_round) == name_of(partial(partial(soft_round, alpha=2.), alpha=3.)) == 'soft_round'
    assert [name_of(f) for f in (plain, lambda x: x, torch.nn.Identity())] == ['plain', 'f', 'Identity']

def test_each_way_runs_its_own_form():
    "Two forms that could not be confused: what runs as it is, and what code is generated from; a step learns by both."
    def climb(by): return lambda v: v+by
    two = estimator('two', climb(1), torch.ones_like, climb(1), compiled=climb(3), near=False)
    one = estimator('one', climb(1), torch.ones_like, climb(1), near=False)
    x,step = torch.tensor([.5, 2.]),leaf(1.)
    ways = (two, 1.), (compiled(two), 3.), (compiled(one), 1.)
    for f,by in ways: assert (f(x)-x).tolist() == [by, by]
    assert grads(two(x, step=step), step)[0] == 2.
    kernel = pieces.fused_kernel(partial(core._vjp, two, (True, True, False)), 'two_vjp', True, 'eager')
    assert kernel(torch.empty(2), [x, torch.ones(2)], [torch.tensor(1.), 0.])[0] == 6.

def test_gradients_of_a_batch():
    "Transforms of backward alone, which runs without gradients."
    x,a,seen = leaf([.5, -1.2, 2.]),leaf(3.),torch.eye(3)
    y = bent(x, a)
    def back(g, **kw): return torch.autograd.grad(y, (x, a), g, retain_graph=True, **kw)
    want = [torch.stack(w) for w in zip(*map(back, seen))]
    assert all(map(torch.equal, back(seen, is_grads_batched=True), want))
    assert all(map(torch.equal, torch.vmap(back)(seen), want))

def test_cached():
    "A thing is made once for equal arguments."
    make = cached(lambda *args: object())
    assert make(1) is make(1) and make(2) is not make(1)

def test_one_kernel_for_each_job(monkeypatch):
    """Where kernels are compiled there is one for each way, dtype and kind of grid, by name, and none where a knob
    learns: here with a stand-in for the compiler that calls the formula."""
    asked = []
    def fuse(f, name, grid):
        asked.append((name, grid))
        def run(to, ts, knobs):
            y,*sums = f(*(t.to(torch.float32) for t in ts), *knobs)
            to.copy_(y)
            return sums
        return run
    monkeypatch.setattr(core, 'fused_kernel', fuse)
    monkeypatch.setattr(core, 'can_fuse', lambda x: True)
    monkeypatch.setattr(pieces, '_FUSED', ('cpu',))
    job = staircase('job', lambda q, a: a*q, lambda q, a: a*torch.ones_like(q), odd=True, a={}).soft
    x = torch.tensor([.3, 1.7])
    def both(x, a=.5, **kw): return back(lambda x: job(x, a, **kw), x)
    want = x.round() + .5*(x-x.round())
    y,g = both(x)
    assert torch.equal(y, want) and g.tolist() == [.5, .5] and asked == [('job_value', False), ('job_vjp', False)]
    both(x, a=.25)
    both(x[:1])
    both(x, a=torch.tensor(.5))
    assert len(asked) == 2
    both(x, step=.5)
    both(x, step=.25, offset=.5)
    assert asked[2:] == [('job_value', True), ('job_vjp', True)]
    both(x.bfloat16())
    assert asked[4:] == [('job_value', False), ('job_vjp', False)]
    a = leaf(.5)
    for _ in range(2): assert grads(job(x, a), a)[0].isfinite()
    assert len(asked) == 6
    s = leaf(.5)
    assert grads(job(x, .5, step=s), s)[0].isfinite() and asked[6:] == [('job_vjp', True)]

def test_numbers_in_a_dtype():
    """The largest and smallest number of a dtype stay, those beyond are infinite or 0
    there; the message says so only then."""
    for dtype in (torch.float32, torch.float64):
        limits,x = torch.finfo(dtype),torch.zeros(2, dtype=dtype)
        least = limits.tiny*limits.eps
        for k in (limits.max, -limits.max, limits.tiny, least): assert check_knob(k, x, 'f', 'k', -INF) == k
        assert check_knob(least/2, x, 'f', 'k') == 0
    x = torch.zeros(2)
    for k,far in ((3.5e38, INF), (-3.5e38, -INF), (10**400, INF), (-10**400, -INF)):
        assert check_knob(k, x, 'f', 'k', -INF) == far
    assert math.copysign(1, check_knob(-1e-300, x, 'f', 'k', -INF)) == -1
    for k,text in (
            (-.5, 'got -0.5'),
            (1e-300, 'got 1e-300, which is 0 in torch.float32'),
            (NAN, 'got nan'),
            (1e300, 'got 1e.300, which is inf in torch.float32'),
            (INF, 'got inf')):
        with pytest.raises(ValueError, match=f'^f: k must be in .*, {text}$'): check_knob(k, x, 'f', 'k', open=True)

@pytest.mark.slow
def test_compiled_knobs():
    "A number, a tensor for each element, one that learns."
    x,each = torch.tensor([.3, 1.75, -2.6]),torch.tensor([.5, .25, 1.])
    q = x-x.round()
    assert torch.equal(compiled(lambda x, a: gentle(x, a))(x, each), x.round()+each*q)
    a = each.clone().requires_grad_()
    assert torch.equal(grads(compiled(lambda x, a: gentle(x, a))(x, a), a)[0], q)
    assert torch.equal(compiled(torch.func.grad(lambda a: gentle(x, a).sum()))(each), q)
    assert torch.equal(compiled(torch.func.grad(lambda x: gentle(x, .5).sum()))(x), torch.full((3,), .5))

def test_a_value_of_several_operations():
    "Slope 1 without a grid, where the value is no single operation of torch's; and an x that is no tensor."
    away = estimator('away', lambda v: torch.trunc(v+torch.copysign(torch.full_like(v, .5), v)))
    x = leaf([.5, -.5, 1.25])
    y = away(x)
    assert y.tolist() == [1., -1., 1.] and grads(y, x)[0].tolist() == [1.]*3 and saved(lambda: away(x)) == []
    for f in (away, cubic, plain):
        with pytest.raises(TypeError, match=f'^{getattr(f, "name", "cubic")}: x must be a torch.Tensor, got list'):
            f([1.])

def test_export():
    "A curve keeps its gradient in an exported program. An estimator is its value there, unless that is to have one."
    valued = estimator('valued', torch.round, export_value=False)
    x = leaf([.25, 1.75])
    for f,slope in ((cubic, .1875), (plain, 0.), (valued, 1.)):
        y = torch.export.export(Calls(f), (x.detach(),)).module()(x)
        assert torch.equal(y, f(x)) and grads(y, x)[0].tolist() == [slope]*2

# --- knobs with names and defaults
def power(**p):
    return staircase('power', lambda q, p: .5*(2*q)**p, lambda q, p: p*(2*q)**(p-1), p=dict(lo=1., **p))

def test_knobs_have_names_and_defaults():
    "By position, by name, or the default: one value, in the hard form and on a grid too."
    f,x = power(default=3.),torch.tensor([.3, 1.7, -2.2])
    for kw in ({}, dict(hard=True), dict(step=.25), dict(hard=True, step=torch.tensor(.3), offset=.1)):
        assert torch.equal(f(x, **kw), f(x, 3., **kw)) and torch.equal(f(x, p=3., **kw), f(x, 3., **kw))
        assert torch.equal(f(x, p=torch.tensor(8.), **kw), f(x, 8., **kw))
    assert repr(f) == f'power{inspect.signature(f)}' == 'power(x, p=3.0, *, hard=False, step=1.0, offset=0.0)'
    assert repr(f.soft) == 'power(x, p=3.0, *, step=1.0, offset=0.0)' and repr(power()).startswith('power(x, p, *,')
    assert f.__name__ == f.soft.__name__ == 'power'

def test_knobs_by_name_are_checked():
    f,x = power(default=3.),torch.ones(2)
    with pytest.raises(TypeError, match='^power: no knob power, only p$'): f(x, power=2.)
    with pytest.raises(TypeError, match='^power: p is given twice$'): f(x, 3., p=2.)
    with pytest.raises(TypeError, match='^power: 2 knobs by position, it has 1$'): f(x, 3., 2.)
    with pytest.raises(TypeError, match='^power: p is missing and has no default$'): power()(x)
    with pytest.raises(TypeError, match='^plain: no knob p, only none$'): estimator('plain', torch.round)(x, p=1.)
    with pytest.raises(ValueError, match=r'^power: p must be in \[1, inf\], got 0.5$'): f(x, p=.5)

def test_knobs_by_name_survive():
    "Compiled in one graph, and under a transform."
    f,x = power(default=3.),torch.tensor([.3, 1.7, -2.2])
    g = torch.compile(lambda x: f(x, p=4.) + f(x), fullgraph=True, backend='eager')
    assert near(g(x), f(x, 4.)+f(x, 3.)) and near(torch.vmap(lambda x: f(x, p=4.))(x), f(x, 4.))

def test_slope_is_checked_when_a_staircase_is_made():
    "Where all knobs are known; and not where its numbers could not be looked at."
    wrong = lambda q: 4*q**3, lambda q: 3*q*q
    said = '^wrong: the slope at q = 0.01 is .*; the rise climbs by 0.0012$'
    with pytest.raises(ValueError, match=said): staircase('wrong', *wrong)
    with pytest.raises(ValueError, match=said):
        staircase('wrong', lambda q, a: a*q**3, lambda q, a: 0*q+a, a=dict(default=4.))
    staircase('wrong', lambda q, a: 4*q**3, lambda q, a: 3*q*q, a={})
    with FakeTensorMode(): staircase('wrong', *wrong)
    torch.vmap(lambda x: staircase('wrong', *wrong)(x))(torch.ones(2))
    with pytest.raises(ValueError, match='is nan'): staircase('nan', lambda q: q, lambda q: q/0*0)

@pytest.mark.parametrize('open', (False, True))
@pytest.mark.parametrize('lo', (-1., 0.))
def test_open_and_closed_ends(lo, open):
    "The ends of a range, as numbers: in it or not, as it says, and nothing beyond."
    f,x = estimator('f', lambda v, a: torch.round(v), a=dict(lo=lo, hi=1., open=open)),torch.zeros(2)
    for a in (.999, lo+1e-3, *[lo, 1.]*(not open)): assert torch.equal(f(x, a), x)
    for a in (lo-1e-3, 1.001, *[lo, 1.]*open):
        with pytest.raises(ValueError, match='a must be in'): f(x, a)

def test_by_mode(monkeypatch):
    "One form for each way to be run: compiled as eager, transformed and exported as compiled, unless given."
    def form(word): return lambda v: f'{word} {v}'
    e,c,t,x = map(form, 'ectx')
    cases = {
        'eeee': by_mode(e), 'eccc': by_mode(e, c), 'eete': by_mode(e, transform=t), 'eeex': by_mode(e, export=x),
        'ectc': by_mode(e, c, t), 'ectx': by_mode(e, c, t, x), 'eccx': by_mode(e, c, export=x),
        'eetx': by_mode(e, transform=t, export=x),
    }
    for want,f in cases.items():
        for how,letter in zip(('eager', 'compile', 'transform', 'export'), want):
            monkeypatch.setattr(parts, 'mode', lambda how=how: how)
            assert f(3) == f'{letter} 3', (want, how)

ENDS = dict(numbers=(-1., 2.), tensors=(torch.tensor(-1.), torch.tensor(2.)), mixed=(-1., torch.tensor(2.)),
    other=(torch.tensor([-1.]), 2.), lower=(-1., None), upper=(None, 2.))

@pytest.mark.parametrize('ends', ENDS.values(), ids=ENDS)
def test_saturate(ends):
    "Values, and slopes: 1 inside and at the ends, an end has what lies beyond it; the same under transforms."
    v = torch.tensor([-3., -1., 0., 2., 5.])
    low,high = (INF*s if e is None else float(e) for s,e in zip((-1, 1), ends))
    want,inside = v.clamp(low, high),(v >= low) & (v <= high)
    learned = [t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in ends]
    x = v.clone().requires_grad_()
    for args in (ends, learned):
        assert torch.equal(saturate(v, *args), want) and torch.equal(saturate(x, *args), want)
        with torch.no_grad(): assert not saturate(x, *args).requires_grad
        g, = torch.autograd.grad(saturate(x, *args).sum(), x)
        assert torch.equal(g, inside.float())
        slope = torch.func.grad(lambda x: saturate(x, *args).sum())
        assert torch.equal(slope(v), inside.float())
        assert torch.equal(torch.func.vmap(lambda x: saturate(x[None], *args)[0])(v), want)
    for t,beyond in zip(learned, (v < low, v > high)):
        if not isinstance(t, torch.Tensor): continue
        for given in (v, x): assert torch.autograd.grad(saturate(given, *learned).sum(), t)[0].sum() == beyond.sum()
    assert not saturate(v, *ends).requires_grad
    nested = torch.nested.nested_tensor([v, v[1:3]], layout=torch.jagged)
    if any(isinstance(t, torch.Tensor) for t in ends): return
    for got,part in zip(saturate(nested, *ends).unbind(), (v, v[1:3])): assert torch.equal(got, part.clamp(low, high))

@pytest.mark.parametrize('kind, once', [('number', False), ('scalar', True), ('row', False), ('meta', False)])
def test_worked_out_once(kind, once):
    "Compiled for a CPU, numbers that come of a tensor without dimensions lie in memory; else each is as it was."
    k = dict(number=3., scalar=torch.tensor(3.), row=torch.tensor([3.]), meta=torch.tensor(3., device='meta'))[kind]
    x,seen = torch.tensor([2.], device='meta' if kind == 'meta' else 'cpu'),[]
    def f(x, k):
        a,b = worked_out_once(k*2, k+1)
        return x*a - b
    def look(gm, inputs):
        seen.extend(n.target for n in gm.graph.nodes)
        return gm.forward
    y = torch.compile(f, fullgraph=True, backend=look)(x, k)
    assert (torch.stack in seen) == once and worked_out_once(k, k) == (k, k)
    assert kind == 'meta' or y == f(x, k) == 8

def test_knobs_by_place_and_by_name():
    "Some by position, the rest by name or by default."
    f = estimator('f', lambda v, a, b: v*a+b, a=dict(lo=-INF, default=3.), b=dict(lo=-INF, default=.5))
    x = torch.tensor([1., -2.])
    for given,(a,b) in (((), (3., .5)), ((2.,), (2., .5)), ((2., 4.), (2., 4.))):
        assert torch.equal(f(x, *given), x*a+b)
    assert torch.equal(f(x, 2., b=7.), x*2+7) and torch.equal(f(x, b=7.), x*3+7)
    assert torch.equal(f(x, b=1., a=5.), x*5+1)

def test_nested_staircases_at_integers():
    "A rise that is right for one side alone, where the error is 0."
    f = staircase('f', lambda q: q*(1-q), lambda q: 1-2*q)
    rows = torch.tensor([0., -0., 1., -2., .3, -.3]),torch.tensor([5., 1.7])
    y = f(torch.nested.nested_tensor(list(rows), layout=torch.jagged))
    for got,x in zip(y.unbind(), rows): assert same(got, f(x))

@pytest.mark.parametrize('bad, got', [(2., '2.0'), (dict(default=2., min=1.), "'min'"), (None, 'None')], ids=str)
def test_a_range_is_a_dict_of_known_words(bad, got):
    told = f'^mine: p must be a dict of lo, hi, open, finite, default, size, held, got {got}$'
    with pytest.raises(TypeError, match=told):
        staircase('mine', lambda q, p: q, lambda q, p: q**0, p=bad)
