"""A device without float64, as Apple's MPS: what is computed there is what a CPU computes, and what needs float64 is
computed on the CPU and brought back. Nothing mixes the two. The device is made of Python (far.py), and its tensors
have values, so this finds what fake tensors cannot. It stays for the life of a process: `test_compat.py` starts one."""
import copy
import pytest
import torch
from far import NAME, Far, device, near
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
import shok_nb as R
from shok_nb.catalog import catalog
from shok_nb.engine import compat
from shok_nb.studies.jpeg import jpeg


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(compat, '_NO_FLOAT64', {NAME})
    with device() as d: yield d

def test_the_device_notices(far):
    "What this file is for: float64, and tensors of two places in one operation."
    x = torch.ones(3).to(far)
    assert isinstance(x, Far) and x.device.type == NAME and x.cpu().sum() == 3
    for make in (x.double, lambda: x.to(torch.float64), lambda: torch.zeros(3, dtype=torch.float64, device=far)):
        with pytest.raises(TypeError, match='no float64'): make()
    with pytest.raises(RuntimeError, match='one on the CPU'): x + torch.ones(3)

def test_unless_it_is_told_the_package_asks_for_float64(far, monkeypatch):
    monkeypatch.setattr(compat, '_NO_FLOAT64', set())
    with pytest.raises(TypeError, match='no float64'): gptq(far)

VALUES = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

def knobs(r):
    "None, each as a tensor, and an uneven grid."
    yield {}
    for k in r.knobs:
        if not isinstance(k.default, int): yield {k.name: torch.tensor(float(k.default))}
    if r.grid: yield dict(step=torch.tensor(.5), offset=torch.tensor([.1, .2, .3, .4]))

def with_gradient(f, x):
    x = x.detach().clone().requires_grad_()
    y = f(x)
    y.square().sum().backward()
    return y,x.grad

def check(f, to, x=VALUES, rtol=4e-6):
    "Value and gradient of `f(x, place)` on both devices: a few units in the last place apart, as other orders are."
    want,got = with_gradient(lambda x: f(x, lambda t: t), x),with_gradient(lambda x: f(x, lambda t: t.to(to)), x.to(to))
    for a,b in zip(want, got):
        assert isinstance(b, Far)
        torch.testing.assert_close(near(b.detach()), a.detach(), rtol=rtol, atol=1e-6)

@pytest.mark.parametrize('r', catalog, ids=lambda r: r.name)
def test_estimators(r, far):
    for kw in knobs(r):
        if r.random: kw = kw | dict(seed=torch.tensor(3))
        check(lambda x, to: r.f(x, **{k: to(v) for k,v in kw.items()}), far)

BESIDE = {
    'fake_quantize': lambda x, to: R.fake_quantize(x, to(torch.tensor([[.1], [.2], [.3]])), 1, 4),
    'lsq': lambda x, to: R.lsq(x, R.lsq_init(x), 4),
    'decimals': lambda x, to: R.decimal_ste(100*x, -1) + R.decimal_ste(x, 3, ties='up'),
    'float_round': lambda x, to: R.float_round(x, 'e4m3'),
    'mx_quantize': lambda x, to: R.mx_quantize(x.repeat(1, 8), 'e2m1'),
    'nvfp4_quantize': lambda x, to: R.nvfp4_quantize(x.repeat(1, 8), seed=torch.tensor(1), rounding=R.stochastic_round),
    'levels_round': lambda x, to: R.levels_round(x, R.NF4),
    'fixed_point': lambda x, to: R.fixed_point(x, 6, 3),
    'fsq': lambda x, to: R.fsq(x, [8, 5, 5, 5]),
    'vq': lambda x, to: R.vq(x, to(torch.eye(4)), method='rotation'),
    'ternary_weight': lambda x, to: R.ternary_weight(x),
    'levels_softmax': lambda x, to: R.levels_softmax(x, R.NF4, 20.),
    'soft_entropy': lambda x, to: x*R.soft_entropy(x)}

@pytest.mark.parametrize('f', BESIDE.values(), ids=BESIDE)
def test_beside_the_catalog(f, far): check(f, far)

def test_jpeg(far):
    pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    check(lambda x, to: jpeg(x, rounding=R.soft_round), far, pictures, rtol=1e-4)

def test_counting(far):
    codes = torch.tensor([0, 0, 3, 3, -1])
    assert R.code_usage(codes.to(far), 8) == R.code_usage(codes, 8)
    assert R.code_entropy(codes.float().to(far)).item() == R.code_entropy(codes).item()
    with pytest.raises(ValueError, match='whole numbers, got 0.5'): R.code_entropy(torch.tensor([.5]).to(far))

# --- what works without training
WEIGHTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
INPUTS = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
GRAM,STEPS = INPUTS.mT@INPUTS,torch.full((8, 1), .2)

def gptq(to): return R.gptq(WEIGHTS.to(to), GRAM.to(to), STEPS.to(to), bits=4)
MATRICES = dict(gptq=gptq, watersic=lambda to: R.watersic(WEIGHTS.to(to), GRAM.to(to), 2.),
    column_scale=lambda to: R.column_scale(GRAM.to(to)),
    learn_codes=lambda to: R.learn_codes(WEIGHTS.to(to), GRAM.to(to), STEPS.to(to), bits=4, steps=20),
    coordinate_descent=lambda to: R.coordinate_descent(WEIGHTS.to(to), GRAM.to(to), STEPS.to(to), bits=4))

@pytest.mark.parametrize('f', MATRICES.values(), ids=MATRICES)
def test_matrices(f, far):
    made,want = f(far),f('cpu')
    if isinstance(want, torch.Tensor): made,want = [made],[want]
    for a,b in zip(made, want):
        assert isinstance(a, Far)
        assert torch.equal(near(a), b.to(a.dtype))               # a scale of float64 is float32 there

def test_float64_beside_it(far):
    "What was given in float64 on the CPU stays as exact; what is made lies where the first tensor does."
    made = R.gptq(WEIGHTS.to(far), GRAM.double(), STEPS.to(far), bits=4)
    assert torch.equal(near(made), R.gptq(WEIGHTS, GRAM.double(), STEPS, bits=4))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

PICTURES = torch.randn(32, 1, 6, 6, generator=torch.Generator().manual_seed(3))

def calibrated(m, x, bits=8):
    "Quantized on the CPU: a graph of a network reads memory, which a device of Python has not."
    place = x.device
    R.quantize_model_(m.cpu(), bits, bits, calibrate=[x.cpu()])
    return m.to(place)

PASSES = dict(deploy_=lambda m, x: R.deploy_(calibrated(m, x), x), equalize_=lambda m, x: R.equalize_(m, x),
    smooth_=lambda m, x: R.smooth_(m, [x]), rotate_=lambda m, x: R.rotate_(m, x),
    reconstruct_=lambda m, x: R.reconstruct_(calibrated(m, x), [x], steps=10, fits=1),
    narrow_accumulators_=lambda m, x: R.narrow_accumulators_(calibrated(m, x, R.Quantizer(8, scale='po2')),
        R.FixedFormat(24, 14)))

@pytest.mark.parametrize('change', PASSES.values(), ids=PASSES)
def test_passes(change, far):
    "The model, where it was, has the outputs of one that was changed on the CPU."
    m,other = net().to(far),net()
    change(m, PICTURES.to(far))
    change(other, PICTURES)
    assert {t.device.type for t in (*m.parameters(), *m.buffers())} == {NAME}
    out = m(PICTURES.to(far))
    assert isinstance(out, Far)
    torch.testing.assert_close(near(out.detach()), other(PICTURES).detach(), rtol=1e-4, atol=1e-5)

def test_calibration(far):
    "Histograms, whose sums are float64, of more values than are kept."
    def chain(): return net()[5:]
    x = torch.randn(40, 1000, 32, generator=torch.Generator().manual_seed(0))
    m,other = chain().to(far),chain()
    R.quantize_model_(m, calibrate=[*x.to(far)])
    R.quantize_model_(other, calibrate=[*x])
    assert all(torch.equal(near(a), b) for a,b in zip(m.state_dict().values(), other.state_dict().values()))
    torch.testing.assert_close(near(m(x[0].to(far)).detach()), other(x[0]).detach())

def test_batches_of_a_loader_are_brought_as_they_come(far):
    rows = [PICTURES[i:i+8].to(far) for i in range(0, 32, 8)]
    loader = DataLoader(rows, batch_size=None)
    want = net()
    R.smooth_(want, [near(r) for r in rows])
    for batches in (rows, loader, iter(rows)):
        m = net().to(far)
        R.smooth_(m, batches)
        assert torch.equal(m[0].weight.cpu(), want[0].weight)

def test_a_pass_that_fails_leaves_the_model_where_it_was(far):
    m = net().to(far)
    was = copy.deepcopy(m.state_dict())
    with pytest.raises((TypeError, ValueError), match='equalize_: '): R.equalize_(m, 'a picture')
    assert {t.device.type for t in m.state_dict().values()} == {NAME}
    assert all(torch.equal(a.cpu(), b.cpu()) for a,b in zip(was.values(), m.state_dict().values()))

@pytest.mark.parametrize('recipe', ('bfloat16', 'mxfp8', 'nvfp4'))
def test_training_in_few_bits(recipe, far):
    "Products of few bits and an optimizer without a float32 copy, some steps."
    def trained(to):
        m,x = net()[5:].to(to),torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(to)
        R.low_precision_(m, recipe, skip=())
        opt = R.RoundedOptimizer(m.parameters(), torch.optim.AdamW, format='bfloat16')
        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(m(x), torch.arange(16).to(to) % 4).backward()
            opt.step()
        return m[0].weight.detach()
    made = trained(far)
    assert isinstance(made, Far)
    torch.testing.assert_close(near(made), trained('cpu'), rtol=1e-2, atol=1e-3)
