"""Bits of codes against scipy and counts by hand, bytes against zlib and lzma read back, steps of columns against the
closed form, widths against the best of all."""
import copy
import itertools
import lzma
import math
import zlib
import pytest
import torch
from estimators import FLOATS, generator
from scipy.stats import entropy as scipy_entropy
from torch import nn
import shok_nb as R
from shok_nb.deployment.integer_layers import pack_int4
from shok_nb.low_precision import sizes
from shok_nb.quantization.quantizer import fresh_copy

CODES = torch.randint(-5, 9, (3, 4, 50), generator=generator())
W = torch.randn(300, 12, generator=generator())

def bits_of(codes):
    counts = torch.unique(codes, return_counts=True)[1]
    return scipy_entropy(counts.numpy(), base=2)

# --- entropy of codes
def test_entropy_is_scipys():
    assert R.code_entropy(CODES).item() == pytest.approx(bits_of(CODES), abs=1e-6)
    for axis in (0, 1, 2, -1, -3):
        want = [bits_of(t) for t in CODES.movedim(axis, 0)]
        assert R.code_entropy(CODES, axis=axis).tolist() == pytest.approx(want, abs=1e-6)

@pytest.mark.parametrize('dtype', [torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS], ids=str)
def test_entropy_of_every_dtype(dtype):
    assert torch.equal(R.code_entropy(CODES.to(dtype), axis=1), R.code_entropy(CODES, axis=1))

def test_entropy_of_few_codes():
    for codes in (torch.zeros(0), torch.tensor(3), torch.full((7,), -2)): assert R.code_entropy(codes).tolist() == 0
    assert R.code_entropy(torch.zeros(2, 0), axis=0).tolist() == [0, 0]
    assert R.code_entropy(torch.zeros(0, 3), axis=1).tolist() == [0, 0, 0]
    assert R.code_entropy(torch.tensor([2**40, -2**40])).item() == 1

# --- with a gradient
def by_hand(x, alpha, step, low, high):
    "Parts of each code, one value after the other."
    counts = dict.fromkeys(range(low, high+1), 0.)
    for v in (x.double()/step).clamp(low, high).flatten():
        y = R.soft_round(v, alpha).item()
        below = math.floor(v)
        counts[below] += 1-(y-below)
        if y > below: counts[below+1] += y-below
    p = torch.tensor([*counts.values()], dtype=torch.float64)/x.numel()
    return -(p*p.clamp(min=1e-300).log2()).sum().item()

@pytest.mark.parametrize('alpha', [0., 1., 5., 20., math.inf])
def test_soft_entropy_is_the_sum_by_hand(alpha):
    x = W.flatten()[:200]*3
    got = R.soft_entropy(x, alpha, 3, step=.7).item()
    assert got == pytest.approx(by_hand(x, alpha, .7, -4, 3), abs=1e-5)

def test_soft_entropy_has_the_hard_limit():
    q = R.Quantizer(3, axis=1).calibrate_(W)
    hard = R.soft_entropy(W, math.inf, 3, step=q.scale, axis=1)
    assert torch.allclose(hard, R.code_entropy(q.to_codes(W), axis=1), atol=1e-6)
    near = R.soft_entropy(W, 200., 3, step=q.scale, axis=1)
    assert (near-hard).abs().max() < .02

def test_soft_entropy_of_both_ends_and_an_offset():
    x = torch.tensor([-9., 9., .25])
    assert R.soft_entropy(x, math.inf, (0, 3)).item() == pytest.approx(bits_of(torch.tensor([0, 3, 0])), abs=1e-6)
    x = torch.tensor([.5, 1.5, 1.5, 2.5])
    assert R.soft_entropy(x, 0., offset=.5).item() == pytest.approx(1.5)
    halves = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3])
    assert R.soft_entropy(x, 0., 3, signed=False).item() == pytest.approx(bits_of(halves))

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_soft_entropy_of_every_dtype(dtype):
    x = (W*2).to(dtype).requires_grad_()
    got = R.soft_entropy(x, 4., 4)
    got.backward()
    assert got.dtype == torch.promote_types(dtype, torch.float32) and x.grad.dtype == dtype
    assert x.grad.isfinite().all()
    assert got.item() == pytest.approx(R.soft_entropy(x.detach().double(), 4., 4).item(), abs=1e-4)

def test_gradients_are_right():
    "Off the integers, where one neighbour gives place to another. Any seed: no value comes within 1e-3 of one."
    x = (W[:4, :5]*1.7).double()
    assert ((x/.6)-(x/.6).round()).abs().min() > 1e-3
    step = torch.tensor(.6, dtype=torch.float64)
    def f(x, step): return R.soft_entropy(x, 3., 4, step=step)
    leaves = x.clone().requires_grad_(),step.requires_grad_()
    assert torch.autograd.gradcheck(f, leaves, eps=1e-7, atol=1e-5)
    assert torch.autograd.gradgradcheck(lambda x: f(x, .6), leaves[:1], eps=1e-7, atol=1e-4)

@pytest.mark.slow
def test_transforms():
    def f(x): return R.soft_entropy(x, 4., 4, step=.5)
    rows = torch.stack([f(x) for x in W])
    assert torch.allclose(torch.vmap(f)(W), rows, atol=1e-6)
    assert torch.allclose(R.soft_entropy(W, 4., 4, step=.5, axis=0), rows, atol=1e-6)
    own = W.clone().requires_grad_()
    f(own).backward()
    assert torch.allclose(torch.func.grad(f)(W), own.grad, atol=1e-8)
    other = W.flip(0)
    _,along = torch.func.jvp(f, (W,), (other,))
    assert along.item() == pytest.approx((own.grad*other).sum().item(), rel=1e-3)
    assert torch.compile(f, backend='eager')(W).item() == pytest.approx(f(W).item(), abs=1e-6)

@pytest.mark.slow
def test_many_values_are_counted():
    "Beyond 2**24 of them in one code, where float32 no longer counts."
    x = torch.zeros(2**24+2**23)
    x[:2**22] = 1
    share = 2**22/len(x)
    want = -share*math.log2(share)-(1-share)*math.log2(1-share)
    assert R.soft_entropy(x, math.inf, 2).item() == pytest.approx(want, abs=1e-6)

def test_nan_and_infinity():
    assert R.soft_entropy(torch.tensor([1., math.nan])).isnan()
    assert R.soft_entropy(torch.tensor([math.inf, -math.inf])).item() == 1
    assert R.soft_entropy(torch.zeros(0)).item() == 0 and R.soft_entropy(torch.zeros(2, 0), axis=0).tolist() == [0, 0]

# --- bytes of a model
def model_of(weights, *shape):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*s) for s in shape or ((30, 20), (20, 7))))
    R.quantize_model_(model, weights, None)
    return model.eval()

def test_bytes_are_those_of_the_codes():
    model = model_of(4)
    report = R.coded_sizes(model)
    for row,layer in zip(report.rows, model):
        q = layer.parametrizations.weight[0]
        codes = q.to_codes(layer.parametrizations.weight.original.detach())
        data = pack_int4(codes).numpy().tobytes()
        assert row.codes == codes.numel() and row.stored == len(data) == math.ceil(codes.numel()/2)
        assert row.entropy == math.ceil(bits_of(codes)*codes.numel()/8) and row.scales == 4*len(codes)
        assert row.zlib <= len(zlib.compress(data, 9)) and row.zlib >= .98*row.entropy
        assert sizes._in_bytes(codes) == data and row.lzma == sizes._by_lzma(data)
    rest = report.rows[-1]
    assert rest.name == 'the rest' and rest.stored == 4*(20+7) and rest.codes == 0
    total = sum(r.zlib+r.scales for r in report.rows)
    assert f'zlib {total:,}' in report.note

def test_written_bytes_are_read_back(monkeypatch):
    "What is counted is what a reader gets the codes from."
    data,kept = bytes(range(7))*300,[]
    for module in (zlib, lzma):
        compress = module.compress
        monkeypatch.setattr(module, 'compress', lambda *a, f=compress, **k: kept.append(f(*a, **k)) or kept[-1])
    assert sizes._by_lzma(data) == len(kept[-1]) and lzma.decompress(kept[-1]) == data
    best = min(len(c.compress(data)+c.flush()) for c in (zlib.compressobj(9), zlib.compressobj(9, strategy=2)))
    assert sizes._by_zlib(data) == best

@pytest.mark.parametrize('ends,bytes', [((-8, 7), .5), ((-128, 7), 1), ((0, 255), 1), ((0, 256), 2), ((-2**20, 0), 4)])
def test_bytes_hold_the_largest_code(ends, bytes):
    codes = torch.tensor([*ends]*50)
    data = sizes._in_bytes(codes)
    assert len(data) == 100*bytes
    kinds = {1: torch.uint8 if ends[1] > 127 else torch.int8, 2: torch.int16, 4: torch.int32}
    if bytes in kinds: assert torch.frombuffer(bytearray(data), dtype=kinds[bytes]).tolist() == codes.tolist()

def test_a_shared_weight_is_counted_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    R.quantize_model_(model, 4, None)
    assert [r.codes for r in R.coded_sizes(model).rows] == [64, 0]

def test_rest_holds_grids_of_inputs_and_buffers():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    R.quantize_model_(model, R.Quantizer(4), 8, calibrate=[torch.rand(9, 8)])
    rest = R.coded_sizes(model).rows[-1]
    assert rest.stored in (4*8 + 4*4*8+8 + 4, 4*8 + 4*4*8+8 + 8)        # bias, norm and its count, a grid

def test_other_grids_are_named():
    mixed = nn.Sequential(nn.Linear(32, 8), nn.Linear(32, 8))
    R.quantize_model_(mixed[0], 4, None)
    R.quantize_model_(mixed[1], 'nf4', None)
    assert '1.weight' in R.coded_sizes(mixed).note
    only = nn.Sequential(nn.Linear(32, 8))
    R.quantize_model_(only, 'nf4', None)
    with pytest.raises(ValueError, match='no quantized weight of integers; 0.weight are on grids of other'):
        R.coded_sizes(only)

@pytest.mark.parametrize('kw', [dict(axis=0), dict(axis=1), dict(block=10), dict(axis=0, learn=True), dict(),
    dict(axis=0, zero_point=True)], ids=str)
def test_entropy_of_a_model_is_that_of_its_codes(kw):
    model = model_of(R.Quantizer(4, **kw))
    codes = [m.parametrizations.weight[0].to_codes(m.parametrizations.weight.original) for m in model]
    want = sum(bits_of(c)*c.numel() for c in codes)/sum(c.numel() for c in codes)
    assert R.weight_entropy(model, math.inf).item() == pytest.approx(want, abs=1e-5)

def test_entropy_of_a_model_reaches_weights_and_scales():
    model = model_of(R.Quantizer(4, axis=0, learn=True))
    R.weight_entropy(model).backward()
    found = {n: p.grad for n,p in model.named_parameters() if 'bias' not in n}
    assert all(g is not None and g.abs().sum() > 0 for g in found.values()) and len(found) == 4

def test_training_with_a_price_makes_the_file_smaller():
    "By a fifth; seeds 0 to 4 of the model make it smaller by 24 to 27 %."
    model = model_of(4, (64, 64))
    before = R.coded_sizes(model).rows[0].zlib
    opt = torch.optim.Adam(model.train().parameters(), 5e-3)
    for _ in range(60):
        opt.zero_grad()
        R.weight_entropy(model, 1.).backward()
        opt.step()
    assert R.coded_sizes(model).rows[0].zlib < .8*before

# --- columns
def gram_of(n=12, spread=1.5):
    g = generator()
    x = torch.randn(400, n, generator=g).double()
    x = (x+.7*x.roll(1, 1))*torch.exp(spread*torch.randn(n, generator=g))
    return x.mT@x/400

@pytest.mark.parametrize('ordered', [False, True])
def test_column_steps_make_all_terms_equal(ordered):
    "By conditional variances: what the inputs before a column leave of it, in the order of decisions."
    gram = gram_of()
    steps = R.column_scale(gram, .3, damping=0., ordered=ordered)
    first = [*range(12)] if not ordered else gram.diagonal().argsort(descending=True).tolist()
    terms = []
    for k,i in enumerate(first):
        # the least error behind column i once those decided later may follow it
        late = first[k+1:]
        rest = gram[i, i] - gram[i, late]@torch.linalg.solve(gram[late][:, late], gram[late, i]) if late else gram[i, i]
        terms.append((rest*steps[i]**2).item())
    assert terms == pytest.approx([terms[0]]*12, rel=1e-6)
    assert steps.log().mean().exp().item() == pytest.approx(.3) and steps.dtype == torch.float64

def test_column_steps_reach_the_bound_of_scalars():
    """Many bits: half the logarithm of 2 pi e/12 above reverse water-filling, and one step pays for the two means more.
    The bound is 4 standard deviations of the error for 4,000 rows."""
    gram,w = gram_of(8),torch.randn(4000, 8, generator=generator()).double()
    def excess(step):
        q = R.gptq(w, gram, step, bits=20, damping=0., ordered=False)
        error = (((q-w)@gram)*(q-w)).mean()
        # continuous entropy of a normal less the logarithm of the step: no bias of a count
        rate = math.log2(2*math.pi*math.e)/2 - torch.as_tensor(step).log2().mean()
        return (rate - (torch.logdet(gram)/math.log(2)/8-error.log2())/2).item()
    single = math.log2(2*math.pi*math.e/12)/2
    assert excess(R.column_scale(gram, .02, damping=0., ordered=False)) == pytest.approx(single, abs=.015)
    d = torch.linalg.cholesky(gram.flip(0, 1)).diagonal()**2
    more = (d.mean().log2()-d.log2().mean()).item()/2
    assert more > .5 and excess(.02) == pytest.approx(single+more, abs=.03)

@pytest.mark.parametrize('bits', [.5, 1., 2.5, 4.])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_watersic_has_the_bits(bits, dtype):
    found = R.watersic(W.to(dtype), gram_of(), bits)
    assert abs(R.code_entropy(found.codes, axis=1).mean().item()-bits) < .02
    assert found.codes.dtype == torch.int32 and found.scale.shape == (12,) and (found.scale > 0).all()

def test_watersic_fits_its_scales():
    "The error is least in the scale of each column: its slope is 0, and steps as they were err more."
    gram = gram_of()
    w = W.double()
    found = R.watersic(w, gram, 1., damping=0.)
    scale = found.scale.clone().requires_grad_()
    e = found.codes*scale-w
    slope, = torch.autograd.grad(((e@gram)*e).sum(), scale)
    assert (slope*found.scale).abs().max() < 1e-6*((w@gram)*w).sum()
    wider = found.codes*(R.column_scale(gram, 1., damping=0.)*(found.scale/R.column_scale(gram, 1., damping=0.)).mean())
    assert ((e@gram)*e).sum() <= (((wider-w)@gram)*(wider-w)).sum()

def test_watersic_of_nothing_and_of_dead_inputs():
    assert R.watersic(torch.zeros(9, 4), torch.eye(4)).codes.abs().sum() == 0
    gram = gram_of()
    gram[3],gram[:, 3] = 0,0
    assert R.watersic(W, gram, 2.).scale.isfinite().all()
    with pytest.raises(ValueError, match=r'watersic: bits must be below log2 of the rows of w, 3, got 3'):
        R.watersic(W[:8], gram_of(), 3.)

# --- widths
def squares(importance, floats):
    def loss(model, batch):
        return sum(h*(m.weight-f).square().sum() for h,m,f in zip(importance, model, floats))
    return loss

def apart(importance, sides, weights=8, **kw):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(n, 10, bias=False) for n in sides])
    floats = [m.weight.detach().clone() for m in model]
    R.quantize_model_(model, R.Quantizer(weights, **kw), None)
    return model,squares(importance, floats)

@pytest.mark.slow
def test_widths_are_the_best_of_all():
    "Of all with so many bits; and what is learned is the closed form, half the logarithm of the importance apart."
    importance = 1.,16.,4.,64.
    model,loss = apart(importance, [40]*4)
    trials = copy.deepcopy(model)
    report = R.learn_bits_(model, [None], loss, 4, steps=40)
    widths = [r.bits for r in report.rows]
    assert sum(widths) == 16
    def error(bits):
        for m,b in zip(trials, bits):
            q = m.parametrizations.weight[0]
            m.parametrizations.weight[0] = fresh_copy(q, bits=b).calibrate_(m.parametrizations.weight.original.detach())
        return loss(trials, None).item()
    every = {b: error(b) for b in itertools.product(range(2, 9), repeat=4) if sum(b) == 16}
    assert every[tuple(widths)] <= 1.05*min(every.values())
    apart_by = [r.learned-report.rows[0].learned for r in report.rows]
    assert apart_by == pytest.approx([0, 2, 1, 3], abs=.5)

@pytest.mark.parametrize('bits', [2, 2.3, 3.7, 5.01, 8])
def test_the_budget_is_met(bits):
    "No bit more fits, whatever the sizes of the weights."
    model,loss = apart((1., 8., 30.), [40, 7, 23])
    rows = R.learn_bits_(model, [None], loss, bits, steps=5).rows
    left = bits*sum(r.values for r in rows) - sum(r.values*r.bits for r in rows)
    assert left >= -1e-3
    assert all(r.bits == 8 or r.values > left + 1e-3 for r in rows)
    for r,m in zip(rows, model):
        q = m.parametrizations.weight[0]
        assert q.bits == r.bits and q.ready and len(m.weight.unique()) <= 2**r.bits

def test_a_width_has_the_slope_of_hgq():
    "The natural logarithm of 2 times what rounding took, which is what the step gives by the chain rule."
    model,_ = apart((1.,), [40], axis=None, init='minmax')
    found = sizes._Widths(sizes._coded_weights(model, 'x')[0], 3, 3)
    found.now = torch.tensor([3.])
    w = model[0].parametrizations.weight.original.detach()
    weight = torch.randn(w.shape, generator=generator())
    slope = found.slopes(lambda: (model[0].weight*weight).sum(), 'x')
    q = found.grids[0][3](w).detach()
    assert slope.item() == pytest.approx(((w-q)*weight).sum().item()*math.log(2), rel=1e-4)
    b = torch.tensor(0., requires_grad=True)
    step = found.grids[0][3].grid()[0].detach()*2**-b
    other, = torch.autograd.grad((R.round_ste(w, step=step)*weight).sum(), b)
    inside = w.abs() <= step.detach()*3.5
    assert inside.all() and slope.item() == pytest.approx(other.item(), rel=1e-4)

@pytest.mark.slow
def test_a_model_of_learned_widths_deploys():
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),torch.rand(64, 16)
    wanted = model(x).detach()
    R.quantize_model_(model, 8, 8, calibrate=[x])
    R.learn_bits_(model, [x], lambda model, x: (model(x)-wanted).square().mean(), 4.)
    before = model.eval()(x)
    R.deploy_(model, x)
    assert (model(x)-before).abs().max() < .05*before.abs().max()

def test_the_model_is_as_it_was_after_an_error():
    model,loss = apart((1., 8.), [10, 20])
    quantizers = [m.parametrizations.weight[0] for m in model]
    state = copy.deepcopy(model.state_dict())
    def wrong(model, batch): return model[0].weight
    def away(model, batch): return torch.ones(())
    below = r'learn_bits_: bits must be from least=2 to most=8, got 1\.9'
    for call,told in ((lambda: R.learn_bits_(model, [None], loss, 1.9), below),
            (lambda: R.learn_bits_(model, [None], loss, 8.5), r'got 8\.5'),
            (lambda: R.learn_bits_(model, [None], wrong), 'loss must return a Tensor of one number'),
            (lambda: R.learn_bits_(model, [None], away), 'loss must depend on the weights of model'),
            (lambda: R.learn_bits_(model, [], loss), 'calibrate gave no batch')):
        with pytest.raises((TypeError, ValueError), match=told): call()
    assert [m.parametrizations.weight[0] for m in model] == quantizers
    assert all(torch.equal(v, state[k]) for k,v in model.state_dict().items())
    assert not any(q._forward_hooks for q in quantizers) and all(p.grad is None for p in model.parameters())

def test_an_optimizer_made_before_trains_the_new_grids():
    "A quantizer of another width keeps the Parameters of the one that was there."
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),torch.randn(64, 8)
    wanted = model(x).detach()
    def loss(model, x): return (model(x)-wanted).square().mean()
    R.quantize_model_(model, 4, None)
    held = {id(p) for g in torch.optim.Adam(model.parameters()).param_groups for p in g['params']}
    R.learn_bits_(model, [x], loss, bits=3)
    assert {id(p) for p in model.parameters()} == held
    for layer in (model[0], model[2]):
        q = layer.parametrizations.weight[0]
        want = R.Quantizer(q.bits, axis=0, learn=True).calibrate_(layer.parametrizations.weight.original)
        assert q.bits == 3 and torch.equal(q.log_scale, want.log_scale) and q.log_scale.requires_grad
