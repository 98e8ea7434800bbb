"gguf 0.19: its numpy reference of the block types, and its reader of our files."
import numpy as np
import pytest
import torch
from estimators import block_rows, generator, same
from gguf import GGMLQuantizationType, GGUFReader, quants
import shok_nb as R

BLOCKS = 'Q8_0', 'Q4_0', 'Q4_1', 'TQ1_0', 'TQ2_0'
SEARCHED = 'IQ4_NL', 'Q6_K', 'Q4_K'                    # it reads them and writes none

def read(path):
    "What the reader makes of each tensor."
    found = {}
    for t in GGUFReader(path).tensors:
        if t.tensor_type.name == 'I64': continue
        values = torch.tensor(quants.dequantize(t.data, t.tensor_type).copy())
        found[t.name] = t.tensor_type.name,values
    return found

@pytest.mark.parametrize('kind', BLOCKS)
def test_gguf_quantize(kind):
    "Every value, and the sign of every zero."
    x,type_of = block_rows(256, 2),GGMLQuantizationType[kind]
    want = torch.tensor(quants.dequantize(quants.quantize(x.numpy(), type_of), type_of))
    assert same(R.gguf_quantize(x, kind), want)

GRIDS = dict(MXFP4=lambda x: R.mx_quantize(x, 'e2m1'), NVFP4=R.nvfp4_quantize,
    BF16=lambda x: R.float_round(x, 'bfloat16'), F16=lambda x: R.float_round(x, 'float16'), F32=lambda x: x)

@pytest.mark.parametrize('kind', [*BLOCKS, *SEARCHED, *GRIDS])
def test_save_gguf(kind, tmp_path):
    "The reader has the values of the grid, the bytes are those of the reference, and saving again changes none."
    x = block_rows(256, 2)
    y = GRIDS[kind](x) if kind in GRIDS else R.gguf_quantize(x, kind)
    report = R.save_gguf(dict(w=x, b=torch.ones(3), n=torch.tensor(7)), tmp_path/'x.gguf', kind)
    found = read(tmp_path/'x.gguf')
    assert found['w'][0] == report['w'][0] == kind and torch.equal(found['w'][1].view_as(y), y)
    assert report['w'][1] == (y-x).abs().max() and found['b'][0] == 'F32'
    bytes_of = {t.name: np.asarray(t.data).view(np.uint8).ravel() for t in GGUFReader(tmp_path/'x.gguf').tensors}
    if kind not in ('MXFP4', 'NVFP4', *SEARCHED):          # it breaks ties of MXFP4 downward
        want = quants.quantize(x.numpy(), GGMLQuantizationType[kind]).view(np.uint8).ravel()
        assert (bytes_of['w'] == want).all()
    assert R.save_gguf(dict(w=y), tmp_path/'y.gguf', kind) == dict(w=(kind, 0.))
    assert torch.equal(read(tmp_path/'y.gguf')['w'][1].view_as(y), y)
    assert all(r.result == 'same' for r in R.same_grid(dict(w=y, b=torch.ones(3), n=torch.tensor(7)),
        tmp_path/'x.gguf').rows)

@pytest.mark.parametrize('kind', [*BLOCKS, *SEARCHED, 'MXFP4', 'NVFP4'])
def test_trained_is_served(kind, tmp_path):
    "A network is trained through a type, and the reader has the weights that it computes with."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    if kind == 'MXFP4': R.quantize_model_(model[0], 'mxfp4', None)
    elif kind == 'NVFP4':           # that of a Quantizer has a scale of the whole tensor, which has no place here
        R.nn.round_weights_(model[0], R.nn.Rounding(R.nvfp4_quantize, deployed=R.nvfp4_quantize))
    else: R.nn.round_weights_(model[0], R.nn.Rounding(R.gguf_quantize, deployed=R.gguf_quantize, format=kind))
    x = torch.randn(64, 256)
    optimizer = torch.optim.Adam(model.parameters(), .01)
    for _ in range(5):
        optimizer.zero_grad()
        (model(x)-x[:, :1]).square().mean().backward()
        optimizer.step()
    model.eval()
    R.save_gguf(model, tmp_path/'x.gguf', lambda name, t: kind if name == '0.weight' else 'F32')
    stored,values = read(tmp_path/'x.gguf')['0.weight']
    assert stored == kind and torch.equal(values.view(8, 256), model[0].weight)
    assert {r.result for r in R.same_grid(model, tmp_path/'x.gguf').rows} == {'same'}

def test_mxfp4_is_theirs_off_ties(tmp_path):
    x,kind = torch.randn(64, 256, generator=generator()),GGMLQuantizationType.MXFP4
    theirs = quants.dequantize(quants.quantize(x.numpy(), kind), kind)
    assert torch.equal(R.mx_quantize(x, 'e2m1'), torch.tensor(theirs))

def test_metadata(tmp_path):
    given = {'a.int': 3, 'a.minus': -4, 'a.large': 2**40, 'a.word': 'héllo', 'a.flag': True, 'a.float': 2.5}
    R.save_gguf(dict(w=torch.ones(2, 32)), tmp_path/'x.gguf', architecture='llama', metadata=given)
    fields = GGUFReader(tmp_path/'x.gguf').fields
    assert {k: fields[k].contents() for k in given} == given
    assert fields['general.architecture'].contents() == 'llama'
