"""Layers of other libraries and the attention of torch, both computed by torch's layers: in whole networks, to the
runtime and back, and where a call fails."""
import copy
import pytest
import torch
from estimators import generator
from test_deploy import session
from torch import nn
from torch.nn import functional as F
from shok_nb import Quantizer, deploy_, quantize_model_, reconstruct_
from shok_nb.networks.attention import Attention
from shok_nb.nn import remove_rounding_


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

class Pictures(nn.Sequential):
    parts,alone = ['1', '3', '5'],['5']          # what is taken apart, and what where weights alone are quantized
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), NormAct(8), nn.Conv2d(8, 8, 3), NormAct(8), nn.Flatten(), Linear(128, 64),
            Scaled(64, 4))
        with torch.no_grad(): self(self.inputs())                  # the statistics
    def inputs(self, n=64): return torch.randn(n, 3, 8, 8, generator=generator())

class Translator(nn.Module):
    "An encoder, and a decoder that attends to it: to two tensors in one call."
    parts,alone = ['encoder.self_attn', 'decoder.self_attn', 'decoder.multihead_attn'],[]
    def __init__(self):
        super().__init__()
        kw = dict(d_model=16, nhead=4, dim_feedforward=32, batch_first=True)
        self.encoder,self.decoder = nn.TransformerEncoderLayer(**kw),nn.TransformerDecoderLayer(**kw)
    def forward(self, x): return self.decoder(x[:, :3], self.encoder(x))
    def inputs(self, n=64): return torch.randn(n, 6, 16, generator=generator())

@pytest.fixture(params=[Pictures, Translator])
def model(request): return request.param().eval()

def apart(model): return [n for n,m in model.named_modules() if hasattr(m, 'whole_again')]

def assert_same(a, b):
    "The same classes, state and output."
    assert [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    state,x = b.state_dict(),b.inputs()
    assert {*a.state_dict()} == {*state} and all(torch.equal(t, state[k]) for k,t in a.state_dict().items())
    assert torch.equal(a(x), b(x))

@pytest.mark.slow
def test_integers_in_the_runtime(tmp_path):
    "Every convolution, and the first Linear; in torch the same to the last bits of the last layer, which has floats."
    model = Pictures().eval()
    x = model.inputs()
    wanted = model(x)
    quantize_model_(model, calibrate=[x])
    report = deploy_(model, x)
    assert (model(x)-wanted).square().mean() < 1e-3*wanted.square().mean()     # 8 bits
    call,_,fused = session(model, x, tmp_path)
    assert fused.count('QLinearConv') == 2 and 'Conv' not in fused
    assert [r.kernel for r in report.rows][:3] == ['QLinearConv', 'QLinearConv', 'QGemm']
    torch.testing.assert_close(torch.from_numpy(call(x)), model(x).detach())

def flipped(found, wanted):
    "The share of sentences with another code somewhere: last bits of a softmax or a norm may carry one over a tie."
    apart = (found-wanted).abs().amax((1, 2))
    assert apart.max() < .01*wanted.abs().max()                               # less than a code changes
    return (apart > 1e-4).float().mean()

@pytest.mark.slow
def test_all_products_with_weights_are_integers(tmp_path):
    "Sixteen of them: four of each attention, and two behind it in each half."
    model = Translator().eval()
    x,floats = model.inputs(),copy.deepcopy(model)
    quantize_model_(model, calibrate=[x])
    quantized = model(x)
    deploy_(model, x)
    assert flipped(model(x), quantized) < .25             # one code of about a thousand in a sentence
    assert (quantized-floats(x)).square().mean() < 1e-3*floats(x).square().mean()     # 8 bits
    call,_,fused = session(model, x, tmp_path)
    assert fused.count('QGemm') == 16 and 'Gemm' not in fused
    assert flipped(torch.tensor(call(x)), model(x)) < .1

def test_there_and_back(model):
    "A copy of the model comes back, too."
    was = copy.deepcopy(model)
    quantize_model_(model, calibrate=[model.inputs()])
    for back in (copy.deepcopy(model), model):
        assert apart(back) == model.parts
        assert_same(remove_rounding_(back, leave_rounded=False), was)

def test_hooks_and_parameters_stay():
    model,called = Pictures().eval(),[]
    weight = model[1].weight
    model[1].register_forward_hook(lambda *of: called.append(1))
    quantize_model_(model, calibrate=[model.inputs()])
    called.clear()
    model(model.inputs(2))
    assert called == [1] and model[1].weight is weight

def test_nothing_changes_where_it_fails(model):
    was,x = copy.deepcopy(model),model.inputs()
    for wrong in (dict(calibrate=[]), dict(calibrate=[x[..., :3]]), dict(calibrate=[x], skip=['no'])):
        with pytest.raises((ValueError, RuntimeError)): quantize_model_(model, **wrong)
        assert_same(model, was)

@pytest.mark.slow
def test_what_stays_whole(model):
    "What has modules inside, where weights alone are quantized; and what is skipped by name or by a test."
    *others,last = model.parts
    ways = dict(weights=Quantizer(4, block=8), activations=None),dict(skip=[last]),dict(skip=lambda n, layer: n == last)
    for kw,left in zip(ways, (model.alone, others, others), strict=True):
        some = copy.deepcopy(model)
        quantize_model_(some, calibrate=[model.inputs()], **kw)
        assert apart(some) == left

def test_weights_alone():
    "A Linear of 4-bit weights has the kernel of torch's."
    model = Pictures().eval()
    quantize_model_(model, Quantizer(4, block=16), None)
    kernels = {r.name: r.kernel for r in deploy_(model, model.inputs(8)).rows}
    assert kernels['5'] == 'MatMulNBits' and kernels['6'] == 'floats: a forward of its own'

@pytest.mark.slow
def test_compiled():
    attention,x = Attention(nn.MultiheadAttention(16, 4, batch_first=True)),torch.randn(2, 6, 16)
    compiled = torch.compile(attention, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x), attention(x, x, x))

@pytest.mark.slow
def test_a_teacher_of_the_user_stays_as_it_is(model):
    "And every layer has been compared with its own."
    floats,was,x = copy.deepcopy(model),copy.deepcopy(model),model.inputs()
    layers = quantize_model_(model, 4, 8, calibrate=[x]).rows
    report = reconstruct_(model, [x], teacher=floats)
    left = [r for r in report.rows if r.note == 'Scaled has a forward of its own']
    fitted = [r for r in report.rows if r not in left]
    assert [r.name for r in left] == [n for n,m in model.named_modules() if isinstance(m, Scaled)]
    assert [r.name for r in fitted+left] == [r.name for r in layers] and all(r.after <= r.before for r in fitted)
    assert_same(floats, was)
