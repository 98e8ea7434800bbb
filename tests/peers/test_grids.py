"""torchao 0.18.0, Brevitas 0.13.4 and qtorch 0.3.0 on grids that are not even: the same numbers, bit for bit, and where
they are not."""
import pytest
import torch
from estimators import generator, same
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
import shok_nb as R

ELEMENTS = dict(e2m1=torch.float4_e2m1fn_x2, e2m3='fp6_e2m3', e3m2='fp6_e3m2', e4m3=torch.float8_e4m3fn,
    e5m2=torch.float8_e5m2)

def torchao_mx(x, format, scale):
    kind = ELEMENTS[format]
    scales,codes = to_mx(x, kind, 32, ScaleCalculationMode(scale))
    return to_dtype(codes, scales, kind, 32, torch.float32)

def blocks(low, high):
    "Blocks of normal numbers, and of quarters where ties are many, between two powers of two."
    g = generator()
    sizes = 2.**torch.randint(low, high, (4096, 1), generator=g)
    x = torch.randn(4096, 64, generator=g)
    return torch.cat([x*sizes, (x*8).round()/4*sizes])

@pytest.mark.parametrize('scale', ['floor', 'ceil', 'even', 'rceil'])
@pytest.mark.parametrize('format', ELEMENTS)
def test_torchao_mx(format, scale):
    "All values equal, zeros with their signs; of a scale of 2^-127 torchao divides by 2^-126, so those blocks are not."
    for x in (blocks(-100, 100), torch.tensor([[0., -0.]*32])):
        assert same(torchao_mx(x, format, scale), R.mx_quantize(x, format, scale=scale))
    tiny = blocks(-149, -127)
    assert not torch.equal(torchao_mx(tiny, format, scale), R.mx_quantize(tiny, format, scale=scale))

def test_torchao_mx_at_infinity():
    "A block that holds infinity has no scale in OCP MX, and is nan with ours; torchao keeps an infinity."
    x = torch.ones(1, 32)
    x[0, 3] = torch.inf
    assert R.mx_quantize(x, 'e2m1').isnan().all() and torchao_mx(x, 'e2m1', 'floor')[0, 3] == torch.inf

@pytest.mark.parametrize('tensor_scale', [None, .01, 3.])
def test_torchao_nvfp4(tensor_scale):
    x,whole = blocks(-12, 12),None if tensor_scale is None else torch.tensor(tensor_scale)
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).dequantize(torch.float32)
    assert same(theirs, R.nvfp4_quantize(x, tensor_scale=tensor_scale))

@pytest.mark.parametrize('format, bits', [('e4m3', {}),
    ('e2m1', dict(bit_width=4, exponent_bit_width=2, mantissa_bit_width=1))], ids=['e4m3', 'e2m1'])
def test_brevitas_mx(format, bits):
    "All values equal, seed 0. Their scale gets a gradient from the largest of its block, ours is constant."
    nn = pytest.importorskip('brevitas.nn')
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act
    x = torch.randn(256, 64, generator=generator())
    layer = nn.QuantIdentity(MXFloat8e4m3Act, group_dim=-1, **bits)
    assert torch.equal(layer(x), R.mx_quantize(x, format))

def test_qtorch_e4m3():
    "Normal numbers up to the largest are equal, seed 0; qtorch has no nan in e4m3, so its largest is 480."
    try: from qtorch.quant import float_quantize  # noqa: I001 (it compiles itself here)
    except Exception as e: pytest.skip(f'qtorch needs a compiler: {type(e).__name__}')
    x = torch.randn(100_000, generator=generator())
    x = x[(x.abs() > 2.**-6) & (x.abs() < 400)]
    def theirs(x): return float_quantize(x, exp=4, man=3, rounding='nearest')
    assert torch.equal(theirs(x), R.float_round(x, 'e4m3'))
    assert theirs(torch.tensor([1000.])) == 480 and R.float_round(torch.tensor([1000.]), 'e4m3') == 448
