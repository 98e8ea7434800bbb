"QONNX's own executor (qonnx 1.0.0) on files of `to_qonnx`: the bits of the model, where its sums are exact."
import pytest
import torch
from torch import nn
import shok_nb as R

pytest.importorskip('qonnx')
import onnx  # noqa: E402 (found by the line above)
from qonnx.core.modelwrapper import ModelWrapper  # noqa: E402 (found by the line above)
from qonnx.core.onnx_exec import execute_onnx  # noqa: E402 (found by the line above)
from qonnx.transformation.infer_shapes import InferShapes  # noqa: E402 (found by the line above)


@pytest.mark.parametrize('bits', (2, 3, 4, 8))
def test_executor(tmp_path, bits, monkeypatch):
    "It asks onnx for the newest version of the files that it makes for ONNX Runtime, which may be older than onnx."
    monkeypatch.setattr(onnx, 'IR_VERSION', min(onnx.IR_VERSION, 10))
    torch.manual_seed(bits)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    for p in model.parameters(): p.data = (p.data*64).round()/64
    x = (torch.randn(32, 1, 8, 8)*64).round()/64                            # ties of the grids among them
    weights = R.Quantizer(bits, axis=0, learn=True, scale='po2')
    R.quantize_model_(model, weights, R.Quantizer(bits, signed=None, scale='po2'), calibrate=[x])
    R.to_qonnx(model, x, tmp_path/'m.onnx')
    m = ModelWrapper(str(tmp_path/'m.onnx')).transform(InferShapes())
    found = execute_onnx(m, {m.graph.input[0].name: x.numpy()})[m.graph.output[0].name]
    assert torch.equal(torch.tensor(found), model(x).detach())
