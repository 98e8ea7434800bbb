"""Networks as others write them: what `deploy_` must see, and what it must leave as it is.

Each network computes after `deploy_` what it computed before, up to one step of the bias and the flips of codes behind
it: 1 % of the largest output, where the faults these guard against made 3 % to 268 %."""
import copy
import dataclasses
import importlib
import math
import pytest
import torch
from estimators import generator, look, older, slow_after
from networks import Lora, Made
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
import shok_nb.deployment.deploy as deploy
import shok_nb.networks.flow as flow
from shok_nb.deployment import proof, weight_codes
from shok_nb.deployment.deploy import deploy_
from shok_nb.deployment.integer_layers import IntegerLayer
from shok_nb.networks.models import quantize_model_
from shok_nb.quantization.quantizer import Quantizer


def image(n=32): return torch.randn(n, 3, 8, 8, generator=generator())
def rows(n=64): return torch.randn(n, 6, generator=generator())*2
def words(length): return torch.randn(64, length, 6, generator=generator())*torch.arange(1., length+1)[:, None]

class Standardized(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight/weight.flatten(1).norm(dim=1)[:, None, None, None], bias)

class SamePadding(nn.Conv2d):
    def forward(self, input): return super().forward(F.pad(input, (1, 1, 1, 1)))

class NormAct(nn.BatchNorm2d):
    def forward(self, input): return F.silu(super().forward(input))

@dataclasses.dataclass
class Out:
    features:object
    logits:object

def scaled(norm, by):
    with torch.no_grad(): norm.weight.mul_(torch.as_tensor(by))
    return norm

def held():
    a = nn.Linear(6, 8)
    m = Made(lambda m, x: m.d(F.relu(m.n(m.first[0](x)))), a=a, n=nn.BatchNorm1d(8), d=nn.Linear(8, 3))
    m.first = [a]
    return m

def closure():
    a = nn.Linear(6, 8)
    return Made(lambda m, x: m.d(F.relu(a(x))), a=a, d=nn.Linear(8, 3))

def hooked(register):
    m = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    register(m[0])
    return m

def two_norms():
    m = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for i,scale in ((1, 8.), (3, .05)): nn.init.constant_(m[i].weight, scale)
    return m

def traced(m, x):
    h = m.a(x)
    return m.d(F.relu(h)) + m.traced(h)

def with_trace():
    m = Made(traced, a=nn.Linear(6, 8), d=nn.Linear(8, 8))
    m.traced = torch.jit.trace(lambda h: h*2+1, torch.randn(64, 8))
    return m

def written(m, x):
    h = m.a(x)
    h.view(-1).mul_(3)
    return m.d(F.relu(m.n(h)))

def pooled(norm): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))

def dead():
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        m[0].weight[0].mul_(1e-7)
        m[0].weight[1].zero_()
        m[0].bias[:2] = .1
        m[1].bias[:2] = .3
    return m

def by_class(m, x): return m.d(F.relu(m.a(x) if isinstance(m.a, nn.Linear) else x.new_zeros(len(x), 8)))

def norm6(): return nn.BatchNorm1d(6)

def three(how): return lambda: Made(how, a=nn.Linear(6, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8))

lin,norm,conv = nn.Linear,nn.BatchNorm1d,nn.Conv2d
TRAPS = dict(
    relu_between=(lambda: nn.Sequential(conv(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), conv(8, 4, 3)), image()),
    pool_between=(lambda: pooled(scaled(nn.BatchNorm2d(8), -1.)), image()),
    dropout_between=(lambda: nn.Sequential(lin(6, 8), nn.ReLU(), nn.Dropout(), norm(8), lin(8, 3)), rows()),
    other_axis=(lambda: Made(lambda m, x: m.d(m.n(m.a(x))), a=lin(6, 6), n=norm6(), d=lin(6, 3)), words(6)),
    other_size=(lambda: Made(lambda m, x: m.d(m.n(m.a(x))), a=lin(6, 6), n=norm(5), d=lin(6, 3)), words(5)),
    transposed=(lambda: Made(lambda m, x: m.d(m.n(m.a(x).transpose(1, 2))), a=nn.Conv1d(6, 6, 1), n=norm6(),
        d=nn.Conv1d(6, 3, 1)), words(6)),
    shared_norm=(lambda: Made(lambda m, x: m.d(F.relu(m.n(m.a(x))) + F.relu(m.n(m.b(x)))), a=lin(6, 8),
        b=lin(6, 8), n=norm(8), d=lin(8, 3)), rows()),
    norm_of_input=(lambda: Made(lambda m, x: m.d(m.n(m.a(x)) + m.n(x)), a=lin(6, 6), n=norm6(), d=lin(6, 3)), rows()),
    norm_and_layer=(lambda: Made(lambda m, x: m.d(m.n(h := m.a(x)) + h), a=lin(6, 6), n=norm6(), d=lin(6, 3)), rows()),
    two_norms=(two_norms, rows()),
    own_forward=(lambda: nn.Sequential(Lora(6, 8), nn.ReLU(), lin(8, 3)), rows()),
    own_convolution=(lambda: nn.Sequential(Standardized(3, 8, 3), nn.ReLU(), conv(8, 4, 3)), image()),
    own_padding=(lambda: nn.Sequential(SamePadding(3, 8, 3), nn.ReLU(), conv(8, 4, 3)), image()),
    own_norm=(lambda: nn.Sequential(conv(3, 8, 3), NormAct(8), conv(8, 4, 3)), image()),
    hook_after=(lambda: hooked(lambda m: m.register_forward_hook(lambda m, a, out: 3*out)), rows()),
    hook_before=(lambda: hooked(lambda m: m.register_forward_pre_hook(lambda m, a: (3*a[0],))), rows()),
    in_a_list=(held, rows()),
    in_a_closure=(closure, rows()),
    by_class=(lambda: Made(by_class, a=lin(6, 8), d=lin(8, 3)), rows()),
    a_dataclass=(lambda: Made(lambda m, x: Out(h := m.a(x), m.d(F.relu(h))), a=lin(6, 8), d=lin(8, 3)), rows()),
    a_trace=(with_trace, rows()),
    written_into_a_view=(lambda: Made(written, a=lin(6, 8), n=norm(8), d=lin(8, 3)), rows()),
    drops_always=(lambda: Made(lambda m, x: m.d(F.dropout(m.a(x), .5, True)), a=lin(6, 8), d=lin(8, 3)), rows()),
    negative_norm=(lambda: nn.Sequential(conv(3, 64, 3), scaled(nn.BatchNorm2d(64), -1.), nn.ReLU(), conv(64, 4, 3)),
        image()),
    norm_of_any_sign=(lambda: nn.Sequential(conv(3, 8, 3), scaled(nn.BatchNorm2d(8), [1, -1, .5, -2, 3, 0, 1, 1]),
        nn.ReLU(), conv(8, 4, 3)), image()),
    norm_without_statistics=(lambda: nn.Sequential(lin(6, 8), norm(8, track_running_stats=False), lin(8, 3)), rows()),
    dead_channels=(dead, image()),
    floor_of_weights=(lambda: nn.Sequential(lin(6, 3)), rows()),
    chain=(three(lambda m, x: m.c(m.b(m.a(x)).relu().view(-1, 8))), rows()),
    residual=(three(lambda m, x: m.c(m.b(h := m.a(x)) + h)), rows()),
    returned=(three(lambda m, x: (h := m.a(x), m.c(m.b(h)))[1]*0 + h), rows()),
    curved=(three(lambda m, x: m.c(m.b(m.a(x)).tanh())), rows()),
    forked=(three(lambda m, x: m.b(h := m.a(x)) + m.c(h)), rows()),
    in_place=(three(lambda m, x: m.c(m.b(torch.relu_(m.a(x))))), rows()),
    called_twice=(lambda: Made(lambda m, x: m.d(F.relu(m.a(F.relu(m.a(x))))), a=lin(6, 6), d=lin(6, 3)), rows()),
)
# The normalization that is folded: one that takes the very output of a layer, once, and alone
FOLDED = dict.fromkeys(('two_norms', 'negative_norm', 'norm_of_any_sign', 'dead_channels'), ['1'])
STAYS = dict(own_forward='Lora has a forward of its own', own_convolution='Standardized has a _conv_forward of its own',
    own_padding='SamePadding has a forward of its own', hook_after='it has a hook', hook_before='it has a hook',
    in_a_list='something else holds it, such as a list', in_a_closure='something else holds it, such as a list',
    by_class='something asks for its class')
# Codes go on where nothing but order-preserving operations lie between, and nobody else looks
FLOWS = dict(chain=['codes', 'codes', 'floats'], residual=['codes', 'codes', 'floats', 'codes'],
    returned=['floats', 'codes', 'floats'], curved=['codes', 'floats', 'floats'], forked=['codes', 'floats', 'floats'],
    in_place=['codes', 'codes', 'floats'], called_twice=['floats']*2, norm_without_statistics=['floats']*2)

def values(out): return [out.features, out.logits] if isinstance(out, Out) else [out]

def run(model, x):
    torch.manual_seed(1)
    with torch.no_grad(): return values(model(x))

def prepared(name):
    torch.manual_seed(0)
    make,x = TRAPS[name]
    model = make()
    for _ in range(20): model(x)                                        # normalizations have seen something
    weights = Quantizer(4, axis=0, rounding=torch.floor) if name == 'floor_of_weights' else 8
    quantize_model_(model.eval(), weights, 8, calibrate=[x])
    return model,x

@pytest.mark.parametrize('name', TRAPS)
@pytest.mark.filterwarnings('ignore:.torch.jit.trace')
def test_traps(name):
    "The numbers are the same, and the report says what was folded, which layer stays and where codes go on."
    model,x = prepared(name)
    want = run(model, x)
    kind = type(next(m for m in model.modules() if hasattr(m, 'input_quantizer')))
    told = deploy_(model, x).rows
    for a,b in zip(run(model, x), want, strict=True): assert (a-b).abs().max() < .01*b.abs().max()
    assert any(isinstance(m, IntegerLayer) for m in model.modules())
    assert all(float(row.gap) < .01 for row in told)
    assert [row.normalization for row in told if row.normalization != '-'] == FOLDED.get(name, [])
    if name in STAYS:
        assert told[0].activations == f'floats: {STAYS[name]}' and told[0].weights == 'int8' and told[0].gap == '0'
        assert any(type(m) is kind for m in model.modules())
    if name in FLOWS: assert [row.activations.split()[-1] for row in told] == FLOWS[name]

def test_a_hook_that_watches_goes_on():
    seen = []
    model,x = hooked(lambda m: m.register_forward_hook(lambda m, a, out: seen.append(len(out)))),rows()
    quantize_model_(model.eval(), calibrate=[x])
    deploy_(model, x)
    seen.clear()
    model(x)
    assert seen == [64]

def test_a_model_that_takes_no_integer_layer():
    def refuses(m, x):
        y = m.a(x)
        if hasattr(m.a, 'codes'): raise TypeError('floats alone')
        return y
    model,x = Made(refuses, a=lin(6, 8)),rows()
    quantize_model_(model.eval(), calibrate=[x])
    with pytest.raises(ValueError, match='^deploy_: the model fails: TypeError: floats alone; nothing was changed$'):
        deploy_(model, x)
    assert not isinstance(model.a, IntegerLayer)

def test_outputs_that_nobody_can_look_into():
    class Closed:
        __slots__ = 'out',
        def __init__(self, out): self.out = out
    model,x = Made(lambda m, x: Closed(m.a(x)), a=lin(6, 8)),rows()
    quantize_model_(model.eval(), calibrate=[x])
    want,report = model(x).out,deploy_(model, x)
    assert report.note.startswith('the outputs could not be compared; ') and isinstance(model.a, IntegerLayer)
    assert torch.allclose(model(x).out, want, atol=1e-3)

def test_a_scale_that_is_lost():
    model,x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),rows()
    quantize_model_(model.eval(), calibrate=[x])
    model[0].input_quantizer.log_scale.data.fill_(math.nan)             # as a training that diverged leaves it
    first,second = deploy_(model, x).rows
    assert first.activations == 'floats: a scale that is no positive number' and second.kernel == 'QGemm'

@pytest.mark.slow
def test_nan_stays():
    for which in ('weight', 'bias', 'norm'):
        model,x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),rows()
        quantize_model_(model.eval(), calibrate=[x])
        where = dict(weight=model[0].parametrizations.weight.original, bias=model[0].bias, norm=model[1].running_mean)
        where[which].data.view(-1)[0] = math.nan
        assert model(x).isnan().any()
        report = deploy_(model, x)
        assert model(x).isnan().any() and report.rows[0].normalization == '-', which
        assert ('no finite number' in repr(report)) == (which != 'norm')

def test_infinite_and_empty_inputs():
    model,x = nn.Sequential(nn.Linear(6, 3)).eval(),rows()
    quantize_model_(model, calibrate=[x])
    odd = torch.tensor([[math.inf]*6, [-math.inf]*6, [math.nan]*6])
    want = model(odd)
    deploy_(model, x)
    # the bias is on the grid of the sums: half a step of it is what an output near 0 may be off
    half = (model[0].input_scale*model[0].scale).max()/2
    assert torch.allclose(model(odd)[:2], want[:2], rtol=1e-5, atol=half) and model(odd)[2].isnan().all()
    for shape in ((0, 6), (0, 5, 6), (6,), (2, 0, 6)): assert model(torch.zeros(shape)).shape == (*shape[:-1], 3)

def test_one_image():
    model,x = nn.Sequential(nn.Conv2d(3, 6, 3)).eval(),image()
    quantize_model_(model, calibrate=[x])
    deploy_(model, x)
    assert torch.equal(model(x[0]), model(x)[0]) and model(torch.randn(3, 9, 9)).shape == (6, 7, 7)

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    "A model answers in its dtype, and one that is cast after it was deployed does too, with the scales it had."
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    x = rows()
    model = make().to(dtype)
    quantize_model_(model, calibrate=[x.to(dtype)])
    want = model(x.to(dtype))
    deploy_(model, x.to(dtype))
    got = model(x.to(dtype))
    assert got.dtype == dtype and (got-want).abs().max() < .02*want.abs().max()
    model = make()
    quantize_model_(model, calibrate=[x])
    deploy_(model, x)
    scales = [t.clone() for k,t in model.state_dict().items() if 'scale' in k]
    want,got = model(x),model.to(dtype)(x.to(dtype))
    assert got.dtype == dtype and (got-want).abs().max() < .02*want.abs().max()
    assert all(map(torch.equal, scales, [t for k,t in model.state_dict().items() if 'scale' in k]))

class Sums(nn.Module):
    "An addition, a mean, a product, a curve and a concatenation of codes."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 8), nn.Linear(16, 5)
    def forward(self, x):
        h = self.a(x).relu()
        h = (h+self.b(h)).relu().mean((2, 3))
        k = self.c(h).sigmoid()
        return self.d(torch.cat([h*k, k], -1))

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('seed', [0, 1, 3])
def test_operations_in_halves(dtype, seed):
    "bfloat16 has 8 bits, so what lies between layers is a code or two off, and the integers are right."
    torch.manual_seed(seed)
    model,x = Sums().eval(),image()
    quantize_model_(model, calibrate=[x])
    exact = copy.deepcopy(model)
    deploy_(exact, x)
    want = exact(x)
    model.to(dtype)
    before = model(x.to(dtype))
    deploy_(model, x.to(dtype))
    got = model(x.to(dtype))
    assert got.dtype == dtype and (got-before).abs().max() < .05*before.abs().max()
    assert (got-want).abs().max() < .05*want.abs().max()

def test_gradient_of_the_input():
    "That of the quantized network: rounding passes it on, the ends of the codes do not."
    model,x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(),rows().requires_grad_()
    quantize_model_(model, calibrate=[x.detach()])
    want, = torch.autograd.grad(model(x).sum(), x)
    deploy_(model, x.detach())
    got, = torch.autograd.grad(model(x).sum(), x)
    assert (got-want).abs().mean() < .02*want.abs().mean()               # a ReLU at code 0 has slope 0

def test_another_parametrization_before_the_quantizer():
    class Twice(nn.Module):
        def forward(self, w): return 2*w
    for make,x in ((lambda: nn.Embedding(6, 4), torch.arange(6)), (lambda: nn.Linear(6, 4), rows())):
        model = nn.Sequential(make())
        parametrize.register_parametrization(model[0], 'weight', Twice())
        q = Quantizer(axis=0).calibrate_(model[0].weight.detach())
        parametrize.register_parametrization(model[0], 'weight', q)
        want = model.eval()(x)
        deploy_(model, x)
        assert torch.equal(model(x), want)

def test_not_reached():
    model,x = Made(lambda m, x: m.a(x), a=nn.Linear(6, 3), b=nn.Linear(6, 3)).eval(),rows()
    report = quantize_model_(model, 8, Quantizer(8).calibrate_(x), calibrate=[x])
    assert report.rows[1].activations == 'not reached by the batches'
    model.b.input_quantizer = Quantizer(8).calibrate_(x)
    report = deploy_(model, x)
    assert report.rows[1].activations in ('floats: not reached by the example', 'floats: float activations')
    assert not isinstance(model.b, IntegerLayer)

# --- in place, or not at all
ONCE = '_flow_or_none', '_planned', 'recorded', '_swap', '_still_called', 'prove', '_note', 'LayerReport'
STEPS = *ONCE,'_layer_or_why','pack_codes_','_judge','store_codes','_stored','_row','IntegerLayer','Dequantize'

@pytest.mark.parametrize('step', slow_after(STEPS, 4))
@pytest.mark.parametrize('late', slow_after([0, 1]))
def test_a_failure_at_any_step_changes_nothing(step, late, monkeypatch):
    "The first or the second call of each step fails; so does what is interrupted by the keyboard."
    model,x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(),
        nn.Linear(64, 4), nn.ConvTranspose1d(1, 1, 2), nn.ConvTranspose1d(1, 1, 2)),image()
    model.insert(6, nn.Unflatten(1, (1, 4)))
    quantize_model_(model, 4, 8, calibrate=[x])
    model.train()
    model[0].eval()
    before = look(model)
    of = next(module for module in (deploy, proof, weight_codes) if hasattr(module, step))
    inner,calls = getattr(of, step),[]
    class Planted(KeyboardInterrupt): "What no code expects."
    def planted(*args, **kwargs):
        calls.append(step)
        if len(calls) > late: raise Planted
        return inner(*args, **kwargs)
    monkeypatch.setattr(of, step, planted)
    if late and step in ONCE: deploy_(copy.deepcopy(model), x)
    else:
        with pytest.raises(Planted): deploy_(model, x)
        assert len(calls) == 1+late
    assert look(model) == before

SPOILED = dict(
    weights=lambda made: made.layer.codes.neg_(),
    input_scale=lambda made: made.layer.input_scale.mul_(1.01),
    zero_point=lambda made: made.layer.input_zero_point.add_(1),
    product=lambda made: made.layer.product.mul_(1.001),
    bias=lambda made: made.layer.bias_codes.add_(2),
    next_scale=lambda made: made.layer.out_scale is not None and made.layer.out_scale.mul_(1.01),
    next_zero_point=lambda made: made.layer.out_zero_point is not None and made.layer.out_zero_point.add_(2))

@pytest.mark.parametrize('what', SPOILED)
def test_the_proof_finds_a_wrong_layer(what, monkeypatch):
    "One number of the first layer is off, by as little as a thousandth: the layer is named, the model as it was."
    model,x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)),rows()
    quantize_model_(model.eval(), calibrate=[x])
    before,swap = look(model),deploy._swap
    def spoiled(model, made, *more):
        SPOILED[what](next(iter(made.values())))
        return swap(model, made, *more)
    monkeypatch.setattr(deploy, '_swap', spoiled)
    with pytest.raises(ValueError, match='^deploy_: 0 .*nothing was changed$'): deploy_(model, x)
    assert look(model) == before

@pytest.mark.slow
def test_the_proof_finds_a_wrong_flow(monkeypatch):
    "A normalization that is folded though a ReLU lies between, or codes handed on though somebody else looks."
    model,x = prepared('relu_between')
    monkeypatch.setattr(deploy, 'norm_behind', lambda flow, m, norms: model[2] if m is model[0] else None)
    with pytest.raises(ValueError, match='^deploy_: 0 differs by .* more than its roundings explain'):
        deploy_(model, x)
    monkeypatch.undo()
    torch.manual_seed(0)
    model = Made(lambda m, x: m.d(F.relu(h := m.a(x))) + h, a=nn.Linear(6, 8), d=nn.Linear(8, 8)).eval()
    x = rows()
    quantize_model_(model, calibrate=[x])
    monkeypatch.setattr(flow._Flow, 'reached', lambda self, *_: [model.d.input_quantizer])
    with pytest.raises(ValueError, match='^deploy_: output 0 differs by .*; nothing was changed$'): deploy_(model, x)

def test_the_report_names_every_layer():
    "Those that were skipped, and those of a class that is not known, too."
    mine,x = Made(lambda m, x: x@m.w, w=nn.Parameter(torch.eye(6))),rows()
    model = nn.Sequential(nn.Linear(6, 6), mine, nn.Linear(6, 3)).eval()
    quantize_model_(model, calibrate=[x], skip=['2'])
    told = [(r.name, r.weights, r.activations) for r in deploy_(model, x).rows]
    assert told == [('0', 'int8', 'codes to floats'), ('1', 'floats', 'not known: w'), ('2', 'floats', 'not quantized')]

# --- graphs with writes, and without
@torch.library.custom_op('shok_nb_tests::add_one', mutates_args=('h',))
def add_one(h:torch.Tensor)->None: h.add_(1)

@torch.library.custom_op('shok_nb_tests::plus_one', mutates_args=())
def plus_one(h:torch.Tensor)->torch.Tensor: return h+1
plus_one.register_fake(torch.empty_like)

def wrote(write):
    "A forward in which `write(m, h)` writes into the first layer's output, or into a buffer."
    def forward(m, x):
        h = m.a(x)
        write(m, h)
        return m.d(h)
    return forward

def in_halves(m, x):
    with torch.autocast('cpu', torch.bfloat16): return m.d(m.a(x))

WRITES = dict(
    view=wrote(lambda m, h: h.view(-1).mul_(3)), wider=wrote(lambda m, h: h.add_(m.wide)),
    after=wrote(lambda m, h: h.relu_().view(-1).mul_(3)),
    seen=lambda m, x: m.d((h := m.a(x), h.view(-1), h.relu_())[1].view(-1, 8)),
    seen_later=lambda m, x: m.d((h := m.a(x), h.view(-1, 8), h.relu_())[1]),
    given=lambda m, x: m.d(m.a(x.clone().view(-1, 6).abs_())),
    item=wrote(lambda m, h: h.__setitem__((slice(None), 0), 0.)), part=wrote(lambda m, h: h[:, 1:].clamp_(0, 1)),
    out=wrote(lambda m, h: torch.neg(h, out=h)),
    own=wrote(lambda m, h: add_one(h)), buffer=wrote(lambda m, h: m.seen.add_(h.mean(0))),
    dropped=wrote(lambda m, h: F.dropout(h, .5, True, True)), region=in_halves,
    training=lambda m, x: m.d(F.batch_norm(m.a(x), m.seen, m.seen.abs()+1, training=True)),
    batch=lambda m, x: m.d(F.batch_norm(m.a(x), m.seen, m.one, training=True)),
    instance=lambda m, x: m.d(F.instance_norm(m.a(x)[:, :, None].expand(-1, -1, 2), m.seen, m.one)[:, :, 0]),
    drawn=lambda m, x: m.d(F.dropout(m.a(x), .5, True)), traced=lambda m, x: m.d(m.a(x).T.T),
    alpha=lambda m, x: m.d(F.alpha_dropout(m.a(x), .5, False)), cast=lambda m, x: m.d(m.a(x).double().float()))
PLAIN = dict(
    relu=wrote(lambda m, h: h.relu_()), add=wrote(lambda m, h: h.add_(1)), twice=wrote(lambda m, h: h.add_(h).relu_()),
    copied=wrote(lambda m, h: h.copy_(h.abs())), between=wrote(lambda m, h: h.add_(m.one)),
    read=lambda m, x: (h := m.a(x), y := h*2, h.relu_(), m.d(h)+y[:, :3])[-1],
    returned=lambda m, x: m.d(F.relu_(m.a(x))), both=lambda m, x: (h := m.a(x), r := h.relu_(), h.add_(r), m.d(r))[-1],
    chain=lambda m, x: m.d(F.relu(m.a(x))), two=lambda m, x: m.d(h := m.a(x)) + h[:, :3],
    unread=lambda m, x: (h := m.a(x), h.sum(), m.d(h))[-1], own=lambda m, x: m.d(plus_one(m.a(x))),
    norm=lambda m, x: m.d(F.batch_norm(m.a(x), m.seen, m.one)), dropout=lambda m, x: m.d(F.dropout(m.a(x), .5, False)),
    flat=lambda m, x: m.d(m.a(x)[:, :, None].flatten(1)), flat_already=lambda m, x: m.d(m.a(x).flatten(1)),
    contiguous=lambda m, x: m.d(m.a(x).contiguous()), reshaped=lambda m, x: m.d(m.a(x).reshape(-1, 2).reshape(-1, 8)),
    unflat=lambda m, x: m.d(m.a(x).unflatten(1, (2, 4)).flatten(1)),
    chunks=lambda m, x: m.d(torch.cat(m.a(x).chunk(2, 1), 1)),
    part=lambda m, x: m.d(m.a(x).chunk(2, 1)[0].repeat(1, 2)),
    attention=lambda m, x: m.d(F.scaled_dot_product_attention(h := m.a(x), h, h)))

def of_two_layers(how):
    model = Made(how, a=nn.Linear(6, 8), d=nn.Linear(8, 3)).eval()
    model.register_buffer('seen', torch.zeros(8))
    model.register_buffer('one', torch.ones(8))
    model.register_buffer('wide', torch.ones(8, dtype=torch.float64))
    return model

@pytest.fixture
def apart(monkeypatch):
    "One entry for each graph that torch's decompositions are asked for."
    made,inner = [],torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(torch.export.ExportedProgram, 'run_decompositions', lambda *a: made.append(a) or inner(*a))
    return made

@pytest.mark.parametrize('name', slow_after(WRITES, 10))
def test_writes_are_taken_apart(name, apart):
    "So are steps that are composed of others, unless the graph is read with them."
    flow.flow_of(of_two_layers(WRITES[name]), rows(), [])
    assert len(apart) == 1

@pytest.mark.slow
def test_others_are_read_as_they_are(apart, monkeypatch):
    "All that is asked of a graph has the answers that it has after decompositions."
    # in evaluation newer decompositions leave nothing of a dropout, older ones a copy
    plain = [f for name,f in PLAIN.items() if name != 'dropout' or older('2.14')]
    models = nn.ModuleList(map(of_two_layers, plain))
    model = Made(lambda m, x: [m(x) for m in models], models=models).eval()
    layers = [layer for m in models for layer in (m.a, m.d)]
    def asked():
        found = flow.flow_of(model, rows(), layers)
        def told(m):
            [entering],[leaving] = found.inputs(m),found.outputs(m)
            return found.only_user(leaving),found.reached([leaving]),found.origin(entering),len(leaving.users)
        return [told(m) for m in layers],found.parameters
    answers = asked()
    assert not apart
    monkeypatch.setattr(flow, '_is_plain', lambda node: False)
    monkeypatch.setattr(flow, '_write_nowhere', lambda graph: None)
    assert asked() == answers and len(apart) == 1

def test_loaded_again():
    "As an editor that reloads modules does: the mark in the graph is registered once, and who feeds whom is known."
    before = dict(vars(flow))
    importlib.reload(flow)
    try:
        model,x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).eval(),rows()
        quantize_model_(model, calibrate=[x])
        assert [r.activations for r in deploy_(model, x).rows] == ['codes to codes', 'codes to floats']
    finally:
        vars(flow).update(before)                           # other tests have met the classes that were there
        importlib.reload(deploy)
