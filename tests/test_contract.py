"""The laws every estimator shares, driven by the catalog. Claims are tested both ways.

Random points: seed 0, so a failure is a change in the code and not bad luck; the bounds are stated beside each test."""
import math
from functools import partial
import pytest
import torch
from estimators import FLOATS, HALVES, generator, near, on_grid, same, slope, variants, with_knobs
from shok_nb import pieces
from shok_nb.catalog import catalog, row

EDGES = [0., -0., .25, -.25, .5, -.5, 1., -1., 1.5, 2.5, -2.5, 7., 1e-6, -1e-6, 1e6, -1e6, 1e-30]
all_variants = pytest.mark.parametrize('r, f', variants())
dtypes = pytest.mark.parametrize('dtype', FLOATS, ids=str)

def points(n=4001, lo=-20., hi=20.):
    "Points of no grid, at least 1e-6 from integers and ties."
    x = torch.rand(n, dtype=torch.float64, generator=generator())*(hi-lo) + lo
    return x[((2*x) - (2*x).round()).abs() > 1e-6]

@all_variants
@dtypes
def test_shape_dtype_layout(r, f, dtype):
    x = torch.randn(4, 3, 5, 6, generator=generator()).mul(3).to(dtype)
    layouts = [x, x[0, 0, 0, 0], x[:0], x.transpose(0, 3), x[..., ::2], x.to(memory_format=torch.channels_last), x[:1].expand(4, 3, 5, 6), x.flip(0)]
    for t in layouts:
        before = t.clone()
        y = f(t)
        assert (y.dtype, y.shape, y.device) == (t.dtype, t.shape, t.device)
        assert y.stride() == torch.empty_like(t).stride()
        assert near(y, f(t.contiguous())) and near(slope(f, t), slope(f, t.contiguous()))
        if on_grid(r, f): assert same(y, f(t.contiguous()))
        assert same(t, before), 'the input was edited'
        if t.numel(): assert y.data_ptr() != t.data_ptr()

# A millionth and a million that are no value of the knob: an error says so. Every other value of a knob is finite.
BEYOND = dict(ewgs_round={('delta', 1e6)}, dsq_round={('alpha', 1e6)}, stable_round={('amplitude', 1e6)},
    clipped_round={('lower', 1e6)}, trust_round={('lower', 1e6)}, reste_sign={('o', 1e-6)}, poisson_round={('rho', 1e6)})

@all_variants
@dtypes
def test_finite_at_edges(r, f, dtype):
    x = torch.tensor(EDGES).to(dtype)
    x = x[x.isfinite()]
    assert f(x).isfinite().all() and slope(f, x).isfinite().all()
    for k in r.knobs:
        for v in (k.lo, k.hi, k.soft, k.hard) + (1e-6, 1e6)*isinstance(k.default, float):
            if v is None: continue
            if (k.name, v) in BEYOND.get(r.name, ()):
                with pytest.raises((ValueError, TypeError), match=f'^{r.name}: {k.name} must be'): f(x, **{k.name: v})
                continue
            assert f(x, **{k.name: v}).isfinite().all(), (k.name, v)
            g = slope(f, x, **{k.name: v})
            assert (g.isfinite() | (slope(f, x.double(), **{k.name: v}) > torch.finfo(dtype).max)).all(), (k.name, v)

@all_variants
@dtypes
def test_not_finite(r, f, dtype):
    "Nan comes back, infinity if the value is unbounded. There the slope is 1 for a straight-through estimator, 0 for a curve, else either."
    x = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    g = slope(f, x)
    assert f(x)[2].isnan() and same(f(x)[:2], x[:2]) == r.unbounded
    assert not g[:2].isnan().any()
    allowed = [1.] if r.slope == '1' else [0.] if r.exact_slope else [0., 1.]
    assert all(v in allowed for v in g[:2].tolist())

@pytest.mark.parametrize('r, f', variants(lambda r: r.unbounded and (r.equivariant or r.odd)))
@dtypes
def test_zero_keeps_its_sign(r, f, dtype):
    z = torch.tensor([0., -0.], dtype=dtype)
    for g in (f, *(partial(f, step=k) for k in (.5, torch.tensor(.5)) if r.grid)): assert same(g(z), z)
    if r.odd and r.monotone: assert f(torch.tensor([-1e-3], dtype=dtype)).signbit().all()

@pytest.mark.parametrize('r, f', variants(lambda r: r.equivariant))
@dtypes
def test_integers_are_fixed(r, f, dtype):
    "Bit for bit, and with the slope of 0 at every magnitude: also where halves and then odd numbers run out."
    top = 2/torch.finfo(dtype).eps
    n = torch.cat([torch.arange(300.), torch.tensor([top/4, top/2-1, top/2, top/2+1, top-1, top, 2*top])]).to(torch.float64)
    n = n.to(dtype)
    n = n[n.isfinite() & (n == n.round())]
    n = torch.cat([n, -n])
    if r.continuous or on_grid(r, f): assert same(f(n), n)
    assert torch.equal(slope(f, n), slope(f, n[:1]).expand_as(n))

@all_variants
def test_equivariant(r, f):
    x = points()
    ok = all(torch.allclose(f(x+k), f(x)+k, atol=1e-12, rtol=0) and torch.allclose(slope(f, x+k), slope(f, x), atol=1e-9, rtol=0) for k in (1, -3, 40))
    assert ok == r.equivariant

@all_variants
def test_odd(r, f):
    x = points()
    assert (torch.allclose(f(-x), -f(x), atol=1e-12, rtol=0) and torch.allclose(slope(f, -x), slope(f, x), atol=1e-12, rtol=0)) == r.odd

@all_variants
def test_on_grid(r, f):
    x = torch.cat([points(), torch.linspace(*r.domain, 30_001, dtype=torch.float64)])
    assert torch.equal(f(x), f(x).round()) == on_grid(r, f)

@all_variants
def test_monotone(r, f):
    x = torch.linspace(-3, 3, 60_001, dtype=torch.float64)
    assert bool((f(x).diff() >= 0).all()) == (r.monotone or r.smooth and on_grid(r, f))

@all_variants
def test_continuous(r, f):
    "Over steps of 2e-7 a continuous curve moves by its steepest slope times that, at most 250 at the default knobs; a jump by .1."
    x = torch.cat([torch.arange(-60, 61, dtype=torch.float64)/20, points(200)])
    jump = (f(x+1e-7)-f(x-1e-7)).abs().max()
    assert bool(jump < 1e-4) == (r.continuous and not on_grid(r, f))

@all_variants
def test_mass_one(r, f):
    "The midpoint rule with 1e5 points: errors below 1e-6 for these slopes, tested at 1e-5, on the cells [0, 1] and [2, 3]."
    x = (torch.arange(100_000, dtype=torch.float64)+.5)/100_000
    assert (abs(slope(f, x).mean()-1) < 1e-5 and abs(slope(f, x+2).mean()-1) < 1e-5) == r.mass_one

@all_variants
def test_exact_slope(r, f):
    "Central differences with h = 1e-6 err by 1e-9 or so plus h²·f'''/6; the points keep away from ties and integers by more than h."
    x = points(500)
    x = x[((2*x) - (2*x).round()).abs() > 1e-4]
    numeric = (f(x+1e-6)-f(x-1e-6))/2e-6
    assert torch.allclose(numeric, slope(f, x), atol=1e-6) == (r.exact_slope and not on_grid(r, f))

@pytest.mark.parametrize('r, f, k', with_knobs(lambda r, f, k: k.soft is not None and not on_grid(r, f)))
def test_soft_end_of_the_knob(r, f, k):
    x = points()
    assert torch.allclose(f(x, **{k.name: k.soft}), x, atol=1e-15, rtol=0)
    assert torch.allclose(slope(f, x, **{k.name: k.soft}), torch.ones_like(x), atol=1e-15, rtol=0)

@pytest.mark.parametrize('r, f, k', with_knobs(lambda r, f, k: k.hard is not None))
def test_hard_end_of_the_knob(r, f, k):
    x = points()
    assert torch.equal(f(x, **{k.name: k.hard}), x.round())
    assert torch.equal(slope(f, x, **{k.name: k.hard}), torch.zeros_like(x))

@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_defaults_are_the_signature(r):
    from inspect import signature
    ps = signature(r.f).parameters
    for k in r.knobs:
        assert ps[k.name].default == k.default and k.lo < k.hi and k.lo <= k.default <= k.hi
    for c in r.choices:
        assert ps[c.name].default == c.default and c.default in c.options
        for o in c.options: assert r.f(torch.zeros(3), **{c.name: o}).shape == (3,)
        with pytest.raises(ValueError, match=f"{c.name} must be .*got 'no such'"): r.f(torch.zeros(3), **{c.name: 'no such'})
    assert {c.name for c in r.choices} == {n for n,p in ps.items() if isinstance(p.default, str) or 'Literal' in str(p.annotation)}
    assert ('hard' in ps) == r.smooth and ('step' in ps and 'offset' in ps) == r.grid

@pytest.mark.parametrize('dtype', HALVES, ids=str)
@all_variants
def test_every_half_precision_number(r, f, dtype):
    "All 65,536 bit patterns: value and gradient are the float32 ones rounded once."
    x = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for kw in [{}] + [{k.name: v} for k in r.knobs for v in (k.lo, k.hi, k.soft, k.hard) if v is not None]:
        assert same(f(x, **kw), f(x.float(), **kw).to(dtype)), kw
        assert same(slope(f, x, **kw), slope(f, x.float(), **kw).to(dtype)), kw

@pytest.mark.parametrize('shape', [(3, 7, 59), pytest.param((3, 70, 1999), marks=pytest.mark.slow)], ids=['small', 'true'])
@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16), ids=str)
@all_variants
def test_pieces(r, f, dtype, shape, monkeypatch):
    """A tensor large enough to be cut into pieces gives what its rows give, and a gradient of another layout is understood.
    Pieces of 64 numbers for the small one; of the size they have for the other."""
    x = torch.randn(shape, generator=generator()).mul(4).to(dtype)
    if x.numel() < pieces._PIECE: monkeypatch.setattr(pieces, '_PIECE', 64)
    torch.set_num_threads(2)
    try:
        rows = lambda t: torch.stack([f(v) for v in t])
        assert near(f(x), rows(x)) and near(f(x.transpose(0, 1)), rows(x.transpose(0, 1)))
        leaf = x.clone().requires_grad_()
        g = torch.randn(shape[::-1], generator=generator()).to(dtype).permute(2, 1, 0)
        assert near(torch.autograd.grad(f(leaf), leaf, g)[0], torch.autograd.grad(rows(leaf), leaf, g.contiguous())[0])
    finally: torch.set_num_threads(1)

def settings(r):
    "Both ends and the middle of each slider, the other knobs as they are."
    for k in r.knobs:
        middle = (k.lo*k.hi)**.5 if k.log else (k.lo+k.hi)/2
        for v in (k.lo, type(k.default)(middle), k.hi): yield k.name,v

@pytest.mark.parametrize('r, name, v', [pytest.param(r, *s, id=f'{r.name}-{s[0]}-{s[1]:g}') for r in catalog if not r.random for s in settings(r)])
def test_claims_along_the_slider(r, name, v):
    """What a row claims without `at_default` holds at every knob. On multiples of 2**-16 both x+k and -x are exact, and 1e-12 is
    for the rounding of values, relative for slopes."""
    f = partial(r.f, **{name: v})
    def claims(c): return getattr(r, c) and c not in r.at_default
    x = points()
    x = x[x.abs() > .01].mul(2**16).round().add(.5)/2**16
    y,w = f(x),slope(f, x)
    if claims('odd'): assert torch.allclose(f(-x), -y, atol=1e-12, rtol=0) and torch.allclose(slope(f, -x), w, rtol=1e-12)
    if claims('equivariant'):
        for k in (1, -3, 40): assert torch.allclose(f(x+k), y+k, atol=1e-12, rtol=0) and torch.allclose(slope(f, x+k), w, rtol=1e-7)
    if claims('on_grid'): assert torch.equal(y, y.round())
    if claims('monotone'): assert (f(torch.linspace(-3, 3, 60_001, dtype=torch.float64)).diff() >= -1e-15).all()
    if claims('mass_one'):
        # from the integer and from the tie, on a logarithmic scale: some slopes are spikes of width e^-30 at one of them
        q = torch.logspace(-18, 0, 20_000, dtype=torch.float64)/4
        area = sum(torch.trapezoid(slope(f, t)*q, q.log()) for t in (q, .5-q, -q, q-.5))
        assert abs(area-1) < 1e-4
    if claims('exact_slope'):
        unit = 10.**-v if name == 'decimals' else 1.
        h,t = 1e-6*unit,x[x.abs() < 3]
        t = t[((2*t/unit) - (2*t/unit).round()).abs() > 1e-3]
        numeric,steep = (f(t+h)-f(t-h))/(2*h),slope(f, t)
        # central differences err by h²f'''/6: a spike of slope S and width 1/S has f''' up to S³
        assert torch.allclose(numeric, steep, rtol=1e-3, atol=1e-5)

def test_a_claim_that_needs_the_defaults():
    "`at_default` is true: these claims are made and fail somewhere."
    from shok_nb import clipped_round, trust_round
    x = torch.tensor([9., 2.2])
    for f in (clipped_round, trust_round):
        assert row(f).at_default == ('on_grid', 'odd') and row(f).on_grid and row(f).odd
        assert f(x, upper=2.5).tolist() == [2.5, 2.] and f(-x, upper=2.5).tolist() == [-2., -2.]
    assert all(getattr(r, c) is True for r in catalog for c in r.at_default)

@pytest.mark.parametrize('r', [r for r in catalog if r.monotone and r.grid and not r.random], ids=lambda r: r.name)
def test_monotone_to_the_last_bits(r):
    """On a grid of .3 from .1, 65,536 neighbouring floats from each of five places never fall by more than 4 units in the last place
    of the largest number on the way, here the step of .3: the last product and sum round once each, the curve by about two."""
    for start in (-.31, -.05, .09, .249, .39):
        bits = torch.tensor([start]).view(torch.int32) + torch.arange(65_536, dtype=torch.int32)
        x = bits.view(torch.float32).sort().values
        assert r.f(x, step=.3, offset=.1).diff().min() >= -4*torch.finfo(torch.float32).eps*.3
