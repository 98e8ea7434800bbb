"""Who reads a tensor, beside those that one run shows: after each change the network computes the same in both modes,
with every flag, size and method, or the tensor is left alone by name."""
import random
import pytest
import torch
from estimators import look, refused, slow_after
from test_equalize import drawn, mapped, notes
from torch import nn
from torch.nn import functional as F
import shok_nb as R


class Net(nn.Module):
    "Channel 2 of the normalization and channel 3 of `a` are outliers."
    def __init__(self, **others):
        super().__init__()
        self.norm,self.flag = nn.LayerNorm(8),False
        self.a,self.b,self.head,self.aux = nn.Linear(8, 8),nn.Linear(8, 8),nn.Linear(8, 3),nn.Linear(8, 3)
        for k,m in others.items(): setattr(self, k, m)
        with torch.no_grad():
            self.norm.weight[2] *= 50
            self.a.weight[3] *= 30
    def mid(self, x): return self.a(self.norm(x)).relu()
    def rest(self, h): return self.head(self.b(h).relu())
    def forward(self, x): return self.rest(self.mid(x)) + self.aux(x)

class FlagHead(Net):
    def forward(self, x):
        h = self.mid(x)
        return self.rest(h) + self.aux(h) if self.flag else self.rest(h)

class InTraining:
    "The flag is the mode."
    flag = property(lambda self: self.training, lambda self, value: None)

class TrainingHead(InTraining, FlagHead): pass

class DeepSupervision(Net):
    "Every stage has a head in training, and the stages are a list."
    def __init__(self): super().__init__(stages=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), heads=nn.ModuleList(
        nn.Linear(8, 3) for _ in range(3)))
    def forward(self, x):
        y = self.head(x) + self.aux(x)
        for stage,head in zip(self.stages, self.heads):
            x = stage(x).relu()
            if self.training: y = y + head(x)
        return y + self.b(x).sum(1, keepdim=True)

class FlagOther(Net):
    "With the flag a head that is known reads another tensor."
    def forward(self, x):
        h = self.mid(x)
        if self.flag: return self.head(h) + self.aux(x)
        return self.rest(h) + self.aux(x)

class FlagCurve(Net):
    "The flag is asked in one line, and changes no layer."
    def forward(self, x):
        h = self.a(self.norm(x))
        h = F.gelu(h) if self.flag else h.relu()
        return self.rest(h) + self.aux(x)

class Encodes(Net):
    def encode(self, x): return self.mid(x)

class Scores(Net):
    def encode(self, x): return self.aux(self.mid(x))
    def forward(self, x): return self.rest(self.mid(x))

class EarlyExit(Net):
    def forward(self, x):
        h = self.mid(x)
        if len(x) == 1: return self.head(h) + self.aux(x)
        return self.rest(h) + self.aux(x)

class Functional(Net):
    "The weight of a layer, beside the layer."
    def forward(self, x): return super().forward(x) + F.linear(x, self.b.weight).sum(1, keepdim=True)

class FunctionalByFlag(Net):
    def forward(self, x):
        y = super().forward(x)
        return y + F.linear(x, self.b.weight).sum(1, keepdim=True) if self.flag else y

class FunctionalInTraining(InTraining, FunctionalByFlag): pass

class DropsPath(Net):
    def __init__(self): super().__init__(drop=nn.Dropout(.3), batch=nn.BatchNorm1d(8))
    def forward(self, x):
        h = F.dropout(self.batch(self.drop(self.mid(x))), .2, self.training)
        return self.rest(h) + self.aux(x)

NETWORKS = (Net, TrainingHead, DeepSupervision, FlagHead, FlagOther, FlagCurve, Encodes, Scores, EarlyExit, Functional,
    FunctionalInTraining, FunctionalByFlag)

def views(model, x):
    "The network in both modes, with its flag, on one row, and by its other method."
    found = []
    for model.flag in (False, True):
        for training in (True, False): found += [model.train(training)(x), model(x[:1])]
    model.flag = False
    return found + ([model.encode(x)] if hasattr(model, 'encode') else [])

def changed(name, model, x): return getattr(R, name)(model, [x] if name == 'smooth_' else x)

@pytest.mark.parametrize('name', slow_after(['equalize_', 'smooth_', 'rotate_'], 1))
@pytest.mark.parametrize('make', NETWORKS)
def test_the_same_however_it_is_run(make, name):
    "To float64; any seed: all are identities."
    model,x = make().double(),drawn(6, 8).double()
    with torch.no_grad():
        wanted = views(model, x)
        report = changed(name, model, x)
        for a,b in zip(views(model, x), wanted): torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-8)
    if make is Net and name != 'rotate_': assert mapped(report)['a'] == 'b'

NOTES = {TrainingHead: 'in training aux reads it', FlagHead: 'aux could read it and was not reached',
    Scores: 'aux could read it and was not reached', FlagOther: 'h is used in FlagOther.forward',
    FlagCurve: 'h is used in FlagCurve.forward', Encodes: 'mid is used in Encodes.encode',
    EarlyExit: 'h is used in EarlyExit.forward', Functional: 'b: its weight is used outside of it'}

@pytest.mark.parametrize('make', NOTES)
def test_what_may_read_is_named(make):
    assert NOTES[make] in notes(R.equalize_(make(), drawn(6, 8)))['a']

class Asks(Net):
    "A value decides in training: no graph can be made there."
    def forward(self, x):
        if self.training and x.mean() > 1e9: raise ValueError('diverged')
        return super().forward(x)

@pytest.mark.parametrize('name', ['equalize_', 'smooth_', 'rotate_'])
def test_no_graph_in_training_is_told(name):
    note = changed(name, Asks(), drawn(6, 8)).note
    assert note.startswith('no graph in training (') and note.endswith('): two runs there were compared')

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 3)

class Flips(Pair):
    "In training channels come in the opposite order."
    def forward(self, x):
        h = self.a(x).relu()
        if self.training: h = h.flip(-1)
        return self.b(h)

class Refines(Pair):
    "In evaluation alone it adds something."
    def forward(self, x):
        y = x[:, :3]
        if not self.training: y = y + self.b(self.a(x).relu())
        return y

def test_layers_that_do_otherwise_in_training():
    assert notes(R.equalize_(Flips(), drawn(6, 8)))['a'] == 'in training channels have other places'
    assert mapped(R.equalize_(Refines(), drawn(6, 8))) == {'a': 'b'}

def test_dropout_and_statistics_stay_out_of_it():
    "They change values in training and not what reads them; statistics, counts and random numbers stay."
    model = DropsPath()
    model.count,state = [1],torch.get_rng_state()
    was = {k: t.clone() for k,t in model.named_buffers()}
    assert mapped(R.smooth_(model, [drawn(6, 8)])) == {'norm': 'a', 'batch': 'b', 'b': 'head'}
    assert all(torch.equal(t, was[k]) for k,t in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state) and model.training

class LayerDrop(Net):
    def forward(self, x):
        h = self.mid(x)
        if not self.training or random.random() < .5: h = self.b(h).relu()
        return self.head(h) + self.aux(x)

@pytest.mark.slow
def test_a_layer_that_is_left_out_at_random():
    "Refused, or left alone by name. Whatever the trace draws, the sources of `head` differ."
    for _ in range(4):
        model = LayerDrop()
        was = look(model)
        try: report = R.equalize_(model, drawn(6, 8))
        except ValueError as e: assert 'in training' in str(e)
        else: assert 'a' in notes(report) and 'b' in notes(report)
        if was != look(model): assert False, 'it was changed'

class Cosine(nn.Linear):
    def forward(self, x): return F.linear(F.normalize(x), F.normalize(self.weight), self.bias)

class Joins(nn.Linear):
    "A forward of several tensors."
    def forward(self, *xs): return super().forward(torch.cat(xs, 1))

class Centred(nn.Conv1d):
    "The forward is torch's; what it calls is not."
    def _conv_forward(self, x, weight, bias): return super()._conv_forward(x, weight-weight.mean(1, keepdim=True), bias)

class Wide(nn.LayerNorm):
    def forward(self, x): return super().forward(x.float()).to(x.dtype)

class Others(Net):
    def __init__(self): super().__init__(cosine=Cosine(8, 3), joins=Joins(16, 3), conv=Centred(8, 3, 1),
        c=nn.Linear(8, 8), d=nn.Linear(8, 8), e=nn.Linear(8, 8))
    def forward(self, x):
        c,d,e = self.c(x),self.d(x),self.e(x)
        return super().forward(x) + self.cosine(c) + self.joins(d, x) + self.conv(e[..., None])[..., 0]

@pytest.mark.slow
def test_layers_of_others_are_left_and_all_else_is_done():
    model,x = Others(),drawn(6, 8)
    wanted = model(x)
    report = R.equalize_(model, x)
    assert mapped(report) == dict(a='b', b='head')
    told = notes(report)
    for source,reader in dict(c='cosine', d='joins', e='conv').items():
        assert told[source] == f'{reader} reads it, with a forward of its own'
        assert told[reader] == 'it has a forward of its own'
    torch.testing.assert_close(model(x), wanted)
    assert R.rotate_(model, x).rows[-3].note == 'cosine reads it, with a forward of its own'

@pytest.mark.slow
def test_a_normalization_of_others_that_is_a_factor():
    model = Net(norm=Wide(8))
    assert mapped(R.smooth_(model, [drawn(6, 8)])) == dict(norm='a', a='b', b='head')

class Widths(nn.Module):
    "One reader takes two rows at once."
    def __init__(self):
        super().__init__()
        self.first,self.one,self.two = nn.Linear(4, 6),nn.Linear(6, 2),nn.Linear(12, 2)
    def forward(self, x):
        h = self.first(x)
        return self.one(h).sum(1) + self.two(h.flatten(1))

def test_readers_of_different_widths():
    model,x = Widths().double(),drawn(3, 2, 4).double()
    wanted = model(x)
    assert mapped(R.rotate_(model, x)) == dict(first='one, two')
    torch.testing.assert_close(model(x), wanted)

@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('name', ['equalize_', 'smooth_', 'rotate_'])
def test_an_example_that_proves_nothing(name, value):
    model,x = Net(),drawn(6, 8)
    x[1, 2] = value
    with refused(model, f'^{name}: .*proves nothing', ValueError): changed(name, model, x)
