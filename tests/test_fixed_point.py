"""Scales that are powers of two, against brute force and the published gradient; formats of `ap_fixed`, against
Python's fractions; networks as C, compiled and compared bit for bit."""
import inspect
import io
import math
import re
import shutil
import subprocess
from fractions import Fraction
import pytest
import torch
from estimators import LAID, generator, slow_after
from networks import Made
from torch import nn
import shok_nb as R
from shok_nb.deployment.integer_operations import IntegerAdd, IntegerAveragePool, IntegerMean

W = torch.randn(6, 64, generator=generator())*torch.logspace(-1, 1, 6)[:, None]

# --- scales
def is_power(scale): return bool((scale.double().log2() == scale.double().log2().round()).all())

def error(w, scale, low=-8, high=7):
    return ((w/scale).round().clamp(low, high)*scale-w).square().mean(-1)

KINDS = (dict(), dict(axis=0), dict(block=16), dict(axis=0, learn=True), dict(init='minmax', axis=0), dict(init='lsq'),
    dict(init='percentile', axis=-1), dict(init='sample', learn=True), dict(signed=False))

@pytest.mark.parametrize('kw', KINDS, ids=str)
def test_scales_are_powers_of_two(kw):
    "The values are codes times them, bit for bit."
    q = R.Quantizer(4, scale='po2', **kw).calibrate_(W)
    scale = q.grid()[0].detach()
    assert is_power(scale) and scale.dtype == torch.float32
    beside = q.kind.beside(scale, q.kind.blocks(W))
    low,high = q.range()
    want = ((q.kind.blocks(W)/beside).round().clamp(low, high)*beside).view_as(W)
    assert torch.equal(q(W), want)
    assert torch.equal((q.kind.blocks(q.to_codes(W))*beside).view_as(W), want)

@pytest.mark.parametrize('format', ['e4m3', 'e2m1', 'nf4'])
def test_scales_of_formats(format):
    q = R.Quantizer(format=format, axis=0, scale='po2').calibrate_(W)
    assert is_power(q.scale)
    def loss(scale): return (R.Quantizer(format=format, axis=0).set_grid_(scale)(W)-W).square().mean(1)
    for other in (q.scale/2, 2*q.scale): assert (loss(q.scale) <= loss(other)).all()

def test_calibration_finds_the_best_power():
    "Of all of them, for each row; the ends of the data round up, so that nothing is clipped."
    powers = 2.**torch.arange(-20, 11)
    q = R.Quantizer(4, axis=0, scale='po2').calibrate_(W)
    errors = torch.stack([error(W, s) for s in powers])
    assert torch.equal(q.scale, powers[errors.argmin(0)])
    q = R.Quantizer(4, axis=0, scale='po2', init='minmax').calibrate_(W)
    most = W.abs().amax(1)
    assert (7*q.scale >= most).all() and (7*q.scale/2 < most).all()
    exact = R.Quantizer(4, scale='po2', init='minmax').calibrate_(torch.tensor([-1.75, .5]))
    assert exact.scale == .25                             # a power of two stays

def test_every_power_is_exact():
    "Of those that the parameter may reach, also where the optimizer has moved it by less than half an octave."
    q = R.Quantizer(8, learn=True, scale='po2')
    q.set_grid_(1.)
    for k in range(-115, 47):
        for off in (-.49, 0., .49):
            with torch.no_grad(): q.log_scale.fill_((k+off)*math.log(2))
            if -80 <= q.log_scale.item() <= 32: assert q.grid()[0].item() == 2.**k, (k, off)
    with torch.no_grad(): q.log_scale.fill_(-1000.)
    assert q.grid()[0].item() == 2.**-115
    with torch.no_grad(): q.log_scale.fill_(1000.)
    assert q.grid()[0].item() == 2.**46

def test_gradient_of_tqt():
    "Equation 7 of arXiv:1903.08066 with the natural logarithm, over the root by which LSQ divides."
    q = R.Quantizer(3, learn=True, scale='po2').calibrate_(W)
    g = torch.randn(W.shape, generator=generator(1))
    q(W).backward(g)
    s = q.grid()[0].item()
    v = W/s
    slope = torch.where(v < -4, -4., torch.where(v > 3, 3., v.round()-v))
    want = s*(g*slope).sum()/(3*W.numel())**.5
    assert torch.allclose(q.log_scale.grad, want, rtol=1e-5)

@pytest.mark.parametrize('start', [2.**-6, 4.])
def test_a_power_is_learned(start):
    "From too fine and too coarse to the best one. Adam moves the logarithm by at most its rate in an iteration."
    q = R.Quantizer(4, learn=True, scale='po2').set_grid_(start)
    w = W[3]
    adam = torch.optim.Adam(q.parameters(), lr=.05)
    for _ in range(200):
        adam.zero_grad()
        (q(w)-w).square().mean().backward()
        adam.step()
        assert is_power(q.grid()[0].detach())
    best = R.Quantizer(4, scale='po2').calibrate_(w).scale
    assert error(w, q.grid()[0]).item() <= 2*error(w, best).item() and q.grid()[0]/best in (.5, 1, 2)

@pytest.mark.parametrize('lr', [1000., -1000.])
def test_any_rate(lr):
    q = R.Quantizer(4, learn=True, scale='po2').calibrate_(W)
    (q(W)-W).square().mean().backward()
    with torch.no_grad(): q.log_scale -= lr*q.log_scale.grad.sign()
    assert is_power(q.grid()[0].detach()) and q(W).isfinite().all()

@pytest.mark.parametrize('learn', [False, True])
def test_by_hand(learn):
    q = R.Quantizer(4, axis=0, learn=learn, scale='po2')
    told = r"^Quantizer: set_grid_ wants a power of two with scale='po2', got 0.3; next to it are 0.25 and 0.5$"
    with pytest.raises(ValueError, match=told): q.set_grid_([.5, .3])
    assert not q.ready
    assert torch.equal(q.set_grid_([.5, 2.**-115]).grid()[0].detach(), torch.tensor([.5, 2.**-115]))
    assert q.set_grid_([2.**-120, 1.]).grid()[0][0] == 2.**-115
    for bad in (0., -1., math.nan, math.inf):
        with pytest.raises(ValueError, match='gives a scale that is not positive and finite'): q.set_grid_([1., bad])

def test_refused():
    for kw,told in ((dict(scale='po3'), r"scale must be one of any, po2, got 'po3'"), (dict(scale=2), 'got int'),
            (dict(scale='po2', zero_point=True), "scale='po2' has no zero point"),
            (dict(scale='po2', format='mxfp4'), 'format=mxfp4 needs no scale of ours')):
        with pytest.raises((TypeError, ValueError), match=told): R.Quantizer(**kw)

@pytest.mark.parametrize('learn', [False, True])
def test_states(learn):
    "A quantizer with other scales refuses them, since it would read another grid there."
    def made(**kw): return R.Quantizer(4, axis=0, learn=learn, **kw)
    q,file = made(scale='po2').calibrate_(W),io.BytesIO()
    torch.save(q.state_dict(), file); file.seek(0)
    other = made(scale='po2')
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(W), q(W))
    for a,b in ((made(), q), (made(scale='po2'), made().calibrate_(W))):
        with pytest.raises(RuntimeError, match="no block, scale='po2'"): a.load_state_dict(b.state_dict())
    assert repr(q).startswith("Quantizer(codes -8 to 7, axis=0, scale='po2'")

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_of_values(dtype):
    q = R.Quantizer(4, axis=0, learn=True, scale='po2').calibrate_(W.to(dtype))
    y = q(W.to(dtype))
    assert y.dtype == dtype and is_power(q.grid()[0].detach())
    assert torch.equal(y.double(), q.to_codes(W.to(dtype))*q.grid()[0].double()[:, None])

@pytest.mark.slow
def test_transforms_and_compiled():
    q = R.Quantizer(4, axis=0, learn=True, scale='po2').calibrate_(W)
    def loss(ps, w): return (torch.func.functional_call(q, ps, w)*w).sum()
    ps = {k: v.detach() for k,v in q.named_parameters()}
    by_func = torch.func.grad(loss)(ps, W)['log_scale']
    (q(W)*W).sum().backward()
    assert torch.allclose(by_func, q.log_scale.grad)
    compiled = torch.compile(q, backend='aot_eager', fullgraph=True)
    assert torch.equal(compiled(W), q(W))

def model_of_powers(seed=0, bits=8, learn=True):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.randn(256, 8, generator=generator(seed))
    weights = R.Quantizer(bits, axis=0, learn=learn, scale='po2')
    activations = R.Quantizer(8, signed=None, learn=learn, init='sample', scale='po2')
    R.quantize_model_(net, weights, activations, calibrate=[x])
    return net.eval(),x

@pytest.mark.parametrize('learn', [False, True])
def test_deployed(learn):
    "All scales stay powers of two, and the codes are those of the quantizers."
    net,x = model_of_powers(learn=learn)
    codes = [m.parametrizations.weight[0].to_codes(m.parametrizations.weight.original) for m in net[::2]]
    report = R.deploy_(net, x)
    assert [r.kernel for r in report.rows] == ['QGemm']*3
    for m,c in zip(net[::2], codes):
        assert torch.equal(m.codes.int(), c)
        assert is_power(m.scale) and is_power(m.product) and is_power(m.input_scale)

@pytest.mark.parametrize('deployed', [False, True])
@pytest.mark.slow
def test_in_onnx(deployed, tmp_path):
    pytest.importorskip('onnxruntime')
    net,x = model_of_powers()
    if deployed: R.deploy_(net, x)
    R.to_onnx(net, x, tmp_path/'net.onnx')            # compares the file with the model, or raises

def test_reconstructed():
    net,x = model_of_powers(bits=3)
    R.reconstruct_(net, [x])
    for q in net.modules():
        if isinstance(q, R.Quantizer): assert is_power(q.grid()[0].detach())

# --- formats
def reference(x, width, integer, signed, rounding, overflow):
    "By Python's fractions and integers."
    v = Fraction(x)*Fraction(2)**(width-integer)
    down = v.numerator//v.denominator
    rest = v-down
    up = down+(rest > 0)
    if rounding == 'TRN': n = down
    elif rounding == 'TRN_ZERO': n = down if v > 0 else up
    elif rest != Fraction(1, 2): n = down if rest < Fraction(1, 2) else up
    else: n = dict(RND=up, RND_MIN_INF=down, RND_INF=up if v > 0 else down, RND_ZERO=down if v > 0 else up,
        RND_CONV=down if down % 2 == 0 else up)[rounding]
    low,high = (-2**(width-1), 2**(width-1)-1) if signed else (0, 2**width-1)
    if overflow == 'SAT_SYM' and signed: low = -high
    if overflow == 'WRAP':
        n %= 2**width
        if signed and n >= 2**(width-1): n -= 2**width
    elif not low <= n <= high: n = 0 if overflow == 'SAT_ZERO' else low if n < low else high
    return float(n*Fraction(2)**(integer-width))

MODES = 'RND', 'RND_ZERO', 'RND_MIN_INF', 'RND_INF', 'RND_CONV', 'TRN', 'TRN_ZERO'
OVERFLOWS = 'SAT', 'SAT_ZERO', 'SAT_SYM', 'WRAP'
modes = pytest.mark.parametrize('rounding', MODES)
overflows = pytest.mark.parametrize('overflow', OVERFLOWS)

@modes
@overflows
@pytest.mark.parametrize('signed', [True, False])
def test_as_fractions(rounding, overflow, signed):
    "Four periods on each side in eighths of a step: all numbers, all ties and what lies around them."
    for width,integer in ((1, 1), (2, 0), (3, 3), (4, 6), (5, -2), (6, 2)):
        if (width, signed, overflow) == (1, True, 'SAT_SYM'): continue
        kw = dict(signed=signed, rounding=rounding, overflow=overflow)
        x = torch.arange(-32*2**width, 32*2**width+1, dtype=torch.float64)/8*2.**(integer-width)
        want = torch.tensor([reference(v, width, integer, **kw) for v in x.tolist()], dtype=torch.float64)
        for dtype in (torch.float64, torch.float32):
            assert torch.equal(R.fixed_point(x.to(dtype), width, integer, **kw).double(), want), (width, dtype)
        half = x.half()
        if torch.equal(half.double(), x): assert torch.equal(R.fixed_point(half, width, integer, **kw).double(), want)

@modes
@overflows
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_far_away(rounding, overflow, dtype):
    "Numbers of every size that the dtype has, next to ties too: floats in steps would lose what lies beside a half."
    info = torch.finfo(dtype)
    sizes = 2.**torch.arange(-30, 16 if dtype == torch.float16 else 100, dtype=torch.float64)
    near = torch.tensor([.5, 1.5, 127.5, 128.5, 255.5, 256, 1e4], dtype=dtype)
    x = torch.cat([(sizes*1.37).to(dtype), near, torch.nextafter(near, near+9), torch.nextafter(near, near-9),
        torch.tensor([info.tiny, info.tiny*info.eps, info.max, 0.], dtype=dtype)])
    x = torch.cat([x, -x])
    for width,integer,signed in ((8, 8, True), (8, 8, False), (7, 12, True), (8, 3, False)):
        kw = dict(signed=signed, rounding=rounding, overflow=overflow)
        want = torch.tensor([reference(v, width, integer, **kw) for v in x.tolist()], dtype=torch.float64)
        y = R.fixed_point(x, width, integer, **kw)
        assert y.dtype == dtype and torch.equal(y, want.to(dtype)), (width, integer, signed)

@pytest.mark.parametrize('dtype, width, signed', [(torch.float32, 25, True), (torch.float32, 24, False),
    (torch.float64, 53, False), (torch.float64, 53, True)])
@overflows
def test_the_widest(dtype, width, signed, overflow):
    "Every bit of the dtype is used: codes around both ends, and periods around them."
    ends = [0, 2**(width-1), 2**width, 2**(width+1)+2**(width-1), -2**(width-1), -2**width, 3*2**width]
    numbers = [float(e+d) for e in ends for d in (-3, -1.5, -1, -.5, 0, .5, 1, 2)]
    x = torch.tensor(numbers, dtype=dtype)
    for rounding in ('TRN', 'RND_CONV'):
        kw = dict(signed=signed, rounding=rounding, overflow=overflow)
        want = [reference(v, width, width, **kw) for v in x.tolist()]
        assert R.fixed_point(x, width, width, **kw).tolist() == want
    with pytest.raises(ValueError, match=r'width must be at most \d\d for'):
        R.fixed_point(x.float(), 26, 8, signed=signed)

def slopes(x, *args, **kw):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(R.fixed_point(x, *args, **kw).sum(), x)[0].tolist()

def test_slopes():
    "Straight-through; a wrap has slope 1 everywhere, as x less a constant has, and saturation 0 beyond the ends."
    x = torch.tensor([-30., -4.2, -4., .3, 3.4, 3.6, 3.9, 50.])
    assert slopes(x, 3, 3) == slopes(x, 3, 3, gradient='saturated') == [1]*8
    for overflow in ('SAT', 'SAT_ZERO'):
        kw = dict(rounding='RND', overflow=overflow)
        assert slopes(x, 3, 3, **kw) == [0, 0, 1, 1, 0, 0, 0, 0]
        assert slopes(x, 3, 3, gradient='saturated', **kw) == [0, 1, 1, 1, 1, 0, 0, 0]
        assert slopes(x, 3, 3, gradient='ste', **kw) == [1]*8
    assert slopes(x, 3, 3, overflow='SAT_SYM') == [0, 0, 0, 1, 0, 0, 0, 0]

@overflows
def test_odd_values(overflow):
    x = torch.tensor([math.inf, -math.inf, math.nan, -0.], requires_grad=True)
    y = R.fixed_point(x, 4, 2, overflow=overflow)
    ends = dict(SAT=[1.75, -2.], SAT_SYM=[1.75, -1.75], SAT_ZERO=[0., 0.])
    if overflow == 'WRAP': assert y[:3].isnan().all()
    else: assert y[:2].tolist() == ends[overflow] and y[2].isnan()
    assert y[3] == 0 and not y[3].signbit()                              # two's complement has one zero
    for t in (torch.zeros(0, 3), torch.tensor(.3), torch.ones(2, 3).mT):
        assert R.fixed_point(t, 4, 2, overflow=overflow).shape == t.shape

@overflows
@pytest.mark.parametrize('rounding', ['TRN', 'RND', R.soft_round, R.floor_ste],
    ids=lambda r: getattr(r, '__name__', r))
@pytest.mark.slow
def test_transforms(rounding, overflow):
    x = 9*torch.randn(4, 6, generator=generator())
    def f(x): return R.fixed_point(x, 4, 3, rounding=rounding, overflow=overflow)
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    g = torch.autograd.grad(y.sum(), leaf)[0]
    close = dict(atol=0 if rounding is not R.soft_round else 1e-5, rtol=1e-5)     # a curve has its own order of sums
    assert torch.allclose(torch.vmap(f)(x), y, **close)
    assert torch.allclose(torch.func.grad(lambda t: f(t).sum())(x), g, **close)
    _,tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent, g, **close)
    checkpointed = torch.utils.checkpoint.checkpoint(f, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(checkpointed.sum(), leaf)[0], g)
    compiled = torch.compile(f, backend='aot_eager', fullgraph=True)
    assert torch.allclose(compiled(leaf), y, **close)
    assert torch.allclose(torch.autograd.grad(compiled(leaf).sum(), leaf)[0], g, **close)


@overflows
@pytest.mark.parametrize('r', LAID, ids=lambda r: r.f.__name__)
def test_every_estimator(r, overflow):
    kw = dict(seed=torch.tensor(0)) if 'seed' in inspect.signature(r.f).parameters else {}
    x = torch.linspace(-7, 7, 256, dtype=torch.float64, requires_grad=True)
    y = R.fixed_point(x, 4, 3, rounding=r.f, overflow=overflow, **kw)
    g = torch.autograd.grad(y.sum(), x)[0]
    assert y.isfinite().all() and g.isfinite().all() and y.dtype == x.dtype
    if r.f is not R.uniform_noise: assert y.abs().max() <= 4.5           # it is no rounding, and no grid holds it
    if r.on_grid: assert torch.equal(R.fixed_point(y, 4, 3, overflow=overflow), y)

def test_a_format_in_a_quantizer():
    x = 9*torch.randn(4, 6, generator=generator())
    for rounding in MODES:
        f = R.FixedFormat(6, 3, rounding=rounding, overflow='SAT')
        q = R.Quantizer(format=f).calibrate_(x)
        y = R.fixed_point(x, 6, 3, rounding=rounding, overflow='SAT')
        assert torch.equal(q(x), y) and torch.equal(q.to_codes(x), (y*8).int()) and q.range() == (-32, 31)
        soft = R.Quantizer(format=f, rounding=R.soft_round).calibrate_(x)
        assert not torch.equal(soft(x), y) and torch.equal(soft.eval()(x), y)
        twin = R.Quantizer(format=f)
        twin.load_state_dict(q.state_dict())
        assert torch.equal(twin(x), y)
    with pytest.raises(RuntimeError, match='another grid'):
        R.Quantizer(format=R.FixedFormat(6, 2)).load_state_dict(q.state_dict())
    for kw in (dict(axis=0), dict(block=2), dict(learn=True), dict(scale='po2')):
        with pytest.raises(ValueError, match='needs no scale of ours'): R.Quantizer(format=f, **kw)
    with pytest.raises(ValueError, match='to_codes got nan'): q.to_codes(x*math.nan)
    assert q(x.bfloat16()).dtype == torch.bfloat16
    assert R.Quantizer(format=R.FixedFormat(40, 8)).calibrate_(x).to_codes(x.double()).dtype == torch.int64

def test_a_model_of_formats():
    "All its layers; what the integer kernels do not know stays floats, and the report says so."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(32, 8, generator=generator())
    q = R.Quantizer(format=R.FixedFormat(8, 3, rounding='RND', overflow='SAT'))
    R.quantize_model_(net, q, q, calibrate=[x])
    net(x).sum().backward()
    y = net.eval()(x)
    assert torch.equal(R.fixed_point(net[0].weight, 8, 3), net[0].weight)
    report = R.deploy_(net, x)
    assert 'FixedFormat' in str(report) and torch.equal(net(x), y)

@pytest.mark.parametrize('kw, told', [(dict(width=0), r'width must be in \[1, 53\], got 0'),
    (dict(width=8.), 'width must be an int, got float'), (dict(integer=200), 'integer must be in'),
    (dict(signed=1), 'signed must be True or False'), (dict(rounding='AP_RND'), 'rounding must be one of RND, '),
    (dict(rounding=None), 'rounding must be'), (dict(overflow='CLIP'), 'overflow must be one of SAT, SAT_ZERO'),
    (dict(width=1, overflow='SAT_SYM'), 'width must be at least 2 for a signed SAT_SYM')], ids=str)
def test_no_format(kw, told):
    given = dict(width=8, integer=3) | kw
    with pytest.raises((TypeError, ValueError), match=f'^FixedFormat: {told}'): R.FixedFormat(**given)
    if kw.get('rounding', 0) is None: told = 'rounding must'
    with pytest.raises((TypeError, ValueError), match=f'^fixed_point: {told}'): R.fixed_point(W, **given)

# --- as C
MAIN = '''#include <stdio.h>
#include "net.h"
int main(void)
{{
    static float x[NET_INPUTS];
    static {kind} q[NET_INPUTS];
    static {leaves} y[NET_OUTPUTS];
    while (fread(x, sizeof x, 1, stdin) == 1) {{
        net_quantize(x, q);
        net(q, y);
        if (fwrite(y, sizeof y, 1, stdout) != 1) return 1;
    }}
    return 0;
}}
'''

def in_c(net, x, folder):
    "What the program makes of `x`, as floats."
    if shutil.which('cc') is None: pytest.skip('no C compiler')
    text = R.to_c(net, x, folder/'net.h').read_text()
    kind,leaves = re.search(r'void net\(const (\w+) \*x, (\w+) \*y', text).groups()
    (folder/'main.c').write_text(MAIN.format(kind=kind, leaves=leaves))
    flags = '-std=c99', '-pedantic', '-Wall', '-Wextra', '-Werror', '-O1'
    subprocess.run(['cc', *flags, '-o', 'main', 'main.c'], cwd=folder, check=True)
    made = subprocess.run([folder/'main'], input=x.numpy().tobytes(), capture_output=True, check=True).stdout
    codes = torch.frombuffer(bytearray(made), dtype=getattr(torch, leaves.removesuffix('_t'))).view(len(x), -1).int()
    points = re.search(r'net_output_point\[\d+\] = \{([^}]*)\}', text)[1].split(',')[:-1]
    each = codes.shape[1]//len(points)
    values = codes*2.**-torch.tensor([int(p) for p in points], dtype=torch.float64).repeat_interleave(each)
    assert torch.equal(values, values.float().double())              # no more bits than the model's
    return values.float()

def deployed(net, x, bits=8, **kw):
    weights = R.Quantizer(bits, axis=0, scale='po2')
    R.quantize_model_(net, weights, R.Quantizer(8, **dict(signed=None, scale='po2') | kw), calibrate=[x])
    R.deploy_(net.eval(), x)
    return net

def many(shape, seed, n=10_000, step=2.**-7):
    "Normal numbers, every second of them on a grid so fine that they are ties of the input's."
    x = torch.randn(n, *shape, generator=generator(seed))
    x[::2] = (x[::2]/step).round()*step
    x[0],x[1] = 1e30,-1e30
    return x

def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 12), nn.Linear(12, 3), nn.ReLU())

def conv():
    head = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    return nn.Sequential(head, nn.Conv2d(4, 6, (3, 2), stride=(2, 1), groups=2, dilation=(1, 2), bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 10), nn.ReLU(), nn.Linear(10, 3))

def ties_of(net, x):
    "How many sums of the first integer layer lie in the middle between two integers that leave."
    layer = next(m for m in net.modules() if hasattr(m, 'bias_codes'))
    total = torch.nn.functional.linear(layer.input_scale.reciprocal().mul(x).round().clamp(-128, 127).double(),
        (layer.weight/layer.scale[:, None]).double(), layer.bias_codes.double())
    n = total*(layer.product/layer.out_scale).double()
    return int(((n-n.floor()) == .5).sum())

@pytest.mark.parametrize('bits', [8, 3])
def test_the_same_bits_in_c(bits, tmp_path):
    "Ten thousand inputs: ties at the input and in each layer, both ends of the grid, and codes of four bits in a byte."
    torch.manual_seed(1)
    net,x = mlp(),many((8,), 2)
    net = deployed(net, x[2:300], bits)
    assert torch.equal(in_c(net, x, tmp_path), net(x))
    entering = x/net[0].input_scale
    assert ((entering-entering.floor()) == .5).sum() > 100 and ties_of(net, x) > 100

@pytest.mark.parametrize('pool', [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True)], ids=['even', 'ceil'])
def test_images_leave_in_c(pool, tmp_path):
    "The last layer is a convolution: a point for each channel; the first takes uint8."
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), pool),many((1, 6, 6), 3, 1000).abs()
    net = deployed(net, x[2:100])
    assert torch.equal(in_c(net, x, tmp_path), net(x).flatten(1))
    assert 'net_quantize(const float *x, uint8_t *q)' in (tmp_path/'net.h').read_text()

@pytest.mark.parametrize('wide', [False, True])
def test_sums_of_more_than_24_bits(wide, tmp_path):
    "Float32 keeps 24 bits of a sum in the deployed model, and the header too. Few weights alone differ in sign."
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1500 if wide else 40, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad(): net[0].weight.copy_(torch.rand_like(net[0].weight)+.2)
    x = many((net[0].in_features,), 4, 500)[2:].abs()
    net = deployed(net, x)
    text = R.to_c(net, x, tmp_path/'net.h').read_text()
    assert ('net_single(s)' in text) == wide
    assert torch.equal(in_c(net, x, tmp_path), net(x))
    alone = deployed(nn.Sequential(nn.Linear(net[0].in_features, 4)), x)
    with torch.no_grad(): alone[0].codes.abs_()
    assert torch.equal(in_c(alone, 9*x, tmp_path), alone(9*x))       # most inputs are at the end, and sums large
    sums = (alone(9*x)/alone[0].product).abs()
    assert (sums.max() > 2**24) == wide

def dead():
    "A row of zeros has its bias alone, on a scale that is a power of two as well."
    net = mlp()
    with torch.no_grad():
        for m in net:
            if isinstance(m, nn.Linear): m.weight[0] = 0.
    return net

class Other(nn.Sequential): pass

IN_C = dict(dead_channels=(dead, (8,), 1000),
    one_layer=(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), (2, 3), 1000),
    another_class=(lambda: Other(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), (8,), 300),
    convolutions=(conv, (2, 10, 9), 10_000))

@pytest.mark.parametrize('name', slow_after(IN_C, 3))
def test_networks_in_c(name, tmp_path):
    make,shape,n = IN_C[name]
    torch.manual_seed(0)
    net,x = make(),many(shape, 5, n)
    net = deployed(net, x[2:300])
    assert torch.equal(in_c(net, x, tmp_path), net(x))

class Block(nn.Module):
    "A residual block of a convolution, with names that C has in use, and a ReLU that is called twice."
    def __init__(self, n, padding=1):
        super().__init__()
        self.quantize,self.round = nn.Conv2d(n, n, 3, padding=padding),nn.Conv2d(n, n, 1)
        self.relu = nn.ReLU()
    def forward(self, x):
        x = self.relu(x)
        return self.relu(x + self.round(self.relu(self.quantize(x))))

class Residual(nn.Module):
    def __init__(self, pool, head=8):
        super().__init__()
        self.first,self.a,self.a_relu = nn.Conv2d(2, 4, 3),Block(4),Block(4)
        self.pool,self.head = pool,nn.Linear(head, 3)
    def forward(self, x):
        x = self.pool(self.a_relu(self.a(self.first(x))))
        return self.head(x.flatten(1))

POOLS = {'mean': (nn.AdaptiveAvgPool2d(1), 4), 'windows': (nn.AvgPool2d(3, 2), 16), 'ceil': (nn.AvgPool2d(
    (2, 3), (3, 2), 1, ceil_mode=True, count_include_pad=False), 36), 'padded': (nn.AvgPool2d(3, 2, 1), 36)}

@pytest.mark.parametrize('pool', POOLS)
def test_residuals_and_means_in_c(pool, tmp_path):
    "Additions, means of a picture and of windows with and without padding: the bits of torch, ties among them."
    torch.manual_seed(3)
    net,x = Residual(*POOLS[pool]),many((2, 8, 7), 4, 1500)
    net = deployed(net, x[2:100])
    kinds = {type(m).__name__ for m in net.modules()}
    assert {'IntegerAdd', 'IntegerMean' if pool == 'mean' else 'IntegerAveragePool'} <= kinds
    assert torch.equal(in_c(net, x, tmp_path), net(x))

class BasicBlock(nn.Module):
    "As in ResNet-18, its normalizations folded."
    def __init__(self, n, out, stride):
        super().__init__()
        self.conv1,self.conv2,self.relu = nn.Conv2d(n, out, 3, stride, 1),nn.Conv2d(out, out, 3, 1, 1),nn.ReLU(True)
        self.downsample = nn.Conv2d(n, out, 1, stride) if stride > 1 else nn.Identity()
    def forward(self, x):
        out = self.conv2(self.relu(self.conv1(x)))
        out += self.downsample(x)
        return self.relu(out)

@pytest.mark.parametrize('narrow', [None, R.FixedFormat(10, 3, overflow='SAT')], ids=['exact', 'narrow'])
@pytest.mark.slow
def test_resnet_in_c(narrow, tmp_path):
    "A ResNet of few channels: strides, a shortcut with a convolution and without, with exact and with narrow sums."
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 7, 2, 3),nn.ReLU(True),nn.MaxPool2d(3, 2, 1)
    net = nn.Sequential(*stem, BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(),
        nn.Linear(16, 10))
    x = many((3, 32, 32), 5, 200)
    net = deployed(net, x[2:60])
    assert sum(type(m).__name__ == 'IntegerAdd' for m in net.modules()) == 2
    exact = net(x)
    if narrow: R.narrow_accumulators_(net, narrow)
    assert torch.equal(in_c(net, x, tmp_path), net(x)) and torch.equal(net(x), exact) == (narrow is None)

@pytest.mark.parametrize('n', [1, 7, 8, 49])
@pytest.mark.parametrize('zero, out_zero', [(128, 0), (100, 7)])
@pytest.mark.parametrize('up', [-3, 2])
@pytest.mark.slow
def test_means_of_any_codes_in_c(n, zero, out_zero, up, tmp_path):
    "Grids with zero points, even and odd, and sums that are ties: as torch computes them in float32."
    def grid(scale, zero): return torch.tensor(2.**scale),torch.tensor(zero, dtype=torch.uint8)
    g,windows = generator(n),IntegerAveragePool(grid(-4, zero), nn.AvgPool2d((1, n)))
    codes = torch.randint(256, (2000, 2, 1, n), generator=g)
    codes[::2] = (codes[::2]//64)*64 + torch.randint(2, (1000, 2, 1, n), generator=g)
    x = (codes-zero)/16
    for m in (IntegerMean(grid(-4, zero)), windows):
        m.feeds(*grid(-4-up, out_zero))
        net = nn.Sequential(m)
        y = net(x).flatten(1)
        assert torch.equal(in_c(net, x, tmp_path), y)
        exact = (codes-zero).double().sum(3).flatten(1)/n*2.**up
        assert n != 8 and up == 2 or (exact % 1 == .5).any()               # 4 t/7 is no tie
    add = Sum(IntegerAveragePool(grid(-4, zero), nn.AvgPool2d(1)), IntegerAdd(grid(-4, zero), grid(-4-up, 255-zero)))
    add.other.feeds(*grid(-4-up, 255-zero))
    add.m.feeds(*grid(-3, out_zero))
    assert torch.equal(in_c(add, x, tmp_path), add(x).flatten(1))

class Sum(nn.Module):
    "What enters is added to itself on another grid."
    def __init__(self, other, m):
        super().__init__()
        self.other,self.m = other,m
    def forward(self, x): return self.m(x, self.other(x))

def test_zero_points_in_c(tmp_path):
    "Grids that are set by hand to powers of two with a zero point: the header has numbers less that code."
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),many((8,), 7, 2000)
    with torch.no_grad(): net[2].weight[0] = 0.
    R.quantize_model_(net, R.Quantizer(8, axis=0, scale='po2'), R.Quantizer(8, zero_point=True), calibrate=[x[2:99]])
    for m,scale,code in ((net[0], 2.**-5, 25), (net[2], 2.**-6, -90)): m.input_quantizer.set_grid_(scale, code)
    R.deploy_(net.eval(), x[2:99])
    assert [int(m.input_zero_point) for m in net[::2]] == [153, 38]
    assert torch.equal(in_c(net, x, tmp_path), net(x))
    assert 'net_quantize(const float *x, int16_t *q)' in (tmp_path/'net.h').read_text()

def plain(net, x, **kw):
    R.quantize_model_(net, 8, R.Quantizer(8, signed=None), calibrate=[x])
    R.deploy_(net.eval(), x)
    return net

class Calls(nn.Module):
    "A layer of integers, called as `way` says."
    def __init__(self, way):
        super().__init__()
        self.m = deployed(nn.Sequential(nn.Linear(8, 8)), many((8,), 7, 100)[2:])[0]
        self.way = way
    def forward(self, x): return self.way(self.m, x)

def forked():
    "A layer that is read on two grids, and so gives floats."
    a,b,c = nn.Linear(8, 8),nn.Linear(8, 8),nn.Linear(8, 2)
    return Made(lambda m, x: m.c(h := m.a(x)) + m.c(m.b(h.relu())), a=a, b=b, c=c)

def test_a_function_for_a_layer_in_c(tmp_path):
    "A ReLU that is called as a function, and is the last."
    torch.manual_seed(0)
    x = many((8,), 7, 300)
    net = deployed(Made(lambda m, x: m.b(m.a(x).relu()).relu(), a=nn.Linear(8, 4), b=nn.Linear(4, 2)), x[2:])
    assert torch.equal(in_c(net, x, tmp_path), net(x)) and (net(x) == 0).any()

@pytest.mark.parametrize('make, told', [
    (lambda x: nn.Linear(8, 2), r'\(model\) is a Linear; deploy_ has made no integers of it'),
    (lambda x: Calls(lambda m, x: m(x) if x.sum() > 0 else x), 'the forward of Calls cannot be read: .*control flow'),
    (lambda x: Calls(lambda m, x: m(x).sigmoid()), 'sigmoid is a call of sigmoid; known are layers, relu and what'),
    (lambda x: Calls(lambda m, x: (m(x), x)), 'model must return one Tensor'),
    (lambda x: Calls(lambda m, x: m(x)+m.bias), '_tensor_constant0 reads other than what was computed'),
    (lambda x: Calls(lambda m, x: m(x).view(-1)), 'view is a call of view'),
    (lambda x: nn.Sequential(nn.Linear(8, 2)), '0 is a Linear; deploy_ has made no integers of it'),
    (lambda x: nn.Sequential(nn.ReLU()), 'the model has no integer layer; deploy_ first'),
    (lambda x: plain(nn.Sequential(nn.Linear(8, 2)), x), '0 has a scale of .*, which is no power of two'),
    (lambda x: deployed(nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)), x), '1 is a .*GELU|1 is a'),
    (lambda x: deployed(nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)), x), '1 is a Softmax; known are integer layers'),
    (lambda x: deployed(forked(), x), 'c takes other integers than the layer before it gives'),
    (lambda x: deployed(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Linear(4, 2)), x), '0 is a Unflatten; known are')],
    ids=lambda told: told if isinstance(told, str) else '')
def test_not_written(make, told, tmp_path):
    x = many((8,), 7, 100)[2:]
    with pytest.raises(ValueError, match=f'^to_c: {told}'): R.to_c(make(x), x, tmp_path/'net.h')
    assert not (tmp_path/'net.h').exists()

def added(other, k):
    "What enters and a function of it, on steps of 1/16 and 2**k, as a step of 1/8."
    other.feeds(*on_grid(k))
    m = IntegerAdd(on_grid(-4), on_grid(k))
    m.feeds(*on_grid(-3))
    return Sum(other, m)

def on_grid(k): return torch.tensor(2.**k),torch.tensor(128, dtype=torch.uint8)

@pytest.mark.parametrize('make, size, told', [
    (lambda: added(IntegerMean(on_grid(-4)), -4), 2, r'm adds shapes \(2, 2, 2\) and \(2, 1, 1\); only equal ones'),
    (lambda: added(IntegerAveragePool(on_grid(-4), nn.AvgPool2d(1)), -24), 2, 'm adds grids whose points are 21 bits'),
    (lambda: nn.Sequential(IntegerAveragePool(on_grid(-4), nn.AvgPool2d(128))), 128, '0 takes means of 16384 numbers'),
    (lambda: nn.Sequential(IntegerMean(on_grid(-4))), 257, '0 takes the mean of 66049 numbers, more than 65793')],
    ids=['shapes', 'points', 'window', 'mean'])
def test_sums_that_are_not_written(make, size, told, tmp_path):
    net = make()
    if isinstance(net, nn.Sequential): net[0].feeds(*on_grid(-4))
    with pytest.raises(ValueError, match=f'^to_c: {told}'): R.to_c(net, torch.zeros(1, 2, size, size), tmp_path/'net.h')

def test_scales_far_apart_are_not_written(tmp_path):
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)),many((8,), 7, 100)[2:]
    R.quantize_model_(net, R.Quantizer(8, axis=0, scale='po2'), R.Quantizer(8, scale='po2'), calibrate=[x])
    net[1].input_quantizer.set_grid_(2.**-60)
    R.deploy_(net.eval(), x)
    with pytest.raises(ValueError, match='^to_c: 0 needs a shift to the left by'): R.to_c(net, x, tmp_path/'net.h')

def test_bad_calls_of_c(tmp_path):
    x = many((8,), 7, 100)[2:]
    net = deployed(mlp(), x)
    for name in ('net.c', '2net.h', 'a-b.h', 'net'):
        with pytest.raises(ValueError, match='file must be named as a function of C'): R.to_c(net, x, tmp_path/name)
    with pytest.raises(FileNotFoundError, match='to_c: file is in .*no, which'): R.to_c(net, x, tmp_path/'no'/'net.h')
    with pytest.raises(TypeError, match='file must be a path, got int'): R.to_c(net, x, 3)
    with pytest.raises(ValueError, match='example must be a batch of inputs'): R.to_c(net, x[0], tmp_path/'net.h')
    with pytest.raises(ValueError, match='0 does not take example'): R.to_c(net, x[:, :3], tmp_path/'net.h')
    deep = deployed(nn.Sequential(nn.Linear(8, 2)), x[:, None])
    with pytest.raises(ValueError, match='0 must take vectors, got shape'): R.to_c(deep, x[:, None], tmp_path/'net.h')
