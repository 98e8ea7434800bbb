"""What a batch and an example are to a model: which parts are arguments, and which may be labels."""
import ast
import copy
import re
import pytest
import torch
from torch import nn
import shok_nb
from shok_nb import deploy_, equalize_, quantize_model_, reconstruct_, rotate_, smooth_
from shok_nb.deployment.runtime import to_onnx
from shok_nb.nn import remove_rounding_

g = torch.Generator().manual_seed(0)                     # any seed: no bound depends on it
X,MASK = torch.randn(16, 5, 8, generator=g),torch.rand(16, 5, generator=g) < .4
LABEL = torch.arange(16)

class Attends(nn.Module):
    "As the models of transformers: what is not needed may be left out."
    def __init__(self):
        super().__init__()
        self.enter,self.leave = nn.Linear(8, 8),nn.Linear(8, 3)
    def forward(self, x=None, mask=None, training=False):
        h = self.enter(x).relu()
        return self.leave(h if mask is None else h.masked_fill(mask[..., None], 9.))

class Recurrent(Attends):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(8, 8, batch_first=True)
    def forward(self, x, h=None): return self.leave(self.inner(self.enter(x), h)[0])

class Any(Attends):
    def forward(self, *xs): return super().forward(*xs)

class Scores(Attends):
    "Its other arguments are no inputs."
    def forward(self, x, scores=False, *, mask=None): return super().forward(x, mask)

H = torch.zeros(1, 16, 8)
ENCODER = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
SURPLUS = dict(mask=(Attends, (X, MASK), 'mask'), state=(Recurrent, (X, H, LABEL), 'h'), any=(Any, (X, MASK), 'xs'),
    encoder=(ENCODER, (X, None, MASK), 'src_mask, src_key_padding_mask'))
USERS = dict(quantize_model_=lambda m, b: quantize_model_(m, calibrate=[b]), smooth_=lambda m, b: smooth_(m, [b]),
    reconstruct_=lambda m, b: reconstruct_(m, [b]))

@pytest.mark.parametrize('fn, use', USERS.items(), ids=USERS)
@pytest.mark.parametrize('make, batch, names', SURPLUS.values(), ids=SURPLUS)
def test_what_may_be_an_argument_is_not_dropped(make, batch, names, fn, use):
    "The error names it, and what to give."
    model = make()
    if fn == 'reconstruct_': quantize_model_(model, activations=None)
    was = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf'^{fn}: batch 0 of calibrate has .* or \*?{names} of forward; give'):
        use(model, batch)
    assert was.keys() == model.state_dict().keys()

def entering(batch, make=Attends):
    "What of `leave` a batch calibrates."
    torch.manual_seed(0)
    model = make()
    quantize_model_(model, calibrate=[batch])
    return model.leave.input_quantizer.grid()[0].item()

FORMS = dict(names=dict(x=X, mask=MASK), call=(X, MASK, {}), both=(X, dict(mask=MASK)))
@pytest.mark.parametrize('batch', FORMS.values(), ids=FORMS)
def test_forms_that_pass_all(batch):
    "Three ways to say that the mask is one: without it the largest value is another."
    assert entering(batch) == pytest.approx(9/255, rel=.01) != pytest.approx(entering((X,)), rel=.1)

@pytest.mark.parametrize('batch', [(X,), [X], X, (X, {})], ids=['tuple', 'list', 'tensor', 'call'])
def test_forms_that_pass_one(batch): assert entering(batch) == entering(dict(x=X))

def test_labels_go_on():
    "Where the forward takes no more than a batch without labels, or only choices, they are left out."
    assert entering((X, LABEL), Scores) == entering(X)
    assert entering((X, dict(label=LABEL)), Scores) == entering(X)
    model = nn.DataParallel(nn.Sequential(nn.Linear(8, 8)))       # whose own forward takes anything
    quantize_model_(model, calibrate=[(X, LABEL)])

@pytest.mark.parametrize('fn', [deploy_, equalize_, rotate_, to_onnx], ids=lambda f: f.__name__)
@pytest.mark.slow
def test_an_example_is_a_call(fn, tmp_path):
    "All of it is passed, or it is an error; so is nan, with which every proof holds."
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    if fn is deploy_: quantize_model_(model, calibrate=[X])
    file = (tmp_path/'m.onnx',) if fn is to_onnx else ()
    told = rf'^{fn.__name__}: the model does not take example: too many .* forward\(input\)'
    with pytest.raises(ValueError, match=told):
        fn(model, (X, LABEL), *file)
    x = X.clone()
    x[3, 2, 1] = torch.nan
    with pytest.raises(ValueError, match=f'^{fn.__name__}: example holds nan'): fn(model, x, *file)
    assert not [*tmp_path.iterdir()]
    fn(model, X, *file)

@pytest.mark.slow
def test_a_mask_is_an_input_of_the_file(tmp_path):
    onnx = pytest.importorskip('onnx')
    to_onnx(Attends(), (X, MASK), tmp_path/'m.onnx')
    assert [i.name for i in onnx.load(tmp_path/'m.onnx').graph.input] == ['x', 'mask']

def test_the_proof_has_the_mask():
    "Every run is on all of the example."
    model = Attends()
    quantize_model_(model, calibrate=[dict(x=X, mask=MASK)])
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append(len(args)))
    deploy_(model, (X, MASK))
    assert {*seen} == {2}

class Remembers(Attends):
    "A state between calls, as of a network for streams."
    h = None
    def forward(self, x):
        if self.h is None: self.h = torch.zeros(8)
        self.h = .5*self.h + self.enter(x).detach().mean((0, 1))
        return self.leave(self.enter(x) + self.h)

class Once(Remembers):
    "What is made once and kept is none."
    def forward(self, x):
        if self.h is None:
            self.h = self.enter(x).detach().mean()
            return self.leave(self.enter(x))
        return self.leave(self.enter(x)-self.h)

def test_a_state_between_calls():
    model = Remembers()
    quantize_model_(model, activations=None)
    with pytest.raises(ValueError, match='^deploy_: the float model answers differently when it is called twice'):
        deploy_(model, X)
    with pytest.raises(ValueError, match='^equalize_: the float model answers differently'): equalize_(Remembers(), X)
    model = Once()
    quantize_model_(model, activations=None)
    assert deploy_(model, X).rows[0].weights == 'int8'

WRONG = dict(array=X.numpy(), names=dict(x=X.numpy()), rows=X[0].tolist(), far=X.to('meta'), wide=X.double())
@pytest.mark.parametrize('batch', WRONG.values(), ids=WRONG)
@pytest.mark.parametrize('fn, use', USERS.items(), ids=USERS)
def test_what_is_no_input(batch, fn, use):
    "The function, the batch and what is in it."
    model = Attends()
    if fn == 'reconstruct_': quantize_model_(model, activations=None)
    told = f'^{fn}: .*(batch 0 of|take) calibrate.*({"|".join(OF_BATCH)})'
    with pytest.raises((TypeError, ValueError, RuntimeError), match=told):
        use(model, batch)

OF_BATCH = 'list of numbers','ndarray; torch.as_tensor','on meta, with a model on cpu','torch.float64 of shape'

@pytest.mark.parametrize('teacher, told', [(nn.Linear(8, 3), 'enter.weight has shape .* there is none'), (3, 'got int'),
    (nn.ModuleDict(dict(enter=nn.Linear(8, 4), leave=nn.Linear(8, 3))), r'enter.weight .* of shape \(4, 8\)')], ids=str)
def test_a_wrong_teacher(teacher, told):
    model = Attends()
    quantize_model_(model, activations=None)
    with pytest.raises((TypeError, ValueError), match=f'^reconstruct_: teacher must be .*{told}'):
        reconstruct_(model, [X], teacher=teacher)
    with pytest.raises(ValueError, match='^reconstruct_: teacher .* model itself'):
        reconstruct_(model, [X], teacher=model)

# --- what is compiled
def network(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()

def whole(m):
    model = torch.compile(m, backend='eager')
    return model,model

def method(m):
    m.compile(backend='eager')
    return m,m

def inner(m):
    m[0] = torch.compile(nn.Sequential(m[0]), backend='eager')
    return m,m

def around(m): return m,torch.compile(lambda x: m(x), backend='eager')

CHANGES = dict(weights=lambda m: quantize_model_(m, 4, None),
    inputs=lambda m: quantize_model_(m, None, 4, calibrate=[X]),
    both=lambda m: quantize_model_(m, 4, 4, calibrate=[X]))
@pytest.mark.slow
@pytest.mark.parametrize('compiled', [whole, method, inner, around])
@pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_compiled_code_that_has_run_is_compiled_again(change, compiled):
    "To the quantized model, which is that of a twin that was never compiled, and back."
    torch._dynamo.reset()
    floats = network()
    twin = copy.deepcopy(floats)
    change(twin)
    model,run = compiled(copy.deepcopy(floats))
    assert torch.equal(run(X), floats(X))
    change(model)
    assert torch.equal(run(X), twin.eval()(X)) and not torch.equal(run(X), floats(X))
    if change is CHANGES['both']:
        reconstruct_(model, [X])
        with torch.compiler.set_stance('force_eager'): now = run(X)
        assert torch.equal(run(X), now)
    remove_rounding_(model, leave_rounded=False)
    assert change is CHANGES['both'] or torch.equal(run(X), floats(X))

@pytest.mark.slow
@torch.no_grad()
def test_compiled_code_sees_integers():
    model,run = around(network())
    quantize_model_(model, 4, 4, calibrate=[X])
    run(X)
    layers = [*model]
    deploy_(model, X)
    seen = []
    for m in layers: m.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(run(X), model(X)) and model[0] is not layers[0]

def test_a_script_is_refused():
    script = torch.jit.trace(network(), X)
    with pytest.raises(TypeError, match='^quantize_model_: model must be .*got a script'): quantize_model_(script)

def test_a_compiled_layer_is_refused():
    "What holds a block is none."
    model = network()
    model[2] = torch.compile(model[2], backend='eager')
    with pytest.raises(ValueError, match='^quantize_model_: 2 is one Linear that torch.compile holds'):
        quantize_model_(model, activations=None)

# --- what prose says
def test_calls_in_docstrings_run():
    """Those in backticks whose arguments are words and numbers of the package."""
    calls = []
    for f in vars(shok_nb).values():
        prose = ' '.join((getattr(f, '__doc__', None) or '').split('Example:')[0].split())
        for code in re.findall('`([^`]+)`', prose):
            try: tree = ast.parse(code, mode='eval').body
            except SyntaxError: continue
            words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            known = vars(shok_nb.nn) | vars(shok_nb)
            if isinstance(tree, ast.Call) and words <= known.keys(): calls.append((code, known))
    assert any('dorefa_weight' in code for code,_ in calls)
    for code,known in calls: eval(code, dict(known))
