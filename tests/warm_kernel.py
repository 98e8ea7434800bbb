"""Kernels without their imports: this process has made those that most pages begin with; each kernel is a fork of it.

A line of JSON on stdin, `dict(cmd=, cwd=, env=)` as jupyter_client has it, starts a kernel, and its process number is
a line on stdout. Nothing of shok_nb is imported here, so a page meets it as a reader's Python does."""
import gc
import inspect
import io
import json
import logging
import os
import signal
import sys
import fastcore.test  # noqa: F401
import ipykernel.debugger  # noqa: F401
import IPython.core.completerlib  # noqa: F401
import IPython.core.oinspect  # noqa: F401
import IPython.core.pylabtools  # noqa: F401
import IPython.extensions.storemagic  # noqa: F401
import ipywidgets  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import onnxscript  # noqa: F401
import sklearn.datasets  # noqa: F401
import sympy.tensor.tensor  # noqa: F401
import torch._dynamo  # noqa: F401
import torch._functorch.aot_autograd  # noqa: F401
import torch.export._trace  # noqa: F401
import tornado.platform.asyncio  # noqa: F401
from ipykernel import kernelapp
from matplotlib.figure import Figure
from once import once


def find_fonts():
    "And the grammar of formulas."
    fig = Figure()
    fig.suptitle('$a$')
    fig.subplots().set_title('A title')
    fig.savefig(io.BytesIO(), format='svg')

logging.disable(logging.WARNING)                                        # torchvision is not needed
once()()
logging.disable(logging.NOTSET)
find_fonts()
inspect.getmodule(compile('', 'of no module', 'exec'))                  # it looks at all, and keeps their files
gc.freeze()                                                             # no kernel walks over what all have

def paths(env): return [p for p in env.get('PYTHONPATH', '').split(os.pathsep) if p]

def become_kernel(cmd, cwd, env):
    "What a new Python with `cmd` would do after its imports."
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3): os.dup2(nothing, fd)                            # what cells write goes to the page all the same
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = paths(env)
    os.chdir(cwd)
    sys.argv = cmd[2:]                                                  # after `python -m`
    kernelapp.launch_new_instance(sys.argv[1:])

def main():
    sys.path.pop(0)                                                     # the folder of the tests
    ours = paths(os.environ)
    sys.path[:] = [p for p in sys.path if p not in ours]                # each kernel has its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)                       # a kernel that ends is gone
    for line in sys.stdin:
        if os.fork(): continue
        os.setsid()                                                     # whoever stops it stops what it started
        print(os.getpid(), flush=True)
        become_kernel(**json.loads(line))
        os._exit(0)

if __name__ == '__main__': main()
