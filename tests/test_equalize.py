"""Factors that move through two layers: the network computes the same, ranges are as the formulas say, and what is
refused, fails or is interrupted leaves every bit where it was."""
import copy
import math
import sys
from functools import partial
import pytest
import torch
from estimators import look, refused, slow_after
from networks import Holding
from torch import nn
from torch.nn import functional as F
import shok_nb as R


def drawn(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def uneven(model, seed=0):
    "Weights whose channels differ by up to 1000, statistics and biases that are not 0 and 1; float64, evaluation."
    g = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for m in model.modules():
            for p in m.parameters(recurse=False):
                p += .1*torch.randn(p.shape, generator=g, dtype=p.dtype)
                p *= 10**(3*torch.rand(len(p), generator=g, dtype=p.dtype)-1.5).view(-1, *[1]*(p.ndim-1))
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.running_mean.normal_(generator=g)
                m.running_var.uniform_(.3, 3., generator=g)
    return model

def mapped(report): return {r.name: r.into for r in report.rows if r.into != '-'}
def notes(report): return {r.name: r.note for r in report.rows if r.into == '-'}

def failing(model, at=99, error=RuntimeError):
    "A model that fails in a call; it counts them, without those of an export."
    def count(m, args):
        if torch.compiler.is_exporting(): return
        calls.append(1)
        if len(calls) >= at: raise error('here')
    calls = []
    model.counted = calls.__len__
    model.register_forward_pre_hook(count)
    return model

class Elsewhere(Holding):
    "Its output depends on the memory of a weight, which the graph between layers does not show."
    def __init__(self, net, layer):
        super().__init__(net=net, kept=[net.get_submodule(layer).weight.data])
    def forward(self, x): return self.net(x) + self.kept[0][0].norm()

class MyNorm(nn.Module):
    "As in many language models: the factor is its weight, or 1+weight."
    def __init__(self, n, plus=False):
        super().__init__()
        self.weight,self.plus = nn.Parameter(torch.rand(n)+.5),plus
    def forward(self, x):
        h = x.float() if x.dtype is torch.float16 else x
        h = (h*(h.square().mean(-1, keepdim=True)+1e-6).rsqrt()).to(x.dtype)
        return h*(1+self.weight) if self.plus else self.weight*h

class Heads(nn.Module):
    "Attention with two heads of values, a gated pair, normalizations that share their factor, and a residual."
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm1,self.norm2,self.norm3 = norm(8),norm(8),norm(8)
        self.q,self.k,self.v,self.out = (nn.Linear(8, 8) for _ in range(4))
        self.gate,self.up,self.down,self.head = nn.Linear(8, 12),nn.Linear(8, 12),nn.Linear(12, 8),nn.Linear(8, 3)
    def forward(self, x):
        h = self.norm1(x)
        q,k,v = (m(h).unflatten(-1, (2, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h))*self.up(h))
        x = self.norm3(x)
        return self.head(x) + x.mean()

class ByHand(nn.Module):
    "Values by two products of matrices, one key head for two of queries, a cast, and a constant factor."
    def __init__(self):
        super().__init__()
        self.q,self.v,self.out = nn.Linear(6, 8),nn.Linear(6, 4),nn.Linear(8, 6)
    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        v = (self.v(x)/3).to(x.dtype)[:, None].expand(-1, 2, -1, -1)
        return self.out(((q@q.mT).softmax(-1)@v).transpose(1, 2).flatten(2))

def chain():
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8),
        nn.BatchNorm2d(8, affine=False), nn.PReLU(8), nn.MaxPool2d(2), nn.Conv2d(8, 6, 1, groups=2), nn.LeakyReLU(),
        nn.AvgPool2d(2, padding=1), nn.Flatten(), nn.Linear(24, 5), nn.Dropout(), nn.Linear(5, 2))

class Branches(nn.Module):
    "Half of the channels each way, shuffled, padded and enlarged."
    def __init__(self):
        super().__init__()
        self.first,self.left,self.right = nn.Conv1d(2, 6, 1),nn.Conv1d(3, 2, 2),nn.ConvTranspose1d(3, 2, 2)
    def forward(self, x):
        h = F.pad(self.first(x).relu(), (1, 2)).flip(1)
        a,b = h.chunk(2, 1)
        return self.left(a).sum(2) + self.right(F.interpolate(b, scale_factor=2)).sum(2)

NETWORKS = {
    'chain': (chain, (4, 3, 10, 10), {'0': '3', '3': '7', '7': '11', '11': '13'}),
    'transposed': (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3,
        groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)), (2, 4, 5, 5), {'0': '2', '2': '5'}),
    'branches': (Branches, (3, 2, 5), {'first': 'left, right'}),
    'one image': (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), (2, 8, 8), {'0': '2'}),
    'three axes': (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.ReLU(), nn.Conv3d(4, 2, 2)), (2, 2, 4, 4, 4),
        {'0': '2'}),
    'one row': (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), (3, 4),
        {'0': '3'}),
    'heads': (Heads, (2, 5, 8), {'v': 'out', 'up': 'down'}),
    'by hand': (ByHand, (2, 5, 6), {'v': 'out'}),
}

@pytest.mark.slow
@pytest.mark.parametrize('name', NETWORKS)
def test_equalized_is_the_same_and_even(name):
    """The same output on other inputs too, to float64; the same pairs as by hand; both sides of a pair alike.
    Any seed: all are identities."""
    make,shape,pairs = NETWORKS[name]
    model,x = uneven(make()),drawn(*shape).double()
    other = drawn(*shape, seed=1).double()
    wanted,modules = model(other),[type(m) for m in model.modules()]
    report = R.equalize_(model, x)
    torch.testing.assert_close(model(other), wanted, rtol=1e-9, atol=1e-9*wanted.abs().max().item())
    assert mapped(report) == pairs
    assert all(r.after <= r.before for r in report.rows if r.into != '-')
    folds = [r.note for r in report.rows if 'folded' in r.note]
    assert sum(m is nn.Identity for m in map(type, model.modules())) == len(folds)
    assert len([*model.modules()]) == len(modules)

def test_rows_and_columns_get_one_range():
    "Of a pair without anything around it: sqrt(r1*r2) exactly, the formula of the paper. Any seed."
    model = uneven(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)))
    rows,columns = model[0].weight.detach().abs().amax(1),model[2].weight.detach().abs().amax(0)
    bias = model[0].bias.detach().clone()
    R.equalize_(model, drawn(2, 5).double())
    both = (rows*columns).sqrt()
    torch.testing.assert_close(model[0].weight.detach().abs().amax(1), both)
    torch.testing.assert_close(model[2].weight.detach().abs().amax(0), both)
    torch.testing.assert_close(model[0].bias.detach(), bias*(columns/rows).sqrt())

@pytest.mark.slow
def test_a_channel_that_is_read_twice():
    "Of its two columns the larger one counts. Any seed."
    model = uneven(ByHand())
    R.equalize_(model, drawn(2, 5, 6).double())
    columns = model.out.weight.detach().abs().amax(0).view(2, 4).amax(0)
    torch.testing.assert_close(model.v.weight.detach().abs().amax(1), columns, rtol=.01, atol=0)

@pytest.mark.slow
def test_a_chain_is_balanced_to_the_end():
    "Where every pair is even within the 1 % at which it stops; 300 times uneven before. Any seed."
    model = uneven(nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(9, 9), nn.ReLU())]))
    R.equalize_(model, drawn(2, 9).double())
    for a,b in zip(model[0:10:2], model[2:12:2]):
        ratio = a.weight.abs().amax(1)/b.weight.abs().amax(0)
        assert (ratio-1).abs().max() < .03

@pytest.mark.parametrize('alpha', slow_after([.3, 1., 0., .5], 2))
@pytest.mark.parametrize('norm', [nn.LayerNorm, nn.RMSNorm])
def test_smoothed_is_the_same_and_by_the_formula(norm, alpha):
    """Query, key and value share max|x|^alpha/max|w|^(1-alpha); over two batches, which may
    come from a generator. Any seed."""
    model,x = uneven(Heads(norm)),drawn(4, 5, 8).double()
    h = model.norm1(x).detach().abs().amax((0, 1))
    readers = model.q,model.k,model.v
    most = torch.stack([m.weight.detach().abs().amax(0) for m in readers]).amax(0)
    factor = h**alpha/most**(1-alpha)
    was = [m.weight.detach().clone() for m in (model.norm1, *readers)]
    wanted = model(x)
    report = R.smooth_(model, iter(x.split(2)), alpha)
    torch.testing.assert_close(model(x), wanted, rtol=1e-9, atol=1e-9*wanted.abs().max().item())
    torch.testing.assert_close(model.norm1.weight.detach(), was[0]/factor)
    torch.testing.assert_close(model.q.weight.detach(), was[1]*factor)
    torch.testing.assert_close(model.k.weight.detach(), was[2]*factor)
    assert mapped(report) == {'norm1': 'q, k, v', 'v': 'out', 'norm2': 'gate, up', 'up': 'down'}
    told = notes(report)
    assert told['norm3'] in ('mean reads it', 'add reads it') and told['gate'] == 'silu reads it'
    assert told['q'] == 'scaled_dot_product_attention reads it' and told['out'] == 'add reads it'
    if alpha == 1.: assert all(r.after == 1. for r in report.rows if r.into != '-')

@pytest.mark.slow
def test_normalizations_of_others():
    "A weight that is a factor takes one; one that is not, such as 1+weight, does not."
    for plus,into in ((False, '1'), (True, '-')):
        model = nn.Sequential(MyNorm(4, plus), nn.Linear(4, 2))
        assert R.smooth_(model, [drawn(8, 4)]).rows[0].into == into
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), nn.GroupNorm(2, 2), nn.ReLU(), nn.Conv2d(2, 2, 1),
        nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 2)).eval()
    report = R.smooth_(model, [drawn(3, 4, 5, 5)])
    assert mapped(report) == {'0': '1', '2': '4'}
    assert notes(report)['5'] == 'it has no weight to take a factor'

def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), layer, layer, nn.Linear(4, 4))

class Squared(nn.Module):
    "What leaves the first layer is multiplied by itself; of the second, one half is added to the other."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c,self.d = nn.Linear(4, 4),nn.Linear(4, 4),nn.Linear(4, 8),nn.Linear(4, 2)
    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h*h)).unflatten(-1, (2, 4)).mean(-2))

def around(m, n=4): return nn.Sequential(nn.Linear(4, 4), m, nn.Linear(n, 2))

REFUSED = {
    'twice': (twice, {'0': '1 is called more than once', '1': 'called more than once', '3': 'the model returns it'}),
    'squared': (Squared, dict(a='mul reads it', c='channels mix before d', d='the model returns it')),
    'weight norm': (lambda: around(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        {'0': '1: its weight is made by _WeightNorm', '1': 'its weight is made by'}),
    'clipped': (lambda: around(nn.ReLU6()), {'0': 'hardtanh reads it'}),
    'max of channels': (lambda: around(nn.MaxPool1d(2), 2), {'0': 'channels mix before 2'}),
    'mean of channels': (lambda: around(nn.AvgPool1d(2), 2), {'0': 'channels mix before 2'}),
    'padded with ones': (lambda: around(nn.ConstantPad1d(1, 1.), 6), {'0': 'pad reads it'}),
}

@pytest.mark.parametrize('name', REFUSED)
def test_what_is_refused_is_told_and_stays(name):
    make,wanted = REFUSED[name]
    model = make().eval()
    was = look(model)
    report = R.equalize_(model, drawn(3, 4))
    told = notes(report)
    for layer,note in wanted.items(): assert note in told[layer], told
    assert (look(model) == was) == (not mapped(report))

@pytest.mark.slow
def test_relu6_becomes_relu_if_asked():
    """The output is that of the network with ReLU; nothing changes where no value is clipped; what is no ReLU6 stays.
    Any seed."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU6(), nn.Linear(8, 8), nn.Hardtanh(), nn.Linear(8, 8),
        nn.Hardtanh(0, 1), nn.Linear(8, 2)).double()
    plain,x = copy.deepcopy(model),drawn(3, 4).double()*100
    plain[1],plain[5] = nn.ReLU(),nn.ReLU()
    report = R.equalize_(model, x, relu6='relu')
    assert mapped(report) == {'0': '2', '4': '6'} and notes(report)['2'] == 'hardtanh reads it'
    assert report.note.startswith('ReLU in place of 2 ReLU6: the output of the example changed by ')
    torch.testing.assert_close(model(x), plain(x))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU6(), nn.Linear(8, 2))
    assert 'changed by 0.0e+00 ' in R.equalize_(model, drawn(3, 4)/100, relu6='relu').note
    assert R.equalize_(nn.Linear(4, 2), drawn(3, 4), relu6='relu').note == ''

def test_a_weight_with_two_names():
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9, bias=False))
    model[2].weight = model[0].weight
    was = look(model)
    report = R.smooth_(model, [torch.arange(9)])
    assert notes(report)['1'] == '2: its weight is shared'
    assert look(model) == was

@pytest.mark.slow
@pytest.mark.parametrize('relu6', ['keep', 'relu'])
def test_another_output_puts_everything_back(relu6):
    "Normalizations that were folded, each ReLU6, and modes and hooks."
    model = nn.Sequential(Elsewhere(net=chain(), layer='13'), nn.ReLU6()).train()
    model[0].net[2].eval()
    with refused(model, 'equalize_: the output would change by .*the model is as it was', ValueError):
        R.equalize_(model, drawn(2, 3, 10, 10), relu6=relu6)

@pytest.mark.slow
@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_puts_everything_back(error):
    "In the second batch of the calibration, and in the last run of the network."
    def network(): return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    counting,batches = failing(network()),drawn(8, 4).split(4)
    R.smooth_(counting, batches)
    for at in range(2, counting.counted()+1):
        model = failing(network(), at, error)
        with refused(model, 'here', (error, ValueError)): R.smooth_(model, batches)

class Counting(nn.Module):
    "A chain that counts its runs in a buffer, through `.data`."
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.register_buffer('runs', torch.zeros(3))
    def forward(self, x):
        if not torch.compiler.is_compiling(): self.runs.data.add_(1)      # a graph has no place for it
        return self.net(x)

@pytest.mark.parametrize('change', [lambda m, x: R.equalize_(m, x), lambda m, x: R.smooth_(m, [x])])
def test_what_its_forward_writes_is_taken_back(change):
    model = Counting()
    assert mapped(change(model, drawn(4, 4))) and not model.runs.any()

@pytest.mark.slow
def test_training_goes_on():
    "Parameters stay the objects they were, so that an optimizer has them; a new bias learns too."
    model = chain().train()
    held = {n: p for n,p in model.named_parameters() if not n.startswith(('1.', '4.'))}
    R.equalize_(model, drawn(2, 3, 10, 10))
    now = dict(model.named_parameters())
    assert all(now[n] is p for n,p in held.items()) and '0.bias' in now
    assert model.training
    model(drawn(2, 3, 10, 10)).sum().backward()
    assert now['0.bias'].grad is not None

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    "Within the rounding of these numbers; any seed."
    model,x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype),drawn(9, 16)
    with torch.no_grad(): model[0].weight[3] *= 50
    x = x.to(dtype)
    wanted = model(x).float()
    assert mapped(R.smooth_(model, [x])) == {'0': '1', '1': '3'} and mapped(R.equalize_(model, x)) == {'1': '3'}
    bound = 16*torch.finfo(dtype).eps*wanted.abs().max()
    assert (model(x).float()-wanted).abs().max() < bound and model[0].weight.dtype == dtype

def test_dead_channels_and_zeros():
    "No division by 0: rows, columns and inputs that are 0 keep their factor of 1."
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[2].weight[:, 2] = 0
    row,bias = model[0].weight[2].clone(),model[0].bias[1].clone()
    R.equalize_(model, drawn(3, 4))
    assert torch.equal(model[0].weight[2], row) and model[0].bias[1] == bias
    assert all(p.isfinite().all() for p in model.parameters())
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    with torch.no_grad(): model[0].weight[2] = 0
    R.smooth_(model, [drawn(3, 4)])
    assert all(p.isfinite().all() for p in model.parameters()) and model[0].weight[2] == 0

def test_bad_input():
    model,x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),drawn(3, 4)
    def bad(match, f, *args):
        with refused(model, match, ValueError): f(model, *args)
    bad('^smooth_: calibrate gave no batch', R.smooth_, [])
    bad('^smooth_: alpha must be in', R.smooth_, [x], 1.5)
    bad('^smooth_: nan or infinity enters 1', R.smooth_, [x, x*math.nan])
    was = sys.gettrace()
    bad('^smooth_: the model does not take calibrate', R.smooth_, [x[:, :3]])
    assert sys.gettrace() is was
    bad('^equalize_: the model does not take example', R.equalize_, x[:, :3])
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 2))
    R.quantize_model_(model)                      # without batches: it cannot run
    bad('^equalize_: the model is quantized', partial(R.equalize_, relu6='relu'), x)
    assert mapped(R.equalize_(nn.ReLU(), x)) == {}

class Asks(nn.Module):
    "Reads a value to decide: no graph can be made of it."
    def __init__(self):
        super().__init__()
        self.norm,self.a,self.b = nn.LayerNorm(8),nn.Linear(8, 8),nn.Linear(8, 4)
    def forward(self, x):
        y = self.a(self.norm(x))
        if y.sum() > 0: y = 2*y
        return self.b(y)

@pytest.mark.parametrize('f', (R.equalize_, R.rotate_))
def test_no_graph_names_the_line(f):
    line = Asks.forward.__code__.co_firstlineno+2
    words = f'^{f.__name__}: the model has no graph: .*, line {line} of forward in test_equalize.py'
    model = Asks()
    with refused(model, words, ValueError): f(model, torch.ones(3, 8))

class Words(nn.Module):
    "Constants of its code look like names: a tuple, an empty one, and one that ends with the name of a value."
    plain = True
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4, 8),nn.Linear(8, 2)
    def forward(self, x):
        shape = ()
        h = self.a(x)
        kept = ('no', 'h') if self.plain else h
        return self.b(F.relu(h)).sum(shape, keepdim=True) if self.plain else kept

def test_constants_of_code_are_no_values():
    "A tuple that the code loads says nothing about which names were read beside it."
    model,x = Words(),drawn(3, 4)
    report = R.equalize_(model, x)
    assert notes(report)['a'].endswith(' is used in Words.forward, of which a part did not run')

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4, 8),nn.Linear(8, 2)
    def forward(self, x): return self.b(F.relu(self.a(x))) + F.relu(self.a(x)).sum()

class Over(Plain):
    "Takes the place of a forward that would keep the layers apart."
    def forward(self, x): return self.b(F.relu(self.a(x)))

class Above(Plain):
    def forward(self, x, plain=False):
        if plain: return super().forward(x)
        return self.b(F.relu(self.a(x)))

class Named(Plain):
    def forward(self, x, plain=False): return Plain.forward(self, x) if plain else self.b(F.relu(self.a(x)))

@pytest.mark.parametrize('kind', (Over, Above, Named))
def test_a_forward_that_another_takes_the_place_of(kind):
    "It cannot run, unless the class speaks of the one above."
    report = R.equalize_(kind(), drawn(3, 4))
    if kind is Over: assert mapped(report) == dict(a='b')
    else: assert notes(report)['a'] == f'b is used in {kind.__name__}.forward, of which a part did not run'

class Managed(nn.Module):
    "What a library gives each model: its methods name the table, and no run of the model calls them."
    __module__ = 'transformers.modeling_utils'
    def get_input_embeddings(self): return self.embed
    def set_input_embeddings(self, table): self.embed = table

class Scored(Managed):
    "A loss of the logits where labels are given, as causal models of transformers have it."
    def __init__(self):
        super().__init__()
        self.embed,self.norm = nn.Embedding(9, 8),nn.RMSNorm(8)
        self.up,self.down,self.head = nn.Linear(8, 16),nn.Linear(16, 8),nn.Linear(8, 9)
    def forward(self, words, labels=None):
        h = self.embed(words)
        h = h + self.down(F.silu(self.up(self.norm(h))))
        logits = self.head(h)
        loss = None
        if labels is not None: loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits if loss is None else (loss, logits)

def test_what_a_reader_gives_may_be_used_anywhere():
    model = Scored().double().eval()
    words = torch.arange(10).view(2, 5) % 9
    loss,logits = model(words, words)
    report = R.rotate_(model, words)
    assert mapped(report) == dict(embed='head, up', down='head, up'), report
    again = model(words, words)
    torch.testing.assert_close(again, (loss, logits))

class Generic(nn.Module):
    "A head of a library: its forward is part of what the model computes."
    __module__ = 'transformers.modeling_layers'
    def forward(self, x, features=False):
        h = self.a(x)
        if features: return h
        return self.b(F.relu(h))

class Classifier(Generic):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(4, 8),nn.Linear(8, 2)

def test_a_forward_of_a_library_is_read():
    told = notes(R.equalize_(Classifier(), drawn(3, 4)))
    assert told['a'] == 'h is used in Classifier.forward, of which a part did not run'
