"vector-quantize-pytorch 1.32.0: the same codes and gradients, for codebooks that its float32 index can count."
import pytest
import torch
from estimators import FLOATS, generator, slope
from vector_quantize_pytorch import FSQ, LFQ, ResidualFSQ, VectorQuantize
from vector_quantize_pytorch.finite_scalar_quantization import floor_ste as vq_floor
from vector_quantize_pytorch.finite_scalar_quantization import round_ste as vq_round
from vector_quantize_pytorch.vector_quantize_pytorch import directional_reparam, rotate_to
from shok_nb import floor_ste, fsq, fsq_codes, fsq_index, lfq, lfq_entropy, round_ste, vq, vq_index

LEVELS = [8, 5, 5, 5],[7, 5, 5, 5, 5],[3],[4, 6]
levels = pytest.mark.parametrize('levels', LEVELS, ids=str)
symmetric = pytest.mark.parametrize('symmetric', [False, True], ids=['', 'symmetric'])

def latents(levels): return torch.randn(2, 500, len(levels), generator=generator())*2

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
@pytest.mark.parametrize('squash', ['tanh', 'clamp'])
def test_fsq_agrees(squash, levels, symmetric):
    """Codes, indices and gradients; symmetric codes with our margin at 0. Seed 0: no latent is within rounding error of
    a tie, where their symmetric clamp rounds halves up."""
    z,peer = latents(levels),FSQ(levels, preserve_symmetry=symmetric, bound_hard_clamp=squash == 'clamp')
    codes,index = peer(z)
    mine = lambda z: fsq(z, levels, squash=squash, symmetric=symmetric, margin=0. if symmetric else 1e-3)
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

# --- stages
@pytest.mark.parametrize('levels', [[5, 5], [4, 4, 4], [8, 5, 3]], ids=str)
@pytest.mark.parametrize('stages', (1, 2, 3))
def test_residual_fsq_agrees(levels, stages):
    """Every token of every stage: their loop over residuals is one FSQ of levels**stages with even cells, told coarse
    to fine. Codes are a constant apart; a few first stages decode to the same."""
    z,n = latents(levels),torch.tensor(levels).float()
    peer = ResidualFSQ(levels=levels, num_quantizers=stages, dim=len(levels), quantize_dropout=True).eval()
    out,index = peer(z)
    wide,more = n/(n-1),dict(stages=stages, symmetric=True)
    codes = fsq(z, levels, **more, gain=1/wide, margin=1/(n**stages-1))
    mine = fsq_index(codes, levels, **more)
    assert torch.equal(mine if stages > 1 else mine[..., None], index.long())
    scale = wide*(1-n**-stages)
    assert torch.allclose(codes*scale, out, atol=1e-6)
    for few in range(1, stages):
        want = peer.get_output_from_indices(index[..., :few])
        assert torch.allclose(fsq_codes(mine[..., :few], levels, **more)*scale, want, atol=1e-6)

# --- LFQ and BSQ
@pytest.mark.parametrize('spherical', (False, True))
def test_lfq_agrees(spherical):
    """Codes, gradients and both entropies, where no probability is below their 1e-5, which they take the logarithm of;
    their index has the first channel highest."""
    z = latents([2]*6)*.1
    peer = LFQ(dim=6, spherical=spherical).train()
    (codes,index,_),terms = peer(z, inv_temperature=1., return_loss_breakdown=True)
    assert torch.allclose(lfq(z, spherical=spherical), codes, atol=1e-6)
    bits = fsq_index(lfq(z), [2]*6, symmetric=True)
    assert torch.equal(sum((bits >> i & 1) << 5-i for i in range(6)), index.long())
    mine = lfq_entropy(z, spherical=spherical)
    assert torch.allclose(torch.stack(mine), torch.stack(terms[:2]), atol=2e-5)
    f = lambda z: lfq(z, spherical=spherical)
    assert torch.allclose(slope(f, z), slope(lambda z: peer(z)[0], z), rtol=1e-4, atol=1e-5)

def test_lfq_differs_at_zero():
    "A zero is 1 here, as of `sign_ste`, and -1 there."
    zero = torch.zeros(1, 1, 3)
    assert lfq(zero).tolist() == [[[1, 1, 1]]] and LFQ(dim=3)(zero)[0].tolist() == [[[-1, -1, -1]]]

# --- vector codebooks
def test_rotation_agrees():
    "Gradients; the value is the code itself here, and theirs is rotated, so it is off by rounding errors."
    z,codebook = torch.randn(400, 5, generator=generator()),torch.randn(32, 5, generator=generator(1))
    e = codebook[vq_index(z, codebook)]
    mine = lambda z: vq(z, codebook, method='rotation')
    theirs = lambda z: rotate_to(z, e)
    assert torch.equal(mine(z), e) and torch.allclose(theirs(z), e, atol=1e-5) and not torch.equal(theirs(z), e)
    assert torch.allclose(slope(mine, z), slope(theirs, z), rtol=1e-4, atol=1e-5)

def test_diveq_agrees():
    "Without noise, gradients of latents and codebook; with it the same spread across the error. Seed 0, 1 %."
    z,codebook = torch.randn(400, 5, generator=generator()),torch.randn(32, 5, generator=generator(1))
    g = torch.randn(400, 5, generator=generator(2))
    def grads(f):
        leaf,codes = z.clone().requires_grad_(),codebook.clone().requires_grad_()
        return torch.autograd.grad(f(leaf, codes), (leaf, codes), g)
    mine = grads(lambda z, c: vq(z, c, method='diveq'))
    theirs = grads(lambda z, c: directional_reparam(z, c[vq_index(z, c)], 0.))
    for a,b in zip(mine, theirs): assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    one = torch.tensor([[2., 0., 0.]])
    torch.manual_seed(0)
    far = directional_reparam(torch.zeros(40_000, 3), one.expand(40_000, 3), .04**2)
    ours = vq(torch.zeros(40_000, 3), one, method='diveq', noise=.04, generator=generator())
    assert torch.allclose(ours.std(0)[1:], far.std(0)[1:], rtol=.02)

def test_nearest_differs_far_from_the_origin():
    "Theirs expands the square, which loses digits: around 1000 a fifth of 500 latents get another than the nearest."
    z,codebook = torch.randn(1, 500, 4, generator=generator())+1000,torch.randn(64, 4, generator=generator(1))+1000
    peer = VectorQuantize(dim=4, codebook_size=64, rotation_trick=False).eval()
    peer._codebook.embed.copy_(codebook[None])
    exact = (z[0, :, None].double()-codebook.double()).square().sum(-1).argmin(-1)
    assert torch.equal(vq_index(z[0], codebook), exact)
    assert (peer(z)[1][0] != exact).float().mean() > .2
