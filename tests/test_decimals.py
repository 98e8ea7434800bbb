"Halves of decimals beside Python's `decimal`, in both meanings, and over the whole range of float64."
import math
from decimal import ROUND_HALF_DOWN, ROUND_HALF_EVEN, ROUND_HALF_UP, Context, Decimal
import numpy as np
import pytest
import torch
from estimators import FLOATS, compiled, generator, same
from shok_nb import decimal_ste

SIZES = 3, 2**14+1, 2**17           # a copy that is changed, a Function, one operation for all
RULES = dict(even=ROUND_HALF_EVEN, away=ROUND_HALF_UP, zero=ROUND_HALF_DOWN)
EXACT = Context(prec=1100, Emin=-9999, Emax=9999)              # a float64 has at most 767 digits

def by_decimal(xs, d, rule, halves):
    unit = Decimal(1).scaleb(-d)
    return [float((Decimal(repr(x)) if halves == 'written' else Decimal(x)).quantize(unit, rule, EXACT)) for x in xs]

def with_halves(n, seed):
    """Sums of money to a tenth of a cent. Every second one is a half, of the others one in ten: more than half of all
    are ties as written, and nearly none as stored."""
    m = torch.randint(-10**9, 10**9, (n,), generator=generator(seed)).double()
    m[::2] = 10*(m[::2]/10).floor() + 5
    return m/1000

@pytest.mark.parametrize('n', [20_000, pytest.param(10**6, marks=pytest.mark.slow)])
def test_cents(n):
    x = with_halves(n, 0)
    for halves in ('written', 'binary'):
        want = by_decimal(x.tolist(), 2, ROUND_HALF_UP, halves)
        assert decimal_ste(x, 2, ties='away', halves=halves).tolist() == want

PLACES = 0, 1, 2, 5, 15, 21, 22, 23, 30, 100, 250, -1, -2, -5, -22, -23, -30, -200, -307

@pytest.mark.parametrize('ties', RULES)
@pytest.mark.parametrize('halves', ['written', 'binary'])
def test_all_places(ties, halves):
    "Halves of 1 to 54 bits and their neighbours among the floats: from small numbers to those with no digits to lose."
    for d in PLACES:
        gen = generator(d)
        bits = torch.randint(0, 54, (60,), generator=gen)
        whole = (torch.rand(60, generator=gen, dtype=torch.float64)*2.**bits.double()).long().tolist()
        x = torch.tensor([float(f'{n}5e{-d-1}') for n in whole], dtype=torch.float64)
        x = x[x.isfinite()]
        x = torch.cat([x, x.nextafter(x+1e300), x.nextafter(x*0), -x])
        want = torch.tensor(by_decimal(x.tolist(), d, RULES[ties], halves), dtype=torch.float64)
        want = torch.where(want.isinf(), x, want)                           # beyond float64 it stays as it is
        assert same(decimal_ste(x, d, ties=ties, halves=halves), want), d

def test_up_and_down():
    "By the sign of the number they are the rules for sizes."
    x = with_halves(2000, 1)
    for halves in ('written', 'binary'):
        up,away,zero = (decimal_ste(x, 2, ties=t, halves=halves) for t in ('up', 'away', 'zero'))
        assert same(up, torch.where(x > 0, away, zero))
        assert same(decimal_ste(x, 2, ties='down', halves=halves), torch.where(x > 0, zero, away))

def test_float32_as_numpy_prints_it():
    "2000 numbers of seven digits: all that float32 tells apart."
    m = torch.randint(0, 10**7, (2000,), generator=generator(2)).double()
    for d in (0, 2, 4, 6):
        x = ((m/10).floor()*10 + 5)/10**(d+1)
        x = x.float()
        want = by_decimal([float(str(v)) for v in x.numpy()], d, ROUND_HALF_UP, 'written')
        assert same(decimal_ste(x, d, ties='away'), torch.tensor(np.float32(want)))

class Away(torch.nn.Module):
    def forward(self, x): return decimal_ste(x, 2, ties='away')

def written_in(dtype): return (torch.arange(-400, 400)/8 + .005).to(dtype)

@pytest.mark.slow
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_transforms_and_export(dtype):
    "The short dtypes are widened in eager code alone; the number that is written is that of the dtype of `x`."
    x = written_in(dtype)
    y = Away()(x)
    assert same(torch.func.vmap(Away())(x), y) and same(torch.export.export(Away(), (x,)).module()(x), y)

@pytest.mark.slow
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_compiled(dtype): assert same(compiled(Away())(written_in(dtype)), Away()(written_in(dtype)))

@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('d', [-2, 0, 1, 10])
def test_what_has_no_digits_left(dtype, n, d):
    "Where `torch.round` overflows a number comes back; elsewhere it is that, to the bit."
    x = 100*torch.randn(n, generator=generator(d+2)).to(dtype)
    for odd in (0., torch.finfo(dtype).max, math.inf, -math.inf):
        x[-1] = odd
        wide = x if dtype == torch.float64 else x.float()
        rounded = torch.round(wide, decimals=d)
        want = torch.where(rounded.isfinite(), rounded, wide).to(dtype)
        leaf = x.clone().requires_grad_()
        for y in (decimal_ste(x, d), decimal_ste(leaf, d)):
            assert torch.equal(y, want) and torch.equal(y.signbit(), want.signbit())
        assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], torch.ones_like(x))
