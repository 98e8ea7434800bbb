"""GPTQ of llm-compressor, Brevitas and ONNX Runtime and the learned rounding of auto-round: the same layers, inputs and
grids. Where the order of weights is the same, theirs are the codes of `gptq`; descent behind it is never worse."""
import sys
from pathlib import Path
import pytest
import torch
import shok_nb as R

sys.path.append(str(Path(__file__).parents[2]/'bench'))
import layers  # noqa: E402 (found by the line above)

SETTINGS = pytest.mark.parametrize('bits, block', [(4, None), (4, 32), (3, None), (3, 32)])

def solved(name, bits, block, seed=0):
    "Any seed: a layer of 64 x 96, what the package finds, and the grid."
    layer = layers.Layer(bits, block, 64, 96, 400, seed)
    got = layers.PEERS[name][0](layer)
    if got is None: pytest.skip('it has no such grid')
    points,grid = got
    codes = points/grid['scale'] + grid.get('zero_point', 0)
    assert (codes-codes.round()).abs().max() < 1e-4           # the grid is theirs
    low,high = grid['bits'] if isinstance(grid['bits'], tuple) else (-2**(bits-1), 2**(bits-1)-1)
    assert codes.min() > low-.1 and codes.max() < high+.1
    return layer,points,grid

@SETTINGS
@pytest.mark.parametrize('name', layers.PEERS)
def test_ours_is_no_worse(name, bits, block):
    """Four seeds; in one order, and in the better of two as `reconstruct_` does. Descent ends where no single weight
    can do better: 1e-4 is for their float32."""
    for seed in range(4):
        layer,points,grid = solved(name, bits, block, seed)
        start = R.gptq(layer.w, layer.gram, **grid, ordered=None)
        default = R.coordinate_descent(layer.w, layer.gram, **grid, start=start)
        for ours in (layers.ours(layer, grid), default):
            assert layer.error(ours) <= layer.error(points)*(1+1e-4)

@SETTINGS
@pytest.mark.parametrize('name, ordered', [('llm-compressor', False), ('llm-compressor, static order', True),
    ('Brevitas GPTQ', False), ('Brevitas GPTQ, act_order', True)])
def test_the_same_codes_in_the_same_order(name, ordered, bits, block):
    "In float32 a tie may part them, and all that follows in that row: at most two rows of 64."
    layer,points,grid = solved(name, bits, block)
    apart = (R.gptq(layer.w, layer.gram, **grid, ordered=ordered)-points).abs() > 1e-3
    assert apart.any(1).sum() <= 2

def test_differs_from_onnxruntime_whose_gptq_rounds_to_nearest():
    "It reads the column of a matrix that is 0 there, so no error reaches the next weights."
    layer,points,grid = solved('ONNX Runtime GPTQ', 4, None)
    steps = layer.w/grid['scale']
    ties = ((steps-steps.floor()-.5).abs() < 1e-4)            # the largest of each row is one, at 7.5 steps
    nearest = R.fake_quantize(layer.w, grid['scale'], bits=4)
    assert ties.sum() < 100
    torch.testing.assert_close(points[~ties], nearest[~ties])
    assert layer.error(points) > 2*layer.error(R.gptq(layer.w, layer.gram, **grid))
