"""Runs what a reader copies from a page: cells of code, in order, in a new process for each page.

A line of JSON on stdin, `dict(cells=, cwd=)`, is a page; the answer is a line on stdout, `null` or what was raised for
each cell. The processes are forks of this one, which has made the imports that take long; nothing of shok_nb is
imported here, and the names of a page begin empty."""
import ast
import contextlib
import json
import os
import sys
import traceback
import types
import fastcore.test  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import onnxscript  # noqa: F401
import torch._dynamo  # noqa: F401
import torch._functorch.aot_autograd  # noqa: F401
from IPython.display import display


def run(source, names):
    "Run a cell as Jupyter does: a value at the end is shown. Returns None, or what it raised."
    try:
        tree = ast.parse(source)
        end = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(';') else None
        exec(compile(tree, '<cell>', 'exec'), names)
        if end:
            value = eval(compile(ast.Expression(end.value), '<cell>', 'eval'), names)
            if value is not None: display(value)
    except Exception as e:
        return ''.join(traceback.format_exception_only(e)).strip()

def page(cells, cwd):
    "Run `cells` in the folder `cwd`."
    os.chdir(cwd)
    sys.modules['__main__'] = main = types.ModuleType('__main__')         # as a new Python has it
    with open(os.devnull, 'w') as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        return [run(c, vars(main)) for c in cells]

def main():
    sys.path.pop(0)                                                     # the folder of the tests
    for line in sys.stdin:
        back,forth = os.pipe()
        if os.fork() == 0:
            os.close(back)
            with open(forth, 'w') as f: f.write(json.dumps(page(**json.loads(line))))
            os._exit(0)
        os.close(forth)
        with open(back) as f: answer = f.read()
        os.wait()
        print(answer or '"the process ended"', flush=True)

if __name__ == '__main__': main()
