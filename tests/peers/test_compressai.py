"CompressAI 1.2.8: its straight-through rounding, noise and bound are ours off the edges; its learned step size is not."
import importlib.util
import sys
import types
import pytest
import torch
from estimators import FLOATS, generator, slope
from shok_nb import clipped_round, round_ste, uniform_noise


def bare(name):
    "Make the package importable without its `__init__`, which wants torchvision, torch-geometric and data sets."
    package = types.ModuleType(name)
    package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = package

bare('compressai')
from compressai.entropy_models import EntropyModel, EntropyModelVbr  # noqa: E402 (of the bare package)
from compressai.ops import LowerBound, quantize_ste  # noqa: E402 (of the bare package)


def quantize(*args): return EntropyModel.quantize(None, *args)
def variable(*args): return EntropyModelVbr.quantize_variable(None, *args)
def vectors(): return torch.randn(2, 64, generator=generator())*3

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_ste_agrees_on_every_finite_half(dtype):
    x = torch.arange(-2**15, 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()]
    assert torch.equal(round_ste(x), quantize_ste(x)) and torch.equal(slope(round_ste, x), slope(quantize_ste, x))

@pytest.mark.parametrize('dtype', FLOATS[2:], ids=str)
def test_ste_agrees(dtype):
    x = torch.cat([torch.arange(-8, 9)/4, vectors()[0], torch.tensor([2.**22+.5, 2.**24+1, 3e38])]).to(dtype)
    assert torch.equal(round_ste(x), quantize_ste(x)) and torch.equal(slope(round_ste, x), slope(quantize_ste, x))

def test_ste_differs_at_infinity_and_minus_zero():
    "The zero form: inf-inf is nan, and -0.3 + 0.3 is +0."
    x = torch.tensor([torch.inf, -torch.inf])
    assert quantize_ste(x).isnan().all() and torch.equal(round_ste(x), x)
    x = torch.tensor([-.3, -0.])
    assert not quantize_ste(x).signbit().any() and round_ste(x).signbit().all()

@pytest.mark.parametrize('dtype', FLOATS[2:], ids=str)
def test_noise_agrees_bit_for_bit(dtype):
    "One global seed, one noise."
    x = vectors().to(dtype)
    torch.manual_seed(0)
    theirs = quantize(x, 'noise')
    torch.manual_seed(0)
    assert torch.equal(uniform_noise(x), theirs)

def test_noise_differs_in_half_precision():
    "10000 draws: theirs are bfloat16 numbers, of which many repeat; ours can keep the digits of float32."
    x = torch.zeros(10_000, dtype=torch.bfloat16)
    torch.manual_seed(0)
    assert len(quantize(x, 'noise').unique()) < 2_000 and len(uniform_noise(x, dtype=torch.float32).unique()) > 9_900

def test_dequantize_agrees_in_value_and_differs_in_gradient():
    "Rounding around the means; for training theirs has no gradient."
    x,m = vectors()
    assert torch.allclose(quantize(x, 'dequantize', m), round_ste(x, offset=m), atol=1e-6)
    assert (slope(lambda x: quantize(x, 'dequantize', m), x) == 0).all() and (slope(round_ste, x, offset=m) == 1).all()

def test_symbols_agree_with_means_and_are_cut_without_a_step():
    "Variable rate without a step drops the fraction, so encoder and decoder disagree with the plain model."
    x,m = vectors()
    assert torch.equal(quantize(x, 'symbols', m), round_ste(x-m).int())
    x = torch.tensor([.6, 1.7, -.6])
    assert variable(x, 'symbols').tolist() == [0, 1, 0]
    assert round_ste(x).tolist() == quantize(x, 'symbols').tolist() == [1, 2, -1]

def gradients(y, x, qs, m, w): return torch.autograd.grad((w*y).sum(), (x, qs, m))

def test_variable_rate_agrees_but_for_the_gradient_of_the_step():
    """Both scale: y(cx, cq, cm) = c*y. Euler's theorem then ties the gradients to the value, x*y_x + q*y_q + m*y_m = y,
    if a straight-through slope is to fit the function it stands for. Ours does; theirs counts x once more."""
    (x,m),qs,w = vectors(),torch.tensor(.7, requires_grad=True),torch.randn(64, generator=generator(1))
    x,m = x.requires_grad_(),m.requires_grad_()
    theirs,ours = variable(x, 'ste', m, qs),round_ste(x, step=qs, offset=m)
    assert torch.allclose(theirs, ours, atol=1e-5)
    (tx,tq,tm),(ox,oq,om) = gradients(theirs, x, qs, m, w),gradients(ours, x, qs, m, w)
    assert torch.allclose(tx, ox) and torch.allclose(tm, om, atol=1e-6)
    euler = lambda gx, gq, gm: (x*gx).sum() + qs*gq + (m*gm).sum()
    y,extra = (w*ours).sum(),(w*(x-m)).sum()
    assert abs(extra) > 1
    assert torch.allclose(euler(ox, oq, om), y, atol=1e-4)
    assert torch.allclose(euler(tx, tq, tm), y+extra, atol=1e-4)

def test_lower_bound_lets_back_in_what_clipped_round_keeps_out():
    "Below the bound theirs passes a gradient that would raise x; ours passes none, above both pass all."
    x = torch.tensor([-1., -1., 2., 2.], requires_grad=True)
    g = torch.tensor([1., -1., 1., -1.])
    both = LowerBound(1)(x),clipped_round(x, lower=1, upper=3)
    theirs,ours = (torch.autograd.grad(y, x, g)[0].tolist() for y in both)
    assert theirs == [0, -1, 1, -1] and ours == [0, 0, 1, -1]
