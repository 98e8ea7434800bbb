"compressed-tensors 0.20: what it reads of our folders."
import json
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import nn
import shok_nb as R

GRIDS = dict(groups=lambda: R.Quantizer(4, block=32), learned=lambda: R.Quantizer(4, block=32, learn=True),
    channels=lambda: R.Quantizer(4, axis=0), tensor=lambda: R.Quantizer(8), three=lambda: R.Quantizer(3, block=32),
    e4m3=lambda: R.Quantizer(format='e4m3', axis=0), one_e4m3=lambda: R.Quantizer(format='e4m3'),
    mxfp4=lambda: 'mxfp4', nvfp4=lambda: 'nvfp4',
    learned_mxfp4=lambda: R.Quantizer(format='mxfp4', learn=True),
    learned_nvfp4=lambda: R.Quantizer(format='nvfp4', learn=True))

def read(folder):
    "Each weight as their compressor makes it, by the scheme that the config gives its layer."
    told = json.loads((folder/'config.json').read_text())['quantization_config']
    config,tensors,found = QuantizationConfig.model_validate(told),load_file(folder/'model.safetensors'),{}
    for scheme in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        for name in scheme.targets:
            own = {k.removeprefix(f'{name}.'): t for k,t in tensors.items() if k.startswith(f'{name}.')}
            found[f'{name}.weight'] = compressor.decompress(own, scheme)['weight']
    return tensors,config,found

@pytest.mark.parametrize('grid', GRIDS)
def test_save_compressed(grid, tmp_path):
    "The weights that they read are those that the model computes with, bit for bit."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 4))
    model[0].weight.data[3:5] *= torch.tensor([[1e-3], [30.]])
    R.quantize_model_(model, GRIDS[grid](), None, skip=['4'])
    model.eval()
    report = R.save_compressed(model, tmp_path, config=dict(model_type='mine'))
    tensors,config,found = read(tmp_path)
    assert {*found} == {*report} == {'0.weight', '3.weight'} and config.ignore == ['4']
    for name,w in found.items():
        assert torch.equal(w.float(), model.get_submodule(name[0]).weight) and report[name][1] == 0
    for name in ('0.bias', '2.weight', '4.weight'): assert torch.equal(tensors[name], model.state_dict()[name])

def test_two_schemes(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    R.quantize_model_(model[0], 'mxfp4', None)
    R.quantize_model_(model[1], R.Quantizer(4, block=32), None)
    R.save_compressed(model, tmp_path)
    _,config,found = read(tmp_path)
    assert config.format == 'mixed-precision' and len(config.config_groups) == 2
    for name,w in found.items(): assert torch.equal(w.float(), model.get_submodule(name[0]).weight)
