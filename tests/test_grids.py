"""Grids that are not even: every value against torch's casts, ml_dtypes and gfloat; every estimator under every
transform; blocks against a second way to write them."""
import inspect
import math
import gfloat
import gfloat.formats as published
import ml_dtypes
import numpy as np
import pytest
import torch
import shok_nb as R
from shok_nb.catalog import catalog
from shok_nb.engine.replay import no_replay


def same(a, b): return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())

def numbers(dtype=torch.float32):
    "200 of each binade of float32, both signs; every bfloat16 and float16; and the ends."
    g = torch.Generator().manual_seed(0)        # any: the sizes, not the digits, are what matters
    sizes = ((1+torch.rand(254, 200, generator=g))*2.**torch.arange(-126, 128)[:, None]).flatten()
    words = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    ends = torch.tensor([0., -0., math.inf, -math.inf, math.nan, 1e-45, -1e-45])
    halves = words.view(torch.bfloat16).float(),words.view(torch.float16).float()
    return torch.cat([sizes, -sizes, *halves, ends]).to(dtype)

# --- values
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e5m2fnuz])
def test_as_torch_casts(dtype):
    x = numbers()
    if dtype == torch.float8_e5m2fnuz: x = x[x.abs() <= 57344]      # beyond it torch's cast differs by version
    assert same(R.float_round(x, dtype, saturate=False), x.to(dtype).float())

OTHERS = dict(e4m3=ml_dtypes.float8_e4m3fn, e5m2=ml_dtypes.float8_e5m2, e2m1=ml_dtypes.float4_e2m1fn,
    e3m2=ml_dtypes.float6_e3m2fn, e2m3=ml_dtypes.float6_e2m3fn, e4m3fnuz=ml_dtypes.float8_e4m3fnuz)

@pytest.mark.parametrize('name', OTHERS)
@pytest.mark.filterwarnings('ignore:invalid value:RuntimeWarning')
def test_as_ml_dtypes(name):
    x = numbers()
    if name not in ('e4m3', 'e5m2'): x = x[x.abs() <= R.FORMATS[name].largest]  # the others have no word for beyond
    assert same(R.float_round(x, name, saturate=False), torch.tensor(x.numpy().astype(OTHERS[name]).astype(np.float32)))

MODES = {R.round_ste: 'TiesToEven', R.trunc_ste: 'TowardZero', R.floor_ste: 'TowardNegative',
    R.ceil_ste: 'TowardPositive'}

@pytest.mark.parametrize('f', MODES, ids=MODES.get)
@pytest.mark.parametrize('name', ['e4m3', 'e5m2', 'e2m1', 'e3m2', 'e2m3'])
def test_as_gfloat_saturates(name, f):
    x = numbers(torch.float64)
    x = x[~x.isnan()][::3]
    info = getattr(published, f'format_info_ocp_{name}')
    want = gfloat.round_ndarray(info, x.numpy(), rnd=getattr(gfloat.RoundMode, MODES[f]), sat=True)
    assert (R.float_round(x, name, f) == torch.tensor(want)).all()

def test_powers_of_two():
    x = numbers().abs()
    # no sign, no zero; torch rounds subnormal numbers up, and ties as its version does
    x = x[(x >= 2.**-126) & (x < 1.5*2.**127) & (torch.frexp(x)[0] != .75)]
    assert same(R.float_round(x, 'e8m0', saturate=False), x.to(torch.float8_e8m0fnu).float())
    assert R.float_round(torch.tensor([1.5, 3., 6.]), 'e8m0').tolist() == [2., 4., 8.]
    assert R.float_round(torch.tensor([-3., 0., math.inf]), 'e8m0').tolist() == [2.**-127, 2.**-127, 2.**127]

def test_own_format():
    "What the bits say of a format without a name, counted one by one."
    f = R.FloatFormat(3, 1, bias=2, largest=24., infinities=False, nans=False, signed_zero=False)
    every = [0, .25] + [2.**(e-2)*(1+m/2) for e in range(1, 8) for m in (0, 1)]
    levels = torch.tensor(sorted({v for v in every if v <= 24}))
    x = torch.linspace(0, 30, 4001)
    gaps = (x[:, None]-levels).abs()
    y = R.float_round(x, f)
    assert torch.isin(y, levels).all() and torch.equal((y-x).abs(), gaps.min(1).values)
    assert not R.float_round(torch.tensor(-0.), f).signbit()

@pytest.mark.parametrize('name', R.FORMATS)
def test_neighbours(name):
    "The step is the distance of the two numbers around, and both are fixed."
    x = numbers()
    x = x[x.abs() < R.FORMATS[name].largest]
    low,high,step = R.float_round(x, name, R.floor_ste),R.float_round(x, name, R.ceil_ste),R.ulp(x, name)
    inside = (low != high) & (high.abs() < R.FORMATS[name].largest)
    assert torch.equal((high-low)[inside], step[inside])
    assert torch.equal(R.float_round(low, name), low) and torch.equal(R.float_round(high, name), high)

# --- gradients beyond the range
def test_gradient_beyond():
    x = torch.tensor([447., 448., 450., 463., 465., 1e4, -450., -1e4, math.nan], requires_grad=True)
    def gradient(**kw): return torch.autograd.grad(R.float_round(x, 'e4m3', **kw).sum(), x)[0].tolist()
    assert gradient() == gradient(gradient='clipped') == [1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert gradient(gradient='saturated') == [1, 1, 1, 1, 0, 0, 1, 0, 1]
    assert gradient(gradient='ste') == [1]*9

# --- every estimator on every grid
X = torch.linspace(-7, 7, 256, dtype=torch.float64)
GRIDS = dict(floats=lambda f: lambda x, **kw: R.float_round(x, 'e2m1', f, **kw),
    blocks=lambda f: lambda x, **kw: R.mx_quantize(x, 'e2m1', f, **kw),
    levels=lambda f: lambda x, **kw: R.levels_round(x, [-6., -2., 0., .5, 3., 7.], f, **kw))
LAID = [r for r in catalog if 'step' in inspect.signature(r.f).parameters]

@pytest.mark.parametrize('grid', GRIDS)
@pytest.mark.parametrize('r', LAID, ids=[r.f.__name__ for r in LAID])
def test_every_estimator(r, grid):
    seeded = 'seed' in inspect.signature(r.f).parameters
    kw = dict(seed=torch.tensor(0)) if seeded else {}
    f,x = GRIDS[grid](r.f),X.clone().requires_grad_()
    y = f(x, **kw)
    g = torch.autograd.grad(y.sum(), x)[0]
    assert y.isfinite().all() and g.isfinite().all() and y.shape == x.shape and y.dtype == x.dtype
    transformed = torch.func.grad(lambda t: f(t, **kw).sum())
    assert torch.allclose(transformed(X), g, atol=1e-9)
    if not seeded: assert torch.equal(torch.vmap(f)(X.view(4, 64)).flatten(), f(X.view(4, 64)).flatten())
    if r.on_grid and grid != 'blocks': assert torch.equal(GRIDS[grid](R.round_ste)(y), y)

def test_stays_in_pieces():
    "In pieces, replayed, as one and compiled: the same values and gradients, bit for bit."
    x = (torch.randn(300_000, generator=torch.Generator().manual_seed(0))*4).view(-1, 32)
    for f in (lambda t: R.float_round(t, 'e4m3'), lambda t: R.mx_quantize(t, 'e2m1'),
            lambda t: R.nvfp4_quantize(t, tensor_scale=.01), lambda t: R.levels_round(t, R.NF4)):
        def both(f, x):
            leaf = x.clone().requires_grad_()
            y = f(leaf)
            return y.detach(),torch.autograd.grad(y.sum(), leaf)[0]
        with no_replay(): want = both(f, x)
        rows = [both(f, t) for t in x.split(1000)]
        whole = [torch.cat(parts) for parts in zip(*rows)]
        for got in (both(f, x), both(f, x), whole, both(torch.compile(f, fullgraph=True), x)):
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

def test_two_codebooks_are_two():
    "A grid that holds a tensor is not known by its name: nothing of one is replayed for the other."
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for i in range(40):
        levels = torch.tensor([-1., 0., 1.+i])
        near = levels[(x[:, None]-levels).abs().argmin(1)]
        assert torch.equal(R.levels_round(x, levels), near)
        assert torch.equal(R.levels_round(x, levels, R.ewgs_round), near)

def test_what_is_kept():
    "Nothing where the slope is 1 and no range matters, else x alone."
    def kept(f):
        seen,x = {},torch.linspace(-9, 9, 1000).requires_grad_()
        def pack(t):
            seen[t.data_ptr()] = t.nbytes
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): f(x)
        return sum(seen.values())//1000
    assert kept(lambda x: R.float_round(x, 'e4m3', gradient='ste')) == 0
    assert kept(lambda x: R.float_round(x, 'e4m3')) == 4
    assert kept(lambda x: R.float_round(x, 'e4m3', R.soft_round, alpha=5.)) == 4

# --- blocks
def by_hand(x, name, scale):
    "One block at a time, in Python's floats: OCP MX 1.0, 6.3."
    f,out = R.FORMATS[name],[]
    top = math.frexp(f.largest)[1]-1
    for row in x.double().tolist():
        a = max(abs(v) for v in row)
        if scale == 'floor': e = math.frexp(a)[1]-1-top
        else: e = math.ceil(math.log2(a))-top
        s = 2.**max(min(e, 127), -127)
        out.append([float(R.float_round(torch.tensor(v/s, dtype=torch.float64), name))*s for v in row])
    return torch.tensor(out)

@pytest.mark.parametrize('scale', ['floor', 'ceil'])
@pytest.mark.parametrize('name', ['e2m1', 'e3m2', 'e4m3'])
def test_blocks_by_hand(name, scale):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 32, generator=g)*torch.exp(6*torch.randn(20, 1, generator=g))
    assert torch.equal(R.mx_quantize(x, name, scale=scale), by_hand(x, name, scale))

def test_blocks_along():
    x = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0))
    along = R.mx_quantize(x, 'e2m1', dim=1, block=8)
    assert torch.equal(along.mT, R.mx_quantize(x.mT.contiguous(), 'e2m1', block=8))
    short = R.mx_quantize(x, 'e2m1', dim=1, pad=True)
    padded = torch.cat([x, torch.zeros(3, 24, 5)], 1)
    assert torch.equal(short, R.mx_quantize(padded, 'e2m1', dim=1)[:, :40])

def test_blocks_at_the_ends():
    rows = torch.zeros(4, 32)
    rows[1, 3],rows[2, 5],rows[3] = math.inf,math.nan,-0.
    y = R.mx_quantize(rows, 'e2m1')
    assert torch.equal(y[0], rows[0]) and y[1:3].isnan().all() and y[3].signbit().all()
    assert R.mx_quantize(torch.zeros(0, 32), 'e2m1').shape == (0, 32)
    tiny = torch.full((32,), 1e-38)
    assert torch.equal(R.mx_quantize(tiny, 'e4m3').isfinite(), tiny.isfinite())

# --- what is refused
@pytest.mark.parametrize('call, kind, told', [
    (lambda x: R.float_round(x, 'e4m4'), ValueError, 'float_round: format must be one of float16'),
    (lambda x: R.float_round(x, torch.int8), TypeError, 'float_round: format'),
    (lambda x: R.float_round(x.long(), 'e4m3'), TypeError, 'float_round: x must be float16'),
    (lambda x: R.float_round(x, 'e4m3', step=2.), TypeError, 'float_round: step belongs to evenly spaced grids'),
    (lambda x: R.float_round(x, 'e4m3', R.decimal_ste), TypeError, 'float_round: rounding'),
    (lambda x: R.float_round(x, 'e4m3', alpha=5.), TypeError, 'float_round: rounding'),
    (lambda x: R.float_round(x, 'e4m3', gradient='all'), ValueError, 'float_round: gradient must be one of'),
    (lambda x: R.FloatFormat(4, 3, largest=1e9), ValueError, 'FloatFormat: largest must be in'),
    (lambda x: R.FloatFormat(12, 3), ValueError, 'FloatFormat: exponent'),
    (lambda x: R.mx_quantize(x, 'e2m1', block=0), ValueError, 'mx_quantize: block'),
    (lambda x: R.mx_quantize(x, 'e2m1', block=7), ValueError, 'mx_quantize: block must divide dim -1 of length 32'),
    (lambda x: R.mx_quantize(x, 'e2m1', dim=2), ValueError, 'mx_quantize: dim'),
    (lambda x: R.mx_quantize(x, 'e2m1', scale='up'), ValueError, 'mx_quantize: scale must be one of floor'),
    (lambda x: R.mx_quantize(x[0, 0], 'e2m1'), ValueError, 'mx_quantize: x must have a dim'),
    (lambda x: R.nvfp4_quantize(x, tensor_scale=0.), ValueError, 'nvfp4_quantize: tensor_scale'),
    (lambda x: R.nvfp4_quantize(x, tensor_scale=torch.ones(32)), ValueError, 'nvfp4_quantize: tensor_scale'),
    (lambda x: R.levels_round(x, [1., 0.]), ValueError, 'levels_round: levels must be finite and ascend'),
    (lambda x: R.levels_round(x, [0., math.inf]), ValueError, 'levels_round: levels must be finite'),
    (lambda x: R.levels_round(x, [1.]), ValueError, 'levels_round: levels must be a vector'),
])
def test_refused(call, kind, told):
    with pytest.raises(kind) as e: call(torch.zeros(2, 32))
    assert str(e.value).startswith(told), e.value
