"""Knobs and grids at the ends of what a float can hold: a result, a slope and a gradient
of the knob, or an error that says why."""
import math
from functools import partial
import pytest
import torch
from estimators import back, floats_of, near, same, slope
import shok_nb as R
from shok_nb.catalog import catalog
from shok_nb.engine.random import noise_like
from shok_nb.estimators.sine import _again
from shok_nb.estimators.surrogates import _dsq_rise

SEED = torch.tensor(3)
# Integers, ties and numbers between, on both sides; float32's smallest numbers and some that are large beside any grid.
X = [0., -0., .25, -.25, .5, -.5, 1., -1., .3, 1.5, 2.5, -2.5, 7., 1e-6, 1e-30, -1e-38, 1e-45, 1e6, -1e6]
TINY,HUGE = (1e-45, 1e-38, 1e-30, 1e-20, 1e-7), (61., 1e4, 1e10, 1e19, 1e30, 3.3e38)

def variants():
    "Each row as it is, hard, with each of its words, and `sga_round` with three neighbours."
    for r in catalog:
        f = partial(r.f, seed=SEED) if r.random else r.f
        yield r,f
        if r.smooth: yield r,partial(f, hard=True)
        for c in r.choices: yield from ((r, partial(f, **{c.name: o})) for o in c.options[1:])
        if r.f is R.sga_round: yield r,partial(f, neighbours=3)

def legal(f, **knob):
    try: f(torch.zeros(1), **knob)
    except ValueError: return False
    return True

both = pytest.mark.parametrize('r, f', [pytest.param(r, f, id=f'{r.name}-{i}') for i,(r,f) in enumerate(variants())])

@both
def test_extreme_numbers(r, f):
    "Every number that a knob accepts gives a finite value and slope; every other is a ValueError, never another error."
    for k in floats_of(r):
        for v in (*TINY, *HUGE, 1e-300, 1e300):
            if not legal(f, **{k: v}): continue
            x = torch.tensor(X)
            assert f(x, **{k: v}).isfinite().all() and slope(f, x, **{k: v}).isfinite().all(), (k, v)

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
@both
def test_extreme_tensors(r, f, dtype):
    "A 0-d knob that learns has a finite gradient wherever the same number is legal, for infinite `x` too."
    for k in floats_of(r):
        for v in (0., 1., *TINY, *HUGE, math.inf):
            if not legal(f, **{k: v}): continue
            x,knob = (torch.tensor(t, dtype=dtype, requires_grad=True) for t in ([*X, math.inf, -math.inf], v))
            y = f(x, **{k: knob})
            grads = torch.autograd.grad(y.sum(), (x, knob), allow_unused=True)
            assert y[:len(X)].isfinite().all() and all(g is None or g.isfinite().all() for g in grads), (k, v, grads)

def test_step_gradient_is_bounded():
    """Each element adds F(v) - vF' but never more than the root of the largest float,
    so sums of 2**64 of them stay finite."""
    most = torch.finfo(torch.float32).max**.5
    def grad(f, x, s):
        step = torch.tensor(s, requires_grad=True)
        f(torch.tensor(x), step=step).sum().backward()
        return step.grad.item()
    for f in (R.soft_round, R.sine_round, R.cosine_round):
        assert abs(grad(f, [1., 1., 1.], 1e-38)) == pytest.approx(3*most, rel=1e-6)
    assert grad(R.round_ste, [1., 1e30], 1e-38) == 0                    # no bound where there is nothing to bound
    assert grad(R.soft_round, [1e15], 1e-3) == pytest.approx(1e18*(1-.06740), rel=1e-3)    # soft(v) - v*soft'(0)

def test_learned_alpha_of_dsq():
    "The derivative in alpha against float64, down to where it is bounded."
    x = torch.tensor([.3, -.2, .9, 1.45], dtype=torch.float64)
    def grad(dtype, a):
        a,v = torch.tensor(a, dtype=dtype, requires_grad=True),x.to(dtype)
        return torch.autograd.grad(_dsq_rise((v.round()-v).abs(), a).sum(), a)[0].double()
    for a in (1e-25, 1e-10, .01, .2, .9):
        assert torch.allclose(grad(torch.float32, a), grad(torch.float64, a), rtol=1e-4), a
    assert (slope(R.dsq_round, x, alpha=1-1e-12) - 1).abs().max() < 1e-6
    assert (slope(R.dsq_round, x.float(), alpha=1-1e-12) - 1).abs().max() < 1e-6

@pytest.mark.parametrize('t', (1e-45, 1e-30, 1e-12, 1e-5, .01, .3, 1.5))
def test_learned_t_of_ede(t):
    "d/dt tanh(tq)/t = (tq sech²(tq) - tanh(tq))/t², which is -2tq³/3 as t goes to 0; by the series or in float64."
    q = torch.tensor([.1, .7, 2.])
    leaf = torch.tensor(t, requires_grad=True)
    R.ede_sign(q, leaf).sum().backward()
    w = q.double()
    z = t*w
    exact = -2*t*w**3/3 if t < 1e-4 else (z/torch.cosh(z)**2 - torch.tanh(z))/t**2 if t < 1 else w/torch.cosh(z)**2
    # float32 loses (eps/z²) of a difference of two nearly equal numbers
    assert leaf.grad.item() == pytest.approx(exact.sum().item(), rel=1e-5 if t < 1e-4 or t > .1 else 1e-2, abs=1e-44)

def test_sga_limit():
    "Below a temperature of 1e-9 nothing changes any more: the mixture is one of its parts, as a number or a tensor."
    x = torch.tensor([.2, .8, 2.4, -1.3])
    for kw in ({}, {'neighbours': 3}):
        for t in (1e-9, 1e-20, 1e-30, torch.tensor(1e-45)):
            assert torch.equal(R.sga_round(x, t, seed=SEED, **kw), x.round())
            assert not slope(R.sga_round, x, temperature=t, seed=SEED, **kw).any()

def test_learned_alpha_of_the_conditional_mean():
    """At a tie the value is ½ for every alpha, so its derivative is 0; elsewhere it is
    that of atanh(2q)/alpha for large alpha."""
    for a in (30., 44., 50., 61., 75.):
        alpha = torch.tensor(a, requires_grad=True)
        tie,away = (R.soft_round_conditional_mean(torch.tensor(q), alpha) for q in (.5, .4))
        assert torch.autograd.grad(tie, alpha)[0].abs() < 1e-7
        assert torch.autograd.grad(away, alpha)[0].item() == pytest.approx(-math.atanh(.8)/a**2, rel=1e-4)

def test_numbers_beyond_the_dtype():
    "A number that float32 cannot hold is infinite or 0, and legal where those are; float64 takes it as it is."
    x = torch.tensor([.3, 1.7])
    for f in (R.fake_quantize, R.lsq):
        with pytest.raises(ValueError, match=f'^{f.__name__}: scale must .*, which is inf'): f(x, 1e39)
    assert all(R.round_ste(x.double(), step=s).isfinite().all() for s in (1e300, 1e-60))
    assert R.round_ste(x.double(), step=1e300).tolist() == [0., 0.]
    for k in (1e300, 10**400, math.inf):
        assert same(R.soft_round(x, k), x.round()) and same(R.sigmoid_round(x, k), torch.tensor([0., 1.]))
        assert same(R.clipped_round(x, upper=k), x.round())

@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_tensors_out_of_range_never_crash(r):
    "The values of tensors are nobody's business: a bad one may give nan but no Python error."
    for k in floats_of(r):
        for v in (0., -1., math.inf, -math.inf, math.nan, 1e-45, -3e38): r.f(torch.tensor(X), **{k: torch.tensor(v)})

def test_root_of_zero():
    assert same(R.reste_sign(torch.tensor([-2., 3.]), torch.tensor(0.)), torch.tensor([-1., 1.]))

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
def test_kumaraswamy_shapes(dtype):
    """By bisection of the distribution 1-(1-x^a)^b, b = (2^a (a-1)+1)/a, in logarithms and float64. From 60 on another
    formula; the last shapes leave no noise. seed 3: any will do, the noise is compared number by number."""
    x = torch.zeros(200, dtype=dtype)
    single = dtype == torch.float32
    u = noise_like(x, 'uniform', seed=SEED).double() + .5
    for a in (1., 2., 59.9, 60., 60.1, 200., 1e4, 1e30, 1e300, math.inf):
        y = noise_like(x, 'kumaraswamy', shape=a, seed=SEED).double() + .5
        lo,hi = torch.zeros_like(u),torch.ones_like(u)
        if a <= 60: logb = math.log((2**a*(a-1)+1)/a)
        else: logb = min(a, 1e300)*math.log(2) + math.log1p((2.**-min(a, 1000.)-1)/a)
        for _ in range(80 if a < 1e6 else 0):
            m = (lo+hi)/2
            # 1-(1-m^a)^b >= u  <=>  b*log1p(-m^a) <= log1p(-u)
            up = (a*m.log()).exp().clamp(max=1-1e-17)
            tail = torch.where(up > 1e-300, torch.log(-torch.log1p(-up)), a*m.log())
            ok = logb + tail >= torch.log(-torch.log1p(-u))
            lo,hi = torch.where(ok, lo, m),torch.where(ok, m, hi)
        if a >= 1e6: lo = torch.full_like(u, .5)
        assert (y-lo).abs().max() < (3e-6 if single else 1e-9), a
        learned = noise_like(x, 'kumaraswamy', shape=torch.tensor(a, dtype=dtype), seed=SEED).double()
        assert near(learned, y-.5, 1e10 if single else 1e4)
    assert torch.equal(R.dither_round(x+.3, 'kumaraswamy', shape=math.inf, seed=SEED), x)
    assert R.stochastic_round(x+.5, seed=SEED).isfinite().all()

@pytest.mark.slow
@pytest.mark.parametrize('dtype', (torch.float32, torch.float64))
def test_any_depth_ends(dtype):
    "A slope at a tie is 2**depth until it is infinite; everything else is done by then, so deeper changes nothing."
    x = torch.tensor([.5, .5-1e-7, .3, 1e-30, -0., 2.5, -1.7], dtype=dtype)
    for a,b in zip(back(partial(R.sine_round, depth=10**9), x), back(_again(1300), x)): assert same(a, b)
