"""Orthogonal matrices between layers: the network computes the same, all that must turn together does, and what is
refused, fails or is interrupted leaves every bit where it was."""
import copy
import pytest
import torch
from estimators import look, refused
from test_equalize import Elsewhere, MyNorm, drawn, failing, mapped, notes, uneven
from torch import nn
from torch.nn import functional as F
import shok_nb as R
from shok_nb.post_training.rotate import _orthogonal, hadamard_matrix, keeping_the_sum


class Language(nn.Module):
    "Words, learned positions, one key head for two of queries, queries that turn with the position, a gated pair."
    def __init__(self, norm, n=12, bias=False):
        super().__init__()
        self.embed,self.place = nn.Embedding(9, n, padding_idx=0),nn.Parameter(torch.randn(1, 5, n))
        self.norm1,self.norm2,self.norm3 = norm(n),norm(n),norm(n)
        self.q,self.k,self.v = nn.Linear(n, 8, bias),nn.Linear(n, 4, bias),nn.Linear(n, 4, bias)
        self.out,self.gate,self.up = nn.Linear(8, n, bias),nn.Linear(n, 16, bias),nn.Linear(n, 16)
        self.down,self.head = nn.Linear(16, n),nn.Linear(n, 9, bias)
    def forward(self, words):
        x = self.embed(words)*3.5 + self.place
        h = self.norm1(x)
        q,k,v = (m(h).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        turn = torch.linspace(0, 1, 4, dtype=x.dtype).cos()
        q,k,v = q*turn,k*turn,v.expand(-1, 2, -1, -1)
        h = F.scaled_dot_product_attention(q, k.expand(-1, 2, -1, -1), v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(h), training=self.training)
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h))*self.up(h))
        return self.head(self.norm3(x)[:, 1:])

class Halves(nn.Module):
    "Values that are split, put together, averaged and padded with zeros."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Linear(4, 8),nn.Linear(4, 8),nn.Linear(8, 3)
    def forward(self, x):
        a,b = torch.cat([self.a(x), -self.b(x)], 1).chunk(2, 1)
        return self.c(F.pad((a+2*b).mean(0, keepdim=True), (0, 0, 1, 0)))

WORDS = torch.arange(10).view(2, 5) % 9
STREAM = 'head, up, gate and 3 more'
LANGUAGE = dict(embed=STREAM, v='out', out=STREAM, down=STREAM)
NETWORKS = {
    'layer norm': (lambda: Language(nn.LayerNorm), WORDS, LANGUAGE),
    'rms norm': (lambda: Language(nn.RMSNorm, bias=True), WORDS, LANGUAGE),
    'a norm of others': (lambda: Language(MyNorm, 10), WORDS, LANGUAGE),
    'halves': (Halves, drawn(2, 6, 4).double(), dict(a='c', b='c')),
    'a chain': (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
        drawn(3, 4).double(), {'0': '1'}),
    'images': (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.AvgPool2d(2), nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2), nn.Conv2d(4, 2, 1)), drawn(2, 2, 10, 10).double(), {'0': '2', '4': '5'}),
}

@pytest.mark.slow
@pytest.mark.parametrize('name', NETWORKS)
def test_rotated_is_the_same(name):
    "To float64, on other inputs too; the same pairs as by hand; every weight of them is another. Any seed."
    make,x,pairs = NETWORKS[name]
    model = uneven(make())
    other = (x+3) % 9 if x is WORDS else drawn(*x.shape, seed=1).double()
    was,wanted = copy.deepcopy(model),model(other).detach()
    report = R.rotate_(model, x)
    torch.testing.assert_close(model(other), wanted, rtol=1e-9, atol=1e-9*wanted.abs().max().item())
    got = mapped(report)
    assert got.keys() == pairs.keys()
    for k,into in pairs.items():
        assert got[k] == into or into is STREAM and got[k].endswith('and 3 more')
        for n in (k, *(() if into is STREAM else into.split(', '))):
            assert (model.get_submodule(n).weight-was.get_submodule(n).weight).abs().max() > .1
    if x is WORDS:
        assert (model.place-was.place).abs().max() > .1
        for m in (model.norm1, model.norm2, model.norm3): assert (m.weight == 1).all()
        for n in 'qk': assert notes(report)[n] == 'mul reads it'
        assert notes(report)['gate'] == 'silu reads it' and notes(report)['head'] == 'the model returns it'

def test_a_pair_turns_by_one_matrix():
    "Of a function: rows by its transpose, columns by itself. Any seed."
    model = uneven(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    q = _orthogonal(6, torch.Generator().manual_seed(5))
    a,bias,b = (p.detach().clone() for p in (model[0].weight, model[0].bias, model[1].weight))
    R.rotate_(model, drawn(2, 4).double(), lambda n: q)
    torch.testing.assert_close(model[0].weight.detach(), q.mT@a)
    torch.testing.assert_close(model[0].bias.detach(), bias@q)
    torch.testing.assert_close(model[1].weight.detach(), b@q)

@pytest.mark.parametrize('n', [1, 2, 12, 33, 64])
@pytest.mark.parametrize('make', [hadamard_matrix, _orthogonal])
def test_matrices(make, n):
    "Orthogonal, with the reflection too, which keeps sums; of a power of 2, every entry has one size. Any seed."
    q = make(n, torch.Generator().manual_seed(n))
    eye,ones = torch.eye(n, dtype=torch.float64),torch.ones(n, dtype=torch.float64)
    kept = keeping_the_sum(q)
    for m in (q, kept): torch.testing.assert_close(m@m.mT, eye)
    torch.testing.assert_close(kept@ones, ones)
    torch.testing.assert_close(keeping_the_sum(kept), kept)
    if make is hadamard_matrix and n in (1, 2, 64): torch.testing.assert_close(q.abs(), torch.full_like(q, n**-.5))

@pytest.mark.slow
def test_the_same_seed_gives_the_same():
    start,found = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),[]
    for seed in (0, 0, 1):
        model = copy.deepcopy(start)
        R.rotate_(model, drawn(3, 4), seed=seed)
        found.append(model[0].weight)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])

class Residual(nn.Module):
    "What `around` makes of the stream; a normalization behind the sum where `last`."
    def __init__(self, around, first=True, returns=False, last=False):
        super().__init__()
        self.first = nn.Linear(4, 8) if first else nn.Identity()
        self.norm,self.layer,self.head = nn.LayerNorm(8),nn.Linear(8, 8),nn.Linear(8, 2)
        self.around,self.returns,self.last = around,returns,last
    def forward(self, x):
        x = self.first(x)
        x = self.norm(x+self.layer(x)) if self.last else x + self.layer(self.norm(x))
        x = self.around(x)
        y = self.head(x+self.layer(x)) if self.last else self.head(x)
        return (y, x) if self.returns else y

def tied():
    model = Language(nn.RMSNorm)
    model.head.weight = model.embed.weight
    return model

REFUSED = {
    'a curve': (lambda: Residual(torch.relu), dict(first='relu reads it', layer='relu reads it')),
    'a factor for each': (lambda: Residual(lambda x: x*torch.linspace(1, 2, 8)), dict(first='mul reads it')),
    'returned': (lambda: Residual(torch.clone, returns=True), dict(first='the model returns it')),
    'the input': (lambda: Residual(torch.clone, first=False), dict(layer='an input or a constant is part of it')),
    'a constant': (lambda: Residual(lambda x: x+torch.linspace(1, 2, 8)), dict(first='is part of it')),
    'a norm behind': (lambda: Residual(torch.clone, last=True), dict(first='norm: ')),
    'tied': (tied, dict(embed='its weight is shared', down='its weight is shared')),
    'a largest norm': (lambda: nn.Sequential(nn.Embedding(9, 8, max_norm=1.), nn.Linear(8, 2)),
        {'0': 'it has a largest norm'}),
    'batch norm': (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), {'0': '1 reads it'}),
    'shuffled channels': (lambda: Residual(lambda x: x.view(-1, 2, 4).mT.flatten(1)), dict(first=' reads it')),
    'groups': (lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 8, 1), nn.Conv1d(8, 8, 1, groups=4),
        nn.Flatten(), nn.Linear(8, 2)), {'1': '2: groups cut its channels'}),
}

@pytest.mark.slow
@pytest.mark.parametrize('name', REFUSED)
def test_what_is_refused_is_told_and_stays(name):
    make,wanted = REFUSED[name]
    model = make().eval()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, (nn.LayerNorm, nn.RMSNorm)): m.weight += .5
    was = look(model)
    x = WORDS if any(isinstance(m, nn.Embedding) for m in model.modules()) else drawn(3, 4)
    report = R.rotate_(model, drawn(3, 8) if name == 'the input' else x)
    told = notes(report)
    for layer,note in wanted.items(): assert note in told[layer], told
    if name == 'a largest norm': return             # its table changes in each call
    if not mapped(report): assert look(model) == was
    else: assert name == 'tied' and mapped(report) == {'v': 'out'}

@pytest.mark.slow
@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError])
def test_an_error_puts_everything_back(error):
    "In the last call and in the one before it, when weights are others already; new biases go too."
    def network(): return uneven(Language(nn.LayerNorm)).train()
    counting = failing(network())
    R.rotate_(counting, WORDS)
    calls = counting.counted()
    for at in (calls, calls-1):
        model = failing(network(), at, error)
        with refused(model, 'here', error): R.rotate_(model, WORDS)

@pytest.mark.slow
def test_another_output_puts_everything_back():
    model = Elsewhere(net=uneven(Language(nn.LayerNorm)), layer='down').train()
    with refused(model, 'rotate_: the output would change by .*the model is as it was', ValueError):
        R.rotate_(model, WORDS)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    "Within the rounding of these numbers; any seed."
    model = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 4)).to(dtype)
    x = drawn(9, 8).to(dtype)
    wanted = model(x).float()
    assert mapped(R.rotate_(model, x)) == {'0': '2'}
    assert (model(x).float()-wanted).abs().max() < 16*torch.finfo(dtype).eps*wanted.abs().max()
    assert model[0].weight.dtype == dtype

@pytest.mark.slow
def test_bad_input():
    model,x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),drawn(3, 4)
    def bad(match, *args):
        with refused(model, match, ValueError): R.rotate_(model, *args)
    bad('^rotate_: the model does not take example', x[:, :3])
    bad(r'^rotate_: rotation\(8\) must be a floating Tensor of shape \(8, 8\), got \(4, 4\)', x, lambda n: torch.eye(4))
    bad(r'^rotate_: rotation\(8\) is not orthogonal', x, lambda n: 2*torch.eye(n))
    bad('^rotate_: example .*proves nothing', x/0)
    assert mapped(R.rotate_(nn.ReLU(), x)) == {}
