"""Fake quantization against torch's kernels, quantized_bits against exact fractions, FSQ codes both ways, for grids of
bits, types and levels. Random tensors come from seed 0."""
import math
from fractions import Fraction
from functools import partial
import numpy as np
import pytest
import torch
from estimators import FLOATS, back, check_every_mode, generator
from shok_nb.estimators.soft import soft_round
from shok_nb.estimators.ste import floor_ste, round_ste
from shok_nb.quantization.fake_quantize import (
    alpha_blend,
    dorefa,
    dorefa_weight,
    fake_quantize,
    lsq,
    lsq_init,
    pact,
    quantize_between,
    quantized_bits,
)
from shok_nb.quantization.fsq import fsq, fsq_codes, fsq_index
from shok_nb.quantization.learned import adaround, adaround_init, flexround, signround

BITS = range(2, 9)

def normal(*shape, dtype=torch.float32): return torch.randn(*shape, generator=generator()).mul(1.5).to(dtype)

def grads(f, *ts):
    "Value, of the shape of the first of `ts`, and the gradients of a random weighting of it."
    return back(f, *ts, g=torch.randn(ts[0].shape, generator=generator(1)))

# --- torch's kernels
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize('bits', BITS)
def test_per_tensor(bits, dtype):
    """Values bit for bit, gradients to a unit in the last place (scale and unscale), at zero points in the middle and
    at both ends. torch multiplies by 1/scale where this divides: values may differ where the quotient is within a
    rounding of a tie, and no value of this seed is."""
    qmin,qmax = ends = -2**(bits-1),2**(bits-1)-1
    x = normal(20_000, dtype=dtype)
    for scale in (.37, .0513):
        for z in (qmin, 0, qmax):
            ours = grads(lambda x: fake_quantize(x, scale, z, ends), x)
            theirs = grads(lambda x: torch.fake_quantize_per_tensor_affine(x, scale, z, qmin, qmax), x)
            assert torch.equal(ours[0], theirs[0]), (scale, z)
            assert torch.allclose(ours[1], theirs[1], rtol=torch.finfo(dtype).eps, atol=0)
            assert torch.equal(ours[1] == 0, theirs[1] == 0)

def test_near_ties():
    """The division is the correctly rounded one: where torch differs, the exact
    quotient of the two floats decides for it."""
    scale = torch.tensor(.1)
    x = (torch.arange(-2000, 2001)+.5)*scale
    x = torch.cat([x, torch.nextafter(x, x-1), torch.nextafter(x, x+1)])
    ours,theirs = fake_quantize(x, .1, bits=13),torch.fake_quantize_per_tensor_affine(x, .1, 0, -4096, 4095)
    differ = ours != theirs
    assert 0 < differ.sum() < len(x)/10
    s = Fraction(scale.item())
    for v,o,t in zip(x[differ].tolist(), (ours/scale)[differ].tolist(), (theirs/scale)[differ].tolist()):
        assert abs(Fraction(v)/s-round(o)) <= abs(Fraction(v)/s-round(t)) + Fraction(2, 2**24)*abs(round(o))

def test_float64_is_float64():
    "torch's kernel keeps the scale in float32 there; this one agrees with exact fractions."
    x = normal(500, dtype=torch.float64)
    want = [float(Fraction(.037))*min(max(round(Fraction(v)/Fraction(.037)), -8), 7) for v in x.tolist()]
    assert fake_quantize(x, .037, bits=4).tolist() == want
    assert torch.fake_quantize_per_tensor_affine(x, .037, 0, -8, 7).tolist() != want

@pytest.mark.parametrize('bits', BITS)
@pytest.mark.parametrize('axis', (0, 1, 2))
def test_per_channel(bits, axis):
    "A scale and an integer zero point for each channel are a broadcast."
    qmin,qmax = ends = 0,2**bits-1
    x = normal(5, 6, 7)
    n,shape = x.shape[axis],[-1 if i == axis else 1 for i in range(3)]
    scale,zp = torch.linspace(.05, .7, n),torch.arange(n, dtype=torch.int32) % (qmax+1)
    ours = grads(lambda x: fake_quantize(x, scale.view(shape), zp.view(shape), ends), x)
    theirs = grads(lambda x: torch.fake_quantize_per_channel_affine(x, scale, zp, axis, qmin, qmax), x)
    assert torch.equal(ours[0], theirs[0]) and torch.allclose(ours[1], theirs[1], rtol=2e-7, atol=0)

@pytest.mark.parametrize('bits', BITS)
def test_learnable(bits):
    """Scale and zero point learn as torch's do, per tensor and per channel; sums over
    3000 values to 1e-4 of the largest term."""
    qmin,qmax = ends = -2**(bits-1),2**(bits-1)-1
    x = normal(3, 1000)
    s,z = torch.tensor([.3]),torch.tensor([1.])                     # given as floats: before rounding, torch's after it
    ours = grads(lambda x, s, z: fake_quantize(x, s, z, ends), x, s, z)
    theirs = grads(lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s, z, qmin, qmax, 1.), x, s, z)
    for a,b in zip(ours, theirs): assert torch.allclose(a, b, rtol=1e-4, atol=1e-3*2**bits)
    assert torch.allclose(ours[1], theirs[1], rtol=2e-7, atol=0)
    s,z = torch.tensor([.1, .3, .9]),torch.tensor([0., 1., -1.])
    ours = grads(lambda x, s, z: fake_quantize(x, s[:, None], z[:, None], ends), x, s, z)
    kernel = torch._fake_quantize_learnable_per_channel_affine
    theirs = grads(lambda x, s, z: kernel(x, s, z, 0, qmin, qmax, 1.), x, s, z)
    for a,b in zip(ours, theirs): assert torch.allclose(a, b, rtol=1e-4, atol=1e-3*2**bits)

@pytest.mark.parametrize('bits', BITS)
def test_zero_points_between_codes(bits):
    """A float zero point is taken as given, as torch's per-channel form takes it: the same
    codes from the reciprocal, values to the last digit; the same gradients."""
    qmin,qmax = -2**(bits-1),2**(bits-1)-1
    x,s,z = normal(3, 5000),torch.tensor([.0513, .37, .9]),torch.tensor([.37, -1.5, qmax-.25])
    def ours(x): return fake_quantize(x, s[:, None], z[:, None], bits=bits, reciprocal=True)
    def theirs(x): return torch.fake_quantize_per_channel_affine(x, s, z, 0, qmin, qmax)
    (a,ga),(b,gb) = grads(ours, x),grads(theirs, x)
    codes = [(y/s[:, None]+z[:, None]).round() for y in (a, b)]
    assert torch.equal(*codes) and codes[0].amin() >= qmin and codes[0].amax() <= qmax
    assert torch.allclose(a, b, atol=1e-6) and torch.allclose(ga, gb, rtol=2e-7, atol=0)

@pytest.mark.parametrize('gradient', ('saturated', 'clipped', 'ste'))
@pytest.mark.parametrize('rounding', (round_ste, partial(round_ste, ties='away')), ids=('fused', 'any'))
def test_zero_point_forms(rounding, gradient):
    """The numbers, tensors and gradients of a zero point. Values half a step from any tie,
    where all forms have the same codes."""
    x = (torch.arange(-12, 13)+.25)*.5
    def f(z, x=x, s=.5): return fake_quantize(x, s, z, bits=4, rounding=rounding, gradient=gradient)
    for z in (-8, 0, 3, 7):
        want = ((x/.5).round()+z).clamp(-8, 7).sub(z)*.5
        for given in (z, float(z), torch.tensor(z), torch.tensor(z, dtype=torch.int8), torch.tensor(float(z))):
            assert torch.equal(f(given), want)
    assert torch.allclose(f(1.4), f(torch.tensor(1.4)))
    assert torch.allclose(f(1.4), ((x/.5+1.4).round().clamp(-8, 7)-1.4)*.5)
    s,z = torch.tensor(.5),torch.tensor(1.4)
    _,gx,gs,gz = grads(lambda x, s, z: f(z, x, s)+0*z, x, s, z)               # under 'ste' it learns nothing
    w = torch.randn(25, generator=generator(1))
    v = x/.5+1.4
    n = v.round()
    inside = dict(saturated=(n >= -8) & (n <= 7), clipped=(v >= -8) & (v <= 7), ste=n == n)[gradient]
    code = torch.where(inside, n.clamp(-8, 7)-v, n.clamp(-8, 7)-1.4)
    assert torch.allclose(gx, w*inside) and torch.allclose(gs, (code*w).sum(), atol=1e-5)
    assert torch.allclose(gz, -.5*(w*~inside).sum(), atol=1e-5)
    # rounded on the way it is a code that learns
    learned = torch.tensor(2.6, requires_grad=True)
    y = f(round_ste(learned))
    assert torch.equal(y, f(3))
    if gradient == 'ste': return
    at = x/.5+3 if gradient == 'clipped' else (x/.5).round()+3
    assert torch.autograd.grad(y.sum(), learned)[0] == -.5*((at < -8) | (at > 7)).sum()

@pytest.mark.parametrize('gradient', ('saturated', 'clipped'))
@pytest.mark.parametrize('dtype', (torch.float32, torch.bfloat16))
def test_zero_point_beyond_numbers(gradient, dtype, monkeypatch):
    """What nan, infinity and huge values teach a zero point is what autograd finds in the plain form; and no other
    autograd runs inside backward, which would keep each operation of a tensor that is cut in pieces."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, .1, -0., 3.9, -4.3], dtype=dtype)
    s,z,w = torch.tensor([.5]),torch.tensor([1.4]),torch.arange(1., 10).to(dtype)
    def learned(again):
        knobs = [t.clone().requires_grad_() for t in (s, z)]
        y = fake_quantize(x.clone().requires_grad_(), *knobs, bits=4, gradient=gradient)
        return torch.autograd.grad(y, knobs, w, create_graph=again)[1]
    want = learned(True)                                # a second derivative goes through the plain form
    grad = torch.autograd.grad
    y = fake_quantize(x.clone().requires_grad_(), s, z.requires_grad_(), bits=4, gradient=gradient)
    monkeypatch.setattr(torch.autograd, 'grad', None)
    found, = grad(y, z, w)
    assert torch.equal(found, want) and found == -.5*(2+3+4+5+8)

def test_zero_points_out_of_range():
    x = torch.tensor([-100., 0., 100.])
    for z,got in ((8, '8'), (-8.5, '-8.5'), (math.nan, 'nan')):
        with pytest.raises(ValueError, match=rf'^fake_quantize: zero_point must be in \[-8, 7\], got {got}'):
            fake_quantize(x, .5, z, 4)
    y = fake_quantize(x, .5, torch.tensor(9, dtype=torch.int8), bits=4)         # not looked at: 0 has no code
    assert y.tolist() == [-8.5, -1., -1.]

def test_bits():
    x = normal(1000)
    for bits in (2, 4, 8):
        n = 2**(bits-1)
        assert torch.equal(fake_quantize(x, .1, bits=bits), fake_quantize(x, .1, bits=(-n, n-1)))
    assert torch.equal(fake_quantize(x, .1, bits=3, signed=False), fake_quantize(x, .1, bits=(0, 7)))
    assert fake_quantize(x, .1, bits=1, signed=False).unique().tolist() == pytest.approx([0., .1])
    assert torch.equal(fake_quantize(x, .1), fake_quantize(x, .1, 0, (-128, 127)))
    assert torch.equal(fake_quantize(x, .1, bits=np.int8(8)), fake_quantize(x, .1))
    for bits,words in (((7, 3), 'the largest code must be in'), ((1, 2, 3), 'bits must be a number or two codes')):
        with pytest.raises(ValueError, match=f'^fake_quantize: {words}'): fake_quantize(x, .1, bits=bits)
    for bits,signed in ((1, True), (0, False), (25, True)):
        with pytest.raises(ValueError, match='^fake_quantize: bits must be in'):
            fake_quantize(x, .1, bits=bits, signed=signed)
    big = quantized_bits(torch.tensor([-1e40, 1e30, 3e28]).double(), 8, 100, symmetric=True)
    assert (big == torch.tensor([-127., 101., 3.]).double()*2.**93).all()
    assert quantized_bits(torch.tensor([-1e38, 1e38]), 8, 127, symmetric=True).isfinite().all()
    assert quantized_bits(torch.tensor([1e-38]), 8, -126).item() == 2.**-133*109

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_reciprocal(dtype):
    "torch's codes bit for bit, ties of a scale that makes them included, with torch's gradients."
    x = normal(4096, 32, dtype=dtype)
    scale = x.float().abs().amax(1)/7.5
    def ours(x): return fake_quantize(x, scale[:, None], bits=4, reciprocal=True)
    zero = torch.zeros(4096, dtype=torch.int32)
    def theirs(x): return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -8, 7)
    (a,ga),(b,gb) = grads(ours, x),grads(theirs, x)
    codes = [(y.float()/scale[:, None]).round() for y in (a, b)]
    assert torch.equal(*codes) and torch.equal(ga == 0, gb == 0)
    assert torch.allclose(ga, gb, rtol=torch.finfo(dtype).eps, atol=0)
    assert dtype != torch.float32 or not torch.equal(fake_quantize(x, scale[:, None], bits=4), b)
    _,got = back(lambda s: fake_quantize(x.float(), s[:, None], bits=4, reciprocal=True), scale)
    v = x.float()*(1/scale[:, None])
    n = v.round()
    want = torch.where((n >= -8) & (n <= 7), n-v, n.clamp(-8, 7)).sum(1)
    assert torch.allclose(got, want, atol=1e-4)

@pytest.mark.parametrize('mode', ('saturated', 'clipped', 'ste'))
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_nan_and_infinity(dtype, mode):
    "nan stays nan, infinity is the end of the range; the scale gets the code from it, and under 'ste' nothing."
    assert fake_quantize(torch.tensor([math.nan], dtype=dtype), .25, bits=4, gradient=mode).isnan()
    x,s = torch.tensor([math.inf, -math.inf, 1e4], dtype=dtype),torch.tensor(.25, requires_grad=True)
    y = fake_quantize(x, s, bits=4, gradient=mode)
    assert y.dtype == dtype and y.tolist() == [1.75, -2., 1.75]
    codes = [torch.autograd.grad(fake_quantize(v, s, bits=4, gradient=mode), s)[0].item() for v in x]
    assert mode == 'ste' or torch.autograd.grad(y.sum(), s)[0] == sum(codes)
    assert codes == [7., -8., 7.] if mode != 'ste' else codes == [0., 0., 7-4*x[2].item()]

# --- LSQ, PACT, DoReFa
def test_lsq_gradients_as_the_paper_states_them():
    "round(v)-v inside, the end of the range outside, times 1/sqrt(N qmax), with N per scale."
    x,scale = normal(4, 500),torch.tensor([[.1], [.2], [.4], [.8]])
    v = x/scale
    ds = torch.where(v <= -4, -4., torch.where(v >= 3, 3., v.round()-v))
    w = torch.randn(4, 500, generator=generator(1))
    _,gx,gs = grads(lambda x, s: lsq(x, s, 3), x, scale)
    assert torch.equal(gx != 0, (v >= -4) & (v <= 3))
    assert torch.allclose(gs, (ds*w).sum(1, keepdim=True)/(500*3)**.5, atol=1e-4)
    assert torch.equal(lsq(x, scale, 3), fake_quantize(x, scale, 0, (-4, 3)))
    assert math.isclose(lsq_init(x, 3), 2*x.abs().mean()/3**.5, rel_tol=1e-6)

@pytest.mark.parametrize('bits', range(1, 9))
def test_dorefa(bits):
    n,x = 2**bits-1,normal(1000)
    assert torch.equal(dorefa(x, bits), (x.clamp(0, 1)*n).round()/n)
    w = dorefa_weight(x, bits)
    assert len(w.unique()) <= 2**bits and (bits == 1 or w.abs().max() == 1)
    assert dorefa_weight(torch.zeros(3), bits).isfinite().all()

# --- QKeras
def qkeras(x, bits, integer, symmetric, keep_negative):
    "The formula of qkeras/quantizers.py 0.9.0 in fractions."
    unsigned = bits-keep_negative
    if not unsigned: return 1 if x >= 0 else -1
    m,m_i = 2**unsigned,Fraction(2)**integer
    return m_i*min(max(round(x*m/m_i), keep_negative*(symmetric-m)), m-1)/m

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pytest.mark.parametrize('bits', range(1, 9))
def test_quantized_bits(bits, dtype):
    "Exact for every combination in every type: eight bits fit the mantissa of a bfloat16."
    halves,zeros = torch.arange(-40, 41).to(dtype)/2**(bits-1)/2,torch.tensor([0., -0.]).to(dtype)
    x = torch.cat([normal(50, dtype=dtype)*3, halves, zeros])
    for integer in range(-2, 5):
        for symmetric in (False, True):
            for keep in (False, True):
                got = quantized_bits(x, bits, integer, symmetric=symmetric, keep_negative=keep)
                assert got.dtype == dtype
                assert got.tolist() == [qkeras(Fraction(v), bits, integer, symmetric, keep) for v in x.tolist()]

# --- TensorFlow's learned ends
def tensorflows(x, low, high, bits, narrow):
    "The rule of fake_quant_ops_functor.h in numpy: value, and the masks of the three gradients."
    first,last = int(narrow),2**bits-1
    scale = (high-low)/(last-first)
    zero = np.floor(np.clip(first-low/scale, first, last)+.5)
    least,most = (first-zero)*scale,(last-zero)*scale
    y = np.floor((np.clip(x, least, most)-least)/scale+.5)*scale + least
    return y,(x >= least) & (x <= most),x < least,x > most

@pytest.mark.parametrize('narrow', [False, True])
@pytest.mark.parametrize('bits', [2, 3, 8, 16])
def test_quantize_between(bits, narrow):
    """Values and three gradients for ends on both sides of 0, on one, and at it; for one pair of ends and for one of
    each channel. In float64, where no value of this seed is next to a tie."""
    ends = torch.tensor([[-1.03, 2.1], [-3., .4], [0., 6.], [-2., 0.], [.5, 2.], [-4., -1.], [-1e-3, 1e-3],
        [-2.5, 4.5]]).double()                                              # with 3 bits its zero point is between two
    x = 3*torch.randn(400, 8, generator=generator(), dtype=torch.float64)
    x[::50] = 0
    g = torch.randn(400, 8, generator=generator(1), dtype=torch.float64)
    y,*grads = back(lambda *a: quantize_between(*a, bits, narrow=narrow), x, ends[:, 0], ends[:, 1], g=g)
    for i,(low,high) in enumerate(ends.tolist()):
        want,inside,below,above = tensorflows(x[:, i].numpy(), low, high, bits, narrow)
        np.testing.assert_allclose(y[:, i].numpy(), want, rtol=0, atol=1e-12)
        np.testing.assert_allclose(grads[0][:, i].numpy(), g[:, i].numpy()*inside, rtol=1e-15, atol=0)
        for found,mask in zip(grads[1:], (below, above)):
            assert math.isclose(found[i], (g[:, i].numpy()*mask).sum(), abs_tol=1e-9)
        alone = quantize_between(x[:, i], low, high, bits, narrow=narrow)
        assert torch.allclose(alone, y[:, i], rtol=0, atol=1e-12)
        assert not alone[::50].any()                                                       # 0 has a code

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_quantize_between_as_torch(dtype):
    "torch's kernel with the same scale and zero point, where halves are no question; nan stays, infinity is clipped."
    x = normal(20_000, dtype=dtype)
    scale = torch.tensor(.020137)                                              # zero point 100
    theirs = torch.fake_quantize_per_tensor_affine(x.float(), scale.item(), 100, 0, 255)
    y,g = back(lambda x: quantize_between(x, -100*scale.item(), 155*scale.item()), x)
    assert y.dtype == dtype and torch.allclose(y.float(), theirs.to(dtype).float(), rtol=torch.finfo(dtype).eps)
    assert 100 < (g == 0).sum() < 10_000
    bad = quantize_between(torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype), 0., 1.)
    assert bad[0].isnan() and bad[1:].tolist() == [1., 0.]

def test_quantize_between_rounds_halves_up():
    x = torch.tensor([.5, 1.5, 2.5, -.5, -1.5])
    assert quantize_between(x, -4., 11., 4).tolist() == [1., 2., 3., 0., -1.]
    assert quantize_between(x, -4., 11., 4, rounding=round_ste).tolist() == [0., 2., 2., 0., -2.]
    soft = partial(soft_round, alpha=3.)
    y,g = back(lambda x: quantize_between(x, -4., 11., 4, rounding=soft), x+.1)
    assert torch.allclose(y, soft(x+.1)) and torch.allclose(g, back(soft, x+.1)[1])

def test_ends_that_have_crossed_come_back():
    low,high = (torch.tensor(k, requires_grad=True) for k in (.3, -.3))
    sgd = torch.optim.SGD([low, high], lr=.01)
    x = normal(200)
    for _ in range(100):
        sgd.zero_grad()
        (quantize_between(x, low, high, 3)-x).square().sum().backward()
        sgd.step()
    assert low < -1 and high > 1
    for low,high in ((torch.tensor(.5), torch.tensor(.5)), (torch.tensor(-3e38), torch.tensor(3e38))):
        y,*g = back(lambda *a: quantize_between(*a), x, low, high)
        assert y.isfinite().all() and all(t.isfinite().all() for t in g)
    with pytest.raises(ValueError, match='^quantize_between: low must be below high, got 1.0 and 1$'):
        quantize_between(x, 1., 1)

# --- QKeras's quantized_relu
@pytest.mark.parametrize('bits,integer,bound', [(6, 3, 6.), (4, 2, 1.5), (8, 0, None), (3, 3, 4.), (5, 1, 100.)])
def test_quantized_relu(bits, integer, bound):
    "QKeras 0.9.0's `quantized_relu(bits, integer, relu_upper_bound=bound)` for bounds that are codes, in fractions."
    step = Fraction(2)**(integer-bits)
    def qkeras(v):
        top = (2**bits-1)*step
        n = min(max(round(Fraction(v)/step)*step, 0), top)
        return float(n if bound is None else min(n, Fraction(bound)))
    x = torch.arange(-64, 1025)/64.
    y,g = back(lambda x: quantized_bits(x, bits, integer, keep_negative=False, bound=bound, gradient='clipped'), x)
    assert y.tolist() == [qkeras(v) for v in x.tolist()]
    end = y.max()
    assert torch.equal(g, ((x >= 0) & (x <= end)).float())

def test_a_bound_between_codes_is_the_code_below():
    x = torch.tensor([.9, 5.])
    assert quantized_bits(x, 4, 2, keep_negative=False, bound=1.1).tolist() == [1., 1.]
    assert quantized_bits(-x, 4, 2, bound=1.1).tolist() == [-1., -4.]
    with pytest.raises(ValueError, match=r'^quantized_bits: bound must be in \[0\.25, inf\], got 0\.1'):
        quantized_bits(x, 4, 2, keep_negative=False, bound=.1)

# --- every transform
FS = dict(
    saturated=fake_quantize,
    soft=partial(fake_quantize, rounding=soft_round),
    lsq=lambda x, s, z, bits: lsq(x, s, bits, offset=z),
    pact=lambda x, s, z, bits: pact(x, s, bits)+z,
    adaround=lambda x, s, z, bits: adaround(x, z, step=s),
    signround=lambda x, s, z, bits: signround(x, z/4, step=s),
    flexround=lambda x, s, z, bits: flexround(x, z, step=s),
    clipped=partial(fake_quantize, gradient='clipped'),
    ste=partial(fake_quantize, gradient='ste'),
    floor=partial(fake_quantize, rounding=floor_ste),
    bits=lambda x, s, z, bits: quantized_bits(x, bits, gradient='saturated')*s+z,
    blend=lambda x, s, z, bits: alpha_blend(x, round_ste(x), s)+z,
    between=lambda x, s, z, bits: quantize_between(x, -s, z, bits),
)

@pytest.mark.slow
@pytest.mark.parametrize('name', FS)
def test_transforms(name):
    x,s,z = torch.linspace(-3, 3, 24),torch.tensor(.3),torch.tensor(1.)
    def f(x, s, z): return FS[name](x, s, z, 3)
    check_every_mode(f, x, s, z, atol=1e-4)
    if name != 'lsq': assert torch.equal(torch.vmap(lambda t: f(t, s, z))(x.view(6, 4)).flatten(), f(x, s, z))

def test_a_share_of_another_dtype():
    x,a = torch.tensor([.3, 1.75], dtype=torch.float16),torch.tensor([.5, 1.], requires_grad=True)
    y = alpha_blend(x, torch.round(x), a)
    y.sum().backward()
    assert y.dtype == x.dtype and torch.equal(y, alpha_blend(x, torch.round(x), a.detach().half()))
    assert a.grad is not None and torch.allclose(a.grad, torch.tensor([-.3, .25]), atol=1e-3)

# --- errors
def test_no_more_than_24_bits():
    for f in (lsq_init, dorefa, dorefa_weight, quantized_bits, partial(lsq, scale=1.), partial(pact, alpha=1.)):
        with pytest.raises(ValueError, match=r'bits must be in \[[12], 24\], got 25'): f(torch.zeros(3), bits=25)

# --- FSQ
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
@pytest.mark.parametrize('symmetric', (False, True))
def test_fsq_levels(symmetric, dtype):
    """Every number of levels up to what the type can tell apart, or 2048: all codes
    used, and each the inverse of its index."""
    for n in [*range(2, 70), 127, 128, 255, 256, 257, 1001, 1002, 2047, 2048]:
        if n > 2/torch.finfo(dtype).eps: break
        i = torch.arange(n)
        codes = fsq_codes(i, [n], symmetric=symmetric, dtype=dtype)
        assert len(codes.unique()) == n and codes.abs().max() == 1
        assert torch.equal(fsq_index(codes, [n], symmetric=symmetric), i)
        far = torch.tensor([-math.inf, math.inf, -1e30, 1e30])
        z = torch.cat([torch.linspace(-6, 6, 40*n), far]).to(dtype)[:, None]
        y = fsq(z, [n], symmetric=symmetric)
        k = fsq_index(y, [n], symmetric=symmetric)
        assert torch.equal(fsq_codes(k, [n], symmetric=symmetric, dtype=dtype), y) and k.min() == 0 and k.max() == n-1

@pytest.mark.parametrize('n', (2, 3, 8, 9, 33))
def test_fsq_symmetric_as_the_paper_states_it(n):
    "2/(L-1) floor((L-1)(tanh z+1)/2 + ½) - 1 of 2411.19842, away from ties by 1e-6."
    z = normal(5000, dtype=torch.float64)
    t = (n-1)*(torch.tanh(z)+1)/2
    z,t = (v[(t-t.floor()-.5).abs() > 1e-6] for v in (z, t))
    got = fsq(z[:, None], [n], symmetric=True, margin=0.)[:, 0]
    assert torch.allclose(got, 2/(n-1)*torch.floor(t+.5)-1, rtol=0, atol=1e-12)

# --- learned rounding
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_learned_roundings_start_where_they_should(dtype):
    "AdaRound gives the weight back to 1e-6 steps, the others round to nearest, in the type of the weights."
    w,step = normal(4, 50, dtype=dtype),torch.tensor([[.1], [.25], [.7], [3.]])
    y = adaround(w, adaround_init(w, step=step, offset=.05), step=step, offset=.05)
    assert y.dtype == dtype and torch.allclose(y.double(), w.double(), rtol=torch.finfo(dtype).eps, atol=3e-6)
    for f in (partial(signround, v=torch.zeros(4, 50)), partial(flexround, divisor=torch.ones(4, 50))):
        assert f(w).dtype == dtype and torch.equal(f(w), w.round())
        assert torch.equal(f(w.float(), step=step), round_ste(w.float(), step=step))
