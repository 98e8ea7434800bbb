"""kornia 0.9.0: the same cubic rounding; its cubic floor is wrong at whole numbers,
and its JPEG tables are made with it."""
import pytest
import torch
from estimators import FLOATS, generator, near, slope
from kornia.enhance import jpeg as kornia
from kornia.enhance import jpeg_codec_differentiable
from shok_nb import cubic_round, floor_ste, round_ste
from shok_nb.studies.jpeg import jpeg, jpeg_tables, pillow_jpeg, psnr

cubic,cubic_floor = kornia._differentiable_polynomial_rounding,kornia._differentiable_polynomial_floor
def points(dtype): return torch.cat([torch.arange(-24, 25)/8, torch.randn(1000, generator=generator())*5]).to(dtype)

@pytest.mark.parametrize('dtype', FLOATS, ids=str)
def test_cubic_agrees(dtype):
    "To a few units in the last place, ties included, in value and slope."
    x = points(dtype)
    assert near(cubic_round(x), cubic(x)) and near(slope(cubic_round, x), slope(cubic, x))

@pytest.mark.parametrize('dtype', FLOATS[:2], ids=str)
def test_cubic_differs_in_half_precision(dtype):
    "Theirs rounds after each operation, ours once: only ours is the float64 result to the last bit."
    x = points(dtype)
    exact = cubic(x.double()).to(dtype)
    assert torch.equal(cubic_round(x), exact) and (cubic(x) != exact).sum() > 5

def test_cubic_differs_at_infinity():
    x = torch.tensor([torch.inf])
    assert cubic_round(x) == torch.inf and cubic(x).isnan()

def test_cubic_floor_is_an_eighth_low_at_whole_numbers():
    "So a scale of 50 percent, quality 75, is 49.875, and quality 100 gets the scale -0.125."
    n = torch.arange(-3., 4)
    assert torch.equal(cubic_floor(n), n-.125) and torch.equal(floor_ste(n), n)
    assert kornia._jpeg_quality_to_scale(torch.tensor([75., 100.])).tolist() == [49.875, -.125]

def tables(quality):
    "What kornia divides by, luma and chroma."
    default = kornia._get_default_qt_y, kornia._get_default_qt_c
    standard = torch.stack([f(None, torch.float64) for f in default])
    scale = kornia._jpeg_quality_to_scale(torch.tensor(float(quality)))
    return cubic_floor(kornia._differentiable_clipping((standard*scale+50)/100, 1, 255))

@pytest.mark.parametrize('quality, low, high', [(50, 0, .004), (75, .95, 1), (90, .9, 1), (100, .88, .89)])
def test_jpeg_tables_differ(quality, low, high):
    "The largest difference from the table in a file of that quality, in grey levels. At 100 all steps should be 1."
    assert low < (tables(quality)-jpeg_tables(quality)).abs().max() < high
    if quality == 100: assert tables(100).max() < .13 and (jpeg_tables(100) == 1).all()

def picture():
    "Grey, (1, 1, 64, 48), waves and noise; seed 0."
    y,x = torch.meshgrid(torch.arange(64.), torch.arange(48.), indexing='ij')
    waves,noise = 50*torch.sin(x/5)*torch.cos(y/7),8*torch.randn(64, 48, generator=generator())
    return (128+waves+noise).round().clamp(20, 235)[None, None]

def grey(): return picture().expand(-1, 3, -1, -1)
def coloured(): return torch.cat([picture(), picture().flip(-1)/2+60, picture().flip(-2)/2+60], 1)

def coded(rgb, quality): return 255*jpeg_codec_differentiable(rgb/255, torch.tensor([float(quality)], dtype=rgb.dtype))

def luma(rgb): return (rgb*torch.tensor([.299, .587, .114], dtype=rgb.dtype).view(3, 1, 1)).sum(1, keepdim=True)

@pytest.mark.parametrize('quality', [10, 50, 75, 95])
@pytest.mark.parametrize('make', [grey, coloured])
def test_jpeg_agrees_on_luma_with_the_same_tables(make, quality):
    "Values and gradients in float64, given their tables and their rounding."
    x = make().double()
    x.requires_grad_()
    mine,peer = luma(jpeg(x, tables(quality), cubic_round)),luma(coded(x, quality))
    assert torch.allclose(mine, peer, rtol=0, atol=1e-8)
    to_mine,to_peer = (torch.autograd.grad(y.sum(), x)[0] for y in (mine, peer))
    assert torch.allclose(to_mine, to_peer, rtol=0, atol=1e-8) and to_mine.count_nonzero() > x.numel()/2

def test_jpeg_differs_in_the_middle_of_the_colours():
    "Theirs puts no colour at 127.5, the format at 128: a grey picture comes back coloured. Ours stays grey."
    spread = lambda rgb: (rgb.amax(1)-rgb.amin(1)).max()
    assert spread(coded(grey(), 50)) > 1 and spread(jpeg(grey(), 50)) < 1e-3

@pytest.mark.parametrize('quality', [75, 90])
def test_ours_is_closer_to_the_file(quality):
    """Luma against a file by Pillow, where their tables are off: the right ones are
    worth 2 dB, the right rounding 1 more."""
    x = picture()
    file = pillow_jpeg(x, quality)
    pictures = luma(coded(grey(), quality)),jpeg(x, quality, cubic_round),jpeg(x, quality, round_ste)
    a,b,c = (psnr(y, file) for y in pictures)
    assert a+2 < b < c-1, (a, b, c)
