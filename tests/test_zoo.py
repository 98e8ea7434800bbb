"The table of networks of others: that it counts what it says, and leaves nothing out."
import itertools
import json
import re
import types
from collections import OrderedDict
import pytest
import torch
import zoo
from torch import nn
from shok_nb import deploy_, quantize_model_, to_onnx


def explained(row):
    "Is each code that is another in the runtime beside a tie, and is nothing left where torch takes those codes?"
    return 0 < row['ties']['flipped'] and row['ties']['farthest'] < 1e-4 and row['ties']['left'] < 1e-5

def test_no_file_has_a_better_place(monkeypatch):
    "Behind a large file another takes longer, because its weights have left the caches: each is behind each as often."
    ort,ran = pytest.importorskip('onnxruntime'),[]
    class Session:
        def __init__(self, file, *args, **kwargs): self.file = file
        def run(self, *args): ran.append(self.file)
    monkeypatch.setattr(ort, 'InferenceSession', Session)
    zoo.seconds_of(dict(floats='a', ours='b', static='c'), {}, rounds=12)
    rounds = [tuple(ran[i:i+3]) for i in range(0, len(ran), 3)]
    assert sorted(rounds) == sorted(2*[*itertools.permutations('abc')])

def test_the_table():
    "Each network once in each setting; a row has either all numbers or an error, and no path of a machine."
    rows = zoo.read()['rows']
    assert len({(r['model'], r['setting']) for r in rows}) == len(rows) > 0
    keys = 'quantized', 'deployed', 'runtime', 'flips', 'integer', 'size', 'seconds', 'parameters', 'unknown'
    for r in rows:
        assert r['setting'] in zoo.SETTINGS and ('error' in r) != all(k in r for k in keys), r['model']
        assert 'error' not in r or 'stage' in r or 'process' in r['error'] or 'seconds' in r['error']
        most = .27 if r['setting'] == zoo.SETTINGS[0] else .16
        assert 'error' in r or r['parameters'] < 1e6 or round(r['size'], 2) <= most, r['model']
        assert 'error' in r or r['runtime'] <= zoo.EXPLAIN or explained(r), r['model']
    done = {s: {r['model'] for r in rows if r['setting'] == s} for s in zoo.SETTINGS[:2]}
    assert all(len(done[s]-{*zoo.NETWORKS}) >= 80 and {*zoo.NETWORKS} <= done[s] for s in done)    # torchvision has 80
    assert not re.search(r'/(home|root|tmp|work|usr)/', zoo.TABLE.read_text('utf-8'))

def test_rows_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, 'TABLE', tmp_path/'zoo.json')
    assert zoo.read()['rows'] == []
    rows = [dict(library='torchvision', model=m, setting=s) for m in 'ba' for s in reversed(zoo.SETTINGS)]
    zoo.write(dict(versions=dict(torch='2'), rows=rows))
    found = zoo.read()
    assert [r['model'] for r in found['rows']] == [*'aaabbb'] and found['versions'] == dict(torch='2')
    assert [r['setting'] for r in found['rows'][:3]] == [*zoo.SETTINGS]

@pytest.mark.slow
def test_multiplications(tmp_path):
    "Those of a convolution in groups and a Linear, from the runtime's own record; a share in integers after deploy_."
    pytest.importorskip('onnxruntime')
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8*36, 5)).eval()
    x = torch.randn(2, 4, 8, 8)
    total = 2*(8*36*2*9) + 2*(8*36*5)
    for integers in (0, 1):
        if integers:
            quantize_model_(model, calibrate=[x])
            deploy_(model, x)
        row,counted,kernels = {},[],zoo.kernels
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zoo, 'kernels', lambda *of: counted.append(kernels(*of)) or counted[-1])
            zoo.run_onnx(to_onnx(model, x, tmp_path/f'{integers}.onnx', any_batch=False), dict(input=x), row)
        assert sum(counted[0].values()) == total and row['integer'] == integers

def test_multiplications_of_einsum():
    "Every letter is a length: 2 * 3 * 4 * 5 for the products of rows, whatever the letters are."
    equation = types.SimpleNamespace(name='equation', s=b'b i d, b j d -> b i j')
    node = types.SimpleNamespace(op_type='Einsum', attribute=[equation])
    assert zoo.products_of(node, {}, [(2, 3, 5), (2, 4, 5)], [(2, 3, 4)]) == 2*3*4*5

def test_an_operator_that_is_not_counted(tmp_path):
    event = dict(name='a_kernel_time', args=dict(op_name='LSTM'))
    file,graph = tmp_path/'profile.json',types.SimpleNamespace(node=[], initializer=[])
    file.write_text(json.dumps([event]))
    with pytest.raises(ValueError, match='the multiplications of LSTM are not counted'): zoo.kernels(file, graph)

@pytest.fixture
def head(tmp_path):
    """A deployed network with floats and curves between its layers, some of them on codes; what it is given, its file,
    and a way to ask for its ties."""
    pytest.importorskip('onnxruntime')
    torch.manual_seed(0)                                       # any: each test makes its own difference
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), curve=nn.Hardswish(), next=nn.Conv2d(4, 6, 3),
        flat=nn.Flatten(), norm=nn.LayerNorm(6*16), head=nn.Linear(6*16, 5))).eval()
    x = torch.randn(4, 3, 8, 8)
    quantize_model_(model, calibrate=[x])
    deploy_(model, x)
    file = to_onnx(model, x, tmp_path/'model.onnx', any_batch=False)
    def ties(fed): return zoo.ties(model, x, file, dict(input=fed), zoo.InRuntime(file, dict(input=fed)).outputs)
    return model,x,ties

@pytest.mark.slow
def test_ties(head):
    "One input on a tie, in the runtime the next float: one code differs, and what follows is as with that code."
    model,x,ties = head
    same = ties(x)
    assert same['codes'] > x.numel() and same['flipped'] == 0 and same['left'] < 1e-6
    scale,code = model.conv.input_scale,model.conv.input_zero_point.float()
    low = high = scale*20.49999
    while (high/scale).round() < 21: low,high = high,torch.nextafter(high, 2*high)
    assert (low/scale).round() == 20 and code < 200           # the last float of one code, the first of the next
    x[0, 0, 0, 0] = low
    other = x.clone()
    other[0, 0, 0, 0] = high
    found = ties(other)
    assert found['flipped'] == 1 and 0 <= found['farthest'] < 1e-4 and found['left'] < 1e-6

@pytest.mark.slow
def test_what_is_no_tie(head):
    "A code that is another one without a tie is seen, and so is a difference that no code explains."
    model,x,ties = head
    other = x.clone()
    other[0, 0, 1, 1] += 1.2*model.conv.input_scale
    assert ties(other)['farthest'] > .01
    with torch.no_grad():
        model.norm.bias[3] += model.head.input_scale          # torch has another norm than the file
        assert ties(x)['farthest'] > .01 and ties(x)['left'] < 1e-6
        model.norm.bias[3] -= model.head.input_scale
        model.head.product *= 1.01                            # and then another head
    assert ties(x)['flipped'] == 0 and ties(x)['left'] > 1e-3
