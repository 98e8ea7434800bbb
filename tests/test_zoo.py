"The table of networks of others: that it counts what it says, and leaves nothing out."
import json
import re
import sys
import types
from pathlib import Path
import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/'bench'))
import zoo  # noqa: E402 (found by the line above)


def test_the_table():
    "Each network once in each setting; a row has either all numbers or an error, and no path of a machine."
    rows = zoo.read()['rows']
    assert len({(r['model'], r['setting']) for r in rows}) == len(rows) > 0
    keys = 'quantized', 'deployed', 'runtime', 'flips', 'integer', 'size', 'seconds', 'parameters', 'unknown'
    for r in rows:
        assert r['setting'] in zoo.SETTINGS and ('error' in r) != all(k in r for k in keys), r['model']
        assert 'error' not in r or 'stage' in r or 'process' in r['error'] or 'seconds' in r['error']
        most = .27 if r['setting'] == zoo.SETTINGS[0] else .16
        assert 'error' in r or r['parameters'] < 1e6 or r['size'] <= most, r['model']
        assert 'error' in r or r['runtime'] <= r.get('nudged', zoo.EXPLAIN), r['model']
    assert not re.search(r'/(home|root|tmp|work|usr)/', zoo.TABLE.read_text('utf-8'))

def test_rows_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, 'TABLE', tmp_path/'zoo.json')
    assert zoo.read()['rows'] == []
    rows = [dict(library='torchvision', model=m, setting=s) for m in 'ba' for s in reversed(zoo.SETTINGS)]
    zoo.write(dict(versions=dict(torch='2'), rows=rows))
    found = zoo.read()
    assert [r['model'] for r in found['rows']] == [*'aabb'] and found['versions'] == dict(torch='2')
    assert [r['setting'] for r in found['rows'][:2]] == [*zoo.SETTINGS]

def test_multiplications(tmp_path):
    "Those of a convolution in groups and a Linear, from the runtime's own record; a share in integers after deploy_."
    pytest.importorskip('onnxruntime')
    from shok_nb import deploy_, quantize_model_, to_onnx
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

def test_an_operator_that_is_not_counted(tmp_path):
    event = dict(name='a_kernel_time', args=dict(op_name='LSTM'))
    file,graph = tmp_path/'profile.json',types.SimpleNamespace(node=[], initializer=[])
    file.write_text(json.dumps([event]))
    with pytest.raises(ValueError, match='the multiplications of LSTM are not counted'): zoo.kernels(file, graph)
