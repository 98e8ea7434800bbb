"""An attention of torch as layers: in whole transformers, to the runtime and back, and where a call fails."""
import copy
import pytest
import torch
from estimators import generator
from test_deploy import session
from torch import nn
from shok_nb import Quantizer, deploy_, quantize_model_, reconstruct_
from shok_nb.nn import remove_rounding_
from shok_nb.quantization.attention import Attention


class Translator(nn.Module):
    "An encoder, and a decoder that attends to it: to two tensors in one call."
    def __init__(self):
        super().__init__()
        kw = dict(d_model=16, nhead=4, dim_feedforward=32, batch_first=True)
        self.encoder,self.decoder = nn.TransformerEncoderLayer(**kw),nn.TransformerDecoderLayer(**kw)
    def forward(self, x): return self.decoder(x[:, :3], self.encoder(x))

def words(n=64): return torch.randn(n, 6, 16, generator=generator())

def attentions(model): return [type(m) for m in model.modules() if isinstance(m, (Attention, nn.MultiheadAttention))]

def flipped(found, wanted):
    "The share of sentences with another code somewhere: last bits of a softmax or a norm may carry one over a tie."
    apart = (found-wanted).abs().amax((1, 2))
    assert apart.max() < .01*wanted.abs().max()                               # less than a code changes
    return (apart > 1e-4).float().mean()

def same_state(a, b):
    a,b = a.state_dict(),b.state_dict()
    return {*a} == {*b} and all(torch.equal(a[k], b[k]) for k in a)

@pytest.fixture
def model():
    torch.manual_seed(0)
    return Translator().eval()

@pytest.mark.slow
def test_all_products_with_weights_are_integers(model, tmp_path):
    "Sixteen of them: four of each attention, and two behind it in each half."
    x,floats = words(),copy.deepcopy(model)
    quantize_model_(model, calibrate=[x])
    assert attentions(model) == [Attention]*3
    quantized = model(x)
    deploy_(model, x)
    assert flipped(model(x), quantized) < .25             # one code of about a thousand in a sentence
    assert (quantized-floats(x)).square().mean() < 1e-3*floats(x).square().mean()     # 8 bits
    call,_,fused = session(model, x, tmp_path)
    assert fused.count('QGemm') == 16 and 'Gemm' not in fused
    assert flipped(torch.tensor(call(x)), model(x)) < .1

def test_there_and_back(model):
    floats = copy.deepcopy(model)
    quantize_model_(model, calibrate=[words()])
    twin = remove_rounding_(copy.deepcopy(model), leave_rounded=False)
    assert attentions(twin) == [nn.MultiheadAttention]*3 and attentions(model) == [Attention]*3
    remove_rounding_(model, leave_rounded=False)
    assert attentions(model) == [nn.MultiheadAttention]*3 and same_state(model, floats)
    assert torch.equal(model(words()), floats(words()))

@pytest.mark.parametrize('wrong', (dict(calibrate=[]), dict(calibrate=[words(2)[..., :3]]), dict(skip=['no'])))
def test_nothing_changes_where_it_fails(model, wrong):
    was = copy.deepcopy(model)
    with pytest.raises((ValueError, RuntimeError)): quantize_model_(model, **dict(calibrate=[words()]) | wrong)
    assert attentions(model) == [nn.MultiheadAttention]*3 and same_state(model, was)
    assert torch.equal(model(words()), was(words()))

def test_what_stays_whole(model):
    "Weights alone, and what is skipped by name or by a test."
    four = quantize_model_(copy.deepcopy(model), Quantizer(4, block=8), None)
    assert [r.kind for r in four.rows].count('MultiheadAttention') == 3
    for skip in (['encoder.self_attn'], lambda name, layer: name == 'encoder.self_attn'):
        some = copy.deepcopy(model)
        quantize_model_(some, calibrate=[words()], skip=skip)
        assert attentions(some) == [nn.MultiheadAttention, Attention, Attention]

def test_it_learns(model):
    "A step of training reaches every projection."
    quantize_model_(model.train(), calibrate=[words()])
    model(words()).square().sum().backward()
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    for name in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
        weights = [getattr(m, name).parametrizations.weight.original for m in layers]
        assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in weights)

def test_compiled():
    torch.manual_seed(0)
    attention,x = Attention(nn.MultiheadAttention(16, 4, batch_first=True)),words(2)
    compiled = torch.compile(attention, backend='aot_eager', fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x), attention(x, x, x))

def test_a_teacher_of_the_user_stays_as_it_is(model):
    floats,was = copy.deepcopy(model),copy.deepcopy(model)
    quantize_model_(model, 4, 8, calibrate=[words()])
    report = reconstruct_(model, [words()], teacher=floats)
    assert len(report.rows) == 16 and all(r.after <= r.before for r in report.rows)
    assert attentions(floats) == [nn.MultiheadAttention]*3 and same_state(floats, was)
