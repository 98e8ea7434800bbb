"""The soft family against mpmath at 50 digits: value, slope and derivative in alpha, written from the paper's tanh form
and not from ours. Points: seed 0. float64 bounds are 1e-11 relative; float32 bounds are stated at each test.
The hard ones against gfloat, and the classes of shok against its own, bit for bit."""
import math
from functools import partial
import mpmath
import pytest
import torch
from estimators import FLOATS, generator, same, slope
from gfloat import Domain, FormatInfo, RoundMode, round_float
import shok_nb as R
from shok_nb.functions import PassRound, ScaleGrad, SoftRound

ALPHAS = 1e-6,1e-3,.05,.0699,.0701,.5,1.,3.,5.,12.,20.,50.,79.
mp = mpmath.mp.clone() if hasattr(mpmath.mp, 'clone') else mpmath.mp
mp.dps = 80

def soft(x, a):
    x,a = mp.mpf(x),mp.mpf(a)
    m = mp.floor(x)+mp.mpf(1)/2
    return m + mp.tanh(a*(x-m))/(2*mp.tanh(a/2))

def inverse(y, a):
    y,a = mp.mpf(y),mp.mpf(a)
    m = mp.floor(y)+mp.mpf(1)/2
    if y == mp.floor(y): return y
    return m + mp.atanh(2*mp.tanh(a/2)*(y-m))/a

def published_logistic(x, b):
    "The A, B, D form, in each cell."
    x,b = mp.mpf(x),mp.mpf(b)
    n,A = mp.floor(x),(mp.exp(b/2)+1)/(mp.exp(b/2)-1)
    return n + A/(1+mp.exp(-b*(x-n-mp.mpf(1)/2))) + (1-A)/2

def mean(z, a): return (inverse(mp.mpf(z)-mp.mpf(1)/2, a) + inverse(mp.mpf(z)+mp.mpf(1)/2, a))/2

FAMILY = [(R.soft_round, soft), (R.soft_round_inverse, inverse), (R.soft_round_conditional_mean, mean),
    (R.logistic_round, published_logistic)]
family = pytest.mark.parametrize('f, oracle', FAMILY, ids=lambda f: f.__name__)

def points(dtype):
    x = torch.rand(12, generator=generator(), dtype=torch.float64)*6-3
    return torch.cat([x, torch.tensor([1e-9, -1e-3, .4999, .5001, -1.001, 2.499])]).to(dtype)

def values(oracle, x, a): return torch.tensor([float(oracle(v, a)) for v in x.tolist()], dtype=torch.float64)

@pytest.mark.parametrize('a', ALPHAS)
@family
def test_value(f, oracle, a):
    "float64 to 1e-14 steps times the conditioning of the inverse; float32 to 4e-6 relative to the distance from zero."
    x = points(torch.float64)
    conditioning = 1 if f in (R.soft_round, R.logistic_round) else max(1, math.sinh(min(a, 30))/a)
    assert torch.allclose(f(x, a), values(oracle, x, a), rtol=0, atol=1e-14*conditioning)
    q = torch.tensor([1e-9, 1e-3, .1, .3, .45, .4999], dtype=torch.float32)
    y = values(oracle, q, a)
    assert ((f(q, a).double()-y).abs() <= 4e-6*y.abs() + 1e-37).all()

@pytest.mark.parametrize('a', ALPHAS)
@family
def test_slope(f, oracle, a):
    """1e-9 relative: the arguments of the sigmoid are rounded, which alpha amplifies. float32 to 1e-7
    times alpha, but for the conditional mean a ten-thousandth beside a tie: of 1/4-q*q three digits
    are left there, and 5e-5 is the worst."""
    single = 1e-4 if f is R.soft_round_conditional_mean else 1e-7*max(a, 10)
    for x,bound in ((points(torch.float64), 1e-9), (points(torch.float32), single)):
        slopes = [mp.diff(lambda v: oracle(v, a), mp.mpf(v), h=mp.mpf(10)**-25) for v in x.tolist()]
        want = torch.tensor([float(s) for s in slopes], dtype=torch.float64)
        assert torch.allclose(slope(lambda x: f(x, a), x).double(), want, rtol=bound, atol=0)

@pytest.mark.parametrize('dtype, bound', [(torch.float64, 1e-7), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize('a', ALPHAS)
@family
def test_alpha_derivative(f, oracle, a, dtype, bound):
    """Relative to the largest over the points. float32 loses most just above the threshold of the series (cancellation)
    and at alpha 79, where a quotient inside the backward pass goes subnormal: 3e-4 either way."""
    x = torch.tensor([.05, .25, .4, 1.3, -2.2], dtype=dtype)
    v = torch.full(x.shape, a, dtype=dtype, requires_grad=True)
    got, = torch.autograd.grad(f(x, v).sum(), v)
    a = mp.mpf(v[0].item())
    slopes = [mp.diff(lambda t: oracle(p, t), a, h=a*mp.mpf(10)**-20) for p in x.tolist()]
    want = torch.tensor([float(s) for s in slopes], dtype=torch.float64)
    assert torch.allclose(got.double(), want, rtol=0, atol=bound*want.abs().max())

def test_logistic_is_soft_round():
    x = points(torch.float64)
    for b in (.01, 1., 5., 10., 30., 100.): assert torch.equal(R.logistic_round(x, b), R.soft_round(x, b/2))

def fixed(step):
    "A format of gfloat's without exponents: below 2**53 steps its numbers are the multiples of `step`, a power of two."
    return FormatInfo('fixed', 61, 53, bias=-51-round(math.log2(step)), is_signed=True, domain=Domain.Extended,
        has_nz=True, num_high_nans=1, has_subnormals=True, is_twos_complement=False)

def nearest(rule, v, step):
    "gfloat's ties to even; at a tie the other rules choose between its floor and ceiling."
    go = partial(round_float, fixed(step), v)
    low,high = go(RoundMode.TowardNegative),go(RoundMode.TowardPositive)
    if rule == 'even' or low == high or v-low != high-v: return go(RoundMode.TiesToEven)
    return dict(up=high, down=low, away=high if v > 0 else low, zero=low if v > 0 else high)[rule]

MODES = zip((R.floor_ste, R.ceil_ste, R.trunc_ste),
    (RoundMode.TowardNegative, RoundMode.TowardPositive, RoundMode.TowardZero))
HARD = [(partial(R.round_ste, ties=t), partial(nearest, t)) for t in ('even', 'away', 'zero', 'up', 'down')]
HARD += [(f, lambda v, step, mode=mode: round_float(fixed(step), v, mode)) for f,mode in MODES]

@pytest.mark.parametrize('step', [1., .25, 8.])
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pytest.mark.parametrize('f, oracle', HARD, ids=['even', 'away', 'zero', 'up', 'down', 'floor', 'ceil', 'trunc'])
def test_hard_rounding(f, oracle, dtype, step):
    """Ties, their neighbours on either side, numbers large and tiny, infinity and nan;
    the sign of zero where there is no grid."""
    eighths,some = torch.arange(-24, 25)/8*step,torch.randn(200, generator=generator())*10
    x = torch.cat([eighths, some, torch.tensor([1e-7, 1025., 2.**22+.5, 2.**23-.5])]).to(dtype)
    x = x[x != 0]
    beside = [torch.nextafter(x, x+by) for by in (-1, 1)]
    x = torch.cat([x, *beside, torch.tensor([0., math.inf, math.nan], dtype=dtype)])
    x = torch.cat([x, -x])
    got,want = f(x, step=step),torch.tensor([oracle(v, step) for v in x.tolist()], dtype=dtype)
    assert same(got, want) if step == 1 else same(got+0, want+0)

@pytest.mark.parametrize('step', [1., .25])
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_stochastic_rounding(dtype, step, monkeypatch):
    """Every toss of a coin with 16 sides, for every sixteenth of a step: bit for bit gfloat's, which counts from zero
    outwards where we count up. So the mean over the sides is x itself, exactly."""
    sides,x = 16,(torch.arange(-48, 49)/16*step).to(dtype)
    toss = torch.arange(sides)
    monkeypatch.setattr(torch, 'rand', lambda shape, dtype, **kw: (toss/sides).to(dtype).expand(shape))
    got = R.stochastic_round(x[:, None].expand(-1, sides), step=step)
    away = lambda v, u: round_float(fixed(step), v, RoundMode.Stochastic, srbits=u if v < 0 else sides-1-u, srnumbits=4)
    assert torch.equal(got, torch.tensor([[away(v, u) for u in range(sides)] for v in x.tolist()], dtype=dtype))
    assert torch.equal(got.double().mean(1), x.double())
    limits = torch.tensor([[math.inf], [-math.inf], [math.nan]], dtype=dtype).expand(-1, sides)
    assert same(R.stochastic_round(limits, step=step), limits)

class ShokPassRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return torch.round(x)
    @staticmethod
    def backward(ctx, grad_output): return grad_output

class ShokScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input): return input
    @staticmethod
    def backward(ctx, grad_output):
        grad_max = grad_output.abs().max()
        return grad_output / grad_max if grad_max > 0 else grad_output

class ShokSoftRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rounded = torch.round(x)
        ratio = torch.where(rounded != 0, x / rounded, torch.zeros_like(x))
        ctx.save_for_backward(torch.where(torch.logical_and(x == 0, rounded == 0), torch.ones_like(x), ratio))
        return rounded
    @staticmethod
    def backward(ctx, grad_output):
        ratio, *_ = ctx.saved_tensors
        return grad_output * ratio

SHOK = [(PassRound, ShokPassRound), (ScaleGrad, ShokScaleGrad), (SoftRound, ShokSoftRound)]
shok = pytest.mark.parametrize('ours, theirs', SHOK, ids=lambda c: c.__name__)

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@shok
def test_classes_of_shok(ours, theirs, dtype):
    "Under their names, with `forward`, `backward` and `apply`: values and gradients. Seed 0."
    assert issubclass(ours, torch.autograd.Function) and ours.__name__ == theirs.__name__.removeprefix('Shok')
    x = (torch.randn(200, generator=generator(), dtype=torch.float64)*3).to(dtype)
    x[:4] = torch.tensor([0., -.3, .5, 1.5])
    def all_of(c):
        leaf = x.clone().requires_grad_()
        y = c.apply(leaf)
        return y.detach(),torch.autograd.grad((y**2).sum(), leaf)[0]
    once = ours is not PassRound and dtype in FLOATS[:2]        # a quotient of halves is rounded once here, twice there
    bound = torch.finfo(dtype).eps if once else 0.
    for a,b in zip(all_of(ours), all_of(theirs)): torch.testing.assert_close(a, b, rtol=bound, atol=bound)

@shok
def test_classes_of_shok_in_parts(ours, theirs):
    "Code that calls the static methods itself, or makes a class of one."
    x,g = torch.tensor([-2.5, .2, 1.4]),torch.tensor([1., -4., .5])
    class Kept:
        def save_for_backward(self, *t): self.saved_tensors = t
    def by_hand(c):
        ctx = Kept()
        return c.forward(ctx, x),c.backward(ctx, g)
    for a,b in zip(by_hand(ours), by_hand(theirs)): assert torch.equal(a, b)
    class Halved(ours):
        @staticmethod
        def backward(ctx, g): return g/2
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(Halved.apply(leaf).sum(), leaf)[0].tolist() == [.5, .5, .5]
    with pytest.raises(RuntimeError, match='setup_context'): torch.func.grad(lambda x: Halved.apply(x).sum())(x)

@shok
def test_classes_of_shok_under_transforms(ours, theirs):
    x = torch.tensor([[-2.5, .2, 1.4], [.6, -.4, 8.]])
    def slope_of(c): return lambda x: torch.func.grad(lambda x: (c.apply(x)**2).sum())(x)
    leaf = x.clone().requires_grad_()
    want, = torch.autograd.grad((theirs.apply(leaf)**2).sum(), leaf)
    assert torch.equal(slope_of(ours)(x), want)
    assert torch.equal(torch.vmap(ours.apply)(x), theirs.apply(x))
    assert torch.func.jvp(ours.apply, (x,), (torch.ones_like(x),))[0].equal(theirs.apply(x))
    for f in (lambda x: ours.apply(x), ours.apply):
        y = torch.compile(f, backend='eager', fullgraph=True)(leaf)
        assert torch.equal(y, theirs.apply(x)) and torch.equal(torch.autograd.grad((y**2).sum(), leaf)[0], want)
    if ours is ScaleGrad: return                # refused there by name
    assert torch.equal(torch.compile(slope_of(ours), backend='eager', fullgraph=True)(x), want)

@pytest.mark.parametrize('f', (R.soft_round, partial(R.soft_round, hard=True), R.logistic_round), ids=('soft', 'hard',
    'logistic'))
def test_a_large_alpha_learns_in_float32(f, monkeypatch):
    """Its gradient at each point of a cell is that of float64 to 1e-6 of the largest, 8 units in the last place; and
    backward runs no autograd of its own."""
    x,grad = torch.linspace(-.49, .49, 99, dtype=torch.float64),torch.autograd.grad
    monkeypatch.setattr(torch.autograd, 'grad', None)
    for a in (7., 20., 70.):
        def teaches(dtype):
            k = torch.full((99,), a, dtype=dtype, requires_grad=True)
            return grad(f(x.to(dtype), k).sum(), k)[0].double()
        want = teaches(torch.float64)
        assert (teaches(torch.float32)-want).abs().max() < 1e-6*want.abs().max()
