"""Differentiable rounding for PyTorch."""
__version__ = "0.2.0"
from . import (calibrate, cubic, decimals, dither, ewgs, fourier, gradient, learned,
    neighbours, quantize, ramp, ratio, scalar_quantize, schedules, sigmoid, signs,
    sine, soft, ste, stochastic, surrogates)
from . import functions as functions, nn as nn      # as itself: also for others to use
from .core import estimator, straight_through
from .staircases import staircase
from .ste import *
from .ratio import *
from .ewgs import *
from .surrogates import *
from .signs import *
from .soft import *
from .sigmoid import *
from .sine import *
from .fourier import *
from .cubic import *
from .ramp import *
from .decimals import *
from .stochastic import *
from .dither import *
from .neighbours import *
from .gradient import *
from .schedules import *
from .quantize import *
from .learned import *
from .scalar_quantize import *
from .calibrate import *
from .quantizer import Quantizer
from .models import quantize_model_, unquantize_
from .deploy import deploy_, onnx_session, to_onnx

# What `from shok_nb import *` brings: functions and classes, no module in place of the
# caller's `random` or `nn`.
__all__ = ['staircase', 'estimator', 'straight_through']
__all__ += ste.__all__
__all__ += ratio.__all__
__all__ += ewgs.__all__
__all__ += surrogates.__all__
__all__ += signs.__all__
__all__ += soft.__all__
__all__ += sigmoid.__all__
__all__ += sine.__all__
__all__ += fourier.__all__
__all__ += cubic.__all__
__all__ += ramp.__all__
__all__ += decimals.__all__
__all__ += stochastic.__all__
__all__ += dither.__all__
__all__ += neighbours.__all__
__all__ += gradient.__all__
__all__ += schedules.__all__
__all__ += quantize.__all__
__all__ += learned.__all__
__all__ += scalar_quantize.__all__
__all__ += calibrate.__all__
__all__ += ['Quantizer', 'quantize_model_', 'unquantize_', 'deploy_']
__all__ += ['onnx_session', 'to_onnx']

# they need more than torch
_LATER = 'catalog', 'checks', 'plots', 'widgets', 'lab', 'jpeg', 'demo'

def __getattr__(name):
    "The modules that need more than torch, imported when asked for."
    if name in _LATER:
        from importlib import import_module
        return import_module(f'.{name}', __name__)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

def __dir__():
    "These too."
    return sorted({*globals(), *_LATER})
