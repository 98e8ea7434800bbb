"""torchao 0.18.0: the same fake quantization and gradients; adding noise before `floor`
moves numbers that are whole already."""
from functools import partial
import pytest
import torch
from estimators import FLOATS, generator, same, slope
from torchao.optim import _AdamW
from torchao.optim.quant_utils import _fp32_to_bf16_sr
from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
from torchao.quantization.quant_primitives import _fake_quantize_affine, _Round
from shok_nb import RoundedOptimizer, fake_quantize, round_ste, stochastic_round, ulp


def theirs(x, scale, zero=None, block=None):
    if zero is None: zero = torch.zeros_like(scale)
    return _fake_quantize_affine(x, block or x.shape, scale, zero, torch.int8, -8, 7)

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_round_agrees_everywhere(dtype):
    x = torch.cat([torch.arange(-12, 13)/4, torch.tensor([-.0, torch.inf, -torch.inf, torch.nan])]).to(dtype)
    assert same(_Round.apply(x), round_ste(x)) and same(slope(_Round.apply, x), slope(round_ste, x))

GRIDS = dict(tensor=(torch.tensor(.25), torch.tensor(-2.), (6, 8), (1, 1, 6, 8)),
    channel=(2.**-torch.arange(6.), torch.zeros(6), (1, 8), (6, 1, 1, 8)),
    block=(torch.full((6, 2), .5), torch.full((6, 2), 3.), (1, 4), (6, 2, 1, 4)))
@pytest.mark.parametrize('scale, zero, block, shape', GRIDS.values(), ids=GRIDS)
def test_fake_quantize_agrees(scale, zero, block, shape):
    "Values, and the gradients of input, scale and zero point, for scales that are powers of two."
    leaves = [t.clone().requires_grad_() for t in (torch.randn(6, 8, generator=generator())*3, scale, zero)]
    x,s,z = leaves
    a = theirs(x, s, z, block)
    b = fake_quantize(x.view(shape), *(t.view(*shape[:2], 1, 1) for t in (s, z)), 4).view(6, 8)
    w = torch.randn(6, 8, generator=generator(1))
    assert torch.equal(a, b) and 0 < (a.detach() == a.detach().max()).sum() < a.numel()
    for p,q in zip(*(torch.autograd.grad((w*y).sum(), leaves) for y in (a, b))): assert torch.allclose(p, q, atol=1e-5)

def test_fake_quantize_differs_at_ties_of_other_scales():
    "Theirs multiplies by 1/scale, as torch does; ours divides: another neighbour at one of the ties of scale .3."
    x = (torch.arange(-8, 7)+.5)*.3
    a,b = theirs(x, torch.tensor(.3)),fake_quantize(x, .3, bits=4)
    assert torch.equal(a, torch.fake_quantize_per_tensor_affine(x, .3, 0, -8, 7)) and (a != b).sum() == 1
    assert torch.equal(b/.3, (x/.3).round())

def test_fake_quantize_differs_in_half_precision():
    "Against float64, seed 0: theirs puts some of 1000 values on another grid point, ours none."
    x,s = torch.randn(1000, generator=generator()).bfloat16(),torch.tensor(.1).bfloat16()
    exact = fake_quantize(x.double(), s.double(), bits=4).bfloat16()
    assert (theirs(x, s) != exact).sum() > 0 and torch.equal(fake_quantize(x, s, bits=4), exact)

def test_fake_quantize_differs_in_the_scale_at_infinity():
    "Both clip an infinite value; the scale learns nan from theirs, the largest code from ours."
    s,x = torch.tensor(.1, requires_grad=True),torch.tensor([torch.inf])
    a,b = theirs(x, s),fake_quantize(x, s, bits=4)
    assert torch.equal(a, b) and torch.autograd.grad(a, s)[0].isnan() and torch.autograd.grad(b, s)[0] == 7

def test_float64_differs():
    x,s = torch.tensor([.3], dtype=torch.float64),torch.tensor(.25, dtype=torch.float64)
    assert fake_quantize(x, s, bits=4) == .25
    with pytest.raises(AssertionError, match='Unsupported input dtype'): theirs(x, s)

@pytest.mark.parametrize('n', [100., -127.])
def test_stochastic_differs_at_whole_numbers(n):
    """`floor(x + rand)`: the sum is rounded, so 2**-18 of the draws reach n+1. That is 32 of 2**23, standard deviation
    5.7, and the bound 8 is more than four away; seed 0. Ours compares noise and fraction: a whole number stays."""
    row = torch.full((1, 2**23), n)
    row[0, 0] = 127.                                   # makes the scale 1
    torch.manual_seed(0)
    codes,scale = quantize_int8_rowwise(row, stochastic_rounding=True)
    assert scale == 1 and 8 < (codes != row).sum() < 56
    assert torch.equal(stochastic_round(row, generator=generator()), row)

@pytest.mark.parametrize('x', [1.003, -1.003, 1.0078125])
def test_stochastic_bfloat16_agrees_within_a_binade(x):
    """From 1 to 2 its grid has step 2**-7: the same two neighbours, means within 5 standard errors
    of 2e5 draws, half a step at most each."""
    v = torch.full((200_000,), x)
    torch.manual_seed(0)
    a,b = _fp32_to_bf16_sr(v).double(),stochastic_round(v, generator=generator(), step=2.**-7).double()
    assert torch.equal(a.unique(), b.unique())
    for y in (a, b): assert abs(y.mean()-v[0]) <= 5*2.**-8/len(v)**.5

def test_a_step_of_adamw_agrees():
    """Parameters in bfloat16: both give one of the two numbers around the step of float32, with its mean. An error is
    less than a step, with a deviation of at most half: of 2**18 the mean has .001, and 5 of these are the bound."""
    g = generator()
    w,grad = (torch.randn(4096, 64, generator=g).bfloat16() for _ in range(2))
    make = partial(torch.optim.AdamW, lr=1e-3, weight_decay=.1)
    def stepped(make, w):
        p = torch.nn.Parameter(w.clone())
        optimizer = make([p])
        p.grad = grad.to(p.dtype)
        optimizer.step()
        return p.detach().float()
    torch.manual_seed(0)
    want,near = stepped(make, w.float()),[]
    theirs = partial(_AdamW, lr=1e-3, weight_decay=.1, bf16_stochastic_round=True)
    for one in (partial(RoundedOptimizer, make=make), theirs):
        err = (stepped(one, w)-want)/ulp(want, 'bfloat16')
        assert err.abs().max() < 1 and abs(err.mean()) < .005
        near.append(err.std())
    assert abs(near[0]-near[1]) < .005
