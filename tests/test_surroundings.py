"""What surrounds a call and is none of its arguments: torch's default dtype, who else makes a weight, a layer that no
batch reached; and tensors whose rows differ in length."""
from contextlib import contextmanager
import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune
import shok_nb as R


@contextmanager
def default(dtype):
    "Torch's default dtype, for a while."
    was = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try: yield
    finally: torch.set_default_dtype(was)

LEVELS = [-1.03, .1, .777]
X = torch.linspace(-3, 3, 96).view(4, 24).sin()*3

# --- numbers of Python
def test_levels_of_a_list_are_doubles():
    "Once they were float32, and then in whatever dtype `x` has."
    x = torch.tensor([-.9, .2, 5.], dtype=torch.float64)
    assert R.levels_round(x, LEVELS).tolist() == LEVELS
    exact = torch.tensor(LEVELS, dtype=torch.float64)
    assert torch.equal(R.levels_softmax(x, LEVELS), R.levels_softmax(x, exact))

def test_search_compares_doubles():
    "A cost that is a number of Python has 53 bits: here float32 takes all costs for equal."
    def cost(v): return 1e9 + float((v-3).square().sum())
    start,end = torch.zeros(1, dtype=torch.float64),torch.full((1,), 9., dtype=torch.float64)
    found = R.integer_search(cost, start, start, end, black_box=True)
    assert found.x.tolist() == [3.] and found.cost == 1e9

# --- the default dtype
def deployed(format):
    model = nn.Sequential(nn.Linear(24, 8, dtype=torch.float32))
    with torch.no_grad():
        for n,p in enumerate(model.parameters()): p.copy_((torch.arange(p.numel()).float() + n).view(p.shape).sin())
    R.quantize_model_(model, R.Quantizer(format=format, axis=0), None)
    R.deploy_(model.eval(), X)
    return model(X).detach()

USES = {'levels_round': lambda: R.levels_round(X, LEVELS), 'levels_softmax': lambda: R.levels_softmax(X, LEVELS),
    **{f'Quantizer({f})': lambda f=f: R.Quantizer(format=f, axis=0).calibrate_(X)(X) for f in ('e4m3', 'nf4')},
    **{f'deploy_ {f}': lambda f=f: deployed(f) for f in ('e4m3', 'nf4')}}

@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('use', USES)
def test_default_dtype(use, dtype):
    "It changes no value and no dtype of what is float32."
    wanted = USES[use]()
    with default(dtype): found = USES[use]()
    assert found.dtype == torch.float32 and torch.equal(found, wanted)

# --- who makes a weight
class Scaled(nn.Module):
    def forward(self, w): return 2*w

MADE = {'is pruned': lambda m: prune.l1_unstructured(m, 'weight', .5),
    'is made by weight_norm': utils.weight_norm, 'is made by spectral_norm': utils.spectral_norm}

@pytest.mark.parametrize('words', MADE)
def test_round_weights_says_who_makes_one(words):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    MADE[words](model[1])
    with pytest.raises(ValueError, match=f'^round_weights_: weight of Linear {words}; torch.nn.utils'):
        R.nn.round_weights_(model, R.nn.RoundSTE(step=.25))
    assert type(model[0]) is nn.Linear

def test_refusal_reads_no_weight():
    "In training each look at a weight under `spectral_norm` is a step of its power iteration."
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))
    before = {k: v.clone() for k,v in model.state_dict().items()}
    with pytest.raises(ValueError, match='is made by _SpectralNorm'): R.quantize_model_(model, 4, None)
    for k,v in model.state_dict().items(): assert torch.equal(v, before[k]), k

@pytest.mark.parametrize('make', [parametrizations.weight_norm, lambda m, w: parametrize.register_parametrization(m, w,
    Scaled())], ids=['weight_norm', 'own'])
def test_bias_that_is_made(make):
    "Four-bit weights beside it are deployed as they are; `equalize_` leaves its layer, and says why."
    model = nn.Sequential(nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    make(model[2], 'bias')
    y = model(X).detach()
    report = R.equalize_(model, X)
    assert 'its bias is made by' in str(report)
    torch.testing.assert_close(model(X), y)
    R.quantize_model_(model, 4, None)
    y = model(X).detach()
    report = R.deploy_(model.eval(), X)
    assert torch.equal(model(X), y) and [r.kernel for r in report.rows if r.weights == 'int4'] == ['MatMulNBits']*3

# --- what no batch reached
class Aside(nn.Module):
    "It computes with the weight of one layer, and never calls it."
    def __init__(self):
        super().__init__()
        self.called,self.read = nn.Linear(24, 6),nn.Linear(6, 3)
    def forward(self, x): return nn.functional.linear(self.called(x), self.read.weight)

def test_state_of_a_model_with_a_layer_that_no_batch_reached():
    model,other = Aside(),Aside()
    report = R.quantize_model_(model, 4, 8, calibrate=[X])
    assert 'not reached' in str(report)
    R.quantize_model_(other, 4, 8)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(X), model.eval()(X))
    with pytest.raises(RuntimeError, match='Missing key'):          # a state without any
        R.quantize_model_(again := Aside(), 4, 8)
        R.quantize_model_(weights := Aside(), 4, None)
        again.load_state_dict(weights.state_dict())

# --- rows of several lengths
PARTS = torch.tensor([[.3, -1.2, .7], [2., .1, -.4]]),torch.tensor([[-3., .6, 1.4]])
def jagged(): return torch.nested.nested_tensor([*PARTS], layout=torch.jagged)

REFUSE = dict(float_round=lambda x: R.float_round(x, 'e4m3'), ulp=lambda x: R.ulp(x, 'e4m3'), log2_round=R.log2_round,
    levels_round=lambda x: R.levels_round(x, LEVELS), levels_softmax=lambda x: R.levels_softmax(x, LEVELS),
    minmax_init=R.minmax_init, mse_init=R.mse_init, percentile_init=R.percentile_init, sample_init=R.sample_init,
    absmean_init=R.absmean_init, lsq_init=R.lsq_init, ternary_weight=R.ternary_weight, xnor_weight=R.xnor_weight,
    soft_entropy=R.soft_entropy, signround_range=R.signround_range, lfq_entropy=R.lfq_entropy,
    vq=lambda z: R.vq(z, torch.eye(3)), vq_index=lambda z: R.vq_index(z, torch.eye(3)),
    vq_loss=lambda z: R.vq_loss(z, torch.eye(3)), fsq_index=lambda codes: R.fsq_index(codes, [3, 3, 3]))

@pytest.mark.parametrize('name', REFUSE)
def test_jagged_is_refused_by_name(name):
    with pytest.raises(TypeError, match=rf'^{name}: \w+ must be dense, got a jagged tensor; use \w+\.values\(\)'):
        REFUSE[name](jagged())

@pytest.mark.parametrize('options', [dict(bits=4), dict(bits=8, zero_point=True), dict(bits=4, axis=-1)], ids=str)
def test_quantizer_takes_jagged(options):
    "Each part is as it is alone; what looks for a scale wants dense values."
    q = R.Quantizer(init='minmax', **options).calibrate_(torch.cat(PARTS))
    for found,part in zip(q(jagged()).unbind(), PARTS): assert torch.equal(found, q(part))
    with pytest.raises(TypeError, match='^Quantizer: x must be dense'): q.calibrate_(jagged())

@pytest.mark.parametrize('options', [dict(format='e4m3'), dict(bits=4, block=3), dict(format='nf4', axis=-1)], ids=str)
def test_quantizer_of_blocks_refuses_jagged(options):
    q = R.Quantizer(**options).calibrate_(torch.cat(PARTS))
    with pytest.raises(TypeError, match='^Quantizer: x must be dense'): q(jagged())

@pytest.mark.parametrize('name', ['mx_quantize', 'nvfp4_quantize', 'int_quantize', 'gguf_quantize', 'best_quantize'])
def test_blocks_refuse_jagged(name):
    x = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)], layout=torch.jagged)
    more = [[R.mx_quantize]] if name == 'best_quantize' else []
    with pytest.raises(TypeError, match=f'^{name}: x must be dense'): getattr(R, name)(x, *more)

def test_layers_refuse_jagged_knobs():
    with pytest.raises(TypeError, match='^RoundSTE: step must be dense'): R.nn.RoundSTE(step=jagged())

def test_other_calls_that_ended_in_words_of_torch():
    with pytest.raises(ValueError, match=r'^FSQ: features must be in \[1, 2\*\*63\), got 1180591620717411303424'):
        R.FSQ([3, 3], features=2**70)
    assert R.ternary_weight(torch.ones(2, 0), block=3).shape == R.xnor_weight(torch.ones(2, 0), block=3).shape == (2, 0)
    for arg in ('scale', 'zero_point'):
        k = {'scale': 1., 'zero_point': 0.} | {arg: torch.ones(1, 2, 3)}
        told = rf'^gptq: {arg} must broadcast to the shape of w, \(2, 3\), got \(1, 2, 3\)'
        with pytest.raises(ValueError, match=told):
            R.gptq(torch.ones(2, 3), torch.eye(3), **k)

# --- layers that share a quantizer, and torch.func
class Twice(nn.Module):
    "Two layers read one tensor."
    def __init__(self):
        super().__init__()
        self.enter,self.first,self.second = nn.Linear(24, 8),nn.Linear(8, 6),nn.Linear(8, 6)
    def forward(self, x):
        h = self.enter(x).relu()
        return self.first(h) + self.second(h)

def test_functional_call_with_a_shared_quantizer():
    "Torch's own puts a module with two names back under one, if it ties weights."
    model = Twice()
    R.quantize_model_(model, 4, 8, calibrate=[X])
    assert model.first.input_quantizer is model.second.input_quantizer
    parameters = dict(model.named_parameters())
    model(X).square().sum().backward()
    def loss(p): return torch.func.functional_call(model, p, (X,), tie_weights=False).square().sum()
    grads = torch.func.grad(loss)({k: p.detach() for k,p in parameters.items()})
    for k,p in model.named_parameters():
        assert p is parameters[k], k
        torch.testing.assert_close(grads[k], p.grad)

@pytest.mark.parametrize('use', [lambda m: R.nn.round_weights_(m, R.nn.RoundSTE()), lambda m: R.save_gguf(m, 'none')],
    ids=['round_weights_', 'save_gguf'])
def test_a_layer_without_a_shape(use):
    with pytest.raises(ValueError, match='weight.* has no shape; call the model once'): use(nn.LazyLinear(4))
