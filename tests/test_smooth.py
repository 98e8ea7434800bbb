"""The smooth pages against mpmath at 130 digits: value and slope of every closed form, written as published and not as
we compute them. Points: seed 0 and a few beside integers and ties. Bounds: float64 to 1e-13 steps times the steepest
slope; float32 to a relative 2e-6 in the tread, beside integers too, unless a test says why not."""
import math
from functools import partial
import mpmath
import pytest
import torch
from estimators import generator, near, same, slope
from torch.utils.flop_counter import FlopCounterMode
import shok_nb as R
from shok_nb.estimators import soft

mp = mpmath.mp.clone()
mp.dps = 130     # the sum of sigmoids starts at 1e-112
RHOS = 1e-6,.01,.5,.9,.999
TEMPERATURES = .002,.02,.1,.2199,.2201,.5,3.

def sine(x, depth):
    for _ in range(depth): x = x - mp.sin(2*mp.pi*x)/(2*mp.pi)
    return x
def cosine(x): return mp.floor(x) + (1-mp.cos(mp.pi*(x-mp.floor(x))))/2
def series(x, n, w): return x + mp.fsum((-1)**k*w(mp.mpf(k))*mp.sin(2*mp.pi*k*x)/k for k in range(1, n+1))/mp.pi
def poisson(x, rho): return x - mp.atan2(rho*mp.sin(2*mp.pi*x), 1+rho*mp.cos(2*mp.pi*x))/mp.pi
def logistic(x, t):
    reach = 5 + int(60*t+.5)                                # e^-60 of the weight lies beyond
    ties = [mp.mpf(k)+mp.mpf(1)/2 for k in range(-reach, reach)]
    return mp.fsum((mp.tanh((x-d)/(2*t))+mp.tanh(d/(2*t)))/2 for d in ties)
def cubic(x): return mp.nint(x) + (x-mp.nint(x))**3

def fejer(n): return lambda x: series(x, n, lambda k: 1-k/(n+1))
def curve(id, f, oracle, **knobs): return pytest.param(f, knobs, oracle, id=id)

CURVES = [curve('cubic', R.cubic_round, cubic), curve('cosine', R.cosine_round, cosine)]
CURVES += [curve(f'sine-{d}', R.sine_round, partial(sine, depth=d), depth=d) for d in (1, 2, 4)]
CURVES += [curve(f'fejer-{n}', R.fourier_round, fejer(n), terms=n, damping='fejer') for n in (1, 2, 3, 4, 5)]
CURVES += [curve(f'poisson-{r}', R.poisson_round, partial(poisson, rho=mp.mpf(r)), rho=r) for r in RHOS]
CURVES += [curve(f'sum-{t}', R.sigmoid_sum_round, partial(logistic, t=mp.mpf(t)), temperature=t) for t in TEMPERATURES]
curves = pytest.mark.parametrize('f, knobs, oracle', CURVES)

def points():
    x = torch.rand(10, generator=generator(), dtype=torch.float64)*6-3
    return torch.cat([x, torch.tensor([1e-9, -1e-3, .4999, .5001, -1.001, 2.499], dtype=torch.float64)])

def tread(): return torch.tensor([1e-6, 1e-4, 1e-3, .0501, .0999, .1001, .2, .2499, .2501, .3, .4, .45, .4999])
def values(oracle, x): return torch.tensor([float(oracle(mp.mpf(v))) for v in x.tolist()], dtype=torch.float64)
def slopes(oracle, x):
    return torch.tensor([float(mp.diff(oracle, mp.mpf(v), h=mp.mpf(10)**-40)) for v in x.tolist()], dtype=torch.float64)

@curves
@pytest.mark.slow
def test_value(f, knobs, oracle):
    x,q = points(),tread()
    steepest = slope(f, torch.tensor([.5], dtype=torch.float64), **knobs).item()
    assert torch.allclose(f(x, **knobs), values(oracle, x), rtol=0, atol=1e-13*max(1, steepest))
    want = values(oracle, q)
    bound = 2e-6*3**(knobs.get('depth', 1)-1)           # the cube near an integer triples a relative error each time
    assert ((f(q, **knobs).double()-want).abs() <= bound*want.abs() + 1e-37).all()
    assert torch.allclose(f(q.double(), **knobs), values(oracle, q.double()), rtol=1e-12, atol=1e-120)

@curves
@pytest.mark.slow
def test_slope(f, knobs, oracle):
    """float32 relative to the steepest slope: its argument is rounded to 3e-8 of a cell
    and the curvature is its square at most."""
    x,q = points(),tread()
    want = slopes(oracle, x)
    steepest = max(1, slope(f, torch.tensor([.5], dtype=torch.float64), **knobs).item())
    assert torch.allclose(slope(f, x, **knobs), want, rtol=1e-9, atol=1e-14*steepest)
    assert torch.allclose(slope(f, q, **knobs).double(), slopes(oracle, q), rtol=2e-6, atol=4e-7*steepest**2)

@pytest.mark.parametrize('n', (1, 2, 5, 10, 50))
def test_partial_sums(n):
    """Undamped sums cross zero inside the tread, so their error is counted in steps: 2nε, or what
    moving x by 4ε makes of it at the tie."""
    oracle = lambda x: series(x, n, lambda k: 1)
    x = points()
    for dtype in (torch.float64, torch.float32):
        q,eps = tread().to(dtype),torch.finfo(dtype).eps
        assert ((R.fourier_round(q, n).double()-values(oracle, q.double())).abs() < (2*n+4*(2*n+1))*eps).all()
        rtol,at_tie = 1e-5 if dtype == torch.float32 else 1e-9,4*(2*n+1)**2*eps
        got = slope(R.fourier_round, q, terms=n).double()
        assert torch.allclose(got, slopes(oracle, q.double()), rtol=rtol, atol=at_tie)
    assert torch.allclose(R.fourier_round(x, n), values(oracle, x), rtol=0, atol=1e-13*n)

@pytest.mark.parametrize('damping', (None, 'fejer'))
@pytest.mark.parametrize('n', range(0, 12))
def test_fixed_points(n, damping):
    """Ties and integers, bit for bit, with any number of terms; the parity of the
    number decides the slope of an integer."""
    fixed = torch.arange(-300, 301)/2
    for dtype in (torch.float32, torch.float64):
        assert same(R.fourier_round(fixed.to(dtype), n, damping=damping), fixed.to(dtype))
    at = slope(R.fourier_round, torch.tensor([0., 7.], dtype=torch.float64), terms=n, damping=damping)
    assert (at-((-1.)**n if damping is None else (n+1) % 2/(n+1))).abs().max() < 1e-12

@pytest.mark.parametrize('n', (1, 2, 3, 8, 30))
def test_fejer_is_a_density(n):
    x = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    assert (slope(R.fourier_round, x, terms=n, damping='fejer') >= 0).all()
    assert (R.fourier_round(x, n, damping='fejer').diff() > -1e-15).all()
    assert (slope(R.fourier_round, x, terms=n) < -.9).any()

@pytest.mark.slow
@pytest.mark.parametrize('f, name, values', [
    (R.sigmoid_sum_round, 'temperature', (1e-9, 1e-3, .05, .219, .221, 1.)),
    (R.poisson_round, 'rho', (0., 1e-6, .5, .99)),
])
def test_knob_derivative(f, name, values):
    "float64 against mpmath to 1e-9, and finite near 0, where a learned one may sit."
    oracle = dict(temperature=logistic, rho=poisson)[name]
    for v in values:
        x = torch.tensor([.05, .25, .4, 1.3, -2.2], dtype=torch.float64)
        k = torch.full(x.shape, v, dtype=torch.float64, requires_grad=True)
        got = torch.autograd.grad(f(x, k).sum(), k)[0]
        assert got.isfinite().all()
        if v < 1e-3: continue
        h = mp.mpf(10)**-40
        found = [mp.diff(lambda t: oracle(mp.mpf(a), t), mp.mpf(v), h=h) for a in x.tolist()]
        want = torch.tensor([float(d) for d in found], dtype=torch.float64)
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-11)

@pytest.mark.parametrize('s', (0., .5, 10., 1000.))
def test_one_sigmoid(s):
    x = points().float()
    z = [mp.mpf(s)*(mp.mpf(v)-mp.mpf('.5')) for v in x.tolist()]
    want = torch.tensor([float(1/(1+mp.exp(-t))) for t in z], dtype=torch.float64)
    steep = torch.tensor([float(s*mp.sech(t/2)**2/4) for t in z], dtype=torch.float64)
    assert torch.allclose(R.sigmoid_round(x, s).double(), want, rtol=2e-6*max(1, s), atol=1e-37)
    assert torch.allclose(slope(R.sigmoid_round, x, steepness=s).double(), steep, rtol=2e-6*max(1, s), atol=1e-37)
    assert same(R.sigmoid_round(x.double(), math.inf), (x > .5).double())

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize('d', (-2, 0, 1, 3, 6))
def test_decimals_are_torch(d, dtype):
    x = torch.randn(10_000, generator=generator(), dtype=dtype)*1000
    assert same(R.decimal_ste(x, d), torch.round(x, decimals=d))

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize('d', (-1, 0, 1, 2))
def test_puzzle_is_the_puzzle(d, dtype):
    "Value and gradient bit for bit, also compiled."
    def published(x):
        s = x*10**d
        diff = (1+1e-2)*s - torch.floor(s)
        return (s - diff + (torch.floor(s) + torch.where(diff >= .5, 1, 0)))/10**d
    x = torch.randn(10_000, generator=generator(), dtype=dtype)*30
    f = lambda x: R.diff_round(x, d)
    assert same(f(x), published(x)) and near(slope(f, x), slope(published, x), 2)
    if dtype == torch.float64: return
    assert same(torch.compile(f, backend='aot_eager', fullgraph=True)(x), published(x))

@pytest.mark.parametrize('alpha, taken', [(.01, 'small'), (4., 'middle'), (500., 'large')])
def test_an_alpha_that_learns_takes_one_formula(alpha, taken):
    "Where eager code may read it; under vmap, or in a graph, each formula is computed, and the result is the same."
    called = []
    def formula(name, size):
        def f(q, a):
            called.append(name)
            return q*size*a
        return f
    rise = soft._three(formula('small', 1), formula('middle', 2), formula('large', 3))
    q,a = tread(),torch.tensor(alpha, requires_grad=True)
    y = rise(q, a)
    assert called == [taken]
    batched = torch.vmap(rise, (None, 0))(q, a[None])[0]
    with FlopCounterMode(display=False): seen = rise(q, a)        # a mode, as any other
    assert sorted(called[1:]) == sorted(['small', 'middle', 'large']*2)
    assert same(batched, y) and same(seen, y)
    for z in (batched, seen): assert same(*[torch.autograd.grad(v.sum(), a, retain_graph=True)[0] for v in (y, z)])
