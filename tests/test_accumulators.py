"""Sums in narrow accumulators: torch, Python's fractions and compiled C say the same; bounds against brute force."""
import copy
import itertools
import math
from fractions import Fraction
import pytest
import torch
from estimators import generator
from test_fixed_point import MODES, OVERFLOWS, conv, deployed, in_c, many, mlp, reference
from torch import nn
import shok_nb as R


def as_fractions(f, v): return Fraction(reference(v, f.width, f.integer, f.signed, f.rounding, f.overflow))

def by_hand(f, after, weights, bias, inputs):
    "One sum, in the order of the inputs: numbers are `Fraction`."
    terms = [w*x for w,x in zip(weights, inputs, strict=True)]
    if after == 'sum': return as_fractions(f, bias+sum(terms))
    total = as_fractions(f, bias)
    for t in terms: total = as_fractions(f, total+as_fractions(f, t))
    return total

def fractions(t): return [Fraction(v) for v in t.double().flatten().tolist()]

def layer(inputs=6, outputs=4, seed=0, bits=4, gain=1., **kw):
    "A deployed Linear on powers of two, a scale for each output, whose outputs are its sums."
    torch.manual_seed(seed)
    net,x = nn.Sequential(nn.Linear(inputs, outputs)),many((inputs,), seed+1, 400)[2:]
    with torch.no_grad(): net[0].weight *= gain*2.**torch.arange(outputs)[:, None]
    return deployed(net, x, bits, **kw),x

FORMATS = [(9, 5), (6, 8), (12, 3), (28, 12)]

@pytest.mark.parametrize('after', ['product', 'sum'])
@pytest.mark.parametrize('overflow', OVERFLOWS)
def test_as_fractions(overflow, after):
    "Every rounding; formats that drop bits, that overflow, and that are finer than the products."
    net,x = layer()
    one,bits = net[0],x[:4]
    entering = (bits/one.input_scale).round().clamp(-128, 127)*one.input_scale
    seen = set()
    for rounding,(width,integer),signed in itertools.product(MODES, FORMATS, (True, False)):
        f = R.FixedFormat(width, integer, signed=signed, rounding=rounding, overflow=overflow)
        R.narrow_accumulators_(net, f, after=after)
        want = [[by_hand(f, after, fractions(w), b, fractions(v)) for w,b in zip(one.weight, fractions(one.bias))]
            for v in entering]
        found = net(bits).double()
        assert found.tolist() == [[float(v) for v in row] for row in want], f
        seen.add(bool((found != by_exact(net, bits, f, after)).any()))
    assert seen == {True, False}                              # formats that lose something, and some that do not

def by_exact(net, x, f, after):
    "The exact sums; the accumulator stays."
    R.narrow_accumulators_(net, None)
    try: return net(x).double()
    finally: R.narrow_accumulators_(net, f, after=after)

@pytest.mark.parametrize('options', [dict(), dict(stride=2, padding=1), dict(padding=(2, 0), dilation=(1, 2)),
    dict(groups=2, padding='same')], ids=str)
@pytest.mark.parametrize('kind', [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_as_fractions(kind, options):
    "Channel by channel, row by row; the padding adds nothing."
    dims = int(kind.__name__[4])
    options = {k: v[:1]+v[1:]*(dims-1) if isinstance(v, tuple) else v for k,v in options.items()}
    torch.manual_seed(0)
    net,x = nn.Sequential(kind(2, 4, 3, **options)),many((2, *[6]*dims), 3, 60)[2:]
    net = deployed(net, x, 4)
    f,one = R.FixedFormat(7, 3, rounding='RND', overflow='SAT'),net[0]
    exact = net(x)
    R.narrow_accumulators_(net, f)
    y,v = net(x),(x/one.input_scale).round().clamp(-128, 127)*one.input_scale
    assert not torch.equal(y, exact)
    sides = [n for p in reversed(one.padding) for n in (p, p)]
    v = nn.functional.pad(v, sides)
    g = generator(5)
    for _ in range(20):
        b,o = (int(torch.randint(n, (1,), generator=g)) for n in y.shape[:2])
        at = [int(torch.randint(n, (1,), generator=g)) for n in y.shape[2:]]
        each = 2//one.groups
        first = o//(4//one.groups)*each
        place = (b, slice(first, first+each), *[slice(i*s, i*s+d*2+1, d)
            for i,s,d in zip(at, one.stride, one.dilation)])
        want = by_hand(f, 'product', fractions(one.weight[o]), fractions(one.bias[o])[0], fractions(v[place]))
        assert y[(b, o, *at)].item() == float(want)

def codes_of(m, x):
    "Integers of what enters."
    return (x/m.input_scale).round().clamp(-128, 127).double()

@pytest.mark.parametrize('after', ['product', 'sum'])
@pytest.mark.parametrize('overflow', OVERFLOWS)
@pytest.mark.parametrize('rounding', MODES)
@pytest.mark.slow
def test_the_same_bits_in_c(rounding, overflow, after, tmp_path):
    "Ten thousand inputs through three layers, with ties among the products, and sums that overflow."
    torch.manual_seed(1)
    net,x = mlp(),many((8,), 2)
    net = deployed(net, x[2:300], 4)
    exact = net(x)
    f = R.FixedFormat(7, 2, rounding=rounding, overflow=overflow)
    report = R.narrow_accumulators_(net, f, after=after)
    assert [r.overflow for r in report.rows][:2] == ['can', 'can'] and report.rows[0].drops != '0'
    y = net(x)
    assert torch.equal(in_c(net, x, tmp_path), y) and (y != exact).double().mean() > .1
    products = codes_of(net[0], x)[:, None]*(net[0].weight/net[0].scale[:, None]).double()
    steps = products*net[0].product.double()[:, None]/f.step
    assert (steps.abs() % 1 == .5).sum() > 1000                                         # ties

@pytest.mark.parametrize('f, after', [(R.FixedFormat(8, 3), 'product'), (R.FixedFormat(8, 3, overflow='SAT'), 'sum'),
    (R.FixedFormat(8, 2, signed=False, rounding='RND', overflow='SAT'), 'product'),
    (R.FixedFormat(31, 8, signed=False), 'product'), (R.FixedFormat(32, 10, overflow='SAT'), 'product')], ids=str)
def test_convolutions_in_c(f, after, tmp_path):
    "One that has groups and dilation too; a register of 32 bits is wider than a float32."
    torch.manual_seed(0)
    net,x = conv(),many((2, 10, 9), 3, 300)
    net = deployed(net, x[2:100])
    R.narrow_accumulators_(net, f, after=after)
    assert torch.equal(in_c(net, x, tmp_path), net(x))

def quantized(net, x, bits=4):
    R.quantize_model_(net, R.Quantizer(bits, axis=0, learn=True, scale='po2'),
        R.Quantizer(8, signed=None, learn=True, scale='po2'), calibrate=[x])
    return net

@pytest.mark.parametrize('make, shape', [(mlp, (8,)), (conv, (2, 10, 9))])
@pytest.mark.parametrize('f', [R.FixedFormat(8, 3), R.FixedFormat(6, 2, rounding='RND', overflow='SAT')], ids=str)
def test_trains_as_it_is_deployed(make, shape, f):
    "The forward of training has the bits of the deployed model, and `deploy_` hands the accumulator on."
    torch.manual_seed(1)
    net,x = make(),many(shape, 2, 300)[2:]
    net = quantized(net, x)
    exact = copy.deepcopy(net)
    report = R.narrow_accumulators_(net, f)
    assert {r.overflow for r in report.rows} & {'can'} and all(r.after == 'product' for r in report.rows)
    net.eval(), exact.eval()
    y = net(x)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    twin = copy.deepcopy(net)
    deployed_ = copy.deepcopy(net)
    R.deploy_(deployed_, x)
    assert torch.equal(deployed_(x), y) and not torch.equal(exact(x), y)
    R.narrow_accumulators_(twin, None)
    assert torch.equal(twin(x), exact(x)) and not any(m._forward_hooks for m in twin.modules())
    R.deploy_(exact, x)
    R.narrow_accumulators_(exact, f)
    assert torch.equal(exact(x), y)

def test_gradient_is_of_the_exact_sum():
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Linear(8, 3)),torch.randn(16, 8, generator=generator())
    net = quantized(net, x)
    g = torch.randn(16, 3, generator=generator(1))
    def slopes():
        net.zero_grad()
        z = x.clone().requires_grad_()
        net(z).backward(g)
        return [z.grad, *[p.grad.clone() for p in net.parameters()]]
    before = slopes()
    R.narrow_accumulators_(net, R.FixedFormat(6, 1))
    assert all(map(torch.equal, slopes(), before))
    R.deploy_(net.eval(), x)
    z = x.clone().requires_grad_()
    net(z).backward(g)
    narrow = z.grad.clone()
    R.narrow_accumulators_(net, None)
    z.grad = None
    net(z).backward(g)
    assert torch.equal(z.grad, narrow)

# --- the width that never overflows
def brute_force(w, bias, low, high):
    "The least and the largest of the bias, each product, and each partial sum in this order, of all inputs."
    seen = [bias]
    for x in itertools.product(range(low, high+1), repeat=len(w)):
        total = bias
        for a,b in zip(w, x):
            total += a*b
            seen += [a*b, total]
    return min(seen), max(seen)

@pytest.mark.parametrize('signed', [True, False, None])
@pytest.mark.parametrize('seed', range(4))
def test_exact_width(seed, signed):
    "All inputs of three numbers, for every output: the width of the report has them all, one bit less has not."
    torch.manual_seed(seed)
    net,x = nn.Sequential(nn.Linear(3, 5)),torch.rand(64, 3, generator=generator(seed))-(signed is not False)*.5
    with torch.no_grad(): net[0].bias *= 10**(seed-1)
    R.quantize_model_(net, R.Quantizer(3, axis=0, scale='po2'), R.Quantizer(4, signed=signed, scale='po2'),
        calibrate=[x])
    low,high = net[0].input_quantizer.range()
    before = R.accumulator_bits(net).rows[0]
    R.deploy_(net.eval(), x)
    one,row = net[0],R.accumulator_bits(net).rows[0]
    assert before._replace(types=row.types) == row and before.types <= row.types
    codes = (one.weight/one.scale[:, None]).round().int().tolist()
    least,most = zip(*[brute_force(w, b, low, high) for w,b in zip(codes, one.bias_codes.tolist())])
    bits = row.exact
    assert -2**(bits-1) <= min(least) and max(most) < 2**(bits-1)
    assert not (-2**(bits-2) <= min(least) and max(most) < 2**(bits-2))
    f = R.FixedFormat(row.width, row.integer)
    ends = [Fraction(float(p))*v/Fraction(f.step) for p,*vs in zip(one.product, least, most) for v in vs]
    low,high = f.ends
    assert all(v.denominator == 1 and low <= v <= high for v in ends)
    assert not all(low <= 2*v <= high for v in ends)
    assert any((v/2).denominator > 1 for v in ends) or row.width-row.integer == -math.log2(one.product.min())

@pytest.mark.parametrize('seed', range(3))
def test_published_bound(seed):
    "The formulas of the paper with logarithms, where they are exact enough to be computed so."
    net,_ = layer(20, 6, seed, gain=3.)
    row,one = R.accumulator_bits(net).rows[0],net[0]
    norm = (one.weight/one.scale[:, None]).abs().sum(1).max().item()
    for size,found in ((norm, row.norm), (20*2**(4-1), row.types)):
        beta = math.log2(size)+8-1
        assert found == math.ceil(beta+math.log2(1+2**-beta)+1)
    assert row.exact <= row.types

def test_the_reported_width_changes_nothing():
    net,x = deployed(conv(), many((2, 10, 9), 3, 200)[2:], 4),many((2, 10, 9), 3, 200)[2:]
    exact = net(x)
    for m,row in zip([m for m in net.modules() if hasattr(m, 'bias_codes')], R.accumulator_bits(net).rows):
        for overflow in ('WRAP', 'SAT'):
            report = R.narrow_accumulators_(m, R.FixedFormat(row.width, row.integer, overflow=overflow))
            assert report.rows[0].overflow == 'never' and report.rows[0].drops == '0'
    assert torch.equal(net(x), exact)

def test_never_is_true_with_dropped_bits():
    "The least width whose report says never: every partial sum of every input stays; one bit less says can."
    net,x = layer(3, 4, bits=3)
    one = net[0]
    ends = torch.tensor(list(itertools.product([-128., 127.], repeat=3)))*one.input_scale
    for after,rounding in itertools.product(('product', 'sum'), ('TRN', 'RND', 'TRN_ZERO')):
        def made(width, o): return R.FixedFormat(width, width-2, rounding=rounding, overflow=o)
        says = [R.narrow_accumulators_(net, made(w, 'SAT'), after=after).rows[0].overflow for w in range(4, 16)]
        assert says == sorted(says) and {*says} == {'can', 'never'}
        least = 4+says.index('never')
        same = []
        for width in (least, least-1):
            both = []
            for o in ('SAT', 'SAT_ZERO'):
                R.narrow_accumulators_(net, made(width, o), after=after)
                both.append(net(ends))
            same.append(torch.equal(*both))
        assert same == [True, False]

# --- odd inputs
def test_odd_inputs():
    net,x = layer()
    R.narrow_accumulators_(net, R.FixedFormat(7, 4, overflow='SAT'))
    assert net(x[:0]).shape == (0, 4) and torch.equal(net(x[0]), net(x[:1])[0])
    assert torch.equal(net(x[:4].view(2, 2, 6)), net(x[:4]).view(2, 2, 4))
    odd = x[:3].clone()
    odd[0, 0],odd[1, 0] = math.nan,math.inf
    y = net(odd)
    assert y[0].isnan().all() and y[1:].isfinite().all() and torch.equal(y[2], net(x[2]))
    assert net(x[:3].bfloat16()).dtype == torch.bfloat16
    torch.manual_seed(0)
    raw,z = quantized(nn.Sequential(nn.Conv2d(2, 3, 3)), many((2, 6, 6), 1, 20)[2:]),many((2, 6, 6), 1, 20)[2:]
    R.narrow_accumulators_(raw, R.FixedFormat(7, 4))
    assert torch.equal(raw(z[0]), raw(z[:1])[0]) and raw(z[:0]).shape == (0, 3, 4, 4)

def test_saved_and_copied(tmp_path):
    net,x = layer()
    R.narrow_accumulators_(net, R.FixedFormat(7, 4))
    torch.save(net, tmp_path/'net.pt')
    for other in (torch.load(tmp_path/'net.pt', weights_only=False), copy.deepcopy(net)):
        assert torch.equal(other(x), net(x)) and 'ap_fixed<7, 4, TRN, WRAP>' in repr(other)

def test_other_files_are_refused(tmp_path):
    "A file that would hold exact sums is not written."
    net,x = layer()
    fresh = quantized(nn.Sequential(nn.Linear(6, 2)), x)
    for model in (net, fresh): R.narrow_accumulators_(model, R.FixedFormat(7, 4))
    told = '0 adds in an accumulator of 7 bits, which this file cannot say'
    for write in (R.to_onnx, R.to_qonnx):
        with pytest.raises(ValueError, match=f'^{write.__name__}: {told}'): write(fresh, x, tmp_path/'m.onnx')
    with pytest.raises(ValueError, match=f'^to_onnx: {told}'): R.to_onnx(net, x, tmp_path/'m.onnx')
    assert not (tmp_path/'m.onnx').exists()

@pytest.mark.parametrize('f, told', [(R.FixedFormat(33, 8), 'format must have at most 32 bits, 31 if unsigned, got 33'),
    (R.FixedFormat(32, 8, signed=False), 'format must have at most 32 bits, 31 if unsigned, got 32'),
    (R.FixedFormat(8, 20), '0 has sums up to .*, less than the step of 4096'),
    (R.FixedFormat(4, -20), '0 adds multiples of .*, beyond the largest number'),
    (R.FixedFormat(32, -50), '0 adds multiples of')], ids=str)
def test_senseless(f, told):
    net,x = layer()
    y = net(x)
    with pytest.raises(ValueError, match=f'^narrow_accumulators_: {told}'): R.narrow_accumulators_(net, f)
    assert torch.equal(net(x), y) and net[0].accumulator is None

def test_refused():
    net,x = layer()
    with pytest.raises(TypeError, match='format must be a FixedFormat or None, got int'): R.narrow_accumulators_(net, 8)
    with pytest.raises(ValueError, match="after must be one of product, sum, got 'end'"):
        R.narrow_accumulators_(net, R.FixedFormat(8, 4), after='end')
    for f in (R.accumulator_bits, lambda m: R.narrow_accumulators_(m, None)):
        with pytest.raises(ValueError, match='no layer adds integers; quantize_model_'): f(nn.Linear(2, 2))
    plain = nn.Sequential(nn.Linear(6, 2))
    R.quantize_model_(plain, 8, 8, calibrate=[x])
    told = "0 has scales that are no powers of two; quantize with scale='po2'"
    with pytest.raises(ValueError, match=told): R.narrow_accumulators_(plain, R.FixedFormat(8, 4))
    assert R.accumulator_bits(plain).rows[0].width == '-'
    only = nn.Sequential(nn.Linear(6, 2))
    R.quantize_model_(only, 8, None)
    with pytest.raises(ValueError, match='no layer adds integers; 0 takes no integers'): R.accumulator_bits(only)

def test_not_handed_on():
    "A normalization that becomes part of a layer changes its scales: `deploy_` says so, and nothing changes."
    torch.manual_seed(0)
    net,x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)),many((2, 6, 6), 1, 40)[2:]
    net(x)
    net = quantized(net.eval(), x)
    R.narrow_accumulators_(net, R.FixedFormat(8, 4))
    y = net(x)
    with pytest.raises(ValueError, match='0, whose sums are in a narrow accumulator, has scales that are no powers'):
        R.deploy_(net, x)
    assert torch.equal(net(x), y)

@pytest.mark.slow
def test_compiled():
    net,x = layer()
    R.narrow_accumulators_(net, R.FixedFormat(7, 4, overflow='SAT'))
    assert torch.equal(torch.compile(net, backend='aot_eager', fullgraph=True)(x), net(x))
    program = torch.export.export(net, (x,))
    assert torch.equal(program.module()(x), net(x))
