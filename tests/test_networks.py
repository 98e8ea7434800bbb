"""Networks made at random: the deployed one computes what the quantized one does, and ONNX Runtime what the deployed
one does. A failure is reduced to the smallest network that still fails, and printed as data for `judge`. A thousand
take twenty minutes of a core: `make test-all` has 160, and all of them with NETWORKS=1000 in its environment."""
import collections
import copy
import os
import pytest
import torch
from estimators import slow_after
from networks import (
    ACTIVATIONS,
    ROUNDINGS,
    STEPS,
    build,
    drawn,
    features,
    judge,
    outputs,
    quantized,
    reduced,
    takes_rounding,
    unexplained,
    units,
    values,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")        # torch says it of even kernels

# The seeds are fixed: a failure comes again, and one found today is not lost tomorrow. They are the first of all, none
# was left out. Others are run by hand: `judge(drawn(seed))`.
QUICK,GROUP,ALL = 5,20,1000
JUDGED = int(os.environ.get('NETWORKS', 160))
GROUPS = [range(QUICK), range(QUICK, GROUP), *(range(i, i+GROUP) for i in range(GROUP, JUDGED, GROUP))]
EXPORTED = 1                        # networks of a group that go through the runtime, as an export takes seconds
REFUSED = .02                       # share of networks that `deploy_` may refuse, naming the layer

def told(seed, spec, verdict, folder):
    "A failure: the smallest network that fails in the same way."
    where = folder if 'runtime' in verdict.kind or 'onnx' in verdict.kind else None
    small = reduced(spec, lambda s: judge(s, where).kind == verdict.kind)
    first = f'seed {seed}: {verdict.kind}; {verdict.told}'
    return f'{first}\n  the smallest that fails so: {small}\n  {judge(small, where).told}'

def failures(seeds, folder, most=3):
    "The failures among seeds, the first few of them reduced, and how often each verdict came."
    found,counted,exports = [],collections.Counter(),0
    for seed in seeds:
        spec = drawn(seed)
        export = spec.get('onnx', False) and exports < EXPORTED
        exports += export
        v = judge(spec, folder if export else None)
        counted[v.kind] += 1
        if v.failed: found.append((seed, spec, v))
    lines = [told(*f, folder) for f in found[:most]] + [f'seed {s}: {v.kind}; {v.told}' for s,_,v in found[most:]]
    return lines,counted

@pytest.mark.parametrize('seeds', slow_after(GROUPS), ids=lambda g: f'{g[0]}-to-{g[-1]}')
def test_networks(seeds, tmp_path):
    pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    lines,counted = failures(seeds, tmp_path)
    if lines: pytest.fail('\n'.join([f'{len(lines)} of {len(seeds)} networks', *lines]), pytrace=False)
    assert counted['refused'] <= max(REFUSED*len(seeds), 2), counted

# Not the first of their groups: in these the runtime rounded weights or a bias that the model keeps in floats
@pytest.mark.slow
@pytest.mark.parametrize('seed', [337, 351, 471, 811])
def test_others_in_the_runtime(seed, tmp_path):
    assert judge(drawn(seed), tmp_path) == ('equal', 'in the runtime too')

@pytest.mark.slow
def test_few_are_refused():
    "Of fifty others, without the runtime."
    kinds = collections.Counter(judge(drawn(seed)).kind for seed in range(ALL, ALL+50))
    assert kinds['refused'] <= REFUSED*50, kinds

# --- the tests of the test
def relu_then_norm(spec):
    "Does a normalization stand behind an activation, with a weight of 4 bits somewhere?"
    kinds = [b['kind'] for b in spec['blocks']]
    return ('act', 'norm') in zip(kinds, kinds[1:]) and spec['weights'].get('bits') == 4

def test_reduced_is_the_smallest():
    "From any network that has it, whatever else it has, what a failure needs is left, and no more; if there is time."
    wanted = dict(input=(6,), blocks=[dict(kind='act'), dict(kind='norm')], weights=dict(bits=4))
    row = [dict(kind='act', of='gelu'), dict(kind='norm', gamma='zero', hook='watch')]
    layer = dict(kind='linear', out=8, seed=3)
    within = [dict(kind='residual', body=[layer, *row], join='cat')]
    for blocks in ([layer, *row, layer], [layer, *within, layer]):
        spec = wanted | dict(seed=0, blocks=blocks, weights=dict(bits=4, init='mse', axis=None), output='dict', tap=1)
        build(spec)
        assert reduced(spec, relu_then_norm) == wanted | dict(seed=0)
        assert reduced(spec, relu_then_norm, most=0) == spec

@pytest.mark.slow
def test_same_network_again():
    for seed in range(2):
        assert drawn(seed) == drawn(seed)
        a,b = quantized(drawn(seed)).state_dict(),quantized(drawn(seed)).state_dict()
        assert all(torch.equal(a[k], b[k]) for k in a)

# What must be among the thousand, and how often. The rarest are about four times as frequent as asked
OFTEN = {15: ['Linear', 'Conv1d', 'Conv2d', 'Conv3d', 'Embedding', 'LSTM', 'GRU', 'MultiheadAttention',
    'TransformerEncoderLayer', 'ConvTranspose1d', 'BatchNorm1d', 'BatchNorm2d', 'BatchNorm3d', 'LayerNorm', 'GroupNorm',
    'InstanceNorm1d', 'residual', 'twice', 'shared', 'held', 'layer > norm', 'act > norm', 'pool > norm', 'norm > norm',
    'norm > layer', 'step > norm', 'norm > act', 'layer > layer', 'norm.gamma=negative', 'norm.gamma=zero',
    'norm.gamma=tiny', 'norm.gamma=large', 'norm.variance=tiny', 'norm.affine=False', 'norm.track_running_stats=False',
    'conv.stride=2', 'conv.dilation=2', 'conv.groups=2', 'conv.groups=all', 'conv.padding=same', 'conv.padding=valid',
    'conv.padding=1', 'conv.bias=False', 'conv.padding_mode=reflect', 'conv.padding_mode=circular',
    'weights.zero_point=True', 'weights.axis=None', 'weights.signed=False', 'weights.learn=True',
    'activations.zero_point=True', 'activations.signed=False', 'positive=True', 'onnx=True', 'output=dict',
    'output=tuple', 'output=dataclass', 'linear.out=3'],
    5: ['Functional', 'Lora', 'Tripled', 'Standardized', 'Padding', 'Activated', 'ConvTranspose2d', 'ConvTranspose3d',
    'InstanceNorm2d', 'InstanceNorm3d', 'MaxPool1d', 'MaxPool2d', 'AvgPool1d', 'AdaptiveAvgPool1d', 'residual.join=cat',
    'residual.join=inplace', 'residual.skip=traced', 'shared.way=row', 'linear.hook=watch', 'linear.hook=pre',
    'linear.hook=triple', 'conv.hook=watch', 'norm.hook=watch', 'linear.pruned=zero', 'linear.pruned=tiny',
    'conv.pruned=zero', 'conv.pruned=tiny', 'step.of=transpose', 'step.of=permute', 'step.of=flatten',
    'step.of=reshape', 'dtype=float64', 'dtype=bfloat16', 'weights.block=2', 'weights.block=3', 'linear.out=96']}
OFTEN[15] += [f'weights.bits={b}' for b in range(2, 8)] + [f'weights.init={i}' for i in ('percentile', 'mse', 'lsq')]
OFTEN[5] += [f'activations.bits={b}' for b in range(2, 8)] + [f'act.of={k}' for k in ACTIVATIONS if k != 'relu']
OFTEN[1] = [f'weights.rounding={k}' for k in ROUNDINGS if takes_rounding(k)] + [f'step.of={k}' for k in STEPS]

@pytest.mark.slow
def test_everything_is_there():
    counted = collections.Counter()
    for seed in range(ALL): counted.update(features(drawn(seed)))
    assert not {(f, counted[f]) for n,fs in OFTEN.items() for f in fs if counted[f] < n}

def rounded_biases(model):
    "A copy whose biases are rounded as deployment rounds them, by hand."
    other = copy.deepcopy(model)
    twin = dict(zip(model.modules(), other.modules()))
    for m,half in units(model).items():
        if m.bias is not None: twin[m].bias.copy_(torch.where(half > 0, (m.bias/(2*half)).round()*2*half, m.bias))
    return other

@pytest.mark.slow
@torch.no_grad()
def test_roundings_are_explained():
    "No false alarm: biases rounded by hand are within the bound, in networks of every kind."
    tried = 0
    for seed in range(15):
        spec = drawn(seed)
        if spec.get('dtype') or 'pruned' in str(spec): continue
        model,x = quantized(spec).eval(),values(spec)
        want,got = outputs(model(x)),outputs(rounded_biases(model)(x))
        assert unexplained(model, x, want, got) is None, seed
        tried += got[0].ne(want[0]).any().item()
    assert tried > 4

@pytest.mark.slow
@pytest.mark.parametrize('change', [lambda m, t: t+6*units(m)[m], lambda m, t: t*1.01, lambda m, t: t.clamp(min=0)],
    ids=['three-units', 'one-percent', 'clipped'])
@torch.no_grad()
def test_faults_are_noticed(change):
    "Three units of a bias, a hundredth of the output, or its sign lost: of one layer, of two, and before a norm."
    layer,relu,norm = dict(kind='linear'),dict(kind='act'),dict(kind='norm')
    for blocks in ([layer], [layer, relu, layer], [layer, relu, layer, norm]):
        spec = dict(seed=3, input=(6,), blocks=blocks, weights={})
        model,x = quantized(spec).eval(),values(spec)
        last = list(units(model))[-1]
        want = outputs(model(x))
        with last.register_forward_hook(lambda m, args, out: change(m, out)): got = outputs(model(x))
        assert unexplained(model, x, want, got) is not None, blocks
