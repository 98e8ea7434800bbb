"What torch does anew at each export and each compilation, and what the tests need once or never."
import functools
import importlib
import torch


def read_torchlib_once():
    "The operators that exports translate and their signatures, kept from the first export on. Returns what makes both."
    try:
        from torch.onnx._internal._lazy_import import onnxscript_apis
        name = onnxscript_apis._name
    except (ImportError, AttributeError): return lambda: None       # another torch has them elsewhere
    @functools.cache
    def operators():
        schemas = importlib.import_module('torch.onnx._internal.exporter._schemas')
        if hasattr(schemas, 'op_signature_from_function'):
            schemas.op_signature_from_function = functools.cache(schemas.op_signature_from_function)
        return importlib.import_module(name).get_torchlib_ops()
    onnxscript_apis.get_torchlib_ops = operators
    return lambda: importlib.import_module('torch.onnx._internal.exporter._registration').ONNXRegistry.from_torchlib()

def list_composites_once():
    """The operators that an export may keep whole are looked for again only when somebody has registered one. Returns
    what looks for them."""
    try:
        from torch.export import decomp_utils, exported_program
    except ImportError: return lambda: None
    search = getattr(exported_program, '_collect_all_valid_cia_ops', None)
    if search is None: return lambda: None
    @functools.lru_cache(1)
    def found(names): return search()
    key,registered = 'CompositeImplicitAutograd',torch._C._dispatch_get_registrations_for_dispatch_key
    def composites(): return found(tuple(registered(key)))
    for m in (exported_program, decomp_utils): m._collect_all_valid_cia_ops = composites
    return composites

def time_no_guards():
    "A compilation empties the processor's cache to time its guards, for a log that nobody reads."
    guards = torch._C._dynamo.guards
    if hasattr(guards, 'profile_guard_manager'): guards.profile_guard_manager = lambda *args: 0.

def once():
    "All of it. Returns what makes the lists of the operators."
    time_no_guards()
    lists = list_composites_once(),read_torchlib_once()
    return lambda: [make() for make in lists]
