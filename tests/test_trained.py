"The table of networks trained here: that it has what its page says, and that it is made as it says."
import json
import pytest
import torch
import trained
from torch import nn


def test_the_rows():
    "Each network and seed once, all ways in each; a network learned something in floats, and lost by rounding."
    rows = json.loads(trained.TABLE.read_text('utf-8'))['rows']
    assert len({(r['model'], r['seed']) for r in rows}) == len(rows) > 0
    for r in rows:
        assert r['model'] in trained.NETWORKS and r['seed'] in trained.SEEDS and [*r['accuracy']] == [*trained.WAYS]
        found = r['accuracy']
        assert found['floats'] > 80 and found['nearest'] < found['reconstructed'] <= found['floats'] + 1
    for name in {r['model'] for r in rows}: assert f'| {name} |' in trained.table(rows)

@pytest.mark.slow
def test_a_row(monkeypatch):
    "A small network in place of torchvision's; all ways, from one start, and twice the same."
    def made(*_, **kw):
        return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(),
            nn.Linear(24, 10))
    models = type('M', (), dict(get_model=staticmethod(made)))
    monkeypatch.setattr(trained, 'torchvision', lambda: type('V', (), dict(models=models)))
    monkeypatch.setattr(trained, 'NETWORKS', dict(small={}))
    monkeypatch.setattr(trained, 'EPOCHS', 4)                # enough for 75 %
    row,again = (trained.row_of('small', 1) for _ in range(2))
    assert [*row['accuracy']] == [*trained.WAYS] and row['accuracy'] == again['accuracy']
    assert row['accuracy']['floats'] > 60 and row['model'] == 'small' and row['seed'] == 1

def test_whole_batches():
    "A last batch of three would spoil the statistics of the normalizations."
    seen,model = [],nn.Linear(4, 3)
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    x,y = torch.randn(131, 4),torch.randint(0, 3, (131,))
    trained.train(model, (x, y), 2, 1e-3, 0)
    assert seen == [trained.BATCH]*4
