"Networks that others wrote: their layers, their batches, their optimizers."
import collections
import dataclasses
import gc
import itertools
import math
import sys
import time
import types
import warnings
from functools import partial
from typing import Any
import pytest
import torch
from estimators import generator, slow_after
from networks import Holding
from processes import spawn
from test_deploy import session
from torch import nn
from shok_nb import (
    Quantizer,
    deploy_,
    mse_init,
    onnx_session,
    parameter_groups,
    quantize_model_,
    to_onnx,
)
from shok_nb.networks import models
from shok_nb.quantization import calibrate
from shok_nb.quantization.calibrate import _error, _grid_of_range


def mlp(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

# --- layers of others
class Conv1D(nn.Module):
    "A Linear whose weight is transposed, as in GPT-2."
    def __init__(self, out, n):
        super().__init__()
        self.weight,self.bias = nn.Parameter(torch.randn(n, out)*.1),nn.Parameter(torch.zeros(out))
    def forward(self, x): return x@self.weight + self.bias

class Two(Holding):
    def forward(self, x): return x@self.u.T@self.v

@pytest.mark.parametrize('loaded', [False, True], ids=['named', 'transformers'])
def test_kinds(loaded, monkeypatch):
    """A layer of another class has a scale for each output, and activations on codes: named in `kinds`, or known where
    transformers is loaded, and nothing is loaded for it. Others are listed as not known."""
    x = torch.randn(64, 16, generator=generator())
    def network(): return nn.Sequential(Conv1D(8, 16), nn.ReLU(), nn.Linear(8, 4))
    row = quantize_model_(network(), calibrate=[x]).rows[-1]
    assert row[1:] == ('Conv1D', 'not known: weight', '-')
    if loaded: monkeypatch.setitem(sys.modules, 'transformers.pytorch_utils', types.SimpleNamespace(Conv1D=Conv1D))
    model = network()
    floats = model(x)
    report = quantize_model_(model, calibrate=[x], kinds=None if loaded else {Conv1D: 1})
    assert report.rows[0][1:] == ('Conv1D', '-128 to 127', '-128 to 127') and len(report.rows) == 2
    made = model[0].parametrizations.weight[0]
    assert made.axis == 1 and made.grid()[0].numel() == 8
    rounded = model.eval()(x)
    assert 0 < (rounded-floats).abs().max() < .02*floats.abs().max()
    deploy_(model, x)
    assert torch.allclose(model(x), rounded, atol=1e-2*rounded.abs().max().item())
    codes = model[0].parametrizations.weight.original
    assert codes.dtype == torch.int8

def test_kinds_with_several_weights():
    model = nn.Sequential(Two(u=nn.Parameter(torch.randn(4, 6)), v=nn.Parameter(torch.randn(6, 3))))
    report = quantize_model_(model, 4, 8, calibrate=[torch.randn(5, 6)], kinds={Two: dict(u=0, v=1)})
    assert report.rows[0][1:] == ('Two', '-8 to 7', 'Two takes floats')
    assert [model[0].parametrizations[k][0].grid()[0].numel() for k in 'uv'] == [4, 3]

def test_experts_of_transformers():
    "Stacked weights have a scale for each row, and a router is a layer."
    def stack(*shape): return nn.Parameter(torch.randn(shape))
    class Router(Holding):
        def forward(self, x): return (x@self.weight.T).softmax(-1)
    class Experts(Holding):
        def forward(self, x):
            a,b = torch.einsum('eoi,bi->beo', self.gate_up_proj, x).chunk(2, -1)
            return torch.einsum('eoi,bei->beo', self.down_proj, a*b).sum(1)
    for cls in (Router, Experts): cls.__module__ = 'transformers.models.mine.modeling_mine'
    for weights,blocks in ((8, (8, 6)), (Quantizer(4, block=4), (4, 6))):
        experts = Experts(gate_up_proj=stack(2, 12, 8), down_proj=stack(2, 8, 6))
        model = nn.Sequential(experts, Router(weight=stack(2, 8)))
        report = quantize_model_(model, weights, 8, calibrate=[torch.randn(5, 8)])
        assert [r.activations for r in report.rows] == ['Experts takes floats', 'Router takes floats']
        made = [model[0].parametrizations[k][0] for k in ('gate_up_proj', 'down_proj')]
        assert tuple(q.block for q in made) == blocks and made[1].grid()[0].shape == (2, 8, 1)
        x = torch.randn(5, 8)
        rounded = model.eval()(x)
        deploy_(model, x)
        assert torch.allclose(model(x), rounded, atol=1e-5)

@pytest.mark.parametrize('kinds, error, told', [
    (3, TypeError, 'kinds must be a dict from classes of layers .*, got int'),
    ([Conv1D], TypeError, 'got list'),
    ({'Conv1D': 1}, TypeError, 'got str'),
    ({nn.Linear(2, 2): 1}, TypeError, 'got Linear'),
    ({Conv1D: 'x'}, TypeError, 'kinds: the axis of weight'),
    ({Conv1D: True}, TypeError, 'kinds: the axis of weight'),
    ({Conv1D: {1: 0}}, TypeError, 'kinds names weights by strings, got int'),
    ({Conv1D: 2}, ValueError, '0.weight'),
    ({Conv1D: dict(w=0)}, ValueError, '0.w is no Parameter'),
], ids=str)
def test_bad_kinds(kinds, error, told):
    model = nn.Sequential(Conv1D(8, 16))
    with pytest.raises(error, match=f'^quantize_model_: .*{told}'):
        quantize_model_(model, calibrate=[torch.randn(2, 16)], kinds=kinds)
    assert not hasattr(model[0], 'parametrizations')

# --- blocks
def test_blocks_where_they_divide():
    "Per channel where they do not, and the report names those."
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 4))
    report = quantize_model_(model, Quantizer(4, block=16), None)
    assert [r.weights for r in report.rows] == ['-8 to 7', '-8 to 7, blocks of 16']
    assert report.note == 'per channel, as 16 does not divide its rows: 0.weight (1 in all)'
    assert model[0].parametrizations.weight[0].grid()[0].numel() == 8
    assert 'in all' in repr(report) and not quantize_model_(mlp(), Quantizer(4, block=16), None).note

# --- batches
class Attends(Holding):
    def forward(self, x, mask): return self.layer(x*mask)

class TakesOne(Attends):
    def forward(self, batch):
        x,mask = (batch['x'], batch['mask']) if isinstance(batch, dict) else (batch.x, batch.mask)
        return super().forward(x, mask)

@dataclasses.dataclass
class Batch:
    x:torch.Tensor
    mask:torch.Tensor

Pair = collections.namedtuple('Pair', 'x mask')
X = torch.randn(64, 6, generator=generator(3))
MASK = (torch.rand(64, 6, generator=generator(4)) < .5).float()
CALLS = dict(names=(Attends, dict(x=X, mask=MASK)), nested=(Attends, ((X, MASK), torch.zeros(64))),
    fields=(Attends, Batch(X, MASK)), label=(Attends, (X, MASK, torch.zeros(64))), one_dict=(TakesOne,
    dict(x=X, mask=MASK)), tuple=(Attends, (X, MASK)), list=(Attends, [X, MASK]), namedtuple=(Attends, Pair(X, MASK)),
    user=(Attends, collections.UserDict(x=X, mask=MASK)),
    one_object=(TakesOne, Batch(X, MASK)), one_pair=(TakesOne, Pair(X, MASK)),
    dict_and_label=(Attends, (dict(x=X, mask=MASK), torch.zeros(64))))

@pytest.mark.parametrize('cls, batch', slow_after(CALLS.values(), 5), ids=CALLS)
def test_batches(cls, batch):
    "Each gives the grid that the product of both gives, deploys with torch's own graph, and is the same number."
    model = cls(layer=nn.Linear(6, 3))
    quantize_model_(model, 8, 8, calibrate=[batch])
    q = Quantizer(8, signed=None, init='sample').calibrate_(X*MASK)
    assert torch.allclose(model.layer.input_quantizer.grid()[0], q.grid()[0])
    labels = type(batch) is tuple and batch[-1] is not MASK
    if labels:                           # an example is a call
        with pytest.raises(ValueError, match='^deploy_: the model does not take example'): deploy_(model, batch)
        batch = batch[:-1] if len(batch) > 2 else batch[0]
    report = deploy_(model, batch)
    assert 'no graph' not in report.note and report.rows[0].weights == 'int8'

def test_batches_limit():
    "Only so many are read, also of a loader without an end."
    read = itertools.count()
    quantize_model_(mlp(), calibrate=(torch.randn(4, 16) for _ in read), batches=5)
    assert next(read) == 5
    with pytest.raises(ValueError, match='^quantize_model_: batches must'):
        quantize_model_(mlp(), calibrate=[torch.randn(4, 16)], batches=0)

ONE = X,dict(x=X),collections.UserDict(x=X),Batch(X, MASK)
@pytest.mark.parametrize('batches', ONE, ids=lambda b: type(b).__name__)
def test_one_batch_is_no_loader(batches):
    with pytest.raises(TypeError, match=r'^quantize_model_: calibrate .*did you mean calibrate=\[x\]'):
        quantize_model_(mlp(), calibrate=batches)

# --- histograms
def seen_of(*parts):
    seen = calibrate.ValueObserver()
    for v in parts: seen.add(v)
    return seen

@pytest.mark.parametrize('scale', [1e-28, 1., 1e35])
def test_a_histogram_is_of_all_values(scale):
    "Quantiles to a bin, both ends, the mean, and no value on the other side of 0."
    parts = [torch.randn(200_000, generator=generator(i))*(1+i)**2*scale for i in range(6)]
    seen,every = seen_of(*parts),torch.cat(parts)
    found = seen.joined()
    assert seen.counts.sum() == len(every) and len(found) <= calibrate._KEPT
    assert (found.amin(), found.amax()) == (every.amin(), every.amax())
    at,every = torch.arange(.005, 1., .01),every.sort().values
    far = (found.quantile(at)-every[(at*(len(every)-1)).long()]).abs().max()
    assert far < .002*every.abs().max()
    assert abs((found < 0).float().mean() - (every < 0).float().mean()) < 1e-3
    relu = seen_of(*(p.relu() for p in parts)).joined()
    assert relu.amin() == 0 and abs((relu < 1e-3*relu.amax()).float().mean()-.5) < .02

def test_histograms_are_joined():
    "They are that of all values; with infinity, which is an error later, its ends."
    parts = [torch.randn(300_000, generator=generator(i))*(1+i) for i in range(3)]
    seen,whole = calibrate.ValueObserver(),seen_of(*parts)
    for p in parts: seen.join(seen_of(p))
    assert torch.equal(seen.counts, whole.counts) and torch.equal(seen.joined(), whole.joined())
    odd,other = (seen_of(torch.full((300_000,), math.inf)) for _ in range(2))
    odd.join(other)
    assert not odd.joined().isfinite().any()

def test_rows_that_are_too_many_get_fewer(monkeypatch):
    "Both ends of each column stay, those of another observer too; few rows are kept as they are."
    monkeypatch.setattr(calibrate, '_KEPT', 64)
    parts = [torch.randn(10, 4, generator=generator(i)) for i in range(9)]
    few,seen,other = (calibrate.ColumnObserver() for _ in range(3))
    few.add(parts[0])
    for p in parts[:6]: seen.add(p)
    for p in parts[6:]: other.add(p)
    seen.join(other)
    found,every = seen.joined(),torch.cat(parts)
    assert torch.equal(few.joined(), parts[0]) and seen.every > 1 and len(found) <= 64//4+2
    assert torch.equal(found.amin(0), every.amin(0)) and torch.equal(found.amax(0), every.amax(0))

LONG_TAILED = dict(exp=torch.exp, cubed=lambda x: x**3, outlier=lambda x: torch.where(x == x.amax(), 60., x))
@pytest.mark.parametrize('kw', [dict(), dict(init='sample'), dict(zero_point=True)], ids=str)
@pytest.mark.parametrize('kind', LONG_TAILED)
def test_the_ends_of_a_histogram_count_as_often_as_they_were_met(kind, kw):
    """The error is that of the grid for all values: it was 1.52 times as large, with both ends counted as a whole
    part of many. A bin is a hundredth of a step, which is 1.0001."""
    parts = [LONG_TAILED[kind](torch.randn(150_000, generator=generator(i))) for i in range(2)]
    every = torch.cat(parts)
    q,best = models._of_values(Quantizer(**kw), 'x', seen_of(*parts), None),Quantizer(**kw).calibrate_(every)
    errors = [(grid(every)-every).square().mean() for grid in (q, best)]
    assert errors[0] < 1.002*errors[1]

def test_histograms_of_ranks():
    "Joined in any way they are that of all values."
    parts = [torch.randn(200_000, generator=generator(i))*(1+i) for i in range(4)]
    whole = seen_of(*parts)
    for split in (1, 3):
        a,b = seen_of(*parts[:split]),seen_of(*parts[split:])
        a.join(b)
        assert torch.equal(a.counts, whole.counts) and a.reach == whole.reach
        assert torch.allclose(a.joined(), whole.joined(), rtol=1e-5)
    few = seen_of(parts[0][:100])
    few.join(seen_of(parts[1][:50]))
    assert torch.equal(few.joined(), torch.cat([parts[0][:100], parts[1][:50]]))

@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_what_is_not_finite_is_found_late(bad):
    parts = [torch.randn(200, 1000, generator=generator(i)) for i in range(4)]
    parts[3][5, 7] = bad
    with pytest.raises(ValueError, match='^quantize_model_: the input of 0: Quantizer: x must be finite'):
        quantize_model_(nn.Sequential(nn.Linear(1000, 2)), calibrate=parts)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_histograms_of_other_dtypes(dtype):
    parts = [torch.randn(200_000, generator=generator(i)).to(dtype) for i in range(4)]
    q = Quantizer(4).calibrate_(torch.cat(parts))
    assert torch.allclose(Quantizer(4).calibrate_(seen_of(*parts).joined()).grid()[0], q.grid()[0], rtol=.02)

# --- the search for least error
@pytest.mark.parametrize('kw', [dict(), dict(zero_point=True), dict(signed=False)], ids=str)
def test_no_share_is_left_out(kw):
    "The search ends early where clipping alone costs more than the best: the best of all 100 is found."
    x = torch.randn(50, 400, generator=generator(1))**3
    if not kw.get('signed', True): x = x.abs()
    for bits in (2, 4, 8):
        found = mse_init(x, bits, axis=0, search='grid', **kw)
        low,high = (x.amin(1, keepdim=True), x.amax(1, keepdim=True)) if 'zero_point' in kw else \
            (torch.zeros(50, 1), x.abs().amax(1, keepdim=True))
        ends = (0, 2**bits-1) if kw.get('signed') is False else (-2**(bits-1), 2**(bits-1)-1)
        least = torch.full((50, 1), math.inf)
        for i in range(1, 101):
            grid = _grid_of_range(low*(i/100), high*(i/100), *ends, 'zero_point' in kw)
            least = torch.minimum(least, _error(x, grid, ends, torch.empty_like(x)))
        grid = (found[0], found[1].float())
        assert torch.allclose(_error(x, grid, ends, torch.empty_like(x)), least, rtol=1e-4)

@pytest.mark.slow
@pytest.mark.parametrize('axis', [0, None])
def test_fifteen_million_weights(axis):
    "In three seconds of one thread that has a core to itself."
    w = torch.randn(15_000, 1000, generator=generator())
    began = time.process_time()
    mse_init(w, 4, axis=axis)
    assert time.process_time()-began < 7.5

# --- optimizers
def test_parameter_groups():
    "Every Parameter once, scales without weight decay."
    model = mlp()
    quantize_model_(model, calibrate=[torch.randn(8, 16)])
    rest,scales = parameter_groups(model, .3)
    names = {p: n for n,p in model.named_parameters()}
    assert {names[p] for p in scales['params']} == {n for n in names.values() if n.endswith('log_scale')}
    assert (rest['weight_decay'], scales['weight_decay']) == (.3, 0)
    assert {*rest['params'], *scales['params']} == {*model.parameters()} and len(rest['params']) == 4
    before = [p.clone() for p in scales['params']]
    optimizer = torch.optim.AdamW(parameter_groups(model, .5), lr=.1)
    for p in model.parameters(): p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p, b) for p,b in zip(scales['params'], before))
    assert len(parameter_groups(mlp())) == 1

def test_an_optimizer_made_before():
    "A warning, unless it is of another model, has no one that holds it, or there are no scales to train."
    model,x = mlp(),torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(UserWarning, match='an optimizer made before does not train the scales'):
        quantize_model_(model, calibrate=[x])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        quantize_model_(mlp(), calibrate=[x])
        other = mlp()
        lost:Any = torch.optim.Adam(other.parameters())
        lost.own = lost                                          # in a ring, and old: a whole collection finds it
        gc.collect()
        del lost
        quantize_model_(other, calibrate=[x])
        fixed = mlp()
        held = torch.optim.Adam(fixed.parameters())
        quantize_model_(fixed, Quantizer(8, axis=0), Quantizer(8), calibrate=[x])
    assert optimizer and held

# --- ranks
def batches(rank):
    "Other values and another number of them in each rank."
    g = generator(rank)
    return [torch.randn(512, 64, generator=g)*(1+rank) for _ in range(12 if rank else 3)]

def grids_of(calibrate):
    "Those of what enters the layers of a network that is the same in every rank."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    quantize_model_(model, calibrate=calibrate)
    return [model[i].input_quantizer.grid()[0].item() for i in (0, 2)],model[0].input_quantizer.range()

def calibrate_in(rank, world, fails=False):
    "What this rank found, or the error; where it `fails` the loader of rank 1 raises."
    def loader():
        if fails and rank: raise OSError('no more data')
        yield from batches(rank)
    try: return grids_of(loader())
    except Exception as e: return f'{type(e).__name__} {e}'

@pytest.mark.slow
def test_ranks_agree():
    "Two processes with other batches get the same grids, of the batches of both."
    first,second = spawn(calibrate_in, 2)
    assert first == second
    assert first[0] == pytest.approx(grids_of(batches(0)+batches(1))[0], rel=1e-3)

@pytest.mark.slow
def test_an_error_in_one_rank_ends_both():
    told = 'RuntimeError quantize_model_: in another rank: OSError: no more data'
    assert spawn(partial(calibrate_in, fails=True), 2) == [told, 'OSError no more data']

# --- into the runtime
class Words(Holding):
    "Embedded, attended by a mask, and a number for each word."
    def forward(self, ids, mask):
        x = self.embed(ids)
        scores = (x@x.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9)
        return dict(found=self.layer(scores.softmax(-1)@x), total=mask.sum(1))

def words(batch, n):
    mask = (torch.rand(batch, n) < .8).long()
    return torch.randint(0, 50, (batch, n)),mask.index_fill(1, torch.tensor(0), 1)

@pytest.mark.slow
@pytest.mark.parametrize('dynamic', [{1: 'length'}, dict(ids={1: 'length'}, mask={-1: 'length'})], ids=['all', 'each'])
def test_any_length(dynamic, tmp_path):
    "Longer and shorter sequences than the example, and other batches, with several arguments."
    pytest.importorskip('onnxruntime')
    model = Words(embed=nn.Embedding(50, 16), layer=nn.Linear(16, 4)).eval()
    quantize_model_(model, calibrate=[words(8, 12)])
    deploy_(model, words(4, 9))
    run = onnx_session(to_onnx(model, words(4, 9), tmp_path/'m.onnx', dynamic=dynamic))
    assert [i.name for i in run.get_inputs()] == ['ids', 'mask']
    assert [i.shape for i in run.get_inputs()] == [['batch', 'length']]*2
    for batch,n in ((1, 5), (3, 20), (4, 9)):
        ids,mask = words(batch, n)
        found,total = run.run(None, dict(ids=ids.numpy(), mask=mask.numpy()))
        with torch.no_grad(): wanted = model(ids, mask)
        assert torch.allclose(torch.tensor(found), wanted['found'], atol=1e-4)
        assert (total == wanted['total'].numpy()).all()

def test_a_length_that_the_model_needs(tmp_path):
    "A model that takes one length only says so before anything is written."
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 2))
    with pytest.raises(ValueError, match='^to_onnx: the model does not take a shorter example'):
        to_onnx(model, torch.randn(3, 8, 4), tmp_path/'m.onnx', dynamic={1: 'length'})
    assert not [*tmp_path.iterdir()]

class Counts(Holding):
    "A model that uses a length of its input as a number, which the exporter writes into the file."
    def forward(self, x, unused): return x.transpose(0, self.axis).reshape(int(x.shape[self.axis]), -1)*2

@pytest.mark.slow
@pytest.mark.parametrize('axis, how', [(0, 'any_batch=False'), (1, 'without it in dynamic')])
def test_a_length_that_is_a_number(axis, how, tmp_path):
    "Such a file was written with one length, and nothing said so. An input that nobody reads has no say."
    model,x = Counts(axis=axis).eval(),(torch.randn(3, 4, 2), torch.randn(3, 4))
    told = f'takes length {3+axis} only along axis {axis} of x, .* or export {how}'
    with pytest.raises(ValueError, match=f'^to_onnx: the file {told}'):
        to_onnx(model, x, tmp_path/'m.onnx', dynamic={axis: 'long'})
    assert not [*tmp_path.iterdir()]
    to_onnx(model, x, tmp_path/'m.onnx', any_batch=axis > 0)

class AsksLength(nn.Module):
    "Another formula for few rows; a number is read too, so that torch's exporter takes its second way."
    def __init__(self):
        super().__init__()
        self.a,self.notes = nn.Linear(4, 4),{}
    def forward(self, x):
        y = self.a(x)
        self.notes['largest'] = float(y.detach().abs().max())
        return x+y if len(x) > 8 else x*y

@pytest.mark.slow
@pytest.mark.parametrize('rows, told', [(32, 'from 9'), (4, 'up to 8')])
def test_a_file_for_some_lengths_alone(rows, told, tmp_path):
    "The exporter narrows the lengths without a word: at others the file computed the wrong formula."
    model,x = AsksLength().eval(),torch.randn(rows, 4, generator=generator())
    with pytest.raises(ValueError, match=f'^to_onnx: the file is right for lengths {told} alone along axis 0 of x'):
        to_onnx(model, x, tmp_path/'m.onnx')
    assert not [*tmp_path.iterdir()]
    to_onnx(model, x, tmp_path/'m.onnx', any_batch=False)

BAD = [({3}, TypeError, 'dynamic must be a dict, got set'), ({1: 2}, (TypeError, ValueError), 'dynamic'),
    (dict(x={1: 'n'}), ValueError, "dynamic names 'x', the inputs are input"),
    (dict(input={7: 'n'}), ValueError, 'two or more along axis 7'),
    (dict(input={'a': 'n'}), TypeError, 'dynamic: an axis'),
    (dict(input={1: 'not a name'}), TypeError, 'must name axes by their numbers')]
@pytest.mark.parametrize('dynamic, error, told', BAD, ids=[str(b[0]) for b in BAD])
def test_bad_axes(dynamic, error, told, tmp_path):
    with pytest.raises(error, match=f'^to_onnx: .*{told}'):
        to_onnx(mlp(), torch.randn(2, 16), tmp_path/'m.onnx', dynamic=dynamic)

# An example is a call: there is no label beside it
WHOLE = {k: v for k,v in CALLS.items() if k not in ('nested', 'label', 'dict_and_label')}
@pytest.mark.parametrize('cls, batch', slow_after(WHOLE.values(), 3), ids=WHOLE)
def test_batches_in_the_runtime(cls, batch, tmp_path):
    "The tensors of a batch are the inputs of the file, by name."
    pytest.importorskip('onnxruntime')
    run = onnx_session(to_onnx(cls(layer=nn.Linear(6, 3)).eval(), batch, tmp_path/'m.onnx'))
    assert [i.name for i in run.get_inputs()] == ['x', 'mask']

def test_half_precision_in_the_runtime(tmp_path):
    "Layers that stay floats among them: what is nudged to see how far outputs may differ keeps its dtype."
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).half().eval()
    x = torch.randn(4, 8).half()
    quantize_model_(model, 4, None)
    deploy_(model, x)
    made = torch.from_numpy(session(model, x, tmp_path)[0](x))
    with torch.no_grad(): assert made.dtype == torch.float16 and (made-model(x)).abs().max() < .004

class Windows(nn.Module):
    "Attention within windows, with a bias and a mask that are added, as in a Swin of transformers."
    def __init__(self):
        super().__init__()
        self.qkv,self.out = nn.Linear(8, 24),nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.randn(1, 2, 4, 4))
        self.register_buffer('mask', torch.randn(2, 1, 4, 4))
    def forward(self, x):
        x = x.view(-1, 4, 8)
        mask = self.bias + self.mask.expand(x.shape[0]//2, 2, 1, 4, 4).reshape(-1, 1, 4, 4)
        q,k,v = (t.view(-1, 4, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))

@pytest.mark.slow
def test_attention_in_windows(tmp_path):
    "The kernels of a CPU lay an attention out as the operators of a file do not: there the reshape had no view."
    model,x = Windows().eval(),torch.randn(6, 8, 8)
    quantize_model_(model, calibrate=[x])
    deploy_(model, x)
    found = torch.from_numpy(session(model, x, tmp_path)[0](x[:3]))
    with torch.no_grad(): assert (found-model(x[:3])).abs().max() < 1e-5
