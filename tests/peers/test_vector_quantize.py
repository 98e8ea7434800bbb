"vector-quantize-pytorch 1.32.0: the same codes and gradients, for codebooks that its float32 index can count."
import pytest
import torch
from estimators import FLOATS, generator, slope
from vector_quantize_pytorch import FSQ
from vector_quantize_pytorch.finite_scalar_quantization import floor_ste as vq_floor
from vector_quantize_pytorch.finite_scalar_quantization import round_ste as vq_round
from shok_nb import floor_ste, fsq, fsq_codes, fsq_index, round_ste

LEVELS = [8, 5, 5, 5],[7, 5, 5, 5, 5],[3],[4, 6]
levels = pytest.mark.parametrize('levels', LEVELS, ids=str)
symmetric = pytest.mark.parametrize('symmetric', [False, True], ids=['', 'symmetric'])

def latents(levels): return torch.randn(2, 500, len(levels), generator=generator())*2

def ours(levels, symmetric, z): return fsq(z, levels, symmetric=symmetric, margin=0. if symmetric else 1e-3)

@pytest.mark.parametrize('f, theirs', [(round_ste, vq_round), (floor_ste, vq_floor)], ids=['round', 'floor'])
@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_ste_agrees_but_at_infinity_and_minus_zero(f, theirs, dtype):
    x = (torch.arange(-12, 13)/4).to(dtype)
    assert torch.equal(f(x), theirs(x)) and torch.equal(slope(f, x), slope(theirs, x))
    x = torch.tensor([-0., torch.inf], dtype=dtype)
    assert f(x).signbit()[0] and not theirs(x).signbit()[0]
    assert f(x)[1] == torch.inf and theirs(x)[1].isnan()

@levels
@symmetric
def test_fsq_agrees(levels, symmetric):
    """Codes, indices and gradients; symmetric codes with our margin at 0. Seed 0: no
    latent is within rounding error of a tie."""
    z,peer = latents(levels),FSQ(levels, preserve_symmetry=symmetric)
    codes,index = peer(z)
    mine = lambda z: ours(levels, symmetric, z)
    assert torch.allclose(mine(z), codes, atol=1e-6)
    assert torch.equal(fsq_index(mine(z), levels, symmetric=symmetric), index.long())
    assert torch.allclose(slope(mine, z), slope(lambda z: peer(z)[0], z), rtol=1e-4, atol=1e-6)

@levels
@symmetric
def test_every_index_agrees_both_ways(levels, symmetric):
    peer = FSQ(levels, preserve_symmetry=symmetric)
    index = torch.arange(peer.codebook_size)
    codes = fsq_codes(index, levels, symmetric=symmetric)
    assert torch.allclose(codes, peer.indices_to_codes(index), atol=1e-6)
    assert torch.equal(fsq_index(codes, levels, symmetric=symmetric), peer.codes_to_indices(codes).long())

def test_index_differs_beyond_two_to_the_24():
    "Theirs adds the digits up in float32: neighbours share a number, and beyond int32 it is not one of the codebook."
    levels = [8]*9
    index = torch.tensor([2**24, 2**24+1])
    peer,codes = FSQ(levels, return_indices=False),fsq_codes(index, levels)
    assert peer.codes_to_indices(codes).tolist() == [2**24]*2 and torch.equal(fsq_index(codes, levels), index)
    levels = [16]*8
    index = torch.tensor([2**32-2**8])
    peer,codes = FSQ(levels, return_indices=False),fsq_codes(index, levels)
    assert peer.codes_to_indices(codes) < 0 and torch.equal(fsq_index(codes, levels), index)

def test_index_differs_at_nan():
    codes = torch.tensor([[torch.nan, 0.]])
    assert fsq_index(codes, [8, 5]) == -1 and FSQ([8, 5]).codes_to_indices(codes) != -1

def test_two_levels_differ():
    "Theirs wants symmetry, ours also does the plain kind."
    with pytest.raises(AssertionError, match='preserve_symmetry'): FSQ([2])
    assert fsq(torch.tensor([[-5.], [5.]]), [2]).tolist() == [[-1], [0]]

def test_noise_differs_in_its_unit():
    """For 16 levels, in steps from the latent: ours stays within half a step, theirs adds half of the whole scale, 3.75
    steps, to a code that is rounded already."""
    z,step = latents([16]),2/15
    far = lambda codes: (codes-torch.tanh(z)).abs().max()/step
    assert far(fsq(z, [16], symmetric=True, margin=0., noise=1., generator=generator())) <= .5001
    torch.manual_seed(0)
    assert 3.75 < far(FSQ([16], preserve_symmetry=True, noise_dropout=1.).train()(z)[0]) <= 4.2501
