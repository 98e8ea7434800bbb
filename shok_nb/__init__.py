"""Differentiable rounding for PyTorch."""
__version__ = "0.2.0"
from types import ModuleType as _Module
from . import functions as functions, nn as nn      # as itself: also for others to use
from .engine.core import estimator as estimator, straight_through as straight_through
from .engine.staircases import staircase as staircase
from .estimators.ste import *
from .estimators.ratio import *
from .estimators.ewgs import *
from .estimators.surrogates import *
from .estimators.signs import *
from .estimators.spikes import *
from .estimators.soft import *
from .estimators.sigmoid import *
from .estimators.sine import *
from .estimators.fourier import *
from .estimators.cubic import *
from .estimators.ramp import *
from .estimators.decimals import *
from .estimators.stochastic import *
from .estimators.dither import *
from .estimators.neighbours import *
from .estimators.gradient import *
from .estimators.bounds import *
from .grids.floats import *
from .grids.blocks import *
from .grids.best import *
from .grids.codebooks import *
from .grids.fixed_point import *
from .grids.files import *
from .training.schedules import *
from .training.replace import through_round as through_round
from .training.design import integer_search as integer_search
from .quantization.fake_quantize import *
from .quantization.learned import *
from .quantization.few_levels import *
from .quantization.fsq import *
from .quantization.tokenizers import *
from .quantization.calibrate import *
from .quantization.quantizer import Quantizer as Quantizer
from .networks.models import parameter_groups as parameter_groups
from .networks.models import quantize_model_ as quantize_model_
from .low_precision.stored import *
from .low_precision.products import *
from .low_precision.served import same_grid as same_grid
from .low_precision.entropy import *
from .low_precision.sizes import coded_sizes as coded_sizes
from .low_precision.sizes import learn_bits_ as learn_bits_
from .low_precision.sizes import weight_entropy as weight_entropy
from .deployment.accumulators import accumulator_bits as accumulator_bits
from .deployment.accumulators import narrow_accumulators_ as narrow_accumulators_
from .deployment.deploy import deploy_ as deploy_
from .post_training.equalize import equalize_ as equalize_, smooth_ as smooth_
from .post_training.rotate import rotate_ as rotate_
from .post_training.closest import *
from .post_training.relaxed import *
from .post_training.reconstruct import reconstruct_ as reconstruct_
from .deployment.runtime import onnx_session as onnx_session, to_onnx as to_onnx
from .chips.hardware import to_c as to_c, to_qonnx as to_qonnx

# What `from shok_nb import *` brings: functions and classes, no module in place of the
# caller's `random` or `nn`.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    n for n,v in globals().items() if n[0] != '_' and not isinstance(v, _Module)]

# They need more than torch, or more time: imported when asked for, by their own names.
_LATER = {m.rpartition('.')[2]: m for m in (
    'catalog', 'checks', 'show.plots', 'show.widgets', 'show.try_it', 'show.lab',
    'studies.jpeg', 'demo')}
_DRAW = dict(plots='matplotlib', lab='matplotlib', widgets='ipywidgets', try_it='ipywidgets')

def __getattr__(name):
    "The modules that are imported when asked for."
    if name in _LATER:
        from importlib import import_module
        return import_module(f'.{_LATER[name]}', __name__)
    own = getattr(getattr(nn, name, None), '__module__', '').startswith(__name__)
    where = '; shok_nb.nn has' if own else ''
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}{where}')

def _installed(package):
    from importlib.util import find_spec
    try: return find_spec(package) is not None
    except (ImportError, ValueError): return False

def __dir__():
    "These too, where what they draw with is installed: `help` asks for all it finds here."
    there = {n for n in _LATER if n not in _DRAW or _installed(_DRAW[n])}
    return sorted({*globals(), *there})
