"Legal tensors that say little: zeros, one value, tiny and huge ones, and one bad value among good ones."
import math
import pytest
import torch
from torch import nn
import shok_nb as R

ROWS = torch.linspace(-1., 1., 4*256).view(4, 256)

def one(x, at, v):
    x = x.clone()
    x.view(-1)[at] = v
    return x

FINITE = dict(
    zeros=torch.zeros(4, 256), zero_row=ROWS*torch.tensor([[1.], [0.], [1.], [1.]]), constant=torch.full((4, 256), .3),
    subnormal=torch.full((4, 256), 1e-42), minus=torch.full((4, 256), -1e-42), tiny=ROWS*1e-30, huge=ROWS*3e38,
    one_hot=one(torch.zeros(4, 256), 5, 1.), empty=torch.zeros(0, 256))
WIDE = 'TQ1_0', 'TQ2_0', 'Q6_K', 'Q4_K'                      # blocks of 256, the whole row
GGUF = 'Q8_0', 'Q4_0', 'Q4_1', 'IQ4_NL', *WIDE

def by_lsq(x): return R.lsq(x, R.lsq_init(x, axis=0) if x.numel() else torch.ones(()), 4)
WAYS = dict(
    float8=lambda x: R.float_round(x, 'e4m3'), bfloat16=lambda x: R.float_round(x, 'bfloat16'),
    e8m0=lambda x: R.float_round(x, 'e8m0'),
    **{f'mx_{s}': lambda x, s=s: R.mx_quantize(x, 'e2m1', scale=s) for s in ('floor', 'ceil', 'even', 'rceil', 'mse')},
    nvfp4=R.nvfp4_quantize,
    nvfp4_own=lambda x: R.nvfp4_quantize(x, tensor_scale=x.detach().abs().sum().clamp(max=3e38)/2688),
    int4=R.int_quantize, **{k: lambda x, k=k: R.gguf_quantize(x, k) for k in GGUF},
    levels=lambda x: R.levels_round(x, R.NF4), log2=R.log2_round, fake=lambda x: R.fake_quantize(x, .1),
    lsq=by_lsq, pact=lambda x: R.pact(x, torch.tensor(1.)), dorefa=R.dorefa, dorefa_weight=R.dorefa_weight,
    quantized_bits=R.quantized_bits, seq=lambda x: R.seq(x, torch.tensor(1.5)),
    between=lambda x: R.quantize_between(x, torch.tensor(-1.), torch.tensor(1.)),
    ternary=lambda x: R.ternary_weight(x, axis=0),
    absmean=lambda x: R.ternary_weight(x, 'absmean', axis=0), xnor=lambda x: R.xnor_weight(x, axis=0),
    flexround=lambda x: R.flexround(x, torch.tensor(1.25)),
    flexround_narrow=lambda x: R.flexround(x, torch.tensor(1.25), step=.1),
    signround=lambda x: R.signround(x, torch.tensor(.3)), adaround=lambda x: R.adaround(x, torch.full_like(x, -9.)),
    clipped=lambda x: R.clipped_round(x, lower=torch.tensor(2.), upper=torch.tensor(-2.)),
    dsq=lambda x: R.dsq_round(x, lower=torch.tensor(0.), upper=torch.tensor(0.)),
    sigmoid=lambda x: R.sigmoid_round(x, center=torch.tensor(math.inf)),
    ramp=lambda x: R.ramp_round(x, threshold=torch.tensor(math.inf)))
# scales of GGUF are halves: they end at 65504, and a reader of the file gets no number either
# and the nearest of these scales to 3e38 leads to 2**128, which float32 has not
NONE_SO_LARGE = {*GGUF, 'mx_ceil', 'mx_even', 'mx_mse', 'mx_rceil'}
# the numbers of these have no 0
NO_ZERO = {'dorefa_weight', 'e8m0', 'IQ4_NL', 'xnor', 'seq'}

# one scale of all values
OF_ALL = {'lsq', 'nvfp4_own', 'dorefa_weight', 'ternary', 'absmean', 'xnor'}

@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('kind', FINITE)
def test_finite_stays_finite(way, kind):
    if kind == 'huge' and way in NONE_SO_LARGE: return
    x = FINITE[kind].clone().requires_grad_()
    y = WAYS[way](x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and (x.grad.abs() < 1e30).all()
    if way not in NO_ZERO: assert not y[x == 0].any()

@pytest.mark.parametrize('way', [w for w in WAYS if w not in OF_ALL])
@pytest.mark.parametrize('bad', (math.inf, -math.inf, math.nan))
def test_one_bad_value_stays_in_its_block(way, bad):
    y,z = WAYS[way](ROWS),WAYS[way](one(ROWS, 0, bad))
    assert torch.equal(y[1:], z[1:]) and (way in WIDE or torch.equal(y[0, 32:], z[0, 32:]))

BLOCKS = [w for w in WAYS if w.startswith(('mx_', 'Q')) or w in ('nvfp4', 'int4')]
MORE_BLOCKS = dict(square=lambda x: R.nvfp4_quantize(x.repeat(4, 1), square=True)[:4, :],
    tensor_scale=lambda x: R.nvfp4_quantize(x, tensor_scale=.01), soft=lambda x: R.nvfp4_quantize(x, R.soft_round),
    half=lambda x: R.int_quantize(x, scale_format='float16'), e4m3=lambda x: R.int_quantize(x, 8, scale_format='e4m3'),
    soft_int=lambda x: R.int_quantize(x, 4, R.soft_round))

STRAIGHT = {'int4', 'half', 'e4m3', 'Q8_0', 'Q4_0', 'Q4_1'}        # whose gradient is 1 wherever nothing is clipped

@pytest.mark.parametrize('way', [*BLOCKS, *MORE_BLOCKS])
@pytest.mark.parametrize('dtype', (torch.float16, torch.float32, torch.float64))
def test_infinity_costs_its_block(way, dtype):
    """All of it is nan, as the scale of a block is that holds it. No gradient is, by any road, and where clipped values
    get none it gets none."""
    f = (WAYS | MORE_BLOCKS)[way]
    for bad in (math.inf, -math.inf):
        x = one(ROWS, 3, bad).to(dtype).requires_grad_()
        y = f(x)
        y.nan_to_num().sum().backward()
        assert y[0, :16].isnan().all() and x.grad.isfinite().all()
        if way not in WIDE: assert torch.equal(y[0, 32:], f(ROWS.to(dtype))[0, 32:])
        other = torch.func.grad(lambda x: f(x).nan_to_num().sum())(x.detach())
        assert not other[0, :16].any()
        if way in STRAIGHT: other[0, :32] = x.grad[0, :32]
        # two ways to one slope, of a dozen operations: AVX-512 with AMX differs by 4.9 eps
        assert torch.allclose(x.grad, other, rtol=8*torch.finfo(dtype).eps, atol=0)

@pytest.mark.parametrize('s', (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize('dtype', (torch.bfloat16, torch.float32, torch.float64))
def test_scale_of_nvfp4_that_is_no_number(s, dtype):
    "As every step and scale in a tensor: what is on its grid is nan. A number is refused."
    for kind in ('zeros', 'constant', 'tiny', 'one_hot'):
        x = FINITE[kind].to(dtype).requires_grad_()
        for t in (torch.tensor(s), torch.tensor([s], dtype=torch.float16)):
            y = R.nvfp4_quantize(x, tensor_scale=t)
            assert y.isnan().all() and not torch.autograd.grad(y.sum(), x)[0].any()
            by_rows = torch.vmap(lambda x, t=t: R.nvfp4_quantize(x, tensor_scale=t))(x)
            assert by_rows.isnan().all()
        with pytest.raises(ValueError, match='^nvfp4_quantize: tensor_scale must be in'):
            R.nvfp4_quantize(x, tensor_scale=s)

@pytest.mark.parametrize('size', (0., 1e-30))
def test_dorefa_weight_trains_from_zeros(size):
    layer,x = nn.Linear(4, 1, bias=False),torch.eye(4)
    with torch.no_grad(): layer.weight.fill_(size)
    for _ in range(60):
        layer.weight.grad = None
        y = x @ R.dorefa_weight(layer.weight, 4).T
        (y - torch.tensor([[1.], [-1.], [.2], [-.6]])).square().mean().backward()
        with torch.no_grad(): layer.weight -= .1*layer.weight.grad
    assert layer.weight.abs().max() < 10
    assert (R.dorefa_weight(layer.weight, 4) - torch.tensor([1., -1., .2, -.6])).abs().max() < .3

def test_scale_of_nvfp4_has_no_sign():
    x = ROWS[:, :64]
    for s in (.01, 3e-4, 7.):
        one,other = (R.nvfp4_quantize(x, tensor_scale=torch.tensor(k*s)) for k in (1, -1))
        assert torch.equal(one, other)
    for s in (torch.tensor(0.), torch.tensor(1e-45), 1e-45):
        y = R.nvfp4_quantize(x, tensor_scale=s)
        assert y.isfinite().all() and y.abs().max() < 1e-32

def test_first_scale_of_lsq():
    x = torch.stack([torch.zeros(8), torch.full((8,), .5), torch.full((8,), 3e38)])
    scale = R.lsq_init(x, 4, axis=0).flatten()
    assert scale.isfinite().all() and (scale > 0).all()
    assert scale[1] == R.lsq_init(x[1], 4) and R.lsq_init(x[0]) == 1
    assert scale[2].item() == pytest.approx(2*3e38/7**.5, rel=1e-5)

@pytest.mark.parametrize('mantissa', (1, 3, 7, 20))
@pytest.mark.parametrize('bias', (None, -5, 9))
def test_formats_of_subnormals_alone(mantissa, bias):
    f = R.FloatFormat(1, mantissa, bias=bias)
    step = 2.**(1-f.bias-mantissa)
    assert f.largest == (2**mantissa-1)*step
    x = torch.linspace(-3, 3, 101)*f.largest
    most = 2**mantissa-1
    assert torch.equal(R.float_round(x, f), (x/step).round().clamp(-most, most)*step)

def test_largest_is_a_number_of_the_format():
    for v,below in ((100., 96.), (17.5, 16.), (.0021, .001953125)):
        with pytest.raises(ValueError, match=f'^FloatFormat: largest must be a number .* {below}'):
            R.FloatFormat(4, 3, largest=v)
        assert R.FloatFormat(4, 3, largest=below).largest == below

def test_gradient_beyond_formats_near_the_largest_float():
    most = R.FORMATS['bfloat16'].largest
    x = torch.tensor([most, 3.395e38, -3.4e38, 1.], requires_grad=True)
    R.float_round(x, 'bfloat16').sum().backward()
    assert x.grad.tolist() == [1, 0, 0, 1]

@pytest.mark.parametrize('f', (R.ewgs_round, R.noisy_soft_round))
def test_estimators_on_a_grid_with_a_scale_of_its_own(f):
    knobs = dict(alpha=5.) if f is R.noisy_soft_round else {}
    x = ROWS[:, :64].clone().requires_grad_()
    y = R.nvfp4_quantize(x, f, tensor_scale=torch.tensor(.003), **knobs)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and (y-x).abs().max() < .5
    if f is R.ewgs_round: assert R.Quantizer(format='nvfp4', rounding=f).calibrate_(x.detach())(x).isfinite().all()

def test_blocks_of_a_format_as_fine_as_the_dtype():
    f = R.FloatFormat(8, 23)
    assert torch.equal(R.mx_quantize(ROWS, f, scale='even'), ROWS)

def test_levels_far_apart_and_on_meta():
    with pytest.raises(ValueError, match='^levels_round: neighbours must be at most 3.4'):
        R.levels_round(ROWS, [-3e38, 2e38])
    assert R.levels_round(ROWS, [-3e38, 0., 3e38]).isfinite().all()
    assert R.levels_round(ROWS.to('meta'), torch.tensor([0., 1.], device='meta')).shape == ROWS.shape
    assert R.levels_round(ROWS.to('meta'), [0., 1.]).device.type == 'meta'
    assert R.levels_softmax(ROWS.to('meta'), [0., 1.], 1.).device.type == 'meta'

@pytest.mark.parametrize('learn', (False, True))
def test_levels_too_far_apart_where_nobody_reads_them(learn):
    "Under a transform and in compiled code: the nearest of them in double precision, with finite slopes, and not 0."
    levels = torch.tensor([-3.2e38, 1.9e38, 2.1e38, 3.3e38], requires_grad=learn)
    x = torch.linspace(-1, 1, 201)*3.4e38
    def f(x): return R.levels_round(x, levels)
    want = levels[(x.double()[:, None] - levels.detach().double()).abs().argmin(1)]
    for way in (torch.vmap(f), torch.compile(f, backend='eager', fullgraph=True)):
        assert torch.equal(way(x), want)
    g = torch.func.grad(lambda x: f(x).mul(1e-3).sum())(x)
    inside = (x > levels[0]) & (x < levels[-1])
    assert g.isfinite().all() and (g[inside] > 4e-4).all() and not g[~inside].any()

def test_format_has_a_sign():
    with pytest.raises(ValueError, match='^Quantizer: format=e4m3 has a sign; leave out signed'):
        R.Quantizer(format='e4m3', signed=False)

@pytest.mark.parametrize('ends', ((1, 255), (3, 17), (-127, -1), (-100, 127)))
def test_codes_without_zero(ends):
    "As torch has them; and as TensorFlow documents its narrow range: ends on codes 1 and 255, x within them."
    x = torch.linspace(-8, 8, 997)
    for zero in {ends[0], sum(ends)//2, ends[1]}:
        want = torch.fake_quantize_per_tensor_affine(x, .07, zero, *ends)
        assert torch.equal(R.fake_quantize(x, .07, zero, ends, reciprocal=True), want)
    if ends[0] > 0:
        with pytest.raises(ValueError, match='^fake_quantize: zero_point'): R.fake_quantize(x, .07, 0, ends)
        with pytest.raises(ValueError, match='^lsq: the smallest code'): R.lsq(x, torch.tensor(.07), ends)

ELEMENTS = ('mxfp4', 'e2m1'),('nvfp4', 'e2m1'),('mxfp8', 'e4m3'),('mxfp6_e3m2', 'e3m2')
@pytest.mark.parametrize('format, left', ELEMENTS)
def test_one_row_that_blocks_do_not_divide(format, left):
    model = nn.Sequential(nn.Linear(64, 41), nn.ReLU(), nn.Linear(41, 3))
    report = str(R.quantize_model_(model, format, None))
    assert 'does not divide its rows: 2.weight (1 in all)' in report and left in report
    model(torch.ones(2, 64)).sum().backward()
    assert model[0].parametrizations.weight[0].format == format and model[2].parametrizations.weight[0].format == left
