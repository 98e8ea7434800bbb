"""Where a value is held at an end the slope is a choice, and this package makes it: 1 at the end itself, 0 one
ulp beyond. torch chose 1 up to 2.13; from 2.14 it chooses 0 for a number and 1/2 for a tensor. Everything here
runs with both, so that no formula rests on either: each function at each of its ends and one ulp to both
sides, against formulas in Python's floats."""
import math
from functools import partial
import pytest
import torch
from estimators import back
import shok_nb as R
from shok_nb import fsq
from shok_nb.estimators.gradient import normalize_grad
from shok_nb.estimators.neighbours import _reinmax_round, _sga
from shok_nb.quantization.fake_quantize import dorefa, dorefa_weight, fake_quantize, pact, quantized_bits
from shok_nb.quantization.learned import adaround, adaround_init, rectified_sigmoid, signround_range
from shok_nb.studies.jpeg import jpeg


# --- the other slopes
def _number(strict):
    def clamp(x, lower=None, upper=None):
        if lower is not None: x = torch.where(x <= lower if strict else x < lower, lower, x)
        return x if upper is None else torch.where(x >= upper if strict else x > upper, upper, x)
    return clamp

def _halves(x, lower=None, upper=None):
    if lower is not None: x = torch.maximum(x, lower)
    return x if upper is None else torch.minimum(x, upper)

def own():
    x = torch.ones((), requires_grad=True)
    return torch.autograd.grad(x.clamp(0, 1), x)[0].item()

@pytest.fixture(params=('own', 'other'), autouse=True)
def slopes(request):
    "Everything that differentiates asks these entries of torch's table; 'other' is 2.14's on 2.13 and 2.13's on 2.14."
    if request.param == 'own':
        yield
        return
    before = own()
    number,tensor = (_number(True), _halves) if before == 1 else (_number(False), _number(False))
    lib = torch.library.Library('aten', 'IMPL')
    for key in ('AutogradCPU', 'AutogradMeta'):
        for kind,f in (('', number), ('.Tensor', tensor)):
            lib.impl('clamp'+kind, f, key)
            lib.impl('clamp_min'+kind, f, key)
            lib.impl('clamp_max'+kind, lambda x, upper, f=f: f(x, None, upper), key)
    assert own() == 1-before
    forget()
    yield
    lib._destroy()
    forget()
    assert own() == before

def forget():
    "What the operations remember of that table."
    for packet in (torch.ops.aten.clamp, torch.ops.aten.clamp_min, torch.ops.aten.clamp_max):
        for name in packet.overloads(): getattr(packet, name)._dispatch_cache.clear()

# --- what is expected
def beside(v, dtype):
    "`v` in `dtype`, and the next number on each side."
    t = torch.tensor(v, dtype=dtype)
    return [torch.nextafter(t, torch.tensor(s*math.inf, dtype=dtype)).item() for s in (-1, 1)] + [t.item()]

def grid(dtype, xs, *knobs):
    "All `xs` and one ulp beside them, with each row of `knobs`."
    return [(x, *k) for v in xs for x in beside(v, dtype) for k in (knobs or [()])]

def hold(x, lower, upper): return min(max(x, lower), upper)
def inside(x, lower, upper): return float(lower <= x <= upper)
def sech2(z): return 1/math.cosh(z)**2
def sigma(z): return 1/(1+math.exp(-z))
def sign(x): return 1. if x >= 0 else -1.

CASES = {}
def case(f, points, floor=1e-2, name='', end=None):
    """`want(*point)`: the value and its derivative by each argument, from Python's floats. None: not stated. `end` is a
    number that `f` has in its dtype, and so the first argument of `want`."""
    def add(want):
        for dtype in (torch.float32, torch.float64):
            of_dtype = want if end is None else partial(want, beside(end, dtype)[2])
            CASES[name or want.__name__, dtype] = (f, points(dtype), of_dtype, floor)
        return want
    return add

@case(lambda x, lower, upper: R.clipped_round(x, lower=lower, upper=upper),
    lambda d: grid(d, (-2.5, -2, -1.5, 1.5, 2, 2.5), (-2., 2.)))
def clipped_round(x, lower, upper):
    n = round(x)
    return hold(n, lower, upper),inside(n, lower, upper),float(n < lower),float(n > upper)

@case(lambda x, s: R.clipped_round(x, step=s), lambda d: grid(d, (-1.25, 1, 1.25), (.5,)))
def clipped_round_learning_its_step(x, s):
    v,n = x/s,round(x/s)
    k = hold(n, -2, 2)
    return k*s,inside(n, -2, 2),n-v if k == n else k

@case(lambda x, lower, upper: R.trust_round(x, .5, lower=lower, upper=upper),
    lambda d: grid(d, (-2.5, -2, 2, 2.5), (-2., 2.)))
def trust_round(x, lower, upper):
    n = round(x)
    y = hold(n, lower, upper)
    return y,float(abs(x-y) <= .5),float(n < lower),float(n > upper)

@case(lambda x, lower, upper: R.dsq_round(x, .2, lower=lower, upper=upper), lambda d: grid(d, (-2, 2, .25), (-2., 2.)))
def dsq_round(x, lower, upper):
    "Five levels: s is (upper-lower)/4, and the value lower + s F((x-lower)/s)."
    if x < lower: return lower,0.,1.,0.
    if x > upper: return upper,0.,0.,1.
    s,k = (upper-lower)/4,math.log(2/.2-1)
    w = (x-lower)/s
    n = round(w)
    slope = k*sech2(k*(.5-abs(n-w)))/(2*(1-.2))
    return n*s+lower,slope,1-slope-(n-w*slope)/4,(n-w*slope)/4

@case(lambda x, s: fake_quantize(x, s, bits=3), lambda d: grid(d, (-1.125, -1, .75, .875), (.25,)))
def fake_quantize_saturated(x, s):
    v,n = x/s,round(x/s)
    k = hold(n, -4, 3)
    return k*s,inside(n, -4, 3),n-v if k == n else k

@case(lambda x, s: fake_quantize(x, s, bits=3, gradient='clipped'),
    lambda d: grid(d, (-1.125, -1, .75, .875), (.25,)))
def fake_quantize_clipped(x, s):
    v,k = x/s,hold(round(x/s), -4, 3)
    return k*s,inside(v, -4, 3),k-v if -4 <= v <= 3 else k

@case(lambda x, s: fake_quantize(x, s, bits=3, rounding=lambda v: v/4), lambda d: grid(d, (-1.25, 1, .75), (.25,)))
def fake_quantize_with_another_rounding(x, s):
    "Values are held one step beyond the codes, at -5 s and 4 s."
    return hold(x, -5*s, 4*s)/4,inside(x, -5*s, 4*s)/4,0.

@case(lambda x: quantized_bits(x, 3, gradient='saturated'), lambda d: grid(d, (-1.125, -1, .75, .875)))
def quantized_bits_saturated(x):
    n = round(4*x)
    return hold(n, -4, 3)/4,inside(n, -4, 3)

@case(lambda x, a: pact(x, a, 2), lambda d: grid(d, (0, 1.5, .5), (1.5,)))
def pact_2_bits(x, a):
    "The upper end is alpha's, as in the paper."
    return round(hold(x, 0, a)*3/a)*a/3,float(0 <= x < a),float(x >= a)

@case(lambda x: dorefa(x, 2), lambda d: grid(d, (0, -0., 1, .5)))
def dorefa_2_bits(x): return round(3*hold(x, 0, 1))/3,inside(x, 0, 1)

@case(R.clipped_sign, lambda d: grid(d, (-1.25, 0, 1.25), (1.25,)))
def clipped_sign(x, clip): return sign(x),float(abs(x) <= clip),sign(x)*(abs(x) > clip)

@case(R.approx_sign, lambda d: grid(d, (-1, 0, 1)))
def approx_sign(x): return sign(x),max(2-2*abs(x), 0)

@case(lambda x, a, threshold: R.triangular_spike(x, a, threshold=threshold),
    lambda d: grid(d, (-.25, .25, .75), (2., .25)))
def triangular_spike(x, a, threshold):
    "Up to its end, where it is 0 already; the threshold goes the other way."
    u = x-threshold
    rest = max(1-a*abs(u), 0.)
    return float(x >= threshold),a*rest,u*rest,-a*rest

@case(R.ede_sign, lambda d: [(x, t) for t in (.5, *beside(1, d), 2.) for x in (-1.5, -.3, .7)])
def ede_sign(x, t):
    "At t = 1 the factor is still 1/t."
    q,z = abs(x),t*abs(x)
    return sign(x),max(t, 1)*sech2(z),sign(x)*(q*sech2(z)/t - math.tanh(z)/t**2 if t <= 1 else q*sech2(z))

@case(R.reste_sign, lambda d: grid(d, (-1.5, .1, 1.5), (3., 1.5)), end=.1)
def reste_sign(near, x, o, clip):
    q,s = min(abs(x), clip),sign(x)
    if q <= near: dq,do = .1**(1/o-1),-q*.1**(1/o-1)*math.log(.1)/o**2
    else: dq,do = q**(1/o-1)/o,-q**(1/o)*math.log(q)/o**2
    return s,dq*(abs(x) <= clip),s*do,s*dq*(abs(x) > clip)

def _ramps(d):
    top = torch.finfo(d).max
    return [*grid(d, (0, .5, 1), (2., 0.), (4., .25), (1., 0.)), *((.4e-30, g, 0.) for g in beside(1e30, d)),
        *((x, .5/top, 0.) for x in (top, beside(top, d)[0], -top))]
@case(lambda x, gain, th: R.ramp_round(x, gain, threshold=th), _ramps, floor=0., end=1e30)
def ramp_round(most, x, gain, th):
    "The gain is held at `most`, 1e30 in the dtype."
    h = gain*(x-th)
    if gain > 1e29: return h,gain,x*(gain <= most),-gain
    return hold(h, 0, 1),gain*inside(h, 0, 1),(x-th)*inside(h, 0, 1),-gain*inside(h, 0, 1)

def _sigmoids(d):
    top = torch.finfo(d).max
    steep = [(x, beside(1e30, d)[2], 0.) for x in (1e-30, -2e-30)]
    return steep + [(x, 1/top, 0.) for x in (top, beside(top, d)[0], -top)]
@case(lambda x, s, c: R.sigmoid_round(x, s, center=c), _sigmoids, floor=0.)
def sigmoid_round(x, s, c):
    y = sigma(s*(x-c))
    return y,s*y*(1-y),(x-c)*y*(1-y),-s*y*(1-y)

@case(R.sigmoid_sum_round, lambda d: [(x, t) for t in (*beside(.22, d), .1, *beside(100., d)) for x in (-.7, .3, 1.25)])
def sigmoid_sum_round(x, t):
    "A sigmoid per tie; 100 steps of noise are the identity."
    if t > 99: return x,1.,0.
    zs = [(x-k-.5)/t for k in range(-40, 40)]
    steep = [sigma(z)*(1-sigma(z)) for z in zs]
    return sum(map(sigma, zs))-40,sum(steep)/t,-sum(p*z for p,z in zip(steep, zs))/t

def _alphas(d):
    fi = torch.finfo(d)
    return (*beside(fi.eps**(1/6), d), 5., *beside(.9*math.log(fi.max), d))

@case(R.soft_round, lambda d: [(x, a) for a in _alphas(d) for x in (.3, -1.25, .501)])
def soft_round(x, a):
    u,T = x-math.floor(x)-.5,math.tanh(a/2)
    return math.floor(x)+.5+math.tanh(a*u)/T/2,a*sech2(a*u)/T/2,(u*sech2(a*u)/T - math.tanh(a*u)*sech2(a/2)/T**2/2)/2

@case(R.soft_round_inverse, lambda d: [(x, a) for a in _alphas(d) for x in (.3, -1.25, .501)])
def soft_round_inverse(y, a):
    u,T = y-math.floor(y)-.5,math.tanh(a/2)
    rest = sech2(a/2) + T*T*(1-4*u*u)                               # 1-(2uT)²
    A = math.atanh(2*u*T) if abs(u) < .5 else math.copysign(a/2, u)
    return math.floor(y)+.5+A/a,2*T/a/rest,-A/a**2 + u*sech2(a/2)/a/rest

@case(R.soft_round_conditional_mean, lambda d: [(x, a) for a in (2., 5., 8.) for x in (-.5, .5, 1.5, .25, -1.75)]
    + [(x, a) for a in _alphas(d) for x in (.3, -1.25)])
def soft_round_conditional_mean(z, a):
    y,*slopes = soft_round_inverse(z-.5, a)
    return y+.5,*slopes

def _fsq(n):
    def f(z, margin):
        if torch.is_tensor(margin): margin = margin[..., None]
        return fsq(z[..., None], [n], margin=margin)[..., 0]
    return f

def codes(n, z, margin):
    low,steps = -(n//2),n-1
    h,o = steps/2*(1+margin),-steps/2-low
    T = math.tanh(z + math.atanh(o/h))
    k,there = round(h*T-o),low <= round(h*T-o) <= low+steps
    return hold(k, low, low+steps)/-low,h*(1-T*T)/-low*there,steps/2*(T - (1-T*T)*(o/h)/(1-(o/h)**2))/-low*there
def _latents(d):
    zs = torch.tensor([*(k/4+.03 for k in range(-14, 15)), 9., -9.], dtype=d)
    return [(z, m) for z in zs.tolist() for m in (.125, -.0625)]
for n in (3, 5, 8): case(_fsq(n), _latents, name=f'fsq_{n}_levels')(partial(codes, n))

for zeta,gamma in ((1.5, -1.5), (2.5, -.5)):
    @case(partial(rectified_sigmoid, zeta=zeta, gamma=gamma), lambda d: [(-1e-3,), (0.,), (1e-3,)],
        name=f'rectified_sigmoid_{zeta}')
    def rectified(v, zeta=zeta, gamma=gamma):
        "At 0 it is exactly 0 or 1."
        s = sigma(v)
        h = s*(zeta-gamma)+gamma
        return hold(h, 0, 1),s*(1-s)*(zeta-gamma)*inside(h, 0, 1)

_ODDS = dict(
    atanh=lambda p: (math.atanh(p)-math.atanh(1-p), 1/(1-p*p)+1/(1-(1-p)**2)),
    linear=lambda p: (math.log(p/(1-p)), 1/(p*(1-p))),
    cosine=lambda p: (2*math.log(math.tan(math.pi/2*p)), 2*math.pi/math.sin(math.pi*p)),
    logit=lambda p: (4/3*math.log(p/(1-p)), 4/3/(p*(1-p))),
)
for kind in _ODDS:
    def sga(x, kind=kind):
        "Distances are kept 1e-6 from both ends; noise .3, temperature 3."
        odds,slope = _ODDS[kind](hold(x, 1e-6, 1-1e-6))
        w = sigma((odds/3 + math.log(.3/.7))/3)
        return w,w*(1-w)*slope/9*inside(x, 1e-6, 1-1e-6)
    def ours(x, kind=kind): return _sga(kind, 2)(x, 3., 4/3, .3)
    CASES[f'sga_round_{kind}', torch.float64] = (ours, grid(torch.float64, (1e-6, 1-1e-6, .5)), sga, 1e-2)

@case(lambda x, s: R.round_ste(x, step=s),
    lambda d: [(k*2/torch.finfo(d).eps*4, s) for k in (1, -2, 64) for s in (.5, .25)])
def grid_finer_than_the_dtype(x, s): return x,1.,0.

# --- how it is asked
# A wrong choice errs by 1/2 and more.
RTOL = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-3, torch.float64: 1e-6}

def check(got, want, dtype, floor, what):
    """Value and slopes, point by point, relative to themselves or to `floor`, and to one ulp of the
    smallest numbers; None is not compared."""
    least = torch.finfo(dtype).smallest_normal*torch.finfo(dtype).eps
    assert len(got) in (1, len(want[0])), (what, len(got), len(want[0]))
    for i,(g,w) in enumerate(zip(got, zip(*want, strict=True))):
        for p,(a,b) in enumerate(zip(g.tolist(), w, strict=True)):
            close = b is None or abs(a-b) <= max(RTOL[dtype]*max(abs(b), floor), least)
            assert close, (what, f'slope {i}' if i else 'value', f'point {p}', a, b)

def tensors(points, dtype): return [torch.tensor(c, dtype=dtype) for c in zip(*points)]

def eager(f, ts, **kw): return back(f, *ts, materialize_grads=True, **kw)

def transformed(f, ts):
    "Name of the transform, the value and the slopes it gives."
    n = tuple(range(len(ts)))
    y = f(*ts)
    yield 'grad',(y, *torch.func.grad(lambda *a: f(*a).sum(), n)(*ts))
    yield 'vmap(grad)',(torch.vmap(f)(*ts), *torch.vmap(torch.func.grad(f, n))(*ts))
    yield 'jacrev',(y, *(j.diagonal() for j in torch.func.jacrev(f, n)(*ts)))
    ones = [tuple(torch.ones_like(t) if i == j else torch.zeros_like(t) for j,t in enumerate(ts)) for i in n]
    yield 'jvp',(y, *(torch.func.jvp(f, tuple(ts), t)[1] for t in ones))

@pytest.mark.parametrize('name, dtype', [pytest.param(*k, id=f'{k[0]}-{str(k[1])[6:]}') for k in CASES])
def test_ends(name, dtype):
    f,points,want,floor = CASES[name, dtype]
    ts = tensors(points, dtype)
    expected = [want(*p) for p in zip(*(t.tolist() for t in ts))]
    with torch.no_grad(): check([f(*ts)], expected, dtype, floor, 'no_grad')
    check(eager(f, ts), expected, dtype, floor, 'eager')
    check(eager(f, ts, create_graph=True), expected, dtype, floor, 'create_graph')
    for what,got in transformed(f, ts): check(got, expected, dtype, floor, what)
    if name == 'fake_quantize_with_another_rounding': return         # holds nothing for a scale that is a number
    for knobs in dict.fromkeys(zip(*(t.tolist() for t in ts[1:]))):  # numbers in place of tensors
        at = [i for i,p in enumerate(zip(*(t.tolist() for t in ts))) if p[1:] == knobs]
        g,x,some = lambda x: f(x, *knobs),ts[0][at],[expected[i][:2] for i in at]
        check(eager(g, [x]), some, dtype, floor, f'eager {knobs}')
        check((g(x), torch.func.grad(lambda x: g(x).sum())(x)), some, dtype, floor, f'grad {knobs}')

@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize('name',
    ('clipped_round', 'pact_2_bits', 'dorefa_2_bits', 'clipped_sign', 'approx_sign', 'quantized_bits_saturated'))
def test_ends_of_halves(name, dtype):
    f,points,want,floor = CASES[name, torch.float32]
    ts = tensors([(b, *p[1:]) for p in points[2::3] for b in beside(p[0], dtype)], dtype)
    expected = [want(*p) for p in zip(*(t.tolist() for t in ts))]
    for what,got in (('eager', eager(f, ts)), *transformed(f, ts)): check(got, expected, dtype, floor, what)

# But one, which compiles for half as long as all others.
DOUBLES = [k for k in CASES if k[1] == torch.float64 and k[0] != 'sigmoid_sum_round']

@pytest.mark.slow
@pytest.mark.parametrize('slopes', ('other' if own() == 1 else 'own',), indirect=True)             # those of 2.14
@pytest.mark.parametrize('group', [DOUBLES[i:i+8] for i in range(0, len(DOUBLES), 8)],
    ids=lambda group: group[0][0])
def test_ends_compiled(group):
    "Eight functions to a graph; compiled gradients, and the gradients of compiled functions."
    rows = [(CASES[k][0], tensors(CASES[k][1], k[1])) for k in group]
    flat = [t for _,ts in rows for t in ts]
    def split(ts):
        ts = iter(ts)
        return [[next(ts) for _ in own] for _,own in rows]
    def f(*flat): return [g(*ts) for (g,_),ts in zip(rows, split(flat))]
    def loss(*flat): return sum(y.sum() for y in f(*flat))
    leaves = [t.clone().requires_grad_() for t in flat]
    ys = torch.compile(f, backend='aot_eager', fullgraph=True)(*leaves)
    slopes = torch.autograd.grad([y.sum() for y in ys], leaves, materialize_grads=True)
    inner = torch.compile(torch.func.grad(loss, tuple(range(len(flat)))), backend='aot_eager', fullgraph=True)(*flat)
    for k,y,a,b in zip(group, ys, split(slopes), split(inner)):
        _,points,want,floor = CASES[k]
        expected = [want(*p) for p in zip(*(t.tolist() for t in tensors(points, k[1])))]
        check((y, *a), expected, k[1], floor, f'compiled {k[0]}')
        check((y, *b), expected, k[1], floor, f'compiled grad {k[0]}')

# --- what is not elementwise, and second derivatives
def everywhere(f, x):
    "The gradient of the 0-d `f` at `x` in eager mode and under transforms."
    yield back(f, x)[1]
    yield torch.func.grad(f)(x)
    yield torch.func.jacrev(f)(x)
    yield torch.func.jacfwd(f)(x)

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
def test_largest_weight_of_dorefa(dtype):
    """tanh(w)/2max + ½ is exactly 1 at the largest weight: it passes what the others
    do, less what it does as the maximum."""
    w,c = torch.tensor([1., .3, -.2], dtype=dtype),torch.tensor([3., 2., 1.], dtype=dtype)
    t = torch.tanh(w)
    want = c/t[0] - torch.tensor([1., 0, 0], dtype=dtype)*(c*t).sum()/t[0]**2
    for g in everywhere(lambda w: (dorefa_weight(w, 3)*c).sum(), w): assert torch.allclose(g, want*(1-t*t), rtol=1e-5)

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
def test_adaround_on_the_grid(dtype):
    "Weights on the grid start at an end of the rectified sigmoid, some of them exactly."
    w = torch.arange(-20, 20, dtype=dtype)/4
    v = torch.cat([adaround_init(w, step=.5), torch.linspace(-4, 4, 11, dtype=dtype)])
    for _ in range(6): v = torch.cat([v, *(torch.nextafter(v, v+s) for s in (-1, 1))]).unique()
    s = torch.sigmoid(v)
    h = s*(1.1+.1)-.1
    assert (h < 0).any() and (h > 1).any() and (dtype == torch.float64 or (h == 0).any())
    want = .5*(h >= 0)*(h <= 1)*1.2*s*(1-s)
    for g in everywhere(lambda v: adaround(torch.zeros_like(v), v, step=.5).sum(), v):
        assert torch.allclose(g, want, rtol=1e-5, atol=0)

@pytest.mark.parametrize('dtype', (torch.float32, torch.float64), ids=str)
def test_smallest_scale_of_signround(dtype):
    "Fifteen of the smallest normal numbers in fifteen steps: the scale is held at that number and still learns."
    tiny = torch.finfo(dtype).tiny
    w,one = torch.tensor([0., 15*tiny], dtype=dtype),torch.ones((), dtype=dtype)
    assert signround_range(w)[0] == tiny
    for g in everywhere(lambda a: signround_range(w, a)[0]/tiny, one): assert g == 1

def test_white_and_black_through_jpeg():
    """A page of one grey level comes back exactly; at both ends the codec without
    rounding of coefficients is the identity."""
    images = torch.tensor([255., 128., 0.]).view(3, 1, 1, 1).expand(3, 1, 8, 16).contiguous()
    weights = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    def f(x): return (jpeg(x, 100, lambda c: c, integers=R.round_ste)*weights).sum()
    assert torch.equal(jpeg(images, 100, lambda c: c, integers=R.round_ste), images)
    for g in (back(f, images)[1], torch.func.grad(f)(images)):
        assert torch.allclose(g, weights, atol=1e-4)

def curvatures(f, x):
    "Second derivatives of an elementwise `f`."
    leaf = x.clone().requires_grad_()
    g, = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    yield torch.autograd.grad(g.sum(), leaf)[0]
    yield torch.vmap(torch.func.grad(torch.func.grad(f)))(x)

def test_second_derivatives():
    "The triangular slope falls by 2 up to its end; reinmax' weight is ½/p, held at p = 2**-24."
    x = torch.tensor(grid(torch.float64, (-1., 1.)), dtype=torch.float64).flatten()
    for g in curvatures(R.approx_sign, x): assert torch.equal(g, -2*x.sign()*(x.abs() <= 1))
    p = torch.tensor(beside(2**-24, torch.float64), dtype=torch.float64)
    for g in curvatures(lambda v: _reinmax_round(v, 0.), p): assert torch.allclose(g, -.5/p**2*(p >= 2**-24))

def test_second_derivative_of_normalize_grad():
    "One number divided by its own magnitude is ±1, down to `eps`; below it is that number over `eps`."
    for g,want in ((.5, 0.), (.5+2**-20, 0.), (.5-2**-20, 2.)):
        x,v = (torch.tensor([k], dtype=torch.float64, requires_grad=True) for k in (1., g))
        out, = torch.autograd.grad(normalize_grad(x, eps=.5), x, v, create_graph=True)
        assert torch.autograd.grad(out, v)[0].item() == pytest.approx(want, abs=1e-9)

# --- learned knobs beyond their range
# The range of each, and a place inside where the loss is to lead.
KNOBS = [
    (R.dsq_round, 'alpha', 0, 1, .4), (R.stable_round, 'amplitude', 0, .225, .1), (R.clipped_sign, 'clip', 0, None, 1.),
    (R.ede_sign, 't', 0, None, 2.), (R.swish_sign, 'beta', 0, None, 2.), (R.reste_sign, 'o', 1, None, 2.),
    (R.reste_sign, 'clip', 0, None, 1.), (R.soft_round, 'alpha', 0, None, 4.), (R.logistic_round, 'beta', 0, None, 8.),
    (R.soft_round_inverse, 'alpha', 0, None, 4.), (R.soft_round_conditional_mean, 'alpha', 0, None, 4.),
    (R.sigmoid_round, 'steepness', 0, None, 4.), (R.sigmoid_sum_round, 'temperature', 0, None, .1),
    (R.poisson_round, 'rho', 0, 1, .5), (R.ramp_round, 'gain', 0, None, 2.), (R.noisy_soft_round, 'alpha', 0, None, 4.),
    (R.sga_round, 'temperature', 0, None, .5), (R.pact, 'alpha', 0, None, 1.), (R.arctan_spike, 'alpha', 0, None, 2.),
    (R.fast_sigmoid_spike, 'alpha', 0, None, 2.), (R.triangular_spike, 'alpha', 0, None, 1.),
]
SIZES = R.ede_sign,R.soft_round,R.logistic_round,R.soft_round_inverse,R.soft_round_conditional_mean, \
    R.sigmoid_sum_round,R.noisy_soft_round,R.sga_round
POINTS = torch.cat([torch.linspace(-1.7, 1.7, 41), torch.tensor([.5, 0., 1., .25])])

def of_knob(f, arg):
    "`f` as a function of `x` and this knob, with noise that does not change."
    kw = dict(seed=torch.tensor(0)) if f in (R.noisy_soft_round, R.sga_round) else {}
    return lambda x, k: f(x, **{arg: k}, **kw)

def beyond(lo, hi): return [lo-2., lo-1e-3] if hi is None else [lo-2., lo-1e-3, hi+1e-3, hi+2.]

def knob_cases(f): return pytest.mark.parametrize('f, arg, lo, hi, inside', KNOBS,
    ids=[f'{k[0].__name__}-{k[1]}' for k in KNOBS])(f)

@knob_cases
def test_knobs_beyond_their_ends_are_finite(f, arg, lo, hi, inside):
    g = of_knob(f, arg)
    for k in (*beyond(lo, hi), lo, -0., hi or 1e4, math.inf, -math.inf):
        y,*slopes = back(g, POINTS, torch.tensor(float(k)), materialize_grads=True)
        assert all(t.isfinite().all() for t in (y, *slopes)), k
        if f not in SIZES and not math.isinf(k) and k < lo: assert slopes[1] != 0, k

@knob_cases
def test_knobs_beyond_their_ends_are_the_end_or_their_size(f, arg, lo, hi, inside):
    "What a tensor means there, by its value and its slope in `x`."
    g = of_knob(f, arg)
    for k in beyond(lo, hi):
        same = abs(k) if f in SIZES else max(k, lo) if hi is None else min(max(k, lo), hi)
        if f is R.dsq_round: same = 1e-3 if k < lo else .9
        for a,b in zip(back(g, POINTS, torch.tensor(k))[:2], back(g, POINTS, torch.tensor(float(same)))[:2]):
            assert torch.equal(a, b), k

@knob_cases
def test_knobs_come_back(f, arg, lo, hi, inside):
    "The gradient is that of the place where the knob is held and leads back. A size is at no end."
    if f in SIZES: return
    g = of_knob(f, arg)
    x = torch.rand(64, generator=torch.Generator().manual_seed(0))*.8 - .4
    for start in beyond(lo, hi):
        k = torch.tensor(start, requires_grad=True)
        sure = -1. if start < lo else 1.
        optimizer = torch.optim.Adam([k], lr=.1)
        for _ in range(40):
            optimizer.zero_grad()
            held = g(x, k)
            # asks for the way in, whatever the slope of the knob is
            towards = torch.autograd.grad(held.sum(), k, retain_graph=True)[0]
            (held.sum()*(towards.sign()*sure)).backward()
            assert k.grad.isfinite() and sure*k.grad >= 0
            optimizer.step()
            if (k > lo) and (hi is None or k < hi): break
        assert k.isfinite() and (k > lo and (hi is None or k < hi)), (start, k)

@pytest.mark.slow
def test_knobs_beyond_their_ends_under_transforms():
    for f,arg,lo,hi,_ in (KNOBS[0], KNOBS[1], KNOBS[5], KNOBS[7], KNOBS[13]):
        g = of_knob(f, arg)
        points = POINTS[:41].double()                # without ties, where an end has a slope for each side
        for k in torch.tensor(beyond(lo, hi), dtype=torch.float64):
            want = back(g, points, k)
            slopes = torch.func.grad(lambda x, k: g(x, k).sum(), (0, 1))(points, k)
            tangent = torch.func.jvp(lambda k: g(points, k).sum(), (k,), (torch.ones_like(k),))[1]
            many = torch.vmap(torch.func.grad(lambda k: g(points, k).sum()))(k.expand(3).clone())
            for a,b in ((slopes[0], want[1]), (slopes[1], want[2]), (tangent, want[2]), (many, want[2].expand(3))):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-4), (f.__name__, k)

@pytest.mark.slow
@pytest.mark.parametrize('slopes', ('own',), indirect=True)
def test_knobs_beyond_their_ends_compiled():
    def f(x, a, b): return R.soft_round(x, a) + R.poisson_round(x, b)
    ts = POINTS,torch.tensor(-2.),torch.tensor(-.5)
    for a,b in zip(back(torch.compile(f, backend='aot_eager', fullgraph=True), *ts), back(f, *ts)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)

def test_knobs_inside_are_the_number():
    for f,arg,lo,hi,inside in KNOBS:
        g = of_knob(f, arg)
        number,tensor = g(POINTS, inside),g(POINTS, torch.tensor(inside, requires_grad=True))
        assert torch.allclose(number, tensor.detach(), rtol=1e-4, atol=1e-5), f.__name__

# --- learned ends, and places on the line
def _between(f, **kw): return lambda x, l, u: f(x, lower=l, upper=u, **kw)
SPANS = dict(clipped=_between(R.clipped_round), clipped_half=_between(R.clipped_round, step=.5, offset=.25),
    trust=_between(R.trust_round), trust_all=_between(R.trust_round, trust=9.), dsq=_between(R.dsq_round),
    dsq_two=_between(R.dsq_round, levels=2))

@pytest.mark.parametrize('name', SPANS)
@pytest.mark.parametrize('lower, upper', ((-1., 2.), (-3., -1.), (.3, .7), (-math.inf, 1.), (0., math.inf),
    (1., 1.+2**-20)))
def test_ends_that_crossed_change_places(name, lower, upper):
    "Values, and slopes for `x` and both ends, by every road; also if one is a number, or each element has its own."
    f = SPANS[name]
    if 'dsq' in name and math.isinf(upper-lower): return
    a,b = (torch.tensor(k, dtype=torch.float64) for k in (lower, upper))
    x = POINTS.double()*2
    want = back(f, x, a, b, materialize_grads=True)
    y,to_x,to_b,to_a = back(f, x, b, a, materialize_grads=True)
    by_func = torch.func.grad(lambda *ts: f(*ts).sum(), (0, 2, 1))(x, b, a)
    each = torch.vmap(f)(x, b.expand_as(x), a.expand_as(x))
    found = y,to_x,to_a,to_b,*by_func,each
    for w,g in zip((*want, *want[1:], want[0]), found): assert torch.allclose(w, g, rtol=1e-6)
    assert all(t.isfinite().all() for t in want)
    for l,u in ((b, lower), (upper, a)): assert torch.equal(f(x, l, u), want[0])
    wide = x[:, None]
    assert torch.equal(f(wide, torch.stack([a, b]), torch.stack([b, a])), want[0][:, None].expand(-1, 2))

@pytest.mark.parametrize('name', SPANS)
@pytest.mark.parametrize('at', (-1., 0., .5))
def test_ends_that_meet(name, at):
    "One value, and each end has the gradient of what lies on its side, so that they part again."
    f = SPANS[name]
    x = torch.tensor([-3., -2., -1.75, 3., 4.])
    y,to_x,low,high = back(f, x, torch.tensor(at), torch.tensor(at))
    assert (y == y[0]).all() and (name == 'trust_all' or not to_x.any()) and low > 0 and high > 0
    if 'dsq' not in name: assert low.item() == pytest.approx(1.5*high.item())
    z = back(f, torch.tensor([at]), torch.tensor(at), torch.tensor(at))
    assert all(t.isfinite().all() for t in z)

@pytest.mark.slow
@pytest.mark.parametrize('name', SPANS)
def test_learned_ends_find_their_range(name):
    "From crossed ends and from ends that meet, by plain gradient descent: those that made the data."
    f = SPANS[name]
    x = torch.linspace(-4, 4, 201)
    for start in ((3., -3.), (0., 0.), (2.5, 1.)):
        l,u = (torch.tensor(k, requires_grad=True) for k in start)
        for _ in range(300):
            to_l,to_u = torch.autograd.grad((f(x, l, u) - f(x, -1., 2.)).square().mean(), (l, u))
            with torch.no_grad():
                l -= .2*to_l
                u -= .2*to_u
        assert (f(x, l, u) - f(x, -1., 2.)).square().mean() < .04, (start, l, u)

PLACES = [(R.sigmoid_round, 'steepness', 'center'), (R.ramp_round, 'gain', 'threshold')]
@pytest.mark.parametrize('f, sharpness, place', PLACES, ids=('sigmoid', 'ramp'))
@pytest.mark.parametrize('sharp', (0., 1., 1000., math.inf))
def test_places_anywhere_on_the_line(f, sharpness, place, sharp):
    "Finite, with the slope of backward by every road: at infinity, at the largest number, and on `x` itself."
    most = torch.finfo(torch.float32).max
    x = torch.tensor([-math.inf, -most, -1., 0., .5, 1., most, math.inf])
    for k in (math.inf, -math.inf, most, -most, 0., .5, 1e-45):
        for s in (sharp, torch.tensor(sharp)):
            def g(x, k, s=s): return f(x, **{sharpness: s, place: k})
            y,*slopes = back(g, x, torch.tensor(k), materialize_grads=True)
            assert y.isfinite().all() and (y >= 0).all() and (y <= 1).all()
            others = torch.func.grad(lambda x, k: g(x, k).sum(), (0, 1))(x, torch.tensor(k))
            for a,b in zip(slopes, others):
                assert a.isfinite().all() and torch.allclose(a, b, rtol=1e-4, atol=1e-4), (k, a, b)

@pytest.mark.parametrize('arg', ('alpha', 'beta'))
def test_shares_of_a_range_come_back(arg):
    "From 0 and below: the scale is that of the least share, and the gradient that of a share."
    w = torch.tensor([[-1.3, 0., .4, 2.], [-.5, .1, .3, 1.]])
    least = back(lambda k: signround_range(w, **{arg: k}, axis=0)[0], torch.tensor(1e-30))
    for k in (0., -1e-3, -2., -math.inf):
        scale,slope = back(lambda k: signround_range(w, **{arg: k}, axis=0)[0], torch.tensor(k))
        assert torch.equal(scale, least[0]) and (math.isinf(k) or torch.equal(slope, least[1])) and least[1] > 0
        assert signround_range(w, **{arg: torch.tensor(k)}, axis=0)[1].abs().max() <= 15
