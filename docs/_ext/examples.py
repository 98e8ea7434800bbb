"""A cell of a notebook as a reader wants it: what one would type, with its value; what must be true of it, folded after
it; and a call that must fail as a call, with the error that it raises.

The notebooks hold the three together, as one writes them. `parts` takes them apart by their statements."""
import ast
import copy
import functools
import re
from dataclasses import dataclass
from symtable import symtable


@dataclass
class Part:
    kind:str        # 'example', 'check' or 'error'
    code:str
    test:str = ''   # of an error: the statement of the notebook, which runs unseen
    says:str = ''   # of an error: what its message must contain

def _fails(node):
    "The call of `expect_fail` if the statement is `with expect_fail(...):`, else None."
    call = node.items[0].context_expr if isinstance(node, ast.With) else None
    return call if isinstance(call, ast.Call) and getattr(call.func, 'id', '') == 'expect_fail' else None

def is_check(node):
    "Does this statement look whether something is true? A loop does whose body ends so."
    if isinstance(node, (ast.For, ast.If, ast.With)): return bool(_fails(node)) or is_check(node.body[-1])
    call = getattr(node, 'value', None)
    return isinstance(node, ast.Assert) or isinstance(call, ast.Call) and getattr(call.func, 'id', '')[:5] == 'test_'

class _Generators(ast.NodeTransformer):
    "Comprehensions as generators: from Python 3.13 on only these have variables of their own in a table of symbols."
    def generic_visit(self, node):
        node = super().generic_visit(node)
        if isinstance(node, (ast.ListComp, ast.SetComp)): return ast.GeneratorExp(node.elt, node.generators)
        if not isinstance(node, ast.DictComp): return node
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)

def symbols(node):
    "The names that a statement reads and those that it binds. Variables of a comprehension or a function are its own."
    source = ast.unparse(_Generators().visit(copy.deepcopy(node)))
    scopes = [top := symtable(source, 'cell', 'exec')]
    for s in scopes: scopes += s.get_children()
    def is_outer(v): return not (v.is_local() or v.is_free())      # is_global() is wrong in a function named top
    reads = {v.get_name() for s in scopes for v in s.get_symbols() if v.is_referenced() and (s is top or is_outer(v))}
    return reads,{v.get_name() for v in top.get_symbols() if v.is_assigned() or v.is_imported()}

def _changes(node):
    """The names that a statement reads, and those that it binds, has an item or an attribute set of, or gives to a
    function that changes its first argument."""
    reads,binds = symbols(node)
    targets = [n for n in ast.walk(node) if isinstance(getattr(n, 'ctx', None), ast.Store)]
    targets += [n for call in ast.walk(node) if _in_place(call) for n in (call.func, *call.args[:1])]
    return reads,binds | reads & {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}

def _in_place(node):
    "Is this a call of a function or a method that ends in `_`?"
    if not isinstance(node, ast.Call): return False
    return re.search('[^_]_$', getattr(node.func, 'attr', getattr(node.func, 'id', ''))) is not None

QUIET = ast.Assign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom

def _acts(node):
    "May the statement change something that it does not name? A print and a check do not."
    call = getattr(node, 'value', None)
    return not (isinstance(node, QUIET) or is_check(node) or getattr(getattr(call, 'func', None), 'id', '') == 'print')

def _can_wait(check, later):
    """May the check run after these statements of its cell? They bind what it does not read and read what it does not
    bind, and none acts, but for the value that the cell ends in."""
    acts = [*filter(_acts, later)]
    if acts and (acts[0] is not later[-1] or not isinstance(acts[0], ast.Expr)): return False
    reads,binds = _changes(check)
    return not any(r & binds or b & reads for r,b in map(_changes, later))

def _statements(code):
    """Each statement with its lines: comments above it are its own, those below the last one are the last one's. Of
    statements in one line the first has it."""
    lines,body = code.splitlines(),ast.parse(code).body
    ends = [n.end_lineno for n in body[:-1]] + [len(lines)]
    return [(n, '\n'.join(lines[start:end])) for n,start,end in zip(body, [0, *ends], ends)]

def _source(node, code):
    "The code of a statement of a block, without the indentation that the block gives it."
    before = code.splitlines()[node.lineno-1][:node.col_offset]
    return re.sub(rf'(?m)^{before}' if before.isspace() else '^', '', ast.get_source_segment(code, node))

def _error(node, code, lines):
    "What must fail, without the `with` around it."
    found = [k.value for k in _fails(node).keywords if k.arg == 'contains']
    says = found[0].value if found and isinstance(found[0], ast.Constant) else ''
    comments = [l for l in lines.splitlines() if l[:1] == '#']
    return Part('error', '\n'.join([*comments, *(_source(n, code) for n in node.body)]), lines.strip('\n'), says)

def _quiet(examples):
    "The value of a cell is that of its last statement: a part that was followed by others shows none."
    for p in examples:
        if isinstance(ast.parse(p.code).body[-1], ast.Expr): p.code += ';'

@functools.cache                        # a page is made several times
def parts(code):
    """The parts of a cell in the order in which they run. A check stands after the example that it is about: at the
    end, unless something changes before that what it looks at."""
    found,checks = [],[]
    def add(kind, lines):
        if not lines: return
        if found and found[-1].kind == kind: found[-1].code += f'\n{lines}'
        else: found.append(Part(kind, lines))
    statements = _statements(code)
    for i,(node,lines) in enumerate(statements):
        if _fails(node): found.append(_error(node, code, lines))
        elif not is_check(node): add('example', lines)
        elif _can_wait(node, [n for n,_ in statements[i+1:]]): checks.append(lines)
        else: add('check', lines)
    for lines in checks: add('check', lines)
    for p in found: p.code = p.code.strip('\n')
    _quiet([p for p in found if p.kind == 'example'][:-1])
    return found
