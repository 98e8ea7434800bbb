"""What the page cannot own: every layer through saving, copying, compiling and
exporting, and weights that are shared or many."""
import copy
import pickle
from functools import partial
import pytest
import torch
from estimators import compiled, exported, generator, grouped, leaves, same, saved
from torch import nn
from torch.nn.utils import parametrize
import shok_nb as R
from shok_nb import nn as L

LAYERS = dict(round=L.RoundSTE, floor=L.FloorSTE, ceil=L.CeilSTE, trunc=L.TruncSTE, sign=L.SignSTE, ratio=L.RatioRound,
    soft=L.SoftRound, logistic=L.LogisticRound, cubic=L.CubicRound, soft_hard=lambda: L.SoftRound(hard=True),
    learned=lambda: L.SoftRound(3, learnable=True), step=lambda: L.RoundSTE(step=.5, learnable=True),
    channels=lambda: L.SoftRound(torch.tensor([1., 2., 3.]), step=nn.Parameter(torch.tensor([.1, .2, .3]))),
    ewgs=lambda: L.Rounding(R.ewgs_round, R.ewgs_round, delta=.3),
    stochastic=L.StochasticRound, seeded=lambda: L.StochasticRound(seed=torch.tensor(3)))
each = pytest.mark.parametrize('make', LAYERS.values(), ids=LAYERS)
X = torch.randn(5, 3, generator=generator())*3

def run(layer, x=X):
    torch.manual_seed(0)                              # for the one layer that draws from torch's own generator
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]

def alike(a, b): return all(same(p, q) for p,q in zip(run(a), run(b), strict=True))

@each
@pytest.mark.parametrize('training', [True, False])
def test_round_trips(make, training):
    layer = make().train(training)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert alike(layer, other) and repr(other) == repr(layer)
    fresh = make().train(training)
    with torch.no_grad():
        for t in fresh.state_dict().values(): t.zero_()
    fresh.load_state_dict(saved(layer.state_dict()))
    assert alike(layer, fresh) and alike(layer, saved(layer, weights_only=False))
    assert [p.requires_grad for p in fresh.parameters()] == [p.requires_grad for p in layer.parameters()]

@each
def test_evaluation_is_hard(make):
    "On the grid, the same every time, and a gradient of training size still arrives."
    layer = make().eval()
    y,again = run(layer)[0],run(layer)[0]
    step = getattr(layer, 'step', 1.)
    assert same(y, again) and torch.allclose(y/step, (y/step).round(), atol=1e-5) and run(layer)[1].abs().sum() > 0
    other = L.FloorSTE, L.CeilSTE, L.TruncSTE, L.SignSTE
    assert isinstance(layer, other) or same(y, R.round_ste(X, step=step).detach())

@pytest.mark.slow
@pytest.mark.parametrize('training', [True, False])
@grouped([pytest.param(make, id=name) for name,make in LAYERS.items() if make is not L.StochasticRound], quick=1)
def test_compiled(group, training):
    layers,xs = [make().train(training) for make, in group],leaves(X, len(group))
    ys = compiled(lambda *xs: [f(x) for f,x in zip(layers, xs)], 'aot_eager')(*xs)
    for layer,x,y in zip(layers, xs, ys):
        got = [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], retain_graph=True)]
        for a,b in zip(got, run(layer), strict=True): assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)

@pytest.mark.parametrize('training', [True, False])
@pytest.mark.slow
def test_compiled_toss(training):
    "Compiled noise is other noise."
    leaf,layer = X.clone().requires_grad_(),L.StochasticRound().train(training)
    y = torch.compile(layer, backend='aot_eager')(leaf)
    want = y.detach().round() if training else run(layer)[0]
    assert torch.equal(y, want) and torch.equal(torch.autograd.grad(y.square().sum(), leaf)[0], 2*y.detach())

@pytest.mark.parametrize('make', (L.RoundSTE, L.SoftRound, L.LogisticRound, L.CubicRound, L.RatioRound))
def test_exported_evaluation_is_one_round(make):
    g = exported(make().eval(), X).graph
    assert [n.target for n in g.nodes if n.op == 'call_function'] == [torch.ops.aten.round.default]

def test_knobs():
    soft = L.SoftRound(4)
    assert soft.alpha.shape == () and isinstance(soft.step, float) and [*soft.state_dict()] == ['alpha']
    assert not [*soft.parameters()]
    learnable = L.SoftRound(learnable=True)
    assert [*learnable.state_dict()] == ['alpha'] == [n for n,_ in learnable.named_parameters()]
    assert [n for n,_ in L.RoundSTE(learnable=True).named_parameters()] == ['step']
    own = nn.Parameter(torch.tensor(2.))
    assert L.SoftRound(own).alpha is own
    shown = {
        soft: 'SoftRound(alpha=4)',
        L.SoftRound(own, step=.5): 'SoftRound(alpha=2 (learns), step=0.5)',
        L.SoftRound(torch.ones(2, 3), hard=True): 'SoftRound(alpha=[2 × 3], hard=True)',
        L.Rounding(R.ewgs_round, R.floor_ste): 'Rounding(ewgs_round)',
        L.FloorSTE(): 'FloorSTE()',
        L.RoundSTE(ties='up'): "RoundSTE(ties='up')",
    }
    for l,text in shown.items(): assert repr(l) == text
    assert L.SoftRound(4).half().alpha.dtype == torch.float16 and L.SoftRound(4).half()(X.half()).dtype == torch.float16
    assert 'alpha' in repr(L.SoftRound().to('meta'))

def unannotated(x, *, level=2, sharp=1., step=1., hard=False): return R.soft_round(x, sharp*level, step=step, hard=hard)

def stringly(x, bits:'int'=3, alpha:'float'=5., *, hard:'bool'=False): return R.soft_round(x, alpha*bits, hard=hard)

def test_functions_of_any_kind():
    "What a function takes is read from its signature: no annotations, strings, a `partial`, a staircase of one's own."
    mine = R.staircase('mine', lambda r, p: r + p*r*0, lambda r, p: 1 + p*r*0, p=dict(default=.5))
    layers = {
        L.Rounding(unannotated, level=3, sharp=2): ['sharp'],
        L.Rounding(stringly, bits=4, alpha=2): ['alpha'],
        L.Rounding(partial(R.soft_round, alpha=7)): ['alpha'],
        L.Rounding(partial(R.soft_round, alpha=7), alpha=torch.tensor(2.)): ['alpha'],
        L.Rounding(mine, p=.25): ['p'],
    }
    for layer,knobs in layers.items():
        assert [*layer.state_dict()] == knobs
        assert same(layer.eval()(X), X.round()) and not same(layer.train()(X), X.round())
    assert [l.state_dict()['alpha'].item() for l in list(layers)[2:4]] == [7., 2.]
    assert (list(layers)[0].level, list(layers)[1].bits) == (3, 4)

def test_functions_that_need_numbers():
    "Functions that an empty tensor says nothing about, with knobs that are checked all the same."
    weights = L.Rounding(R.dorefa_weight, R.dorefa_weight, bits=2)
    assert same(weights(X), R.dorefa_weight(X, 2)) and weights.bits == 2
    codes = L.Rounding(R.fsq, R.fsq, levels=(5, 5, 5))
    assert same(codes(X), R.fsq(X, (5, 5, 5)))
    with pytest.raises(ValueError, match='levels must'): L.Rounding(R.fsq, R.fsq, levels=())
    with pytest.raises(TypeError, match='^Rounding: f cannot be called as .*unexpected keyword'):
        L.Rounding(R.dorefa_weight, R.dorefa_weight, bit=2)

ROUNDINGS = dict(partial=partial(R.soft_round, alpha=5.), function=R.soft_round, layer=L.SoftRound(5.),
    foreign=unannotated, cubic=partial(R.cubic_round), deployed=L.Rounding(R.ewgs_round, R.round_ste))

@pytest.mark.parametrize('rounding', ROUNDINGS.values(), ids=ROUNDINGS)
def test_no_soft_value_leaks(rounding):
    layer = L.Rounding(R.lsq, R.lsq, scale=torch.tensor(.1), bits=4, rounding=rounding)
    for m in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same(m.eval()(X), R.lsq(X, torch.tensor(.1), 4))
    layer = L.Rounding(R.lsq, R.lsq, scale=torch.tensor(.1), rounding=partial(R.soft_round, alpha=1.))
    R.KnobScheduler(layer, lambda step: 9.)
    assert layer.rounding.alpha == 9.

@pytest.mark.parametrize('rounding', [R.stochastic_round, R.uniform_noise, lambda v: R.soft_round(v, 5.), nn.Tanh(),
    L.Rounding(R.uniform_noise, R.uniform_noise)], ids=['random', 'noise', 'lambda', 'tanh', 'deployed'])
def test_no_hard_twin(rounding):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r'^Rounding: rounding=.* gives soft or random values in evaluation'):
        L.Rounding(R.lsq, R.lsq, scale=torch.tensor(.1), rounding=rounding)
    assert torch.equal(before, torch.get_rng_state())

def test_swap():
    shared = L.RoundSTE(step=torch.tensor(.5))
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()), L.FloorSTE(offset=.25)).eval()
    L.swap_rounding_(model, (L.RoundSTE, L.FloorSTE), L.SoftRound(2.))
    assert model[0] is model[1][0] and not model[0].training and torch.equal(model[0].step, torch.tensor(.5))
    assert model[2].offset == .25
    assert [*model.state_dict()] == ['0.alpha', '0.step', '1.0.alpha', '1.0.step', '2.alpha']
    assert isinstance(model[1][1], nn.ReLU)
    L.swap_rounding_(model, L.SoftRound, lambda old: L.RoundSTE(step=old.step))
    assert type(model[2]) is L.RoundSTE
    assert torch.equal(model(X), R.round_ste(R.round_ste(R.round_ste(X, step=.5), step=.5).relu()))
    with pytest.raises(ValueError, match='no round inside Sequential; it replaces layers, no call within a forward'):
        L.swap_rounding_(model, torch.round, L.RoundSTE())
    with pytest.raises(ValueError, match='no round_ste inside RoundSTE'):
        L.swap_rounding_(L.RoundSTE(), R.round_ste, L.SoftRound())

def test_weights():
    """Convolutions and attention too, the optimizer's Parameters stay its own, tied
    weights stay tied, and only weights change."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    for n in (2, 4, 4): model.append(nn.Linear(n, 4))
    model[5].weight = model[4].weight
    sgd = torch.optim.SGD(model.parameters(), lr=.1)
    held = {id(p) for p in model.parameters()}
    L.round_weights_(model, lambda layer: L.SoftRound(step=layer.weight.abs().max().item()/3))
    assert {id(p) for p in model.parameters()} == held and not parametrize.is_parametrized(model[1])
    x,start = torch.randn(4, 1, 3, 3, generator=generator()),copy.deepcopy(model.state_dict())
    model(x).square().sum().backward()
    sgd.step()
    assert not torch.equal(start['3.parametrizations.weight.original'], model[3].parametrizations.weight.original)
    steps = [model[i].parametrizations.weight[0].step for i in (0, 3, 4, 5)]
    L.swap_rounding_(model, L.SoftRound, L.RoundSTE())                               # inside the parametrizations
    assert [model[i].parametrizations.weight[0].step for i in (0, 3, 4, 5)] == steps
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(model.state_dict())
    y = model.eval()(x)
    L.remove_rounding_(model)
    assert torch.equal(model(x), y) and torch.equal(loaded.eval()(x), y)
    assert model[4].weight is model[5].weight and {id(p) for p in model.parameters()} == held
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear, nn.Linear, nn.Linear]
    assert [*model.state_dict()] != [*loaded.state_dict()]
    saved(model, weights_only=False)
    L.remove_rounding_(loaded)
    assert torch.equal(loaded(x), y)

def test_weights_by_name():
    mha = nn.MultiheadAttention(4, 2)
    mha = L.round_weights_(mha, L.RoundSTE(step=.25), layers=nn.MultiheadAttention, name='in_proj_weight')
    assert torch.equal(mha.in_proj_weight*4, (mha.in_proj_weight*4).round())
    mha.in_proj_weight = torch.full((12, 4), .3)
    assert torch.equal(mha.in_proj_weight, torch.full((12, 4), .25))
    assert torch.equal(mha.parametrizations.in_proj_weight.original, torch.full((12, 4), .3))
    other = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))            # not ours: it stays
    for leave in (True, False):
        with pytest.raises(ValueError, match='^remove_rounding_: nothing rounds the weights or the inputs of a layer'):
            L.remove_rounding_(other, leave_rounded=leave)
    assert parametrize.is_parametrized(other, 'weight')

class Adds(nn.Module):
    "Layers, a normalization and an addition: what every pass finds."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.n = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 4), nn.BatchNorm2d(4)
    def forward(self, x):
        h = self.n(self.a(x)).relu()
        return self.c((h+self.b(h)).relu().mean((2, 3)))

PASSES = dict(quantize_model_=lambda m, x: R.quantize_model_(m, calibrate=[x]),
    weights=lambda m, x: R.quantize_model_(m, 'e4m3', None), deploy_=lambda m, x: R.deploy_(m, x),
    equalize_=lambda m, x: R.equalize_(m, x),
    low_precision_=lambda m, x: R.low_precision_(m),
    round_weights_=lambda m, x: L.round_weights_(m, L.RoundSTE(step=.1)))

@pytest.mark.parametrize('name', PASSES)
@pytest.mark.parametrize('within', [False, True], ids=['a_model', 'a_model_of_inference'])
def test_passes_within_inference_mode(name, within):
    "The model trains afterwards as one that was made outside; one that never could train is computed with."
    x,models = torch.randn(8, 3, 5, 5, generator=generator()),[]
    for inside in (True, False):
        torch.manual_seed(0)
        with torch.inference_mode(inside and within): model = Adds().eval()
        if name == 'deploy_':
            with torch.inference_mode(inside and within): R.quantize_model_(model, calibrate=[x])
        with torch.inference_mode(inside): PASSES[name](model, x*1)
        held = [*model.parameters(), *model.buffers()]
        assert any(t.is_inference() for t in held) == (inside and within)
        if not within: model(x.requires_grad_()).sum().backward()
        models.append(model)
    one,other = models
    with torch.inference_mode(): assert torch.equal(one(x), other(x))
    if within: return
    grads = [(p.grad, q.grad) for p,q in zip(one.parameters(), other.parameters(), strict=True)]
    assert all(p is q is None or torch.equal(p, q) for p,q in grads)

def test_a_lazy_model_within_inference_mode():
    with torch.inference_mode(), pytest.raises(ValueError, match='^quantize_model_: 0.weight has no shape'):
        R.quantize_model_(nn.Sequential(nn.LazyLinear(4)), 4, None)

# --- a default device elsewhere, as `torch.set_default_device('cuda')` before a model on the CPU
ELSEWHERE = PASSES | dict(reconstruct_=lambda m, x: R.reconstruct_(m, [x]), rotate_=lambda m, x: R.rotate_(m, x),
    smooth_=lambda m, x: R.smooth_(m, [x]), remove_rounding_=lambda m, x: L.remove_rounding_(m))

@pytest.mark.parametrize('name', ELSEWHERE)
def test_passes_with_another_default_device(name):
    "They make what they make without one."
    x,models = torch.randn(8, 3, 5, 5, generator=generator()),[]
    for device in ('meta', 'cpu'):
        torch.manual_seed(0)
        model = Adds().eval()
        if name in ('deploy_', 'reconstruct_', 'remove_rounding_'): R.quantize_model_(model, calibrate=[x])
        with torch.device(device): ELSEWHERE[name](model, x)
        models.append(model)
    states = [m.state_dict() for m in models]
    assert states[0].keys() == states[1].keys()
    for a,b in zip(states[0].values(), states[1].values()): assert same(a, b) if isinstance(a, torch.Tensor) else a == b
    assert same(models[0](x), models[1](x))

def test_a_recurrent_layer_with_another_default_device():
    model,x = nn.LSTM(4, 8),torch.randn(5, 3, 4, generator=generator())
    R.quantize_model_(model, 4, None)
    with torch.device('meta'): assert R.reconstruct_(model, [x]).rows

def test_files_and_sizes_with_another_default_device(tmp_path):
    model = nn.Sequential(nn.Linear(256, 4))
    R.quantize_model_(model, 4, None)
    with torch.device('meta'):
        for t in ('Q8_0', 'Q4_K', 'Q6_K', 'IQ4_NL', 'TQ1_0', 'TQ2_0', 'NVFP4'):
            R.save_gguf(model, tmp_path/'a.gguf', t)
            assert R.same_grid(model, tmp_path/'a.gguf').rows
        R.save_compressed(model, tmp_path/'b')
        assert R.same_grid(model, tmp_path/'b').rows
        assert R.coded_sizes(model).rows and R.weight_entropy(model) > 0
        codes = torch.tensor([1, 1, 2], device='cpu')
        assert R.code_entropy(codes).is_cpu

@pytest.mark.parametrize('make', [lambda: R.Quantizer(), lambda: R.Quantizer(4, rounding=R.soft_round),
    lambda: R.Quantizer(4, rounding=L.StochasticRound())], ids=['nearest', 'soft', 'random'])
def test_a_quantizer_made_on_meta(make):
    "As a large model is, until its state is loaded."
    x = torch.randn(9, generator=generator())
    want = make().calibrate_(x)
    with torch.device('meta'): layer = make()
    layer.load_state_dict(want.state_dict(), assign=True)
    assert same(layer.eval()(x), want.eval()(x))
