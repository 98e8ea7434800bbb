"""Grids that are not even: every value against torch's casts, ml_dtypes and gfloat; every estimator under every
transform; blocks against a second way to write them."""
import copy
import dataclasses
import inspect
import itertools
import json
import math
import struct
from functools import partial
import gfloat
import gfloat.formats as published
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from estimators import LAID, back, block_rows, generator, kept, lumped, saved, slow_after, through_onnx
from test_files import gguf
import shok_nb as R
from shok_nb.engine.grid import Grid
from shok_nb.engine.replay import no_replay
from shok_nb.grids import floats
from shok_nb.grids.best import _chosen


def same(a, b): return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())

def numbers(dtype=torch.float32):
    "200 of each binade of float32, both signs; every bfloat16 and float16; and the ends."
    g = generator()        # any: the sizes, not the digits, are what matters
    sizes = ((1+torch.rand(254, 200, generator=g))*2.**torch.arange(-126, 128)[:, None]).flatten()
    words = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    ends = torch.tensor([0., -0., math.inf, -math.inf, math.nan, 1e-45, -1e-45])
    halves = words.view(torch.bfloat16).float(),words.view(torch.float16).float()
    return torch.cat([sizes, -sizes, *halves, ends]).to(dtype)

# --- values
NEGATED = dict(float_round=partial(R.float_round, format='e4m3'), mx_quantize=partial(R.mx_quantize, format='e2m1'),
    nvfp4_quantize=R.nvfp4_quantize)

@pytest.mark.parametrize('name', NEGATED)
def test_a_view_that_is_negated(name):
    "Such as the imaginary part of a conjugate: torch keeps a sign beside its bits, which may not be read alone."
    f,x = NEGATED[name],torch.randn(4, 32, generator=generator())
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg() and same(f(negated), f(-x))
    leaf = negated.detach().requires_grad_()
    assert same(torch.autograd.grad(f(leaf).sum(), leaf)[0], back(f, -x)[1])

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

@pytest.mark.parametrize('f', [R.FloatFormat(8, 3, bias=145), R.FloatFormat(11, 4)])
def test_numbers_below_the_normal_ones_of_the_dtype(f):
    "They have binades too, where the bits of float32 say none; float64 has bits for them."
    x = numbers()
    x = torch.cat([x, x[:4000]*2.**-14, torch.arange(-999, 999)*2.**-149])
    assert same(R.float_round(x, f), R.float_round(x.double(), f).float())

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
MIXED = partial(R.mx_quantize, format='e2m1', scale='up'),partial(R.int_quantize, bits=4)

GRIDS = dict(floats=lambda f: lambda x, **kw: R.float_round(x, 'e2m1', f, **kw),
    blocks=lambda f: lambda x, **kw: R.mx_quantize(x, 'e2m1', f, **kw),
    ints=lambda f: lambda x, **kw: R.int_quantize(x, 4, f, **kw),
    best=lambda f: lambda x, **kw: R.best_quantize(x, MIXED, f, **kw),
    q8_0=lambda f: lambda x, **kw: R.gguf_quantize(x, 'Q8_0', f, **kw),
    q4_0=lambda f: lambda x, **kw: R.gguf_quantize(x, 'Q4_0', f, **kw),
    q4_1=lambda f: lambda x, **kw: R.gguf_quantize(x, 'Q4_1', f, **kw),
    powers=lambda f: lambda x, **kw: R.log2_round(x, f, exponents=(-3, 2), **kw),
    levels=lambda f: lambda x, **kw: R.levels_round(x, [-6., -2., 0., .5, 3., 7.], f, **kw))

@lumped([pytest.param(r, g, id=f'{r.f.__name__}-{g}') for r in LAID for g in GRIDS], lambda r, grid: r.f.__name__)
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
    if r.on_grid and grid in ('floats', 'levels', 'powers'): assert torch.equal(GRIDS[grid](R.round_ste)(y), y)

def test_a_grid_of_ones_own_says_how_it_lies():
    class Nowhere(Grid): pass
    with pytest.raises(NotImplementedError): R.round_ste(X, step=Nowhere())

KINDS = 'Q8_0', 'Q4_0', 'Q4_1'
IN_ROWS = dict(e4m3=lambda t: R.float_round(t, 'e4m3'), mx=lambda t: R.mx_quantize(t, 'e2m1'),
    nvfp4=lambda t: R.nvfp4_quantize(t, tensor_scale=.01),
    up=lambda t: R.nvfp4_quantize(t, tensor_scale=.01, scale='up'),
    ue5m3=lambda t: R.nvfp4_quantize(t, scale_format=UE5M3),
    four_six=lambda t: R.best_quantize(t, [partial(R.nvfp4_quantize, tensor_scale=.01, top=k) for k in (6, 4)]),
    best=lambda t: R.best_quantize(t, MIXED), levels=lambda t: R.levels_round(t, R.NF4),
    ints=lambda t: R.int_quantize(t, scale_format='float16'), **{k: partial(R.gguf_quantize, format=k) for k in KINDS})

ROWS = 4*torch.randn(9375, 32, generator=generator())

def both(f, x=ROWS, g=None):
    "Value and gradient, where `g` is that of the value."
    return torch.stack(back(f, x, g=g))

@pytest.mark.parametrize('name', IN_ROWS)
def test_stays_in_pieces(name):
    "In pieces, replayed and row by row: the same values and gradients, bit for bit."
    f = IN_ROWS[name]
    with no_replay(): want = both(f)
    by_rows = torch.cat([both(f, t) for t in ROWS.split(1000)], 1)
    for got in (by_rows, both(f), both(f)): assert torch.equal(got, want)

@pytest.mark.slow                         # the first code that is generated waits 15 s for a compiler of C++
@pytest.mark.parametrize('name', IN_ROWS)
def test_compiled_in_rows(name):
    "Generated code gives the same bits."
    f = IN_ROWS[name]
    assert torch.equal(both(torch.compile(f, fullgraph=True)), both(f))

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', R.FORMATS)
def test_steps_from_sums(name, dtype, monkeypatch):
    "What compiled code does in the place of bits, at every size."
    x = numbers(dtype)
    x,grid = x[~x.isnan()],floats.grid_of(R.FORMATS[name])
    want = grid.steps(x)
    monkeypatch.setattr(floats, 'for_cpu', lambda x: True)
    assert torch.equal(grid.steps(x), want)

def test_steps_from_sums_of_all():
    "Each float32 of one binade, hence of all: a power of two goes through sums and products unchanged."
    x = (torch.arange(2**23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    for m in (0, 3): assert (floats._scaled_binade(x, m, 2.**90) == 2.**-m).all()

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', R.FORMATS)
def test_nearest_from_sums(name, dtype, monkeypatch):
    """The shorter way of compiled code, and of eager code where there is no -0, at every size, zeros with their signs
    and nan: the number that the cells give."""
    f,x = R.FORMATS[name],numbers(dtype)
    both = floats.grid_of(f),floats.grid_of(dataclasses.replace(f, signed_zero=False))
    for compiled in (False, True):
        if compiled: monkeypatch.setattr(floats, 'for_cpu', lambda x: True)
        for grid in both:
            cells = grid.cells(x)
            assert same(grid.nearest(x), cells.value(cells.v.round()))
            summed = f.largest < 1e30 and (compiled or not grid.signed_zero)
            assert grid.is_summed(x) == summed and not dataclasses.replace(grid, over=math.inf).is_summed(x)

@pytest.mark.slow
@pytest.mark.parametrize('name', ['e4m3', 'e2m1'])
def test_nearest_from_sums_of_all(name, monkeypatch):
    "Each float32 of three binades: where the step grows with the number, where it is the least, and below."
    grid = floats.grid_of(R.FORMATS[name])
    unsigned = dataclasses.replace(grid, signed_zero=False)
    for top,sign in itertools.product((0, math.frexp(grid.finest)[1]-1, math.frexp(grid.finest)[1]-3), (1, -1)):
        x = (torch.arange(2**23, dtype=torch.int32) + (127+top << 23)).view(torch.float32)*sign
        cells = grid.cells(x)
        want = cells.value(cells.v.round())
        assert same(unsigned.nearest(x), want+0.)
        monkeypatch.setattr(floats, 'for_cpu', lambda x: True)
        assert same(grid.nearest(x), want) and same(unsigned.nearest(x), want+0.)
        monkeypatch.undo()

@pytest.mark.parametrize('own', [None, 1/6, .3])
def test_scales_of_nvfp4(own):
    "Every float32 of a binade as the largest of its block, of all sizes, nan and infinity: the scale is of e4m3."
    grid = R.deployment.weight_codes.nvfp4_grid
    if not own: grid = dataclasses.replace(grid, whole=False)
    sizes = torch.tensor([0., 1e-30, 2.**-6, .1, 447., 448., 2000., 1e30, math.inf, math.nan])*6
    x = torch.cat([sizes, torch.arange(2**23, dtype=torch.int32).add(127 << 23).view(torch.float32)])[:, None]
    of = torch.tensor(own or 1.)
    amax = x/6/of if own else x/6
    want = R.float_round(amax.clamp(2.**-6, 448.), 'e4m3')
    assert same(grid.shared(x, of), torch.where(x.isfinite(), want, math.nan))

def test_two_in_a_graph_of_any_size():
    "With `dynamic=True` Dynamo makes inputs of floats; the second of two in a graph ended in an error inside it."
    def f(x): return R.mx_quantize(3*R.mx_quantize(x, 'e4m3'), 'e4m3')
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend='aot_eager')
    for n in (3, 5):
        x = torch.randn(n, 64, generator=generator(n))
        for y,z in zip(both(compiled, x, x+1), both(f, x, x+1), strict=True): assert torch.equal(y, z)

@pytest.mark.slow
def test_compiled_beyond_the_range():
    "The gradient is that of eager code, whatever its own sign."
    x = torch.tensor([447., 448., 448.1, 463., 465., 1e4, math.inf, 0.])
    x,g = torch.cat([x, x, -x, -x]),torch.tensor([1., -2.]).repeat_interleave(8).repeat(2)
    def f(x): return R.float_round(x, 'e4m3', saturate=False)
    compiled = both(torch.compile(f, fullgraph=True), x, g)
    torch.testing.assert_close(compiled, both(f, x, g), rtol=0, atol=0, equal_nan=True)

@pytest.mark.parametrize('error', ['squares', 'sizes', 'largest'])
def test_best_of_several_by_hand(error):
    "Three grids, two with scales of their own for the tensor: each block is that of the grid with the least error."
    x = torch.randn(500, 16, generator=generator())*torch.logspace(-3, 1, 500)[:, None]     # any seed: a law
    grids = [partial(R.nvfp4_quantize, tensor_scale=x.abs().amax()/2688),
        partial(R.nvfp4_quantize, tensor_scale=x.abs().amax()/1536, top=4), partial(R.int_quantize, bits=4, block=16)]
    ys = torch.stack([f(x) for f in grids])
    of = dict(squares=lambda e: e.square().sum(-1), sizes=lambda e: e.abs().sum(-1), largest=lambda e: e.abs().amax(-1))
    errors = of[error](ys.double()-x.double())
    got = of[error](R.best_quantize(x, grids, error=error).double()-x.double())
    assert (got <= errors.amin(0)*(1+1e-6)).all() and errors.argmin(0).bincount().min() > 20
    assert torch.equal(R.best_quantize(x.T, [partial(f, dim=0) for f in grids], error=error).T,
        R.best_quantize(x, grids, error=error))

def test_the_choice_of_a_grid_draws_nothing():
    "What the rounding draws decides no grid: each draw is one of the two neighbours on the grid that nearest chose."
    x = torch.randn(300, 16, generator=generator())                                          # any seed: a law
    grids = [partial(R.nvfp4_quantize, scale='up', top=k) for k in (6, 4)]
    errors = torch.stack([(f(x)-x).square().sum(1) for f in grids])
    first = (errors[0] <= errors[1])[:, None]
    one,other = (f(x, R.stochastic_round, seed=torch.tensor(5)) for f in grids)
    got = R.best_quantize(x, grids, R.stochastic_round, seed=torch.tensor(5))
    assert torch.equal(got, torch.where(first, one, other)) and 50 < first.sum() < 250

def test_gradient_on_the_best_grid():
    "That of the chosen grid, clipped where it clips."
    x = torch.tensor([[7.9, 1., 0., 0.], [7., 7., 7., 7.]], requires_grad=True)
    grids = [partial(R.mx_quantize, format='e2m1', block=4), partial(R.int_quantize, block=4)]
    assert torch.autograd.grad(R.best_quantize(x, grids).sum(), x)[0].tolist() == [[1.]*4]*2
    floor = [partial(R.mx_quantize, format='e2m1', block=4, gradient=g) for g in ('clipped', 'saturated')]
    assert torch.autograd.grad(R.best_quantize(x, [floor[0], floor[0]]).sum(), x)[0][0].tolist() == [0., 1., 1., 1.]
    with pytest.raises(ValueError, match="^best_quantize: grids must agree on gradient, got 'clipped' and 'saturated'"):
        R.best_quantize(x, floor)

ROUNDED_AGAIN = dict(mx=lambda s: partial(R.mx_quantize, format='e2m1', scale=s), mx8=lambda s: partial(R.mx_quantize,
    scale=s), nvfp4=lambda s: partial(R.nvfp4_quantize, scale=s), nvfp4_own=lambda s: partial(R.nvfp4_quantize, scale=s,
    tensor_scale=.0037), four=lambda s: partial(R.nvfp4_quantize, scale=s, top=4))

@pytest.mark.parametrize('name', ROUNDED_AGAIN)
def test_rounding_twice_changes_no_value(name):
    "With the scale rounded up as well as without: a block that is on its grid keeps its scale, or a finer one."
    x = torch.cat([ROWS, ROWS*2.**torch.arange(-5, 4).repeat(1042)[:9375, None]])
    for s in ('nearest', 'up') if 'mx' not in name else ('ceil', 'rceil', 'up'):
        f = ROUNDED_AGAIN[name](s)
        y = f(x)
        assert torch.equal(f(y), y), s

@pytest.mark.slow
def test_scales_rounded_up_clip_nothing():
    "Every float32 of a binade as the largest of its block, and some of all sizes within the reach of the scales."
    grid = dataclasses.replace(R.deployment.weight_codes.nvfp4_grid, whole=False, scale='up')
    sizes = torch.tensor([2.**-6, .1, 447., 448.])*6
    x = torch.cat([sizes, torch.arange(2**23, dtype=torch.int32).add(127 << 23).view(torch.float32)])[:, None]
    scale = grid.shared(x, None)
    assert same(scale, R.float_round(scale, 'e4m3')) and (x/scale <= 6*(1+1e-6)).all()
    less = scale/2+R.float_round(scale*.96, 'e4m3')/2                 # between it and the number below
    assert (less < x/6*(1+1e-6)).sum() > 0 and (scale*8/9 <= x/6*(1+1e-6)).all()

def test_two_codebooks_are_two():
    "A grid that holds a tensor is not known by its name: nothing of one is replayed for the other."
    x = torch.randn(1000, generator=generator())
    for i in range(40):
        levels = torch.tensor([-1., 0., 1.+i])
        near = levels[(x[:, None]-levels).abs().argmin(1)]
        assert torch.equal(R.levels_round(x, levels), near)
        assert torch.equal(R.levels_round(x, levels, R.ewgs_round), near)

@pytest.mark.parametrize('gradient', ['clipped', 'saturated', 'ste'])
def test_learned_levels(gradient):
    "The gradient of x is that of fixed levels, that of even levels the one of their step, in all three ways."
    g = generator()
    x,w = (2*torch.randn(1000, dtype=torch.float64, generator=g) for _ in range(2))
    x.requires_grad_()
    even,step = torch.arange(-4., 4., dtype=torch.float64),torch.tensor(.3, dtype=torch.float64, requires_grad=True)
    by_step = torch.autograd.grad((R.fake_quantize(x, step, bits=3, gradient=gradient)*w).sum(), step)[0]
    by_levels = torch.autograd.grad((R.levels_round(x, step*even, gradient=gradient)*w).sum(), step)[0]
    assert torch.allclose(by_step, by_levels, rtol=1e-9)
    levels = torch.tensor([-2., -1., .5, 3.], dtype=torch.float64)
    for f,kw in ((R.round_ste, {}), (R.soft_round, dict(alpha=5.)), (R.ewgs_round, {})):
        ys = [R.levels_round(x, k, f, gradient=gradient, **kw) for k in (levels, levels.clone().requires_grad_())]
        both = [torch.autograd.grad((y*w).sum(), x)[0] for y in ys]
        assert torch.equal(*ys) and torch.allclose(*both, atol=1e-12)
        of_a_transform = torch.func.grad(lambda x: (R.levels_round(x, levels, f, gradient=gradient, **kw)*w).sum())
        assert torch.allclose(of_a_transform(x.detach()), both[0], atol=1e-12)
    leaf = levels.clone().requires_grad_()
    odd = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64, requires_grad=True)
    y = R.levels_round(odd, leaf, gradient=gradient)
    to_x,to_levels = torch.autograd.grad(y[:2].sum(), (odd, leaf))
    assert same(y.detach(), torch.tensor([3., -2., math.nan], dtype=torch.float64)) and to_levels.isfinite().all()
    assert to_x[:2].tolist() == [0., 0.]

def test_log2_round():
    "The nearest exponent, at every size; 0 stays, infinity is the largest."
    x = numbers(torch.float64)
    x = x[x.isfinite() & (x.abs() >= 2.**-126) & (x.abs() < 2.**127)]
    away = ((x.abs().log2() % 1)-.5).abs() > 1e-9                    # from where two powers are as near
    want = torch.copysign(2**x.abs().log2().round(), x)
    assert torch.equal(R.log2_round(x)[away], want[away])
    ends = torch.tensor([0., -0., math.inf, -math.inf, math.nan, 1e-45, .1, 1.42, 9.])
    want = torch.tensor([0., -0., 8., -8., math.nan, .25, .25, 2., 8.])
    assert same(R.log2_round(ends, exponents=(-2, 3)), want)
    x = torch.tensor([.1, .3, -5., 9.], requires_grad=True)
    def gradient(**kw): return torch.autograd.grad(R.log2_round(x, exponents=(-2, 3), **kw).sum(), x)[0].tolist()
    assert gradient() == [0, 1, 1, 0] and gradient(gradient='saturated') == [0, 1, 1, 1]
    assert gradient(gradient='ste') == [1]*4

def po2_exponents(bits, max_value, relu):
    "Of QKeras 0.9.0: a bit for the sign of x, and one for that of the exponent, unless no value is above 1."
    kept = bits-(not relu)-(max_value is None or max_value > 1)
    return -2**kept,2**kept-1

def as_in_qkeras(x, bits, max_value=None, relu=False, floor=False, even=False):
    """quantized_po2 and quantized_relu_po2 of QKeras 0.9.0 with use_ste=False, written from quantizers.py
    (_clip_power_of_two) in numpy's float32. Beside QKeras 0.9.0 itself, on TensorFlow 2.15.1, it was the same for
    200,000 values in every case below."""
    f,(low,high) = np.float32,po2_exponents(bits, max_value, relu)
    if even: high = 2*(high//2)
    size = np.maximum(x, f(0)) if relu else np.abs(x)
    v = np.maximum(size, f(1e-7))
    if max_value is not None: v = np.where(v >= max_value, f(max_value), v)
    v = np.log(np.sqrt(v) if even else v)/f(math.log(2))
    n = np.where(size < f(1e-7), f(low), (1+even)*np.clip(np.floor(v) if floor else np.round(v), low, high))
    return np.where(relu | (x >= 0), f(1), f(-1))*np.exp2(n.astype(f))

def po2(x, bits, max_value=None, relu=False, floor=False, even=False):
    "The same by log2_round."
    low,high = po2_exponents(bits, max_value, relu)
    if max_value is not None: x = x.clamp(-max_value, max_value)
    if even: y = R.log2_round(x.abs().sqrt(), exponents=(low, 2*(high//2)))**2
    else: y = R.log2_round(x.abs(), R.floor_ste if floor else R.round_ste, exponents=(low, high))
    if relu: return torch.where(x > 0, y, 2.**low)
    return torch.where(x == 0, 2.**low, torch.copysign(y, x))

def of_many_sizes():
    "Both signs, 2**-23 to 2**40, where QKeras is right; away from where float32 logarithms and ours may differ."
    g = generator()        # any: the sizes, not the digits, are what matters
    x = (torch.randint(2, (20_000,), generator=g)*2.-1)*2.**(63*torch.rand(20_000, generator=g)-23)
    quarters = 4*x.abs().log2()                 # ties of both spacings, and where a floor jumps
    return torch.cat([x[(quarters-quarters.round()).abs() > 1e-4], torch.zeros(1)])

@pytest.mark.parametrize('relu', [False, True])
@pytest.mark.parametrize('how', [{}, dict(floor=True), dict(even=True)], ids=['round', 'floor', 'even'])
@pytest.mark.parametrize('max_value', [None, .3, 1., 5., 100.])
@pytest.mark.parametrize('bits', [3, 4, 6])
def test_po2_of_qkeras(bits, max_value, how, relu):
    x = of_many_sizes()
    want = torch.tensor(as_in_qkeras(x.numpy(), bits, max_value, relu, **how))
    got = po2(x, bits, max_value, relu, **how)
    assert len(x) > 19_000 and torch.equal(got, want)

def test_where_qkeras_is_not_right():
    "What is below its epsilon, a largest value between two powers, infinity, and powers of two that it floors."
    def theirs(*v, **kw): return as_in_qkeras(np.array(v, np.float32), **kw).tolist()
    def ours(*v, **kw): return po2(torch.tensor(v), **kw).tolist()
    assert theirs(9e-8, 1.1e-7, bits=8) == [2.**-64, 2.**-23] and ours(9e-8, bits=8) == [2.**-23]
    assert theirs(3., bits=4, max_value=3.) == [4.]                 # above the largest value
    assert R.log2_round(torch.tensor(3.), exponents=(-4, 1)) == 2
    powers = 2.**torch.arange(-20, 21)
    assert torch.equal(po2(powers, 8, floor=True), powers)
    floored = torch.tensor(as_in_qkeras(powers.numpy(), 8, floor=True))
    assert torch.isin(floored, torch.cat([powers, powers/2])).all()     # which ones depends on the logarithm
    x,y = np.float32(1e30),np.float32(2.**7)                            # clipped: with use_ste it returns this sum
    assert x+(y-x) == 0 and ours(1e30, math.inf, bits=5) == [128., 128.]

@pytest.mark.parametrize('bits, terms', [(2, 1), (4, 1), (4, 3), (5, 2), (7, 3), (9, 4)])
def test_apot_levels(bits, terms):
    "As in the paper, 2.2: sums of terms from {0, 2^-i, 2^-(i+n), ...}, over the largest."
    k = (bits-1)//terms
    sets = [[0.]+[2.**-(i+j*terms) for j in range(2**k-1)] for i in range(terms)]
    sums = sorted({sum(t) for t in itertools.product(*sets)})
    want = torch.tensor([-s/sums[-1] for s in sums[:0:-1]]+[s/sums[-1] for s in sums])
    assert torch.allclose(R.apot_levels(bits, terms), want) and len(want) == 2**bits-1

@pytest.mark.parametrize('backend', slow_after(['aot_eager', 'inductor']))
def test_levels_of_each_channel(backend):
    rows = torch.tensor([[-1., 0., 2.], [-3., 1., 2.]], requires_grad=True)
    x = 3*torch.randn(4, 2, 5, generator=generator())
    y = R.levels_round(x, rows, axis=1)
    for c in (0, 1): assert torch.equal(y[:, c], R.levels_round(x[:, c], rows[c]))
    def f(t): return R.levels_round(t, rows.detach(), axis=-2)
    assert torch.equal(torch.compile(f, fullgraph=True, backend=backend)(x), y)
    assert torch.equal(torch.vmap(f)(x), y)

def test_what_is_kept():
    "Nothing where the slope is 1 and no range matters, else x alone."
    x = torch.linspace(-9, 9, 1000).requires_grad_()
    ways = (dict(gradient='ste'), 0), ({}, 4), (dict(rounding=R.soft_round, alpha=5.), 4)
    for kw,each in ways:
        found = {t.data_ptr(): t.nbytes for t in kept(lambda: R.float_round(x, 'e4m3', **kw))}
        assert sum(found.values())//1000 == each

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
    g = generator()
    x = torch.randn(20, 32, generator=g)*torch.exp(6*torch.randn(20, 1, generator=g))
    assert torch.equal(R.mx_quantize(x, name, scale=scale), by_hand(x, name, scale))

def test_blocks_along():
    x = torch.randn(3, 40, 5, generator=generator())
    along = R.mx_quantize(x, 'e2m1', dim=1, block=8)
    assert torch.equal(along.mT, R.mx_quantize(x.mT.contiguous(), 'e2m1', block=8))
    short = R.mx_quantize(x, 'e2m1', dim=1, pad=True)
    padded = torch.cat([x, torch.zeros(3, 24, 5)], 1)
    assert torch.equal(short, R.mx_quantize(padded, 'e2m1', dim=1)[:, :40])

def test_squares():
    "Each tile alone is a block of 256."
    x = torch.randn(2, 32, 48, generator=generator())
    y = R.nvfp4_quantize(x, square=True, tensor_scale=.01)
    for i,j in ((0, 0), (1, 2), (0, 1)):
        tile = x[1, 16*i:16*i+16, 16*j:16*j+16]
        scale = R.float_round(tile.abs().amax()/6/.01, 'e4m3')
        want = R.float_round(tile*((1/torch.tensor(.01))/scale), 'e2m1')*(scale*.01)
        assert torch.equal(y[1, 16*i:16*i+16, 16*j:16*j+16], want)

UE5M3,POWERS = R.FloatFormat(5, 3, infinities=False),R.FloatFormat(3, 0, infinities=False, nans=False)

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('format', [UE5M3, 'e4m3', 'e5m2', 'float16', POWERS], ids=str)
@pytest.mark.parametrize('scale', ['nearest', 'up'])
def test_formats_of_block_scales(format, scale, dtype):
    "The normal number next to what fits, or the one above it; beyond the ends, the end."
    f = format if isinstance(format, R.FloatFormat) else R.FORMATS[format]
    x = torch.randn(400, 16, generator=generator(), dtype=dtype)*2.**torch.linspace(-22, 22, 400, dtype=dtype)[:, None]
    fits = (x.abs().amax(1, keepdim=True)/6).clamp(2.**(1-f.bias), f.largest)
    near = R.float_round(fits, f)
    above = torch.where(near < fits, near + R.ulp(fits, f).to(dtype), near)
    of_block = near if scale == 'nearest' else above
    y = R.nvfp4_quantize(x, scale=scale, scale_format=format)
    assert torch.equal(y, R.float_round(x*(1/of_block), 'e2m1')*of_block) and len(of_block.unique()) > 6

def test_blocks_at_the_ends():
    rows = torch.zeros(4, 32)
    rows[1, 3],rows[2, 5],rows[3] = math.inf,math.nan,-0.
    y = R.mx_quantize(rows, 'e2m1')
    assert torch.equal(y[0], rows[0]) and y[1:3].isnan().all() and y[3].signbit().all()
    assert R.mx_quantize(torch.zeros(0, 32), 'e2m1').shape == (0, 32)
    tiny = torch.full((32,), 1e-38)
    assert torch.equal(R.mx_quantize(tiny, 'e4m3').isfinite(), tiny.isfinite())

# --- integers in blocks
def as_in_ggml(x, kind):
    "The arithmetic of quantize_row_q8_0_ref and its kin (ggml-quants.c), in numpy's float32."
    x,f = x.numpy(),np.float32
    d = np.abs(x).max(1, keepdims=True)
    if kind == 'Q8_0': d = d/f(127)
    if kind == 'Q4_0': d = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)/f(-8)
    if kind == 'Q4_1': d = (x.max(1, keepdims=True)-x.min(1, keepdims=True))/f(15)
    back = np.where(d == 0, f(0), f(1)/np.where(d == 0, f(1), d))
    stored = d.astype(np.float16).astype(f)
    if kind == 'Q4_0': return (np.minimum(np.trunc(x*back+f(8.5)), 15)-8)*stored
    if kind == 'Q4_1':
        least = x.min(1, keepdims=True)
        codes = np.minimum(np.trunc((x-least)*back+f(.5)), 15)
        return codes*stored + least.astype(np.float16).astype(f)
    v = x*back
    return (np.sign(v)*np.floor(np.abs(v)) + np.sign(v)*np.floor(2*(np.abs(v)-np.floor(np.abs(v)))))*stored

@pytest.mark.parametrize('kind, n', [('Q8_0', 32), ('Q4_0', 32), ('Q4_1', 32), ('TQ1_0', 256),
    ('TQ2_0', 256)])
def test_as_ggml(kind, n):
    x = block_rows(n)
    assert torch.equal(R.gguf_quantize(x, kind), torch.tensor(as_in_ggml(x, kind)))

@pytest.mark.parametrize('kind', ('IQ4_NL', 'Q6_K', 'Q4_K'))
def test_a_search_is_one_operation_of_a_graph(kind):
    "Written out it has up to two thousand, and code for them takes minutes. Value and gradient as eager ones."
    from torch._dynamo.backends.common import aot_autograd  # it loads the compiler
    sizes = []
    def count(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph
    x,f = torch.randn(3, 256, generator=generator(), requires_grad=True),partial(R.gguf_quantize, format=kind)
    ys = f(x),torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=count))(x)
    assert torch.equal(*ys) and sizes[0] < 100
    assert torch.equal(*[torch.autograd.grad(y, x, x.detach())[0] for y in ys])

@pytest.mark.parametrize('kind', ('IQ4_NL', 'Q6_K'))
def test_a_search_in_a_transform_that_is_compiled(kind):
    x,f = torch.randn(3, 256, generator=generator()),torch.vmap(partial(R.gguf_quantize, format=kind))
    assert torch.equal(torch.compile(f, fullgraph=True, backend='aot_eager')(x), f(x))

def test_gradient_of_blocks_of_integers():
    "Where nothing is clipped it is 1; Q4_0 clips what is beyond 7.5 of its scale on the other side."
    x = torch.randn(64, 32, generator=generator())
    x[:, 0],x[:, 1] = -8.,7.9
    for f in (R.int_quantize, *[partial(R.gguf_quantize, format=k) for k in KINDS]):
        leaf = x.clone().requires_grad_()
        g = torch.autograd.grad(f(leaf).sum(), leaf)[0]
        clips = getattr(f, 'keywords', {}) == dict(format='Q4_0')
        assert (g[:, 1] == 1-clips).all() and (g[:, 2:] == 1).all() and (g[:, 0] == 1).all()

def test_scale_of_integers():
    x = block_rows(32)
    assert R.int_quantize(x).isfinite().all() and not R.int_quantize(torch.zeros(32)).any()
    scale = (x.abs().amax(1, keepdim=True)/127).bfloat16().float().clamp(min=1e-38)
    want = (x/scale).round().clamp(-128, 127)*scale
    assert torch.equal(R.int_quantize(x, 8, scale_format=torch.bfloat16), want)
    assert R.int_quantize(torch.full((32,), 1e-9), scale_format='float16').isfinite().all()

# --- as a layer
SCALED = 'e4m3', 'e5m2', 'e2m1', 'nf4', torch.float8_e4m3fn, R.FloatFormat(3, 2)
OWN = ('mxfp4', 'mxfp6_e2m3', 'mxfp6_e3m2', 'mxfp8', 'nvfp4', 'Q8_0', 'Q4_0', 'Q4_1', 'TQ1_0', 'TQ2_0', 'IQ4_NL',
    'Q6_K', 'Q4_K', 'bfloat16', 'float16', 'tf32')
BLOCKS_THAT_LEARN = 'mxfp4', 'mxfp6_e2m3', 'mxfp6_e3m2', 'mxfp8', 'nvfp4'
LAYERS = [(f, {}) for f in OWN] + [(f, dict(learn=True)) for f in BLOCKS_THAT_LEARN]
LAYERS += [(f, kw) for f in SCALED for kw in ({}, dict(axis=0), dict(block=32), dict(axis=0, learn=True),
    dict(init='minmax'))]

@pytest.mark.parametrize('format, kw', LAYERS, ids=lambda v: str(v)[:20])
def test_quantizer(format, kw):
    "Its value is a fixed point; a state, a copy and evaluation give the same; a gradient comes back."
    w = torch.randn(4, 256, generator=generator()).requires_grad_()
    q = R.Quantizer(format=format, **kw).calibrate_(w)
    y = q(w)
    assert torch.equal(q(y), y) and torch.equal(copy.deepcopy(q).eval()(w), y)
    twin = R.Quantizer(format=format, **kw)
    twin.load_state_dict(q.state_dict())
    assert torch.equal(twin(w), y) and repr(q).startswith('Quantizer(format=')
    y.sum().backward()
    assert w.grad.count_nonzero() > 900 and (not q.learn or q.log_scale.grad.isfinite().all())
    with pytest.raises(RuntimeError, match='has another format'):
        R.Quantizer(learn=q.learn).load_state_dict(q.state_dict())
    with pytest.raises(RuntimeError, match='has another grid'):
        R.Quantizer(format='e3m2', learn=q.learn).load_state_dict(q.state_dict())

@pytest.mark.parametrize('format, element', [('mxfp4', 'e2m1'), ('mxfp8', 'e4m3'), ('nvfp4', 'e2m1')])
def test_block_scales_that_learn(format, element):
    """Each is a number of its format, over one power of two for all: values and gradients are those of elements with
    these scales. It learns where another is better, and a value beyond the ends gives the end a gradient."""
    w = torch.randn(8, 64, generator=generator())*torch.logspace(-2, 2, 8)[:, None]
    q = R.Quantizer(format=format, learn=True).calibrate_(w)
    with torch.no_grad(): q.log_scale += .3*torch.randn(q.log_scale.shape, generator=generator())
    scale = q.grid()[0].detach()
    if format == 'nvfp4':
        above = 2.**(scale.max()/448).log2().ceil()
        assert torch.equal((scale/above).to(torch.float8_e4m3fn).float()*above, scale) and scale.max()/above > 224
    else: assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, .5))
    plain = R.Quantizer(format=element, block=64//scale.shape[1], learn=True).set_grid_(scale)
    with torch.no_grad(): plain.log_scale.copy_(scale.log())
    y,(dw,ds) = q(w).detach(),torch.autograd.grad(q(w.requires_grad_()).square().sum(), (w, q.log_scale))
    want = torch.autograd.grad(plain(w).square().sum(), (w, plain.log_scale))
    assert torch.allclose(y, plain(w), rtol=1e-6) and ds.count_nonzero() == ds.numel()
    assert torch.allclose(dw, want[0], rtol=1e-5) and torch.allclose(ds, want[1], rtol=1e-3, atol=1e-4*ds.abs().max())

def test_quantizer_chooses():
    "The best of 41 scales is no worse than the largest; stochastic while training, nearest in evaluation."
    w = torch.randn(8, 256, generator=generator())
    def error(init): return (R.Quantizer(format='e2m1', axis=0, init=init).calibrate_(w)(w)-w).square().sum(1)
    assert (error('mse') <= error('minmax')).all() and error('mse').sum() < .95*error('minmax').sum()
    q = R.Quantizer(format='mxfp4', rounding=R.stochastic_round).calibrate_(w)
    assert not torch.equal(q(w), q(w)) and torch.equal(q.eval()(w), R.mx_quantize(w, 'e2m1'))
    q = R.Quantizer(format='nvfp4').calibrate_(w)
    assert torch.equal(q(w), R.nvfp4_quantize(w, tensor_scale=q.scale)) and (torch.frexp(q.scale)[0] == .5).all()

@pytest.mark.parametrize('format', ['e2m3', 'e3m2'])
def test_six_bits(format):
    "The word has the grid of mx_quantize; 6 bits have no dtype in torch, so there are no codes."
    w = torch.randn(8, 64, generator=generator())
    q = R.Quantizer(format=f'mxfp6_{format}').calibrate_(w)
    assert torch.equal(q(w), R.mx_quantize(w, format))
    with pytest.raises(TypeError, match=f'torch has no dtype for format=mxfp6_{format}'): q.to_codes(w)

@pytest.mark.parametrize('format', ['e4m3', 'e5m2', 'bfloat16'])
def test_quantizer_codes(format):
    w = torch.randn(8, 64, generator=generator())
    q = R.Quantizer(format=format).calibrate_(w)
    codes = q.to_codes(w)
    assert codes.dtype == {'e4m3': torch.float8_e4m3fn, 'e5m2': torch.float8_e5m2}.get(format, torch.bfloat16)
    assert torch.equal(codes.float()*q.scale, q(w))

@pytest.mark.parametrize('format', ['e4m3', 'nf4', 'mxfp4', 'mxfp6_e3m2', 'nvfp4', 'Q4_0'])
def test_quantize_model(format):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    x = torch.randn(8, 64, generator=generator())
    report = R.quantize_model_(model, format, 'e4m3', calibrate=[x])
    assert [(r.weights, r.activations) for r in report.rows] == [(format, 'e4m3')]*2
    model(x).sum().backward()
    before = model.eval()(x)
    rows = R.deploy_(model, x).rows
    on_grid = {k: f'floats on the grid of {k}' for k in ('Q4_0', 'mxfp6_e3m2')}
    kept = (on_grid | dict(e4m3='float8_e4m3fn')).get(format, format)
    assert torch.equal(model(x), before) and all(r.weights == kept for r in rows)

STORED = {'e4m3': 'float8_e4m3fn', 'e5m2': 'float8_e5m2', 'e4m3fnuz': 'float8_e4m3fnuz', 'e5m2fnuz': 'float8_e5m2fnuz',
    'bfloat16': 'bfloat16', 'float16': 'float16'}
FOUR_BITS = 'mxfp4', 'nvfp4', 'nf4', 'e2m1'
CODED = [(k, {}) for k in (*STORED, 'mxfp8', *FOUR_BITS)] + [(k, kw) for k in ('e4m3', 'nf4', 'e2m1')
    for kw in (dict(axis=0), dict(block=16), dict(axis=0, learn=True))]
CODED += [(k, dict(learn=True)) for k in ('mxfp4', 'mxfp8', 'nvfp4')]

def one_layer(format, kw, dtype=torch.float32):
    "A layer with every binade, zeros and a short row in its weights, quantized; a batch; what it gives."
    g = generator()
    layer = torch.nn.Linear(64, 33)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(33, 64, generator=g)*2.**torch.linspace(-40, 6, 33)[:, None])
        layer.weight[1],layer.weight[2, ::2] = 0.,-0.
    model = torch.nn.Sequential(layer).to(dtype)
    x = torch.randn(16, 64, generator=g).to(dtype)
    R.quantize_model_(model, R.Quantizer(format=format, **kw), None)
    return model.eval(),x,model(x).detach()

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('format, kw', CODED, ids=lambda v: str(v)[:24])
def test_deploy_codes(format, kw, dtype):
    "Codes and scales give the weight bit for bit, through a state, a copy, a cast and without packing."
    model,x,before = one_layer(format, kw, dtype)
    weight = model[0].weight.detach().clone()
    plain = copy.deepcopy(model)
    assert R.deploy_(model, x).rows[0].weights == STORED.get(format, format)
    made = model[0].parametrizations.weight
    assert torch.equal(model[0].weight, weight) and torch.equal(model(x), before)
    kind = {'mxfp8': torch.float8_e4m3fn}.get(format) or getattr(torch, STORED.get(format, 'uint8'))
    assert made.original.dtype == kind and made.original.numel() == (33*64//2 if format in FOUR_BITS else 33*64)
    state,twin = saved(model.state_dict()),copy.deepcopy(model)
    for t in twin.state_dict().values(): t.view(torch.uint8).fill_(1)
    assert not torch.equal(twin[0].weight, weight)
    twin.load_state_dict(state)
    assert torch.equal(twin(x), before) and torch.equal(copy.deepcopy(model)(x), before)
    half = copy.deepcopy(model).half()
    assert half[0].parametrizations.weight.original.dtype == kind
    wide = torch.promote_types(dtype, torch.float32)
    if dtype == torch.float32: assert torch.equal(half[0].weight, weight.to(wide).half())
    with pytest.raises(ValueError, match='0 holds codes, as deploy_ made it'): R.nn.remove_rounding_(model)
    R.deploy_(plain, x, pack=False)
    stored = plain[0].parametrizations.weight.original
    assert torch.equal(plain[0].weight, weight) and stored.shape == (33, 64) and stored.dtype == kind

def in_runtime(file, x):
    "What ONNX Runtime makes of `x`."
    run = R.onnx_session(file)
    return torch.tensor(run.run(None, {run.get_inputs()[0].name: x.numpy()})[0])

def single(columns):
    "10,000 rows of one number each: their products with weights depend on no order of sums."
    g = generator()
    x = torch.zeros(10_000, columns)
    x[range(10_000), torch.randint(columns, (10_000,), generator=g)] = torch.randn(10_000, generator=g)
    return x

@pytest.mark.parametrize('deployed', slow_after([True, False]))
@pytest.mark.parametrize('format, kw', slow_after([('e4m3', dict(axis=0)), ('nvfp4', {}), ('nf4', {}), ('Q8_0', {}),
    ('e5m2', {}), ('e4m3', dict(block=16)), ('mxfp4', {}), ('e3m2', {}),
    ('nvfp4', dict(learn=True))], 4), ids=lambda v: str(v)[:24])
def test_format_in_onnx(format, kw, deployed, tmp_path):
    "The weights in the file are those of torch bit for bit, and 10,000 outputs too where sums are exact."
    model,_,_ = one_layer(format, kw)
    with torch.no_grad(): model[0].bias.zero_()
    weight = model[0].weight.detach().clone()
    if deployed: R.deploy_(model, torch.ones(2, 64))
    file = R.to_onnx(model, torch.eye(64), tmp_path/'m.onnx')
    assert torch.equal(model[0].weight, weight)
    for x in (torch.eye(64), single(64)): assert torch.equal(in_runtime(file, x), model(x).detach())
    if deployed and format[0] == 'e' and format != 'e3m2':
        kinds = {t.data_type for t in onnx.load(file).graph.initializer}
        assert onnx.TensorProto.FLOAT8E5M2 in kinds or onnx.TensorProto.FLOAT8E4M3FN in kinds

def hard_values(codes, scale, shape):
    "Ten thousand numbers: all ties of a format if the scale is a power of two, what lies beyond it, and normal ones."
    x = torch.randn(10_000, generator=generator())
    ties = (codes[1:]+codes[:-1])/2*scale
    far = codes[-1]*scale*torch.tensor([1, 1.03125, 1.0625, 1.125, 2, torch.inf])
    found = torch.cat([ties, -ties, codes*scale, far, -far, torch.tensor([torch.nan, 0., -0., 1e-40])])
    x[:len(found)] = found
    return x.reshape(shape)

@pytest.mark.parametrize('axis', slow_after([1, None]))
@pytest.mark.parametrize('format', slow_after(['e4m3', 'e5m2fnuz', torch.float8_e5m2,
    'e5m2', 'e4m3fnuz', torch.float8_e4m3fn], 3), ids=str)
@pytest.mark.slow
def test_float8_in_onnx(format, axis, tmp_path):
    "Each pair of operators gives the values of torch bit for bit: ties, nan, zeros, subnormals and what is too large."
    dtype = format if isinstance(format, torch.dtype) else getattr(torch, STORED[format])
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    for scale in (2.**-5, .3):
        x = hard_values(codes, scale, (2500, 4))
        q = R.Quantizer(format=format, axis=axis).calibrate_(torch.randn(8, 4)).eval()
        q.set_grid_(torch.full_like(q.grid()[0], scale))
        file = R.to_onnx(torch.nn.Sequential(q), torch.ones(4, 4), tmp_path/'m.onnx')
        assert same(in_runtime(file, x), q(x)) and q(x).isnan().sum() == 1
    made = onnx.load(file).graph
    assert [n.op_type for n in made.node if n.op_type != 'Sum'] == ['QuantizeLinear', 'DequantizeLinear']

def test_float8_overflow_of_the_runtime():
    """Files of ours saturate, which is the default. Asked not to, the kernels of ONNX Runtime are not as specified:
    what is beyond the largest number should be nan in e4m3 and infinite in e5m2, as in the casts of torch."""
    def quantized(x, kind, saturate):
        model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
            g (float[n] x) => (float[n] y) <float one = {{1}}, float zero = {{0}}> {{
                z = Cast <to = {kind}> (zero)
                q = QuantizeLinear <saturate = {saturate}> (x, one, z)
                y = DequantizeLinear (q, one, z)
            }}""")
        run = onnxruntime.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
        return torch.tensor(run.run(None, {'x': x.numpy()})[0])
    nan,inf,kinds = torch.nan,torch.inf,onnx.TensorProto
    e4m3 = 'e4m3',kinds.FLOAT8E4M3FN,480.,[448., nan],[nan, nan]
    e5m2 = 'e5m2',kinds.FLOAT8E5M2,61440.,[nan, inf],[inf, inf]
    for format,kind,beyond,theirs,specified in (e4m3, e5m2):
        x = torch.tensor([beyond, 1e9])
        assert torch.equal(quantized(x, kind, 1), R.float_round(x, format))
        assert same(quantized(x, kind, 0), torch.tensor(theirs))
        assert same(R.float_round(x, format, saturate=False), torch.tensor(specified))

@pytest.mark.parametrize('deployed', slow_after([True, False]))
@pytest.mark.parametrize('format', slow_after(['e4m3', 'e5m2']))
@pytest.mark.slow
def test_float8_network_in_onnx(format, deployed, tmp_path):
    """The runtime makes no integer kernel of float8 between layers of any kind; outputs are those of torch bit for bit
    where sums are exact."""
    kinds = torch.nn.Conv2d(3, 8, 3),torch.nn.ReLU(),torch.nn.MaxPool2d(2),torch.nn.Conv2d(8, 8, 3)
    kinds += torch.nn.Hardtanh(0, 6),torch.nn.Flatten(),torch.nn.Linear(32, 10)
    model = torch.nn.Sequential(*kinds)
    for m in model:
        if hasattr(m, 'weight'): torch.nn.init.constant_(m.bias, 0.)
    x = torch.randn(8, 3, 10, 10, generator=generator())
    R.quantize_model_(model, format, format, calibrate=[x])
    before = model.eval()(x)
    if deployed:
        R.deploy_(model, x)
        assert torch.equal(model(x), before)
    R.to_onnx(model, x, tmp_path/'m.onnx')
    kinds = {t.data_type for t in onnx.load(tmp_path/'m.onnx').graph.initializer}
    assert {'e4m3': onnx.TensorProto.FLOAT8E4M3FN, 'e5m2': onnx.TensorProto.FLOAT8E5M2}[format] in kinds
    linear,x = torch.nn.Sequential(model[-1]),single(32)
    file = R.to_onnx(linear, x[:4], tmp_path/'one.onnx')
    assert torch.equal(in_runtime(file, x), linear(x).detach()) and linear(x).count_nonzero() > 50_000

@pytest.mark.parametrize('format, kw', [('e3m2', {}), ('mxfp4', {}), ('nf4', {}), ('e4m3', dict(block=16))], ids=str)
def test_activations_of_a_format_in_onnx(format, kw, tmp_path):
    "What the runtime's operators have no codes for is refused."
    model,x = torch.nn.Sequential(torch.nn.Linear(64, 4)),torch.ones(2, 64)
    R.quantize_model_(model, 'e4m3', None)
    model.insert(0, R.Quantizer(format=format, **kw).calibrate_(x))
    with pytest.raises(ValueError, match=f'^to_onnx: 0 rounds values to format={format}, which is written'):
        R.to_onnx(model, x, tmp_path/'m.onnx')
    assert not [*tmp_path.iterdir()] and torch.equal(model(x), copy.deepcopy(model)(x))

def test_codes_of_mxfp4():
    "The nibbles are those of OCP MX 1.0: sign, exponent, mantissa; the first of a pair is low; scales are e8m0."
    model,x,_ = one_layer('mxfp4', {})
    weight = model[0].weight.detach().clone()
    R.deploy_(model, x)
    made = model[0].parametrizations.weight
    nibbles = np.stack([made.original.numpy() & 15, made.original.numpy() >> 4], -1).reshape(33, 2, 32)
    sign,exponent,mantissa = nibbles >> 3,nibbles >> 1 & 3,nibbles & 1
    size = np.where(exponent == 0, mantissa/2, (1+mantissa/2)*2.**(exponent-1.))
    value = np.where(sign == 1, -size, size)*2.**(made[0].scale.numpy().astype(float)-127)[..., None]
    assert made[0].scale.dtype == torch.uint8 and torch.equal(torch.tensor(value.reshape(33, 64)).float(), weight)

def test_deploy_undone(monkeypatch):
    "Codes that are not those of the quantizer are seen, and the model is as it was."
    model,x,before = one_layer('nvfp4', {})
    shown = repr(model)
    monkeypatch.setattr(R.deployment.weight_codes, 'e2m1_codes', lambda y: (y > 0)*3)
    with pytest.raises(ValueError, match='0.weight has other codes than its quantizer; nothing was changed'):
        R.deploy_(model, x)
    assert torch.equal(model(x), before) and repr(model) == shown

# --- files
def test_save_gguf(tmp_path):
    x = block_rows(64)
    given = dict(a=-1, b=2.5, c=True, d='word', e=7)
    report = R.save_gguf(dict(b=torch.ones(5), n=torch.tensor(3), w=x), tmp_path/'x.gguf', 'Q4_0', metadata=given)
    about,found = gguf(tmp_path/'x.gguf')
    assert about == {'general.architecture': 'shok_nb', 'general.quantization_version': 2} | given
    assert found['b'][:2] == (0, [5]) and np.frombuffer(found['b'][2], np.float32).tolist() == [1]*5
    assert found['n'] == (27, [1], b'\3'+bytes(7))
    number,shape,data = found['w']
    assert shape == [200, 64] and number == 2
    blocks = np.frombuffer(data, np.uint8).reshape(400, 18)
    scale = torch.tensor(blocks[:, :2].copy().view(np.float16)).float()
    codes = torch.tensor(np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1).astype(np.float32))
    y = R.gguf_quantize(x, 'Q4_0')
    assert torch.equal(((codes-8)*scale).view(200, 64), y)
    assert report == dict(b=('F32', 0.), n=('torch.int64', 0.), w=('Q4_0', (y-x).abs().max().item()))

def test_saved_as_evaluated(tmp_path):
    "A model's weights are those of evaluation, and it is as it was."
    model = torch.nn.Sequential(torch.nn.Linear(32, 4), torch.nn.Dropout(), torch.nn.BatchNorm1d(4))
    R.nn.round_weights_(model, R.nn.RoundSTE(step=.25))
    model[1].eval()
    report = R.save_gguf(model, tmp_path/'x.gguf', 'F32')
    assert {*report} == {'0.weight', '0.bias', *(f'2.{k}' for k in model[2].state_dict())}
    assert [m.training for m in model] == [True, False, True]
    _,found = gguf(tmp_path/'x.gguf')
    written = torch.tensor(np.frombuffer(found['0.weight'][2], np.float32)).view(4, 32)
    assert torch.equal(written, model.eval()[0].weight) and not list(tmp_path.glob('*.part'))

def stored(path):
    "A safetensors file read by hand."
    data = path.read_bytes()
    size, = struct.unpack_from('<Q', data)
    head = json.loads(data[8:8+size])
    assert head.pop('__metadata__') == dict(format='pt') and size % 8 == 0
    kinds = dict(F32=torch.float32, I32=torch.int32, I64=torch.int64, U8=torch.uint8, F8_E4M3=torch.float8_e4m3fn)
    def tensor(dtype, shape, data_offsets):
        first,last = (8+size+at for at in data_offsets)
        return torch.frombuffer(bytearray(data[first:last]), dtype=kinds[dtype]).view(shape)
    return {name: tensor(**about) for name,about in head.items()}

def nibbles(t): return torch.stack([t & 15, t >> 4], -1).flatten(-2)

@pytest.mark.parametrize('format', ['ints', 'e4m3', 'mxfp4', 'nvfp4'])
def test_save_compressed(format, tmp_path):
    "Codes times scales of the file are the weights, bit for bit."
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4))
    R.quantize_model_(model[0], R.Quantizer(4, block=32) if format == 'ints' else format, None)
    report = R.save_compressed(model.eval(), tmp_path, config=dict(a=1))
    told,t = json.loads((tmp_path/'config.json').read_text()),stored(tmp_path/'model.safetensors')
    assert told['a'] == 1 and told['quantization_config']['ignore'] == ['1'] and [*report] == ['0.weight']
    scale,packed = t['0.weight_scale'],t.get('0.weight_packed')
    if format == 'ints': v = (nibbles(packed.view(torch.uint8)).float()-8).view(32, 2, 32)*scale[..., None]
    elif format == 'e4m3': v = t['0.weight'].float()*scale
    else:
        numbers = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
        v = torch.cat([numbers, -numbers])[nibbles(packed).long()].view(32, scale.shape[1], -1)
        if format == 'mxfp4': v = v*2.**(scale.float()-127)[..., None]
        else: v = v*(scale.float()/t['0.weight_global_scale'])[..., None]
    assert torch.equal(v.reshape(32, 64), model[0].weight) and report['0.weight'][1] == 0
    assert torch.equal(t['1.weight'], model[1].weight) and torch.equal(t['0.bias'], model[0].bias)

def one(weights, **kw):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    R.quantize_model_(model, weights, **dict(activations=None) | kw)
    return model

@pytest.mark.parametrize('call, kind, told', [
    (lambda p: R.save_gguf(dict(w=1.), p), TypeError, 'save_gguf: w must be a Tensor'),
    (lambda p: R.save_gguf(dict(w=torch.ones(2, 32)*1e9), p, 'Q8_0'), ValueError, 'save_gguf: w is too large for Q8_0'),
    (lambda p: R.save_gguf(dict(w=torch.ones(2, 32, device='meta')), p), ValueError,
        'save_gguf: w is on the meta device'),
    (lambda p: R.save_gguf(dict(w=torch.ones(2, dtype=torch.cfloat)), p), TypeError, 'save_gguf: w must hold floats'),
    (lambda p: R.save_gguf({}, p, metadata=dict(a=[[1]])), TypeError, "save_gguf: metadata 'a' must be"),
    (lambda p: R.save_gguf({}, p, 'q8'), ValueError, 'save_gguf: types must be one of F32'),
    (lambda p: R.save_compressed(one('Q4_0'), p), ValueError, 'save_compressed: 0.weight is in Q4_0'),
    (lambda p: R.save_compressed(one(R.Quantizer(8, zero_point=True)), p), ValueError,
        'save_compressed: 0.weight has a zero point'),
    (lambda p: R.save_compressed(one(R.Quantizer(12)), p), ValueError,
        'save_compressed: 0.weight has codes -2048 to 2047'),
    (lambda p: R.save_compressed(one(8, activations=R.Quantizer(8), calibrate=[torch.ones(1, 64)]), p), ValueError,
        'save_compressed: what enters 0'),
])
def test_not_saved(call, kind, told, tmp_path):
    with pytest.raises(kind) as e: call(tmp_path/'x')
    assert str(e.value).startswith(told) and not list(tmp_path.iterdir())

# --- what is refused
@pytest.mark.parametrize('call, kind, told', [
    (lambda x: R.float_round(x, torch.int8), TypeError, 'float_round: format'),
    (lambda x: R.float_round(x, 'e4m3', step=2.), TypeError, 'float_round: step belongs to evenly spaced grids'),
    (lambda x: R.float_round(x, 'e4m3', R.decimal_ste), TypeError, 'float_round: rounding'),
    (lambda x: R.float_round(x, 'e4m3', alpha=5.), TypeError, 'float_round: rounding'),
    (lambda x: R.FloatFormat(4, 3, largest=1e9), ValueError, 'FloatFormat: largest must be in'),
    (lambda x: R.FloatFormat(12, 3), ValueError, 'FloatFormat: exponent'),
    (lambda x: R.mx_quantize(x, 'e2m1', block=7), ValueError, 'mx_quantize: block must divide dim -1 of length 32'),
    (lambda x: R.mx_quantize(x, 'e2m1', dim=2), ValueError, 'mx_quantize: dim'),
    (lambda x: R.mx_quantize(x[0, 0], 'e2m1'), ValueError, 'mx_quantize: x must have a dim'),
    (lambda x: R.nvfp4_quantize(x, tensor_scale=torch.ones(32)), ValueError, 'nvfp4_quantize: tensor_scale'),
    (lambda x: R.int_quantize(x, 1), ValueError, 'int_quantize: bits'),
    (lambda x: R.nvfp4_quantize(x, scale='ceil'), ValueError, 'nvfp4_quantize: scale must be one of nearest, up'),
    (lambda x: R.nvfp4_quantize(x, top=8.), ValueError, 'nvfp4_quantize: top must be in'),
    (lambda x: R.best_quantize(x, R.nvfp4_quantize), TypeError, 'best_quantize: grids must be a list'),
    (lambda x: R.best_quantize(x, MIXED, error='mse'), ValueError, 'best_quantize: error must be one of squares'),
    (lambda x: R.best_quantize(x, [*MIXED, lambda x: x]), TypeError, 'best_quantize: grids[2] cannot be called'),
    (lambda x: R.best_quantize(x[:, :4], [partial(f, block=2) for f in (*MIXED, MIXED[0])]), ValueError,
        'best_quantize: grids must be at most as many'),
    (lambda x: R.int_quantize(x, block=24), ValueError, 'int_quantize: block must divide dim -1 of length 32'),
    (lambda x: R.gguf_quantize(x, 'TQ1_0'), ValueError, 'gguf_quantize: block must divide dim -1 of length 32'),
    (lambda x: R.log2_round(x, exponents=(3, 3)), ValueError, 'log2_round: the largest exponent'),
    (lambda x: R.apot_levels(4, 2), ValueError, 'apot_levels: terms must divide bits-1'),
    (lambda x: R.nvfp4_quantize(x, scale_format='bfloat16'), ValueError,
        'nvfp4_quantize: scale_format must have no normal number below 2**-30'),
    (lambda x: R.nvfp4_quantize(x, scale_format='e9'), ValueError,
        'nvfp4_quantize: scale_format must be one of float16'),
    (lambda x: R.nvfp4_quantize(x, square=True), ValueError, 'nvfp4_quantize: square=True wants two last dims'),
    (lambda x: R.levels_round(x, [1., 0.]), ValueError, 'levels_round: levels must be finite and ascend'),
    (lambda x: R.levels_round(x, [0., math.inf]), ValueError, 'levels_round: levels must be finite'),
    (lambda x: R.levels_round(x, [0., 1., 1.]), ValueError, 'levels_round: levels must be finite and ascend, got 1'),
    (lambda x: R.levels_round(x, torch.tensor([0, 1])), TypeError, 'levels_round: levels must be float16'),
    (lambda x: R.nvfp4_quantize(x[:, :31]), ValueError, 'nvfp4_quantize: block must divide dim -1 of length 31'),
    (lambda x: R.Quantizer(format='e4m3', bits=4), ValueError, 'Quantizer: format=e4m3 says the bits, got 4'),
    (lambda x: R.Quantizer(format='e4m3', zero_point=True), ValueError, 'Quantizer: format=e4m3 has no zero point'),
    (lambda x: R.Quantizer(format='e4m3', init='lsq'), ValueError, 'Quantizer: init must be one of minmax, mse'),
    (lambda x: R.Quantizer(format='e4m3', rounding=R.decimal_ste), TypeError, 'Quantizer: rounding'),
    (lambda x: R.quantize_model_(torch.nn.Linear(2, 2), 'fp4', None), TypeError,
        "quantize_model_: weights must be bits, a format, a Quantizer, another module or None, got 'fp4'; known are"),
    (lambda x: R.levels_round(x, [1.]), ValueError, 'levels_round: levels must be a vector'),
    (lambda x: R.levels_round(x, [[0., 1.]]), ValueError, 'levels_round: levels must be a vector'),
    (lambda x: R.levels_round(x, [[0., 1.]], axis=0), ValueError, 'levels_round: levels must have a row for each'),
    (lambda x: R.levels_round(x, [[0., 1.], [1., 0.]], axis=0), ValueError, 'levels_round: levels must be finite'),
    (lambda x: R.levels_round(x, [[0., 1.]], axis=2), ValueError, 'levels_round: axis'),
])
def test_refused(call, kind, told):
    with pytest.raises(kind) as e: call(torch.zeros(2, 32))
    assert str(e.value).startswith(told), e.value

ALONG = dict(mx=partial(R.mx_quantize, format='e2m1', block=16), mse=partial(R.mx_quantize, scale='mse', block=16),
    nvfp4=partial(R.nvfp4_quantize, tensor_scale=.01), int=partial(R.int_quantize, block=16),
    best=lambda x, dim: R.best_quantize(x, [partial(R.nvfp4_quantize, top=t, dim=dim) for t in (6, 4)]))

@pytest.mark.parametrize('name', ALONG)
@pytest.mark.parametrize('shape', [(16, 2**17+5), (1, 32, 2**16), (48, 7, 900)], ids=str)   # all beyond a piece
def test_blocks_along_any_dim(name, shape):
    "Those of the last dim, moved there and back: a block is never cut, if it is the only one too."
    x = torch.randn(shape, generator=generator())
    for dim in range(x.ndim):
        if x.shape[dim] % 16: continue
        want = ALONG[name](x.movedim(dim, -1).contiguous(), dim=-1).movedim(-1, dim)
        assert same(ALONG[name](x, dim=dim), want) and same(ALONG[name](x, dim=dim-x.ndim), want), dim

@pytest.mark.parametrize('format, dtype', [('bfloat16', torch.bfloat16), ('float16', torch.float16)])
@pytest.mark.parametrize('saturate', [True, False])
def test_a_cast_of_torch_rounds_to_the_nearest(format, dtype, saturate):
    """In eager code torch's own cast is the rounding: the bits of the formula for every upper half of a pattern with
    lower halves about and at a tie, with subnormals, infinity, nan and what lies beyond the largest."""
    top = torch.arange(-2**15, 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = (top[:, None] | low).view(torch.float32)
    grid = floats.grid_of(floats.FORMATS[format], saturate)
    assert (grid.cast(x) is dtype) == floats._casts_all(dtype) and grid.cast(x.double()) is None
    want,got = Grid.nearest(grid, x),grid.nearest(x)
    assert ((want == got) & (want.signbit() == got.signbit()) | want.isnan() & got.isnan()).all()
    others = dict(bfloat16=R.FloatFormat(8, 7, largest=1.5*2.**127), float16=R.FloatFormat(5, 10, signed_zero=False))
    assert floats.grid_of(others[format], saturate).cast(x) is None

def test_a_processor_that_takes_subnormals_for_zero_casts_nothing(monkeypatch):
    "Then the formula rounds, as it does everywhere else."
    x = torch.tensor([2.**-133*1.4, -2.**-130, 1.01])
    want = R.float_round(x, 'bfloat16')
    monkeypatch.setattr(floats, '_casts_all', lambda dtype: False)
    assert torch.equal(R.float_round(x, 'bfloat16'), want) and want[0] == 2.**-133

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_a_choice_by_the_bits(dtype):
    "It is torch's `where`, with a bool for each block: -0 and nan keep their bits. What learns is chosen by torch."
    a = torch.tensor([[0., -0., torch.inf, 1.], [torch.nan, -2., 3., -0.]], dtype=dtype)
    b,mask = -a.flip(1),torch.tensor([[True], [False]])
    ints = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    for m in (mask, ~mask): assert torch.equal(_chosen(m, a, b).view(ints), torch.where(m, a, b).view(ints))
    assert _chosen(mask, a.clone().requires_grad_(), b).grad_fn is not None

# --- graphs that others read
def rows(x): return x[:len(x)//32*32].view(-1, 32)

def of_four_and_six(x): return R.best_quantize(x, [partial(R.nvfp4_quantize, top=top) for top in (6., 4.)])

SEED = torch.tensor(3)
READ = {name: partial(R.float_round, format=name) for name in ('e4m3', 'e2m1', 'e5m2fnuz', 'bfloat16', 'tf32', 'e8m0')}
READ |= {f'{name}, beyond': partial(R.float_round, format=name, saturate=False) for name in ('e4m3', 'e5m2', 'e8m0')}
READ |= {'fine': partial(R.float_round, format=R.FloatFormat(7, 30)), 'low': partial(R.float_round,
    format=R.FloatFormat(8, 3, bias=145)), 'wide': partial(R.float_round, format=R.FloatFormat(11, 4))}
READ |= {f'mx, {scale}': partial(R.mx_quantize, format='e2m1', scale=scale) for scale in
    ('floor', 'even', 'ceil', 'rceil', 'mse', 'up')}
READ |= {'mx, even, integers': partial(R.mx_quantize, scale='even',
    format=R.FloatFormat(1, 2, infinities=False, nans=False))}
READ |= {'nvfp4': R.nvfp4_quantize, 'nvfp4, up': partial(R.nvfp4_quantize, scale='up'), '4/6': of_four_and_six}
READ |= {'log2': R.log2_round, 'levels': partial(R.levels_round, levels=[-1., 0., 2.]),
    'decimal': R.decimal_ste, 'fixed': partial(R.fixed_point, width=8, integer=3)}
READ |= {'soft': partial(R.float_round, format='e4m3', rounding=partial(R.soft_round, alpha=3.)),
    'tossed': partial(R.float_round, format='e4m3', rounding=R.stochastic_round, seed=SEED),
    'stochastic': partial(R.stochastic_round, seed=SEED)}

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', READ)
def test_traced(name, dtype):
    "`torch.jit.trace` cannot write down that bits are looked at. Traced on other numbers, which decide nothing."
    f,x = READ[name],rows(numbers(dtype))
    for leaf in (x, x.clone().requires_grad_()):
        other = leaf.detach().roll(7).requires_grad_(leaf.requires_grad)
        traced = torch.jit.trace(lambda x: f(x), other, check_trace=False)
        assert same(traced(leaf), f(leaf))
    few = rows(torch.randn(256, generator=generator(), dtype=dtype)*9)
    assert torch.allclose(back(traced, few)[1], back(f, few)[1], rtol=1e-6)

class Side(torch.nn.Module):
    "All of them, side by side."
    def forward(self, x): return tuple(f(x) for f in READ.values())

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')                      # of the exporter
def test_read_by_onnx_runtime():
    "ONNX has no bits of numbers, and no copysign; the runtime's Where makes 0 of -0, and no other sign is lost."
    x = rows(numbers())
    ys = through_onnx(Side(), (x.roll(7),), (x,))
    for (name,f),y in zip(READ.items(), ys, strict=True):
        want = f(x)
        if name == 'soft': y = torch.where((y-want).abs() <= 2e-6*want.abs().clamp(min=1), want, y)   # no expm1
        assert same(torch.where(want == 0, y.abs(), y), torch.where(want == 0, 0., want)), name
        assert not (y.signbit() & ~want.signbit() & ~want.isnan()).any(), name

@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_the_largest_of_all_in_onnx():
    "It wants to be told which dims that are."
    class Weight(torch.nn.Module):
        def forward(self, w): return R.dorefa_weight(w, bits=3)
    w = torch.randn(4, 8, generator=generator())
    y, = through_onnx(Weight(), (w.roll(1),), (w,))
    assert torch.allclose(y, R.dorefa_weight(w, bits=3), atol=1e-6)
