"""What an error says, for those that no page shows: a page shows three that teach. Each row is a call and a part of its
message; the tables of test_bad_input.py and test_bad_calls.py ask the same of every argument, but not for the words;
test_errors.py asks every estimator for those of its tensors, steps and knobs."""
import json
import math
import literate
import pytest
import torch
from pages import NBS
from torch import nn
import shok_nb as R
from shok_nb.nn import Rounding, RoundSTE, SoftRound, remove_rounding_, round_weights_

X = torch.tensor([-.7, .3, 1.4])
W = torch.linspace(-1, 1, 256).view(4, 64)
INTS = torch.arange(3)

def of_estimators():
    yield lambda: R.dsq_round(X, levels=4.),'levels must be an int, got float'
    yield lambda: R.stable_round(X, .23),'amplitude must be in [0, 0.225], got 0.23'
    yield lambda: R.clipped_round(X, lower=2.),'got 2 and 2'
    yield lambda: R.trust_round(X, -1.),'trust must be in [0, inf], got -1'
    yield lambda: R.swish_sign(X, -1.),'beta must be in [0, inf], got -1'
    yield lambda: R.soft_round_inverse(INTS),'soft_round_inverse: y must be'
    yield lambda: R.logistic_round(X, math.nan),'beta must be in [0, inf], got nan'
    yield lambda: R.sine_round(X, True),'got bool'
    yield lambda: R.fourier_round(X, -1),'terms must be >= 0, got -1'
    yield lambda: R.fourier_round(X, damping=torch.ones(2)),"damping must be None or 'fejer', got tensor"
    yield lambda: R.diff_round(X, True),'diff_round: decimals must be an int, got bool'
    yield lambda: R.decimal_ste(X, ties='up', halves='decimal'),'halves must be one of written, binary'
    g,seed = torch.Generator(),torch.tensor(0)
    yield lambda: R.stochastic_round(X, generator=g, seed=seed),'stochastic_round: got both generator and seed'
    yield lambda: R.stochastic_round(INTS),'stochastic_round: x must be float16'
    yield lambda: R.stochastic_round(X, step=0),'step must be in (0, inf), got 0'
    yield lambda: R.local_expectation(torch.square, INTS),'local_expectation: x must be float16'
    yield lambda: R.quantize_grad(X, seed=0),'seed must be an int64 torch.Tensor, got int'
    yield lambda: R.normalize_grad(X, eps=-1),'eps must be in [0, inf], got -1'
    yield lambda: R.scale_grad(X, math.nan),'factor must be in (-inf, inf), got nan'
    yield lambda: R.scale_grad(INTS, 1.),'got torch.int64'
    yield lambda: R.lower_bound(X, torch.zeros(3, 1)),'lower_bound: bound of shape (3, 1) is larger than x'
    yield lambda: R.lower_bound(X, None),'lower_bound: bound must be a number'
    yield lambda: R.checks.check_estimator(R.round_ste, skip='vmap'),"no law 'vmap' to skip"

def of_random():
    from shok_nb.engine.random import noise_like, uniform_like
    yield lambda: uniform_like(X, seed=torch.tensor(3.)),'got torch.float32; use seed.long()'
    yield lambda: uniform_like(X, seed=torch.arange(2)),'got shape (2,); use torch.vmap'
    yield lambda: noise_like(X, 'pink'),"kind must be one of"

def of_quantization():
    yield lambda: R.quantized_bits(X, 8.),'bits must be an int, got float'
    yield lambda: R.minmax_init(X, signed=0),'minmax_init: signed must be True or False, got int'
    yield lambda: R.minmax_init(W, 4, axis=0, block=16),'give axis or block, not both, got 0 and 16'
    yield lambda: R.percentile_init(W, 4, percentile=.5),'percentile must be in [50, 100], got 0.5'
    yield lambda: R.minmax_init(W, 1),'bits must be in [2, 24], got 1'
    q = R.Quantizer(8)
    q.calibrate_(W)
    yield lambda: R.Quantizer(4, axis=0, block=16),'give axis or block, not both, got 0 and 16'
    yield lambda: R.Quantizer(init='best'),'init must be one of minmax, percentile, mse,'
    yield lambda: R.Quantizer(signed=0),'signed must be True or False, got int'
    yield lambda: R.gptq(W, torch.eye(64), torch.zeros(()), bits=4),'scale must be positive and finite, got 0 to 0'
    yield lambda: R.Quantizer().calibrate_(W/0),'x must be finite'
    yield lambda: q.to_codes(W*math.nan),'to_codes got nan, which has no code'
    def upside_down(x, *args, **kw): return torch.tensor(-1.),torch.tensor(0)
    yield lambda: R.Quantizer(init=upside_down).calibrate_(W),'gives a scale that is not positive and finite'
    yield lambda: R.Quantizer(init='lsq', zero_point=True),"init='lsq' has no zero point"
    yield lambda: R.Quantizer(format='mxfp4', axis=0),'mxfp4 needs no scale of ours; leave out axis'
    yield lambda: R.Quantizer(format='nvfp4', learn=True, axis=0),'nvfp4 says its blocks and the format of their scales'
    yield lambda: R.Quantizer(format='mxfp4').calibrate_(W[:, :3]),'block must divide the last axis, of length 3, got'
    yield lambda: R.Quantizer(1),'bits must be in [2, 24], got 1'
    def soft(v): return R.soft_round(v, 3.)
    yield lambda: R.Quantizer(rounding=soft),'gives soft or random values in evaluation'
    yield lambda: R.Quantizer().calibrate_(INTS),'got torch.int64'
    yield lambda: R.signround(INTS),'w must be float16'
    yield lambda: R.fsq_codes(INTS, [8]*22),'at most 2**63'
    yield lambda: R.fsq_codes(torch.zeros(3), [8]),'must be a dense integer Tensor, got torch.float32'

def of_layers():
    yield lambda: Rounding(R.dorefa_weight, R.dorefa_weight, bits=99),'bits must be in [1, 24], got 99'
    scale = torch.tensor(.1)
    told = 'rounding=uniform_noise gives soft or random values'
    yield lambda: Rounding(R.lsq, R.lsq, scale=scale, rounding=R.uniform_noise),told
    yield lambda: Rounding(R.sign_ste, R.sign_ste, learnable=True),'sign_ste was given no float knob to learn'
    yield lambda: SoftRound(beta=3.),"SoftRound: got an unexpected keyword argument 'beta'"
    yield lambda: SoftRound(-1),'alpha must be in [0, inf], got -1'
    yield lambda: round_weights_(nn.ReLU(), RoundSTE()),'no layer of these kinds with a weight in ReLU'
    yield lambda: remove_rounding_(nn.Linear(2, 2)),'nothing rounds the weights or the inputs of a layer'

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

BATCH = torch.linspace(-1, 1, 64).view(8, 8)

def of_models():
    from shok_nb.networks.flow import call_of_example
    quantized = network()
    R.quantize_model_(quantized, 8, 8, calibrate=[BATCH])
    yield lambda: R.quantize_model_(nn.ReLU()),'no layer to quantize in ReLU'
    yield lambda: call_of_example('deploy_', nn.ReLU(), (X, INTS)),'too many'
    yield lambda: R.quantize_model_(network(), calibrate=[BATCH], skip='0'),"did you mean skip=['0']?"
    yield lambda: R.deploy_(quantized, BATCH[:, :1]),'the model does not take example: RuntimeError'
    yield lambda: R.watersic(torch.eye(2, 8), torch.eye(8), bits=3),'bits must be below log2 of the rows of w, 1, got 3'

def of_deployment(folder):
    from shok_nb.deployment.integer_operations import IntegerAdd, IntegerAveragePool
    net = network()
    R.quantize_model_(net, R.Quantizer(8, scale='po2'), R.Quantizer(8, scale='po2'), calibrate=[BATCH])
    R.deploy_(net, BATCH)
    yield lambda: R.to_onnx(net, 'x', folder/'no.onnx'),'example must be a torch.Tensor, got str'
    def grid(scale, zero): return torch.tensor(scale),torch.tensor(zero, dtype=torch.uint8)
    yield lambda: IntegerAveragePool(grid(1., 0), nn.ReLU()),'must be an nn.AvgPool2d, got ReLU'
    told = 'IntegerAdd: input_zero_point must be torch.uint8'
    yield lambda: IntegerAdd(grid(1/8, 128), (torch.tensor(1/8), torch.tensor(3))),told
    told = '0 is a Linear; deploy_ has made no integers of it'
    yield lambda: R.to_c(nn.Sequential(nn.Linear(8, 3)), BATCH, folder/'other.h'),told
    told = 'file must be named as a function of C, such as net.h'
    yield lambda: R.to_c(net, BATCH, folder/'my-net.h'),told
    told = 'ggml reads up to 4 dims'
    yield lambda: R.save_gguf(dict(w=torch.ones(1, 1, 1, 1, 32)), folder/'no.gguf'),told
    told = "'split.count' is of a file in parts"
    yield lambda: R.save_gguf(dict(w=torch.ones(2, 32)), folder/'no.gguf', metadata={'split.count': 2}),told

def of_show():
    from shok_nb.show.lab import bias_variance, report
    from shok_nb.show.plots import curves
    from shok_nb.show.try_it import descend
    from shok_nb.show.widgets import player, tune
    def ramp(x, gain): return x*gain
    yield lambda: descend(R.soft_round, 0., beta=2.),"unexpected keyword argument 'beta'"
    yield lambda: tune(R.soft_round, alpha=-1.),'must be in [0, inf], got -1'
    yield lambda: tune(R.round_ste, ties='odd'),"must be one of even, away, zero, up, down, got 'odd'"
    yield lambda: tune(R.decimal_ste, decimals=1.5),'decimals must be a whole number, got 1.5'
    yield lambda: player('soft_round'),'player: f must be a function'
    yield lambda: tune(R.round_ste, hard=True),"unexpected keyword argument 'hard'"
    yield lambda: tune(ramp),"missing a required argument: 'gain'"
    yield lambda: curves(R.soft_round, ax=None, beta=3.),"unexpected keyword argument 'beta'"
    yield lambda: bias_variance(R.round_ste, x=.5),'x must be a vector, got shape ()'
    yield lambda: bias_variance(R.round_ste, draws=1),'draws must be >= 2, got 1'
    yield lambda: report(R.soft_round, beta=3.),"unexpected keyword argument 'beta'"

ROWS = (of_estimators, of_random, of_quantization, of_layers, of_models, of_deployment, of_show)

@pytest.mark.parametrize('rows', ROWS, ids=lambda f: f.__name__.removeprefix('of_'))
def test_message(rows, tmp_path):
    other = []
    for call,told in rows(tmp_path) if rows is of_deployment else rows():
        try: call()
        except Exception as e: said = str(e)
        else: said = 'nothing'
        if told not in said: other.append((told, said))
    assert not other and not [*tmp_path.iterdir()]

def test_a_page_shows_three_errors():
    "At most: one that must fail is a row above, or of a table of nonsense, or a check."
    def shown(nb):
        made = literate.convert(json.loads(nb.read_text('utf-8')), {}, 'shok_nb')['cells']
        return [c['id'] for c in made if 'raises-exception' in c['metadata'].get('tags', ())]
    count = {nb.stem: len(shown(nb)) for nb in NBS}
    assert max(count.values()) == 3, {k: n for k,n in count.items() if n > 3}
