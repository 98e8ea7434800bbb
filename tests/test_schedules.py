"What the page cannot run: real compilers, saved files, and the trainers of other packages where they are installed."
import warnings
import pytest
import torch
from estimators import INDUCTOR, generator
from torch import nn
import shok_nb as R
from shok_nb.nn import LogisticRound, SoftRound, round_weights_, swap_rounding_


def net(): return nn.Sequential(nn.Linear(3, 4), SoftRound(step=.5), nn.Linear(4, 1), SoftRound())

@pytest.mark.slow
@pytest.mark.parametrize('backend', ['eager', INDUCTOR])
@pytest.mark.parametrize('make', [
    net,
    lambda: round_weights_(nn.Sequential(nn.Linear(3, 4)), SoftRound(step=.1)),
], ids=['layers', 'weights'])
def test_annealing_compiles_once(make, backend):
    "Forward and backward, train mode: every step of a schedule through one compilation, with the values of eager mode."
    model = make()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    scheduler = R.KnobScheduler(compiled, R.linear_schedule(transition_steps=5))    # finds what is inside
    x = torch.randn(2, 3, generator=generator())
    for i in range(6):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            y = compiled(x)
            got = torch.autograd.grad(y.sum(), list(model.parameters()))
        want = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert torch.allclose(y, model(x), atol=1e-5) and all(torch.allclose(a, b, atol=1e-4) for a,b in zip(got, want))
        scheduler.step()
    assert scheduler.get_last_value() == 12.

def test_checkpoint(tmp_path):
    "Saved in the middle and resumed in new objects, a run continues as if it had not stopped."
    def start():
        torch.manual_seed(0)
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=.1)
        return model, sgd, R.KnobScheduler(model, R.cosine_schedule(transition_steps=8))
    def train(model, sgd, scheduler, steps):
        for _ in range(steps):
            sgd.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            sgd.step()
            scheduler.step()
    whole,parts = start(),start()
    train(*whole, 8)
    train(*parts, 3)
    torch.save([o.state_dict() for o in parts], tmp_path/'run.pt')
    resumed = start()
    for o,state in zip(resumed, torch.load(tmp_path/'run.pt', weights_only=True)): o.load_state_dict(state)
    assert resumed[2].last_epoch == 3 and resumed[0][1].alpha == parts[0][1].alpha
    train(*resumed, 5)
    assert all(torch.equal(a, b) for a,b in zip(whole[0].state_dict().values(), resumed[0].state_dict().values()))

def test_follows_the_model():
    "Buffers are looked up at each step: another dtype, another layer, another name."
    model = net()
    scheduler = R.KnobScheduler(model, R.linear_schedule(0., 10., transition_steps=10))
    model.double()
    scheduler.step()
    assert model[1].alpha.dtype == torch.float64 and model[1].alpha == model[3].alpha == 1.
    swap_rounding_(model, SoftRound, SoftRound(7.))
    scheduler.step(5)
    assert model[1].alpha == 5. and scheduler.last_epoch == 5
    swap_rounding_(model, SoftRound, LogisticRound())
    R.KnobScheduler(model, R.linear_schedule(30., 30., transition_steps=1), knob='beta')
    assert model[1].beta == 30.
    with pytest.raises(ValueError, match="no buffer named 'alpha'"): scheduler.step()
    with pytest.raises(ValueError, match='a Parameter learns by itself'):
        R.KnobScheduler(SoftRound(learnable=True), float)

def test_no_warning_where_slopes_live():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        R.KnobScheduler(net(), R.linear_schedule(20., 500., transition_steps=1)).step()
        R.KnobScheduler(nn.Sequential(LogisticRound()), R.linear_schedule(40., 40., transition_steps=1), knob='beta')
    with pytest.warns(UserWarning, match=r'alpha starts at 21: \d\d% of all x'):
        R.KnobScheduler(net(), R.linear_schedule(21., 21., transition_steps=1))

@pytest.mark.parametrize('make, package', [
    (R.lightning_callback, 'lightning'),
    (R.transformers_callback, 'transformers'),
    (R.fastai_callback, 'fastai'),
])
def test_callback_without_its_package(make, package, monkeypatch):
    import sys
    for m in (package, 'lightning.pytorch', 'pytorch_lightning', 'fastai.callback.core'):
        monkeypatch.setitem(sys.modules, m, None)
    with pytest.raises(ImportError, match=f'^{make.__name__} needs the package {package}: pip install {package}$'):
        make(R.KnobScheduler(torch.tensor(0.), R.linear_schedule(transition_steps=9)))

class Recorder(nn.Module):
    "A model that writes down the knob it was trained with."
    def __init__(self):
        super().__init__()
        self.linear,self.soft,self.seen = nn.Linear(1, 1),SoftRound(),[]
    def forward(self, x):
        if self.training: self.seen.append(self.soft.alpha.item())
        return self.soft(self.linear(x))

def data(n=4): return [(torch.full((1, 1), i/n), torch.zeros(1, 1)) for i in range(n)]

def test_lightning(tmp_path):
    L = pytest.importorskip('lightning.pytorch', reason='needs lightning')
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Recorder()
        def training_step(self, batch, i): return self.net(batch[0]).sum()
        def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=.1)
    m = Module()
    off = 'logger', 'enable_checkpointing', 'enable_progress_bar', 'enable_model_summary'
    def fit(**kw):
        callback = R.lightning_callback(R.KnobScheduler(m, lambda i: 1.+i))
        quiet = dict.fromkeys(off, False) | dict(max_epochs=2, accelerator='cpu', default_root_dir=tmp_path)
        L.Trainer(callbacks=[callback], **quiet, **kw).fit(m, torch.utils.data.DataLoader(data(), batch_size=None))
    fit()
    assert m.net.seen == [1., 2., 3., 4., 5., 6., 7., 8.] and m.net.soft.alpha == 9.    # after the last step, the end
    m.net.seen.clear()
    fit(accumulate_grad_batches=2)
    assert m.net.seen == [1., 1., 2., 2., 3., 3., 4., 4.]

def test_transformers(tmp_path):
    tr = pytest.importorskip('transformers', reason='needs transformers')
    pytest.importorskip('accelerate', reason='the Trainer of transformers needs accelerate')
    class Model(Recorder):
        def forward(self, x=None, **kw): return dict(loss=super().forward(x).sum())
    m = Model()
    args = tr.TrainingArguments(output_dir=str(tmp_path), max_steps=3, gradient_accumulation_steps=2,
        per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy='no',
        remove_unused_columns=False)
    callback = R.transformers_callback(R.KnobScheduler(m, lambda i: 1.+i))
    tr.Trainer(model=m, args=args, train_dataset=[dict(x=x[0]) for x,_ in data(8)], callbacks=[callback]).train()
    assert m.seen == [1., 1., 2., 2., 3., 3.] and m.soft.alpha == 4.

def test_fastai():
    pytest.importorskip('fastai', reason='needs fastai')
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    m = Recorder()
    dls = DataLoaders(*(torch.utils.data.DataLoader(data(), batch_size=None) for _ in range(2)))
    learn = Learner(dls, m, loss_func=lambda y, t: y.sum(), cbs=[R.fastai_callback(R.KnobScheduler(m, lambda i: 1.+i))])
    with learn.no_logging(): learn.fit(2)
    assert m.seen == [1., 2., 3., 4., 5., 6., 7., 8.] and m.soft.alpha == 9.
