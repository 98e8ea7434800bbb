"Layers of other libraries in whole networks: to the runtime and back, with weights alone, and where a call fails."
import copy
import pytest
import torch
from estimators import generator
from test_deploy import session
from torch import nn
from torch.nn import functional as F
from shok_nb import Quantizer, deploy_, quantize_model_, reconstruct_
from shok_nb.nn import remove_rounding_
from shok_nb.quantization.apart import _InARow


class NormAct(nn.BatchNorm2d):
    "As in timm: a batch normalization and, inside it, the activation behind it."
    def __init__(self, channels):
        super().__init__(channels)
        self.drop,self.act = nn.Identity(),nn.ReLU(inplace=True)
    def forward(self, x):
        if self.training: self.num_batches_tracked.add_(1)
        stats = self.running_mean,self.running_var
        x = F.batch_norm(x, *stats, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(x))

class Linear(nn.Linear):
    "As in timm: weights in the dtype of the input."
    def forward(self, x): return F.linear(x, self.weight.to(x.dtype), self.bias)

class Scaled(nn.Linear):
    "None of torch's."
    def forward(self, x): return 2*super().forward(x)

def pictures(n): return torch.randn(n, 3, 8, 8, generator=generator())

def classes(model): return [type(m) for m in model.modules() if isinstance(m, (nn.BatchNorm2d, nn.Linear, _InARow))]

@pytest.fixture
def model():
    torch.manual_seed(0)                                       # any: no result depends on it
    model = nn.Sequential(nn.Conv2d(3, 8, 3), NormAct(8), nn.Conv2d(8, 8, 3), NormAct(8), nn.Flatten(), Linear(128, 64),
        Scaled(64, 4))
    with torch.no_grad(): model(pictures(64))                  # the statistics
    return model.eval()

WHOLE = [NormAct, NormAct, Linear, Scaled]

def test_integers_in_the_runtime(model, tmp_path):
    "Every convolution, and the first Linear; in torch the same to the last bits of the last layer, which has floats."
    x = pictures(64)
    wanted = model(x)
    quantize_model_(model, calibrate=[x])
    report = deploy_(model, x)
    assert (model(x)-wanted).square().mean() < 1e-3*wanted.square().mean()     # 8 bits
    call,_,fused = session(model, x, tmp_path)
    assert fused.count('QLinearConv') == 2 and 'Conv' not in fused
    assert [r.kernel for r in report.rows][:3] == ['QLinearConv', 'QLinearConv', 'QGemm']
    torch.testing.assert_close(torch.from_numpy(call(x)), model(x).detach())

def test_there_and_back(model):
    "With its hooks and its Parameters; a copy of the model comes back, too."
    was,called = copy.deepcopy(model),[]
    model[1].register_forward_hook(lambda *of: called.append(1))
    weight = model[1].weight
    quantize_model_(model, calibrate=[pictures(64)])
    assert classes(model).count(_InARow) == 2 and model[1].weight is weight
    called.clear()
    model(pictures(2))
    assert called == [1]
    for back in (copy.deepcopy(model), model):
        remove_rounding_(back, leave_rounded=False)
        assert classes(back) == WHOLE and torch.equal(back(pictures(2)), was(pictures(2)))
        assert {*back.state_dict()} == {*was.state_dict()}

def test_nothing_changes_where_it_fails(model):
    was = copy.deepcopy(model)
    with pytest.raises(ValueError, match='skip names'): quantize_model_(model, calibrate=[pictures(8)], skip=['no'])
    with pytest.raises(RuntimeError): quantize_model_(model, calibrate=[pictures(8)[:, :2]])
    assert classes(model) == WHOLE and {*model.state_dict()} == {*was.state_dict()}
    assert torch.equal(model(pictures(2)), was(pictures(2)))

def test_weights_alone(model):
    "What has modules inside stays as it is; a Linear of 4-bit weights has the kernel of torch's."
    quantize_model_(model, Quantizer(4, block=16), None)
    report = deploy_(model, pictures(8))
    assert classes(model)[:2] == [NormAct]*2
    kernels = {r.name: r.kernel for r in report.rows}
    assert kernels['5'] == 'MatMulNBits' and kernels['6'] == 'floats: a forward of its own'

def test_skipped(model):
    quantize_model_(model, calibrate=[pictures(64)], skip=lambda name, layer: name == '5')
    assert isinstance(model[5], Linear) and isinstance(model[1], _InARow)

def test_a_teacher_of_the_user_stays_as_it_is(model):
    floats = copy.deepcopy(model)
    quantize_model_(model, 4, 8, calibrate=[pictures(64)])
    report = reconstruct_(model, [pictures(64)], teacher=floats)
    assert classes(floats) == WHOLE and all(r.after <= r.before for r in report.rows)
