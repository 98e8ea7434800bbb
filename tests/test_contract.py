"""The laws every estimator shares, driven by the catalog: those of `shok_nb.checks`, which anybody may run, and what
only the catalog can be asked. Points come from seed 0, so a failure is a change in the code and not bad luck."""
from functools import partial
from inspect import signature
from typing import get_args
import pytest
import torch
from estimators import FLOATS, lumped, on_grid, seeded, slope, variants
import shok_nb as R
from shok_nb import clipped_round, trust_round
from shok_nb.catalog import catalog, row
from shok_nb.checks import LAWS, _edges, _ends_of, _points, hard_row, is_the_same_in_pieces

all_variants = pytest.mark.parametrize('r, f', variants())

def claims(r, f):
    "The row of a variant, whose hard form claims other things than the smooth one."
    return hard_row(r) if on_grid(r, f) and not r.on_grid else r

def cases():
    "Each law for each variant that it asks anything of, in each of its dtypes."
    for law in LAWS:
        for p in variants():
            r,f = p.values
            if not law.applies(claims(r, f)): continue
            for d in law.dtypes:
                yield pytest.param(p.id, law, r, f, d, id=f'{law.name}-{p.id}' + (f'-{d}' if d else ''))

@lumped(cases(), lambda variant, *_: variant)
def test_law(variant, law, r, f, dtype): law.test(f, claims(r, f), dtype)

@pytest.mark.slow
@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16), ids=str)
@all_variants
def test_pieces_of_their_true_size(r, f, dtype):
    torch.set_num_threads(2)
    try: is_the_same_in_pieces(f, r, dtype, shape=(3, 70, 1999))
    finally: torch.set_num_threads(1)

# A millionth and a million that are no value of the knob: an error says so. Every other value of a knob is finite.
BEYOND = dict(ewgs_round={('delta', 1e6)}, dsq_round={('alpha', 1e6)}, stable_round={('amplitude', 1e6)},
    clipped_round={('lower', 1e6)}, trust_round={('lower', 1e6)}, reste_sign={('o', 1e-6)},
    poisson_round={('rho', 1e6)})
def far():
    for p in variants():
        for k in p.values[0].knobs:
            if not isinstance(k.default, float): continue
            for v in (1e-6, 1e6):
                for d in FLOATS: yield pytest.param(*p.values, k, v, d, id=f'{p.id}-{k.name}-{v:g}-{d}')

@lumped(far(), lambda r, *_: r.name)
def test_far_beyond_the_slider(r, f, k, v, dtype):
    "Finite at the edges, or refused by name."
    x = _edges(dtype)
    if (k.name, v) in BEYOND.get(r.name, ()):
        with pytest.raises((ValueError, TypeError), match=f'^{r.name}: {k.name} must be'): f(x, **{k.name: v})
        return
    g,large = slope(f, x, **{k.name: v}),slope(f, x.double(), **{k.name: v}) > torch.finfo(dtype).max
    assert f(x, **{k.name: v}).isfinite().all() and (g.isfinite() | large).all()

@all_variants
def test_one_slope_at_the_ends_of_knobs(r, f):
    "At ties too, where the hard end is a jump: `torch.func` and a second derivative get the slope of backward."
    x = torch.tensor([0., .5, -.5, 1., 1.5, 2.5, -1.5, .25, .3, -1., 1.7])
    for kw in _ends_of(r):
        numbers = {k: v for k,v in kw.items() if isinstance(v, float)}
        for knobs in (kw, {k: torch.tensor(v) for k,v in numbers.items()}):
            def total(x, knobs=knobs): return f(x, **knobs).sum()
            want,leaf = slope(f, x, **knobs),x.clone().requires_grad_()
            again, = torch.autograd.grad(total(leaf), leaf, create_graph=True)
            for got in (torch.func.grad(total)(x), again.detach()):
                assert torch.allclose(got, want, rtol=1e-3, atol=1e-3), (knobs, x[(got-want).abs() > 1e-3])

@all_variants
def test_default_device_elsewhere(r, f):
    "Constants are made where `x` is, whatever `torch.set_default_device` says. Seed 0: of a draw, the same one."
    def made():
        torch.manual_seed(0)
        return f(x),slope(f, x)
    x = _points(61).float()
    want = made()
    with torch.device('meta'): got = made()
    for a,b in zip(got, want): assert torch.equal(a, b)

def _below_zero():
    "What takes the step of a grid, and may learn it."
    yield from (p for p in variants(lambda r: r.grid))
    yield from (p for p in seeded() if p.values[0].grid)
    q = R.fake_quantize
    for f in (partial(q, bits=4), partial(q, bits=4, rounding=R.floor_ste), partial(q, bits=4, reciprocal=True),
            partial(R.lsq, bits=4)):
        yield pytest.param(None, lambda x, step, f=f: f(x, step), id=f'{f.func.__name__}-{len(f.keywords)}')
    learned = dict(adaround=lambda x, step: R.adaround(x, R.adaround_init(x, step=.7), step=step),
        flexround=lambda x, step: R.flexround(x, .6, step=step))
    for k,f in learned.items(): yield pytest.param(None, f, id=k)

@pytest.mark.parametrize('r, f', [*_below_zero()])
def test_a_step_below_zero(r, f):
    "An optimizer may bring a step there. Its size is that of the grid, in each road: the slopes are the same."
    steps = torch.tensor([[.7], [-.7]]).double().requires_grad_()
    xs = _points(61).double().expand(2, -1).clone().requires_grad_()
    both = [f(x, step=s) for x,s in zip(xs, steps)]
    assert torch.equal(*both)
    dx,ds = torch.autograd.grad(sum(y.sum() for y in both), (xs, steps))
    assert torch.equal(*dx) and ds[0] == -ds[1]
    each = torch.func.vmap(lambda x, s: f(x, step=s), randomness='same')
    assert torch.equal(*(each(x[:, None], s.expand(61)) for x,s in zip(xs, steps)))

def seen(r, name, option):
    "Does the option move two neighbouring points of a line, with any option of the menus? One point shows nowhere."
    x = torch.linspace(*r.domain, 601)
    moved = (r.f(x, **{c.name: o}) != r.f(x, **{c.name: o, name: option}) for c in r.choices for o in c.options)
    return any((m[1:] & m[:-1]).any() for m in moved)

@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_defaults_are_the_signature(r):
    ps = signature(r.f).parameters
    for k in r.knobs:
        assert ps[k.name].default == k.default and k.lo < k.hi and k.lo <= k.default <= k.hi
    for c in r.choices:
        assert ps[c.name].default == c.default and c.default in c.options
        for o in c.options: assert r.f(torch.zeros(3), **{c.name: o}).shape == (3,)
        with pytest.raises(ValueError, match=f"{c.name} must be .*got 'no such'"):
            r.f(torch.zeros(3), **{c.name: 'no such'})
    words = {n: get_args(p.annotation) for n,p in ps.items()
        if isinstance(p.default, str) or 'Literal' in str(p.annotation)}
    assert {c.name for c in r.choices} <= {*words}
    for n,options in words.items():             # what has no menu is what no picture shows
        if n not in {c.name for c in r.choices}: assert options and not any(seen(r, n, o) for o in options), n
    assert ('hard' in ps) == r.smooth and ('step' in ps and 'offset' in ps) == r.grid

def settings(r):
    "Both ends and the middle of each slider, the other knobs as they are."
    for k in r.knobs:
        middle = (k.lo*k.hi)**.5 if k.log else (k.lo+k.hi)/2
        for v in (k.lo, type(k.default)(middle), k.hi): yield pytest.param(r, k.name, v, id=f'{r.name}-{k.name}-{v:g}')

@pytest.mark.parametrize('r, name, v', [s for r in catalog if not r.random for s in settings(r)])
def test_claims_along_the_slider(r, name, v):
    """What a row claims without `at_default` holds at every knob. On multiples of 2**-16 both x+k and -x are exact, and
    1e-12 is for the rounding of values, relative for slopes."""
    f = partial(r.f, **{name: v})
    close = partial(torch.allclose, atol=1e-12, rtol=0)
    def claims(c): return getattr(r, c) and c not in r.at_default
    x = _points()
    x = x[x.abs() > .01].mul(2**16).round().add(.5)/2**16
    y,w = f(x),slope(f, x)
    if claims('odd'): assert close(f(-x), -y) and torch.allclose(slope(f, -x), w, rtol=1e-12)
    if claims('equivariant'):
        for k in (1, -3, 40): assert close(f(x+k), y+k) and torch.allclose(slope(f, x+k), w, rtol=1e-7)
    if claims('on_grid'): assert torch.equal(y, y.round())
    if claims('monotone'): assert (f(torch.linspace(-3, 3, 60_001, dtype=torch.float64)).diff() >= -1e-15).all()
    if claims('mass_one'):
        # from the integer and from the tie, on a logarithmic scale: some slopes are spikes of width e^-30 at one
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

def forms():
    "Both ends and the middle of each slider, and each variant as it is."
    for r in catalog:
        for p in settings(r): yield pytest.param(r, partial(r.f, **{p.values[1]: p.values[2]}), id=p.id)
    yield from variants()

@pytest.mark.parametrize('r, f', [p for p in forms() if not p.values[0].random])
def test_tails_under_transforms(r, f):
    """Where a slope is small autograd of a plain formula may subtract numbers that are nearly equal: a tanh gives 0 for
    5e-9. A thousandth beside what the slope is within two thousandths of the place, so that it may cross 0."""
    if r.name == 'ewgs_round': return                       # has no forward mode, and another gradient under `func`
    x = torch.cat([-torch.logspace(-4, 1.2, 997), torch.logspace(-4, 1.2, 997)])
    around = torch.stack([slope(f, x.double()*(1+d)).abs() for d in (-2e-3, -1e-3, 0, 1e-3, 2e-3)]).amax(0)
    want,room = slope(f, x.double()),1e-3*around+1e-30
    def total(t): return f(t).sum()
    found = dict(reverse=torch.func.grad(total)(x), forward=torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        twice=torch.autograd.grad(total(t := x.clone().requires_grad_()), t, create_graph=True)[0].detach())
    for way,got in found.items():
        off = ((got-want).abs()/room).max()
        assert off <= 1, (way, float(x[((got-want).abs()/room).argmax()]), float(off))

def learned():
    "Both ends and the middle of each slider of a knob that may learn."
    for r in catalog:
        for p in settings(r):
            learns = {k.name for k in r.knobs if k.learns}
            if p.values[1] in learns and type(p.values[2]) is float and not r.random: yield p

@pytest.mark.parametrize('r, name, v', learned())
def test_tails_of_a_knob(r, name, v):
    "The same for what a knob learns at each place; a tenth, since the curves cross 0 and are cancelled there."
    def learns(x):
        k = torch.full_like(x, v, requires_grad=True)
        return torch.autograd.grad(r.f(x, **{name: k}).sum(), k)[0]
    x = torch.cat([-torch.logspace(-4, 1.2, 997), torch.logspace(-4, 1.2, 997)])
    around = torch.stack([learns(x.double()*(1+d)).abs() for d in (-2e-3, -1e-3, 0, 1e-3, 2e-3)]).amax(0)
    assert ((learns(x)-learns(x.double())).abs() <= .1*around + 1e-30).all()

def test_a_claim_that_needs_the_defaults():
    "`at_default` is true: these claims are made and fail somewhere."
    x = torch.tensor([9., 2.2])
    for f in (clipped_round, trust_round):
        assert row(f).at_default == ('on_grid', 'odd') and row(f).on_grid and row(f).odd
        assert f(x, upper=2.5).tolist() == [2.5, 2.] and f(-x, upper=2.5).tolist() == [-2., -2.]
    assert all(getattr(r, c) is True for r in catalog for c in r.at_default)

@pytest.mark.parametrize('r', [r for r in catalog if r.monotone and r.grid and not r.random], ids=lambda r: r.name)
def test_monotone_to_the_last_bits(r):
    """On a grid of .3 from .1, 65,536 neighbouring floats from each of five places never fall by more than 4 units in
    the last place of the largest number on the way, here the step of .3: the last product and sum round once each, the
    curve by about two."""
    for start in (-.31, -.05, .09, .249, .39):
        bits = torch.tensor([start]).view(torch.int32) + torch.arange(65_536, dtype=torch.int32)
        x = bits.view(torch.float32).sort().values
        assert r.f(x, step=.3, offset=.1).diff().min() >= -4*torch.finfo(torch.float32).eps*.3
