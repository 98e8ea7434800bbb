"An export of torch reads the sources of some five hundred operators anew each time: in the tests once is enough."
import functools
import importlib


def read_torchlib_once():
    "The list of the operators that exports translate, kept from the first export on. Returns what makes it."
    try:
        from torch.onnx._internal._lazy_import import onnxscript_apis
        name = onnxscript_apis._name
    except (ImportError, AttributeError): return lambda: None       # another torch has them elsewhere
    @functools.cache
    def operators(): return importlib.import_module(name).get_torchlib_ops()
    onnxscript_apis.get_torchlib_ops = operators
    return operators
