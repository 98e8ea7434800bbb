"""Scales that are powers of two, against brute force and the published gradient."""
import io
import math
import pytest
import torch
from estimators import generator
from torch import nn
import shok_nb as R

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
