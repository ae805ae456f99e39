"""The interpreter: walks one program in order, both arms of a branch, a loop's body once, calls followed into the project.

Nothing is executed. Expressions become `Value`s (constants folded, dtypes carried), operations become `Event`s in a `Trace`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...core.ops import LAYERS
from . import attributes, objects, torch_calls
from .dtypes import result
from .guards import guards_of, window_guard
from .regions import AUTOCAST, NO_GRAD, Region
from .source import OwnClass, OwnFunction, Project, WalkedFile
from .torch_names import FRAMEWORK_REGIONS, IN_FILE, MODULE_METHODS, TRAINERS
from .trace import MAX_DEPTH, MAX_STATEMENTS, Context, Event, FileView, Frame, Guard, Options, Trace
from .uses import dotted
from .values import HALF, NONE, NOTHING, UNKNOWN, Args, Env, Kwargs, Thing, Value, ancestors, constant, copied, join, replace


def heirs(function: OwnFunction, module: WalkedFile) -> Iterator[OwnClass]:
    """Classes that inherit this method, override others that it may call, and are instantiated nowhere in the file."""
    owner = function.owner
    if owner is None or function.name.startswith("__") or f"self.{function.name}" in module.uses.called:
        return
    for heir in module.classes:
        if heir is owner or heir.find(function.name) is not function or heir.name in module.uses.called:
            continue
        if any(f"self.{name}" in module.uses.called and owner.find(name) for name in heir.methods if name != "__init__"):
            yield heir


def _spine(node: ast.Assign) -> tuple[ast.AST | None, str]:
    start: ast.AST = node.value
    while isinstance(start, ast.Call) and isinstance(start.func, ast.Attribute) and isinstance(start.func.value, ast.Call):
        start = start.func.value
    return start, dotted(node.targets[0])


def _after_exit(at: Context, implied: tuple[Guard, ...]) -> Context:
    return replace(at, guards=at.guards + implied, exits=at.exits | {key for key, _ in implied})


def truth(frame: Frame, test: ast.expr, value: Value) -> bool | None:
    """The outcome of a test if the code itself fixes it."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.BoolOp):  # `if False and ...`: what the first part decides
        first = test.values[0]
        decides = isinstance(first, ast.Constant) and bool(first.value) == isinstance(test.op, ast.Or)
        return isinstance(test.op, ast.Or) if decides else None
    if isinstance(test, ast.Compare) and dotted(test.left) == "__name__":
        return frame.module.is_entry
    if dotted(test).rpartition(".")[2] == "TYPE_CHECKING":
        return False
    if isinstance(test, ast.Compare) and value.kind == "const" and isinstance(value.const, bool):
        return value.const
    return None


_BINARY: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.FloorDiv: "floor_divide", ast.Mod: "remainder",
}  # fmt: skip


_FOLD: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "dict",
        "enumerate",
        "filter",
        "float",
        "getattr",
        "hasattr",
        "int",
        "isinstance",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "next",
        "pow",
        "print",
        "range",
        "reversed",
        "round",
        "set",
        "setattr",
        "sorted",
        "str",
        "sum",
        "super",
        "tuple",
        "type",
        "zip",
    ]
)


def _accepts(function: OwnFunction, given: int, kwargs: Kwargs) -> bool:
    """Whether a method can be called with so many arguments, and with these by name."""
    spec: Any = function.node.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args)][1:]
    needed = len(names) - len(spec.defaults)
    known = {*names, *(a.arg for a in spec.kwonlyargs)}
    if not spec.kwarg and not known.issuperset(kwargs):
        return False
    return given + len(kwargs) >= needed and (given <= len(names) or spec.vararg is not None)


def _fold(op: ast.operator, left: Value, right: Value) -> Value:
    try:
        if isinstance(op, ast.Pow) and abs(right.const) > 512:
            return Value("const")
        return Value("const", const=_FOLD[type(op)](left.const, right.const), tags=(left.tags | right.tags) & {"finfo"})
    except (ArithmeticError, ValueError, TypeError):
        return Value("const")


def join_contexts(left: Value, right: Value) -> Value:
    both = [v.ref for v in (left, right) if isinstance(v.ref, Region)]
    tags = left.tags & right.tags
    if len(both) == 1:
        return Value("context", ref=replace(both[0], enabled=None if both[0].enabled else both[0].enabled), tags=tags)
    if len(both) == 2 and both[0].dtype != both[1].dtype:
        kind = "half" if {both[0].dtype, both[1].dtype} <= HALF else both[0].dtype
        return Value(
            "context",
            ref=replace(both[0], dtype=kind, device=both[0].device if both[0].device == both[1].device else ""),
            tags=tags,
        )
    return replace(left, tags=tags)


def _alike(item: Value) -> Value:
    return Value(
        "", item.dtype, item.why, item.line, op="comprehension", inputs=(item,), tags=item.tags, thing=item.thing
    )  # fmt: skip


SUPER = "super()"  # field with what a class gives to the __init__ of a base outside the project


# what a cached call still has to tell: calls that change gradients, scalers and optimizers
_PROTOCOL = ("scaler.", "optimizer.", "framework.", "backward", "clip_grad", "grad_read", "autograd.grad", "module_call")


def signature(values: list[Value], kwargs: Kwargs) -> tuple[object, ...]:
    def key(v: Value) -> tuple[object, ...]:
        const = v.const if isinstance(v.const, (int, float, str, bool, type(None))) else None
        return (v.kind, v.dtype, v.op, const, v.thing, v.tags, id(v.ref) if v.ref else 0)

    return (*map(key, values), *((k, key(v)) for k, v in kwargs.items()))


def _rebased(event: Event, base: Context) -> Event:
    at = event.at
    return replace(event, at=replace(at, guards=at.guards[len(base.guards) :], loops=at.loops[len(base.loops) :]))


def _moved(inner: Context, outer: Context) -> Context:
    return replace(inner, guards=outer.guards + inner.guards, loops=outer.loops + inner.loops)


INNER = "(region)"  # field of a class derived from autocast: what its own __init__ opens


_ENTERS = ("__enter__", "__aenter__")


def is_manager(info: OwnFunction) -> bool:
    """Whether a call of the function gives a context manager: `@contextmanager def zone(): ... yield`."""
    return any(name.rpartition(".")[2] in ("contextmanager", "asynccontextmanager") for name in info.decorators)


def _context(regions: tuple[Region, ...], has_grad: bool, outer: Context) -> Value:
    tags = frozenset({"no_grad"}) if outer.has_grad and not has_grad else frozenset()
    inner = tuple(Value("context", ref=region) for region in regions[:-1])
    return Value("context", ref=regions[-1] if regions else None, inputs=inner, tags=tags)


def enter_by_hand(frame: Frame, value: Value) -> Value:
    """`stack.enter_context(region)`, or `region.__enter__()`: holds until the block of the frame ends, or `__exit__`."""
    if isinstance(value.ref, Region):
        is_conditional = bool(frame.at.guards)
        frame.entered.append(replace(value.ref, enabled=None) if is_conditional and value.ref.enabled else value.ref)
    return UNKNOWN


def leave_by_hand(frame: Frame, value: Value) -> Value:
    if isinstance(value.ref, Region):
        frame.entered[:] = [r for r in frame.entered if r.node is not value.ref.node]
        kept = tuple(r for r in frame.at.regions if r.node is not value.ref.node or r.node is None)
        frame.at = frame.inside(regions=kept)
    return UNKNOWN


class Interpreter:
    """Walks a program from the entry points of one file; what it imports is read where it is used."""

    def __init__(self, project: Project, options: Options):
        self.project = project
        self.options = options
        self.follows_imports = True
        self.modules: dict[str, WalkedFile | None] = {}
        self.traces: list[Trace] = []
        self.statements = 0  # a generated monster must not hang the check
        self.instances: dict[tuple[object, ...], Value] = {}  # as they were when built
        self.memory: dict[tuple[object, ...], tuple[Value, tuple[Event, ...]]] = {}  # calls already followed
        self.stored: dict[str, list[Value]] | None = None  # for a probe: what was put where other functions find it

    def walk(self, module: WalkedFile) -> FileView:
        """Runs the module body, then every function that nothing has called yet, and keeps what was seen."""
        self.run_body(module)
        called = {path.rpartition(".")[2] for path in module.uses.called}
        tried: set[ast.AST] = set()
        while waiting := [f for f in module.functions if f.module is module and f.node not in tried]:
            for function in sorted(waiting, key=lambda f: f.called_as in called):  # entry points first: they run their helpers
                ran = function.node in tried or any(f.runs for f in module.functions if f.node is function.node)
                tried.add(function.node)
                if not ran:
                    self.run_entry(function, function.owner)
            for function in waiting:
                for owner in heirs(function, module):
                    self.run_entry(function, owner)
        return FileView(module, self.traces, self.options)

    def run_body(self, module: WalkedFile) -> None:
        self.follows_imports = module.uses.is_active
        self.modules[module.filename] = module
        module.is_loaded = module.is_entry = True
        body = Trace("<module>", module)
        self.traces.append(body)
        self.run_block(Frame(self.options, module, body, module.env), module.tree.body)

    def forget(self) -> None:
        """Lets go of what was walked: it is full of cycles, which the garbage collector takes long to find."""
        for module in self.modules.values():
            if module is not None:
                module.env.clear()
                module.functions.clear()
                module.classes.clear()
        self.traces, self.instances, self.memory = [], {}, {}

    def run_entry(self, function: OwnFunction, owner: OwnClass | None) -> Value:
        """Runs a function that nothing calls, on the example of its class."""
        trace = Trace(function.name, function.module, owner)
        self.traces.append(trace)
        outer = Frame(self.options, function.module, trace, Env(), closure=function.closure, owner=owner)
        args: list[Value] = []
        if owner is not None:
            owner.example = owner.example or Thing("self", "module" if owner.is_module else "")
            this = Value("instance", ref=owner, thing=owner.example)
            self.build(outer, owner, this, [], {}, owner.node)
            args = [] if "staticmethod" in function.decorators else [this]
        if function.runs and owner is function.owner and self.stored is None:
            return UNKNOWN
        return self.run_function(outer, function, args, {}, Context(stack=(function,)), is_entry=True)

    def run_block(self, frame: Frame, body: Sequence[ast.stmt]) -> None:
        """Runs the statements; on return `frame.is_over` says whether the end of the block is reached."""
        frame.is_over = False
        saved = frame.at
        for statement in body:
            if frame.is_over:
                break
            self.statements += 1
            if self.statements > MAX_STATEMENTS:
                frame.is_over = True
                break
            for region in frame.entered:
                if region not in frame.at.regions:
                    frame.at = frame.inside(regions=(*frame.at.regions, region))
            handler = _STATEMENTS.get(type(statement))
            if handler:
                handler(self, frame, statement)
        frame.at = saved

    def assign(self, frame: Frame, target: ast.expr, value: Value) -> None:
        if self.stored is not None:
            self._note_stored(frame, target, value)
        if isinstance(target, ast.Name):
            if target.id in frame.globals:
                frame.module.env[target.id] = value
            if value.thing is not None and not value.thing.name:
                value.thing.name = target.id
            frame.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._assign_items(frame, target.elts, value)
        elif isinstance(target, ast.Attribute):
            self._assign_attribute(frame, target, value)
        elif isinstance(target, ast.Subscript):
            base = self.evaluate(frame, target.value)
            index = self.evaluate(frame, target.slice)
            if base.kind == "dict" and isinstance(base.ref, dict):
                base.ref[index.const if index.const is not NOTHING else f"?{target.lineno}"] = value
            elif isinstance(index.const, str) and dotted(target.value):
                frame.env[f"{dotted(target.value)}[{index.const}]"] = value
            frame.emit("setitem", target, (base, index, value))
        elif isinstance(target, ast.Starred):
            self.assign(frame, target.value, UNKNOWN)

    def _note_stored(self, frame: Frame, target: ast.expr, value: Value) -> None:
        assert self.stored is not None
        while isinstance(target, (ast.Subscript, ast.Starred)):
            target = target.value
        if isinstance(target, ast.Attribute):
            self.stored.setdefault(target.attr, []).append(value)
        elif isinstance(target, ast.Name) and (not frame.at.stack or target.id in frame.globals or frame.closure is not None):
            self.stored.setdefault(target.id, []).append(value)

    def _assign_items(self, frame: Frame, targets: list[ast.expr], value: Value) -> None:
        if value.kind in ("tuple", "list") and len(value.inputs) == len(targets):
            for target, item in zip(targets, value.inputs):
                self.assign(frame, target, item)
            return
        for position, target in enumerate(targets):
            part = attributes.part_of(frame, value, position, target)
            self.assign(frame, target, part)

    def _assign_attribute(self, frame: Frame, target: ast.Attribute, value: Value) -> None:
        base = self.evaluate(frame, target.value)
        if target.attr == "grad":
            frame.emit("set_grad", target, (base, value))
            return
        path = dotted(target)
        if value.thing is not None and not value.thing.name:
            value.thing.name = path
        if base.kind == "instance" and base.thing is not None:
            known = base.thing.attrs.get(target.attr)
            is_conditional = bool(frame.at.guards) or value.is_none
            base.thing.attrs[target.attr] = join(known, value) if known is not None and is_conditional else value
            return
        if target.attr == "data" and base.thing is not None and value.is_half:
            base.thing.dtype = value.dtype
        if base.thing is not None:
            base.thing.attrs[target.attr] = value
        if path:
            frame.env[path] = value

    def run_assign(self, frame: Frame, node: ast.Assign) -> None:
        frame.spine = _spine(node)
        value = self.evaluate(frame, node.value)
        frame.spine = (None, "")
        for target in node.targets:
            if value.op in ("add", "sub", "lerp") and value.dtype != "fp32":
                self._notice_accumulation(frame, node, target, value)
            self.assign(frame, target, value)

    def _notice_accumulation(self, frame: Frame, node: ast.Assign, target: ast.expr, value: Value) -> None:
        """`acc = acc * d + x` and `p.data = m * p.data + ...` are running sums."""
        known = frame.lookup(dotted(target)) if isinstance(target, ast.Name) else self.evaluate(frame, target)
        if known is None or not known.is_half:
            return
        origin = known.inputs[0] if known.op == "view" and known.inputs else known
        if any(v is known or v is origin for v in ancestors(value, 12)):
            frame.emit("accumulate", node, (known, value), out=value)

    def run_annassign(self, frame: Frame, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(frame, node.target, self.evaluate(frame, node.value))

    def run_augassign(self, frame: Frame, node: ast.AugAssign) -> None:
        left = self.evaluate(frame, node.target)
        right = self.evaluate(frame, node.value)
        value = self.binary(frame, node, node.op, left, right, in_place=True)
        frame.emit("augassign", node, (left, right, constant(type(node.op).__name__)), out=value)
        if not (isinstance(node.target, ast.Attribute) and node.target.attr in ("grad", "data")):
            self.assign(frame, node.target, value)

    def run_expr(self, frame: Frame, node: ast.Expr) -> None:
        self.evaluate(frame, node.value)

    def run_return(self, frame: Frame, node: ast.Return) -> None:
        frame.returns.append(self.evaluate(frame, node.value) if node.value else NONE)
        frame.is_over = True

    def _leave(self, frame: Frame, node: ast.stmt) -> None:
        if isinstance(node, ast.Raise) and node.exc:
            self.evaluate(frame, node.exc)
        elif isinstance(node, ast.Continue):
            frame.emit("leave", node, ())
        frame.is_over = True

    def run_if(self, frame: Frame, node: ast.If) -> None:
        test = self.evaluate(frame, node.test)
        known = truth(frame, node.test, test)
        if known is not None:
            self.run_block(frame, node.body if known else node.orelse)
            return
        saved, env = frame.at, frame.env
        yes, no = (guards_of(frame, node.test, test, arm) + window_guard(frame, node, arm) for arm in (True, False))

        env.begin()
        self.narrow(frame, node.test, True)
        frame.at = replace(saved, guards=saved.guards + yes)
        self.run_block(frame, node.body)
        changed_yes, over_yes = env.take_back(), frame.is_over

        env.begin()
        self.narrow(frame, node.test, False)
        frame.at = replace(saved, guards=saved.guards + no)
        self.run_block(frame, node.orelse)
        changed_no, over_no = env.take_back(), frame.is_over

        frame.at = saved
        frame.is_over = over_yes and over_no
        if over_yes and not over_no:
            frame.at = _after_exit(saved, no)
            env.put(changed_no)
        elif over_no and not over_yes:
            frame.at = _after_exit(saved, yes)
            env.put(changed_yes)
        else:
            env.put_joined(changed_yes, changed_no)

    def _loop(self, frame: Frame, node: ast.For | ast.AsyncFor) -> None:
        source = self.evaluate(frame, node.iter)
        saved = frame.at
        frame.at = replace(saved, loops=(*saved.loops, node))
        self.assign(frame, node.target, attributes.element_of(frame, source, node.target))
        self.run_block(frame, node.body)
        frame.at = saved
        self.run_block(frame, node.orelse)
        frame.is_over = False

    def run_while(self, frame: Frame, node: ast.While) -> None:
        self.evaluate(frame, node.test)
        saved = frame.at
        frame.at = replace(saved, loops=(*saved.loops, node))
        self.run_block(frame, node.body)
        frame.at = saved
        self.run_block(frame, node.orelse)
        frame.is_over = False

    def run_with(self, frame: Frame, node: ast.With | ast.AsyncWith) -> None:
        saved, entered = frame.at, len(frame.entered)
        for item in node.items:
            value = self.evaluate(frame, item.context_expr)
            self.enter(frame, value)
            if item.optional_vars is not None:
                self.assign(frame, item.optional_vars, value if value.kind != "context" else UNKNOWN)
        self.run_block(frame, node.body)
        frame.at = saved
        del frame.entered[entered:]

    def enter(self, frame: Frame, value: Value) -> None:
        """Takes the effect of entering a context manager; undone by whoever restores `frame.at`."""
        if value.kind == "instance":
            value = self.entered_instance(frame, value)
        if value.kind != "context":
            return
        for inner in value.inputs:
            self.enter(frame, inner)
        if isinstance(value.ref, Region):
            frame.at = frame.inside(regions=(*frame.at.regions, value.ref))
        if "no_grad" in value.tags:
            frame.at = frame.inside(has_grad=False)
        if "enable_grad" in value.tags:
            frame.at = frame.inside(has_grad=True)

    def run_try(self, frame: Frame, node: ast.Try) -> None:
        self.run_block(frame, node.body)
        over = frame.is_over
        if not over:
            self.run_block(frame, node.orelse)
            over = frame.is_over
        saved, env = frame.at, frame.env
        for handler in node.handlers:
            env.begin()
            frame.at = replace(saved, guards=(*saved.guards, (f"except@{handler.lineno}", True)))
            if handler.name:
                frame.env[handler.name] = UNKNOWN
            self.run_block(frame, handler.body)
            changed = env.take_back()
            if not frame.is_over:  # what the body bound wins: the handler is the fallback
                env.put({name: value for name, value in changed.items() if value is not None and name not in env})
                over = False
        frame.at = saved
        self.run_block(frame, node.finalbody)
        frame.is_over = frame.is_over or over

    def run_match(self, frame: Frame, node: ast.Match) -> None:
        self.evaluate(frame, node.subject)
        saved, env = frame.at, frame.env
        merged: dict[str, Value | None] = {}
        for position, case in enumerate(node.cases):
            env.begin()
            frame.at = replace(saved, guards=(*saved.guards, (f"match@{node.lineno}:{position}", True)))
            self.run_block(frame, case.body)
            for name, value in env.take_back().items():
                known = merged.get(name, env.get(name))
                merged[name] = join(known, value) if known is not None and value is not None else known or value
        env.put(merged)
        frame.at, frame.is_over = saved, False

    def run_functiondef(self, frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        frame.mark(node)
        info = OwnFunction(node, frame.module, None, frame.env if frame.at.stack else None)
        frame.module.functions.append(info)
        for decorator in node.decorator_list:
            self._decorator(frame, decorator)
        frame.env[node.name] = Value("function", ref=info)

    def _decorator(self, frame: Frame, node: ast.expr) -> None:
        target = self.evaluate(frame, node.func if isinstance(node, ast.Call) else node)
        frame.emit("decorator", node, (target,))
        if isinstance(node, ast.Call):
            self.evaluate(frame, node)

    def run_classdef(self, frame: Frame, node: ast.ClassDef) -> None:
        info = OwnClass(node, frame.module)
        names, parents = [], []
        for base in node.bases:
            value = self.evaluate(frame, base)
            if isinstance(value.ref, OwnClass):
                parents.append(value.ref)
                names.append(value.ref.name)
            else:
                names.append(value.ref if isinstance(value.ref, str) else dotted(base))
        info.bases, info.parents = tuple(names), tuple(parents)
        frame.module.classes.append(info)
        body = Frame(self.options, frame.module, frame.trace, info.attrs, frame.at, frame.env, info)
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                frame.mark(statement)
                method = OwnFunction(statement, frame.module, info, frame.env if frame.at.stack else None)
                info.methods[statement.name] = method
                frame.module.functions.append(method)
                for decorator in statement.decorator_list:
                    self._decorator(body, decorator)
            else:
                self.run_block(body, [statement])
        frame.env[node.name] = Value("class", ref=info, thing=Thing(node.name))

    def run_import(self, frame: Frame, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            frame.env[name] = Value("external", ref=alias.name if alias.asname else name)
            if self.follows_imports and (alias.asname or "." not in alias.name):
                found = self.project.resolve(frame.module, alias.name)
                if found is not None:
                    frame.env[name] = Value("lazy", ref=(found, "", alias.name))

    def run_importfrom(self, frame: Frame, node: ast.ImportFrom) -> None:
        project = self.project if self.follows_imports else None
        target = project.resolve(frame.module, node.module or "", node.level) if project else None
        for alias in node.names:
            name = alias.asname or alias.name
            if name == "*":
                self._import_all(frame, target)
                continue
            path = f"{node.module or ''}.{alias.name}".lstrip(".")
            frame.env[name] = Value("external", ref=path)
            inside = (
                project.resolve(frame.module, f"{node.module or ''}.{alias.name}".lstrip("."), node.level) if project else None
            )
            if inside is not None:  # from package import module
                frame.env[name] = Value("lazy", ref=(inside, "", path))
            elif target is not None:
                frame.env[name] = Value("lazy", ref=(target, alias.name, path))

    def _import_all(self, frame: Frame, filename: str | None) -> None:
        """`from lib import *`: every public name that the body of a file of the project binds."""
        module = self._module(filename) if filename is not None else None
        if module is None or module is frame.module:
            return
        self.load(frame, module)
        for name, value in module.env.items():
            if not name.startswith("_") and name.isidentifier():
                frame.env[name] = value

    def run_delete(self, frame: Frame, node: ast.Delete) -> None:
        for target in node.targets:
            frame.env.drop(dotted(target))

    def run_global(self, frame: Frame, node: ast.Global | ast.Nonlocal) -> None:
        if isinstance(node, ast.Global):
            frame.globals.update(node.names)

    def run_assert(self, frame: Frame, node: ast.Assert) -> None:
        self.evaluate(frame, node.test)

    def narrow(self, frame: Frame, test: ast.expr, arm: bool) -> None:
        """Takes over what `if x.dtype == torch.float16` or `if isinstance(m, nn.LayerNorm)` says."""
        if isinstance(test, ast.Call):
            self._narrow_class(frame, test, arm)
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Attribute)):
            return
        path = dotted(test.left.value)
        if test.left.attr != "dtype" or not path:
            return
        value = self.evaluate(frame, test.left.value)
        wanted = self.evaluate(frame, test.comparators[0])
        names = {v.const for v in (wanted.inputs or (wanted,)) if v.kind == "dtype"}
        holds = arm is isinstance(test.ops[0], (ast.Eq, ast.In, ast.Is))
        if holds and names <= {"fp32", "fp64"} and len(names) == 1:
            frame.env[path] = replace(value, kind="tensor", dtype=names.pop(), why=f"tested at line {test.lineno}")
        elif value.dtype in names or (not holds and value.is_half):  # code that asks knows what it does
            frame.env[path] = replace(value, dtype="")

    def _narrow_class(self, frame: Frame, test: ast.Call, arm: bool) -> None:
        if dotted(test.func) != "isinstance" or len(test.args) != 2 or not arm:
            return
        path = dotted(test.args[0])
        wanted = self.evaluate(frame, test.args[1])
        names = [
            v.ref.rpartition(".")[2]
            for v in (wanted.inputs or (wanted,))
            if v.kind == "external" and v.ref.startswith("torch.nn.")
        ]
        if path and names:
            known = self.evaluate(frame, test.args[0])
            frame.env[path] = replace(known, kind="module", ref=names[0], thing=known.thing or Thing(path, "module"))

    def evaluate(self, frame: Frame, node: ast.AST | None) -> Value:
        handler = _EXPRESSIONS.get(type(node)) if node is not None else None
        return handler(self, frame, node) if handler else UNKNOWN

    def value_constant(self, frame: Frame, node: ast.Constant) -> Value:
        frame.mark(node)
        return Value("const", const=node.value, node=node)

    def value_name(self, frame: Frame, node: ast.Name) -> Value:
        found = frame.lookup(node.id)
        if found is None:
            if node.id in _BUILTINS:
                return Value("external", ref=f"builtins.{node.id}")
            return frame.unknown(node.id)
        return self.resolve_lazy(frame, found, node.id) if found.kind == "lazy" else found

    def value_attribute(self, frame: Frame, node: ast.Attribute) -> Value:
        base = self.evaluate(frame, node.value)
        return self.attribute(frame, base, node.attr, node)

    def binary(
        self, frame: Frame, node: ast.AST, op: ast.operator, left: Value, right: Value, *, in_place: bool = False
    ) -> Value:
        if left.is_number and right.is_number and type(op) in _FOLD:
            return _fold(op, left, right)
        if isinstance(op, ast.Add) and left.kind in ("list", "tuple") and left.kind == right.kind:
            return replace(left, inputs=left.inputs + right.inputs)
        name = _BINARY.get(type(op), "bitop")
        if in_place and name in ("add", "sub", "mul", "div") and left.kind == "tensor":
            out = replace(left, op=name, inputs=(left, right), node=node, tags=left.tags | (right.tags & {"scaled"}))
        elif "tensor" in (left.kind, right.kind) or name == "matmul":
            out = result(frame, name, node, (left, right), {})
        else:
            out = replace(result(frame, name, node, (left, right), {}), kind="", dtype="")
        if ("loop_index" in (left.op, right.op) and name == "remainder") or "modulo" in left.tags | right.tags:
            out = replace(out, tags=out.tags | {"modulo"})
        if (
            frame.at.regions
            or out.is_half
            or left.is_half
            or right.is_half
            or out.tags & {"scaled", "unscaled"}
            or "grad" in left.tags | right.tags
        ):
            frame.emit(name, node, (left, right), out=out)
        return out

    def value_binop(self, frame: Frame, node: ast.BinOp) -> Value:
        return self.binary(frame, node, node.op, self.evaluate(frame, node.left), self.evaluate(frame, node.right))

    def value_unaryop(self, frame: Frame, node: ast.UnaryOp) -> Value:
        value = self.evaluate(frame, node.operand)
        if isinstance(node.op, ast.USub):
            if value.is_number:
                return replace(value, const=-value.const)
            return replace(value, op="neg", inputs=(value,), node=node) if value.kind == "tensor" else value
        if isinstance(node.op, ast.Not):
            return constant(not value.const) if value.const is not NOTHING else Value(tags=value.tags & {"modulo"})
        return value

    def value_boolop(self, frame: Frame, node: ast.BoolOp) -> Value:
        values = [self.evaluate(frame, v) for v in node.values]
        out = values[0]
        for value in values[1:]:
            out = join(out, value)
        return replace(out, tags=out.tags | frozenset(t for v in values for t in v.tags if t == "modulo"))

    def value_compare(self, frame: Frame, node: ast.Compare) -> Value:
        left = self.evaluate(frame, node.left)
        others = [self.evaluate(frame, c) for c in node.comparators]
        tags = {"modulo"} if any("modulo" in v.tags or v.op == "remainder" for v in (left, *others)) else set()
        if left.kind == "dtype" or any(o.kind == "dtype" for o in others):
            tags.add("dtype_test")
        if len(others) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            a, b = left.const, others[0].const
            is_open = "default" in left.tags | others[0].tags
            if not is_open and isinstance(a, str) and isinstance(b, str) and a and b and "half" not in (a, b):
                return constant((a == b) is isinstance(node.ops[0], ast.Eq))
        return Value(
            "tensor" if left.kind == "tensor" else "",
            dtype="bool",
            op="compare",
            inputs=(left, *others),
            tags=frozenset(tags),
            node=node,
        )

    def value_ifexp(self, frame: Frame, node: ast.IfExp) -> Value:
        test = self.evaluate(frame, node.test)
        known = truth(frame, node.test, test)
        if known is not None:
            return self.evaluate(frame, node.body if known else node.orelse)
        saved = frame.at
        frame.at = replace(saved, guards=saved.guards + guards_of(frame, node.test, test, True))
        left = self.evaluate(frame, node.body)
        frame.at = replace(saved, guards=saved.guards + guards_of(frame, node.test, test, False))
        right = self.evaluate(frame, node.orelse)
        frame.at = saved
        if left.kind == right.kind == "context":
            return join_contexts(left, right)
        return join(left, right)

    def value_subscript(self, frame: Frame, node: ast.Subscript) -> Value:
        base = self.evaluate(frame, node.value)
        index = self.evaluate(frame, node.slice)
        if (
            base.kind in ("tuple", "list")
            and isinstance(index.const, int)
            and -len(base.inputs) <= index.const < len(base.inputs)
        ):
            return base.inputs[index.const]
        if base.kind == "module" and base.inputs:
            if base.ref == "ModuleList" and isinstance(index.const, int) and -len(base.inputs) <= index.const < len(base.inputs):
                return base.inputs[index.const]
            return base if index.kind == "slice" else base.inputs[0]
        is_known = index.const is not NOTHING and "default" not in index.tags
        if base.kind == "dict" and isinstance(base.ref, dict) and is_known and index.const in base.ref:
            return base.ref[index.const]
        if base.kind == "dict" and isinstance(base.ref, dict) and "*" in base.ref:  # made by a comprehension: all items are alike
            return base.ref["*"]
        if (
            base.kind == "dict"
            and isinstance(base.ref, dict)
            and base.ref
            and (index.const is NOTHING or "default" in index.tags)
        ):
            values = [v for v in base.ref.values() if isinstance(v, Value)]
            if len(values) == 1:  # a registry of one
                return values[0]
            if values and all(v.kind in ("dtype", "const") for v in values):  # {"fp16": torch.float16, ...}[args.dtype]
                out = values[0]
                for value in values[1:]:
                    out = join(out, value)
                return out
        if base.kind == "tensor":
            name = "part" if base.op in ("module_call", "part") else "getitem"
            if name == "part" and index.const == "loss":
                return Value("tensor", op="model_loss", inputs=(base,), line=base.line)
            return replace(base, op=name, inputs=(base, index), node=node)
        path = dotted(node.value)
        if path and isinstance(index.const, str):
            found = frame.unknown(f"{path}[{index.const}]")
            return found if found.kind or found.op else replace(found, op="key", ref=index.const, inputs=(base,))
        if base.thing is not None and base.thing.dtype:
            return Value(thing=base.thing)
        return Value(thing=Thing(""), op="getitem", inputs=(base,), tags=base.tags & {"scaled", "grad"})

    def value_slice(self, frame: Frame, node: ast.Slice) -> Value:
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                self.evaluate(frame, part)
        return Value("slice")

    def _sequence(self, frame: Frame, node: ast.Tuple | ast.List | ast.Set) -> Value:
        items = tuple(self.evaluate(frame, e) for e in node.elts)
        return Value("tuple" if isinstance(node, ast.Tuple) else "list", inputs=items, node=node)

    def value_dict(self, frame: Frame, node: ast.Dict) -> Value:
        items: dict[Any, Value] = {}
        for key, value in zip(node.keys, node.values):
            item = self.evaluate(frame, value)
            if key is None:
                if item.kind == "dict" and isinstance(item.ref, dict):
                    items.update(item.ref)
                else:
                    items["**"] = item
                continue
            name = self.evaluate(frame, key).const
            try:
                items[name if name is not NOTHING else f"?{value.lineno}:{value.col_offset}"] = item
            except TypeError:
                continue
        return frame.emit(
            "dict", node, (), {k: v for k, v in items.items() if isinstance(k, str)}, Value("dict", ref=items, node=node)
        )

    def value_lambda(self, frame: Frame, node: ast.Lambda) -> Value:
        info = OwnFunction(node, frame.module, None, frame.env)
        return Value("function", ref=info)

    def value_joinedstr(self, frame: Frame, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.evaluate(frame, part.value)
        return Value("const")

    def _wrapped(self, frame: Frame, node: ast.Starred | ast.Await | ast.YieldFrom) -> Value:
        return self.evaluate(frame, node.value)

    def value_yield(self, frame: Frame, node: ast.Yield) -> Value:
        frame.yields.append(frame.at)
        return self.evaluate(frame, node.value)

    def value_namedexpr(self, frame: Frame, node: ast.NamedExpr) -> Value:
        value = self.evaluate(frame, node.value)
        self.assign(frame, node.target, value)
        return value

    def _comprehension(self, frame: Frame, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        saved = frame.at
        frame.env.begin()
        source = UNKNOWN
        for generator in node.generators:
            source = self.evaluate(frame, generator.iter)
            frame.at = frame.inside(loops=(*frame.at.loops, node))
            self.assign(frame, generator.target, attributes.element_of(frame, source, generator.target))
            for test in generator.ifs:
                self.evaluate(frame, test)
        if isinstance(node, ast.DictComp):
            self.evaluate(frame, node.key)
            out = Value("dict", ref={"*": self.evaluate(frame, node.value)})
        else:
            out = _alike(self.evaluate(frame, node.elt))
        frame.env.take_back()
        frame.at = saved
        return out

    def _mapped(self, frame: Frame, node: ast.Call, args: list[Value]) -> Value:
        """`map(f, xs)`: f is called once, on an element of xs."""
        if len(args) < 2 or len(node.args) != len(args):
            return Value("", op="call:map", inputs=tuple(args))
        saved = frame.at
        frame.at = frame.inside(loops=(*saved.loops, node))
        made = ast.copy_location(ast.Call(func=node.args[0], args=node.args[1:], keywords=[]), node)
        elements = [attributes.element_of(frame, source, name) for source, name in zip(args[1:], node.args[1:])]
        item = self.call_value(frame, made, args[0], elements, {})
        frame.at = saved
        return _alike(item)

    def attribute(self, frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
        if base.kind == "external":
            return attributes.external_attribute(f"{base.ref}.{name}")
        if base.kind == "project":
            found = base.ref.env.get(name)
            if found is not None and found.kind == "lazy":
                found = self.resolve_lazy(frame, found, name)
            return found if found is not None else Value(thing=Thing(name))
        if base.kind == "finfo":
            return attributes.finfo_attribute(base, name)
        if base.kind == "instance":
            return self._instance_attribute(frame, base, name, node)
        if base.thing is not None and base.thing.kind == "options" and name in base.thing.attrs:
            return base.thing.attrs[name]
        if base.kind == "class" and isinstance(base.ref, OwnClass):
            method = base.ref.find(name)
            found = base.ref.field_of(name)
            return (
                Value("function", ref=method, tags=frozenset({"unbound"}))
                if method
                else found or Value(op=f"class.{name}", ref=base.ref)
            )
        if name == "grad" and base.kind in ("tensor", "", "instance", "module"):
            value = Value(
                "tensor", op="grad", inputs=(base,), line=getattr(node, "lineno", 0), node=node, tags=frozenset({"grad"})
            )
            return frame.emit("grad_read", node, (base,), out=value)
        if name == "dtype":
            kind = base.dtype or (base.thing.dtype if base.thing else "")
            return Value("dtype", const=kind, op="dtype", inputs=(base,), sure=base.sure)
        if name in ("shape", "ndim"):
            return Value("const" if name == "ndim" else "", dtype="int")
        if name == "type" and base.kind == "device":
            return constant(base.const) if base.const is not NOTHING else UNKNOWN
        if base.kind == "dict" and isinstance(base.ref, dict) and name in base.ref:
            return base.ref[name]
        if base.kind == "tensor":
            return attributes.tensor_attribute(frame, base, name, node)
        if base.thing is not None:
            return attributes.thing_attribute(frame, base, name, node)
        path = dotted(node)
        return frame.unknown(path) if path else Value(thing=Thing(name))

    def _instance_attribute(self, frame: Frame, base: Value, name: str, node: ast.AST) -> Value:
        owner = base.ref
        method = owner.find(name)
        found = attributes.field_of(base, name)
        if found is not None:
            return found
        if method is not None:
            if method.decorators & {"property", "cached_property", "functools.cached_property"}:
                return self.follow(frame, method, [base], {}, node)
            return Value("function", ref=method, inputs=(base,))
        value = Value(thing=Thing(dotted(node) or f"self.{name}"))
        if base.thing is not None:
            base.thing.attrs[name] = value
        return value

    def value_call(self, frame: Frame, node: ast.Call) -> Value:
        args: list[Value] = []
        for argument in node.args:
            value = self.evaluate(frame, argument)
            if isinstance(argument, ast.Starred) and value.kind in ("tuple", "list"):
                args.extend(value.inputs)
            else:
                args.append(value)
        if isinstance(node.func, ast.Attribute):
            receiver = self._receiver(frame, node.func)
        else:
            receiver = None
        kwargs = self._keywords(frame, node)
        if receiver is not None and isinstance(node.func, ast.Attribute):
            return self.call_method(frame, node, receiver, node.func.attr, args, kwargs)
        return self.call_value(frame, node, self.evaluate(frame, node.func), args, kwargs)

    def _receiver(self, frame: Frame, func: ast.Attribute) -> Value | None:
        if isinstance(func.value, ast.Call) and dotted(func.value.func) == "super" and frame.owner is not None:
            return Value("super", ref=frame.owner, inputs=(frame.env.get("self", UNKNOWN),))
        return self.evaluate(frame, func.value)

    def _keywords(self, frame: Frame, node: ast.Call) -> dict[str, Value]:
        kwargs: Kwargs = {}
        for keyword in node.keywords:
            value = self.evaluate(frame, keyword.value)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif value.kind == "dict" and isinstance(value.ref, dict):
                kwargs.update({k: v for k, v in value.ref.items() if isinstance(k, str) and isinstance(v, Value)})
        return kwargs

    def call_method(self, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
        if base.kind == "external":
            return self.call_external(frame, node, f"{base.ref}.{name}", args, kwargs)
        if base.kind == "parser":
            return torch_calls.parser_method(frame, node, base, name, args, kwargs)
        if base.kind == "project":
            return self.call_value(frame, node, self.attribute(frame, base, name, node.func), args, kwargs)
        if base.kind == "super":
            return self._call_super(frame, node, base, name, args, kwargs)
        if base.kind == "instance":
            method = base.ref.find(name)
            field = attributes.field_of(base, name)
            if field is not None and field.kind:
                return self.call_value(frame, node, field, args, kwargs)
            if method is not None:
                is_static = any(dotted(d) == "staticmethod" for d in getattr(method.node, "decorator_list", ()))
                return self.follow(frame, method, args if is_static else [base, *args], kwargs, node)
            if field is not None and not objects.knows(name):
                return self.call_value(frame, node, field, args, kwargs)
        if base.kind == "class" and isinstance(base.ref, OwnClass):
            return self._call_class_method(frame, node, base, name, args, kwargs)
        if base.kind == "dict" and isinstance(base.ref, dict) and name in ("get", "pop") and args:
            found = base.ref.get(args[0].const) if isinstance(args[0].const, str) else None
            return found if found is not None else UNKNOWN
        if base.kind == "list" and name in ("append", "extend") and args and isinstance(node.func, ast.Attribute):
            added = args[0].inputs if name == "extend" and args[0].kind in ("list", "tuple") else (args[0],)
            self.assign(frame, node.func.value, replace(base, inputs=(*base.inputs, *added)))
            return NONE
        if base.kind in ("", "module") and not objects.knows(name):
            member = self.attribute(frame, base, name, node.func)
            return self.call_value(frame, node, member, args, kwargs)
        return self._known_method(frame, node, base, name, args, kwargs)

    def _call_super(self, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
        for parent in base.ref.parents:
            method = parent.find(name)
            if method is not None:
                return self.follow(frame, method, [base.inputs[0], *args], kwargs, node)
        this = base.inputs[0].thing
        if name == "__init__" and this is not None:
            if objects.optimizer_base(base.ref):
                this.attrs[SUPER] = Value("dict", ref=kwargs, inputs=tuple(args))
            self.remember_base(frame, base.ref, this, args, kwargs, node)
        return UNKNOWN

    def _call_class_method(self, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
        owner = base.ref
        if name == "apply" and owner.derives_from(("Function",)):
            forward = owner.find("forward")
            out = Value("tensor", op="custom_function", inputs=tuple(args), node=node)
            frame.emit("custom_function", node, (base, *args), kwargs, out)
            if forward is not None:
                self.follow(frame, forward, [UNKNOWN, *args], kwargs, node)
            return out
        method = owner.find(name)
        if method is None:
            made = objects.call_pretrained(frame, node, name, kwargs)
            return replace(made, kind="instance", ref=owner) if made is not None else UNKNOWN
        return self.follow(frame, method, [base, *args] if "classmethod" in method.decorators else args, kwargs, node)

    def call_value(self, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
        if target.kind == "external":
            return self.call_external(frame, node, target.ref, args, kwargs)
        if target.op == "class.apply" and isinstance(target.ref, OwnClass):
            return self._call_class_method(frame, node, Value("class", ref=target.ref), "apply", args, kwargs)
        if target.kind == "function" and isinstance(target.ref, OwnFunction):
            return self.follow(frame, target.ref, [*target.inputs, *args], kwargs, node)
        if target.kind == "class" and isinstance(target.ref, OwnClass):
            return self.construct(frame, target.ref, args, kwargs, node)
        if target.kind == "instance":
            return self._call_instance(frame, node, target, args, kwargs)
        if target.kind == "partial":
            return self.call_value(frame, node, target.inputs[0], [*target.inputs[1:], *args], {**target.ref, **kwargs})
        if target.kind == "module":
            return self.call_layer(frame, node, target, args, kwargs)
        if target.kind == "framework" and target.inputs:  # a DeepSpeed engine runs its model
            return self.call_value(frame, node, target.inputs[0], args, kwargs)
        return self._call_unknown(frame, node, target, args, kwargs)

    def _call_instance(self, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
        method = target.ref.find("forward") if target.ref.is_module else None
        method = method or target.ref.find("__call__") or target.ref.find("forward")
        if method is None:
            return self._call_unknown(frame, node, target, args, kwargs)
        region, saved = target.thing.region if target.thing is not None else None, frame.at
        if region is not None:
            frame.at = frame.inside(regions=(*saved.regions, region))
        value = self.follow(frame, method, [target, *args], kwargs, node)
        frame.at = saved
        if region is not None:
            return objects.module_call(frame, node, target, args, kwargs)
        if target.ref.is_module:
            made = objects.module_call(frame, node, target, args, kwargs)
            if method in frame.at.stack or len(frame.at.stack) >= MAX_DEPTH:  # its forward was not read, but could be
                return replace(made, dtype="", why="")
            if value.kind == "tensor" and value.dtype:
                value = replace(value, inputs=(*value.inputs, made))
            elif value.kind not in ("tuple", "dict", "list"):
                value = replace(made, inputs=(*made.inputs, value))
        if len(args) + len(kwargs) > 1:
            frame.emit("loss_call", node, tuple(args), kwargs, value)
        return value

    def guess_class(self, frame: Frame, target: Value, args: Args, kwargs: Kwargs) -> Value | None:
        """The file's own model behind a parameter: the only class whose forward takes such a call and that is instantiated
        nowhere in the file."""
        if target.thing is None or target.kind:
            return None
        if "class" in target.thing.attrs:
            return target.thing.attrs["class"]
        loose = [
            c for c in frame.module.classes if c.is_module and "forward" in c.methods and c.name not in frame.module.uses.called
        ]
        found = [c for c in loose if _accepts(c.methods["forward"], len(args), kwargs)]
        if len(found) != 1 or frame.owner is found[0]:
            return None
        value = Value("instance", ref=found[0], thing=target.thing)
        target.thing.attrs["class"] = value
        self.build(frame, found[0], value, [], {}, found[0].node)
        return value

    def _call_unknown(self, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
        path = dotted(node.func) or (target.thing.name if target.thing else "")
        uses = frame.module.uses
        is_part = frame.owner is not None and frame.owner.is_module and path.startswith("self.") and "." not in path[5:]
        is_model = uses.is_module(path) or (is_part and target.thing is not None)
        if not is_model and objects.is_loss(args, kwargs):
            return objects.emit_loss(frame, node, args, kwargs)
        is_piece = any(uses.is_module(path[:at]) for at in range(len(path)) if path[at] == ".")  # `model.head(x)`
        is_held = path.startswith("self.") and "." not in path[5:] and target.thing is not None and not target.op
        is_given = (isinstance(node.func, ast.Name) or is_piece or is_held) and bool(args)
        guessed = self.guess_class(frame, target, args, kwargs) if is_model or (is_given and frame.at.region) else None
        if guessed is not None:
            return self._call_instance(frame, node, guessed, args, kwargs)
        if is_model or (is_given and frame.at.region):
            return objects.module_call(frame, node, target, args, kwargs)
        frame.emit("unknown_call", node, (target, *args), kwargs)
        inputs = (*args, *kwargs.values())
        tags = frozenset(t for v in inputs for t in v.tags if t == "scaled")
        return Value(op=f"call:{path.rpartition('.')[2]}", inputs=inputs, thing=frame.fresh(node), node=node, tags=tags)

    def construct(self, frame: Frame, info: OwnClass, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        """An instance of a class of the project; its __init__ is run once for the same arguments."""
        key = (info, frame.at.regions, signature(args, kwargs))
        known = self.instances.get(key)
        if known is not None:
            value = replace(copied(known), node=node)
        else:
            value = Value("instance", ref=info, thing=Thing("", kind="module" if info.is_module else ""), node=node)
            info.example = info.example or value.thing
            self.build(frame, info, value, args, kwargs, node)
            self.instances[key] = copied(value)
        thing = value.thing
        assert thing is not None
        if isinstance(node, ast.Call) and info.derives_from(TRAINERS):
            return self._own_trainer(frame, info, value, args, kwargs, node)
        base = objects.optimizer_base(info)
        if base and isinstance(node, ast.Call):
            passed = thing.attrs.get(SUPER, Value("dict", ref=kwargs, inputs=tuple(args)))
            return objects.new_optimizer(frame, node, base, list(passed.inputs) or args, passed.ref)
        for item in (*args, *kwargs.values()):
            if item.kind in ("scaler", "optimizer"):
                frame.emit(f"{item.kind}.passed", node, (item,))
        return value

    def _own_trainer(self, frame: Frame, info: OwnClass, value: Value, args: Args, kwargs: Kwargs, node: ast.Call) -> Value:
        """A class of the project derived from Hugging Face's Trainer: its compute_loss runs inside the region, too."""
        model = kwargs.get("model", args[0] if args else UNKNOWN)
        asked = kwargs.get("args", args[1] if len(args) > 1 else UNKNOWN)
        if model.thing is not None:
            model.thing.is_trained = True
            frame.emit("framework.train", node, (model,), kwargs)
        framework = Value("trainer", const=asked.const, node=asked.node or node)
        loss = info.find("compute_loss")
        if loss is not None:
            self._run_mixed(frame, node, framework, loss, [value, model, Value(thing=Thing("inputs"))], {})
        elif model.kind == "instance":
            self._run_mixed(frame, node, framework, model.ref.find("forward"), [model], {})
        return value

    def build(self, frame: Frame, info: OwnClass, value: Value, args: Args, kwargs: Kwargs, node: ast.AST) -> None:
        thing = value.thing
        if thing is None or thing.is_built:
            return
        thing.is_built = True
        init = info.find("__init__")
        if init is not None:
            self.follow(frame, init, [value, *args], kwargs, node)
            return
        fields = [s.target.id for s in info.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        thing.attrs.update({**dict(zip(fields, args)), **{name: kwargs[name] for name in fields if name in kwargs}})

    def resolve_lazy(self, frame: Frame, value: Value, name: str) -> Value:
        """The definition behind a name imported from another file of the project."""
        filename, attribute, path = value.ref
        target = self._module(filename)
        if target is None or target is frame.module:
            return Value("external", ref=path)
        self.load(frame, target)
        found = target.env.get(attribute) if attribute else Value("project", ref=target)
        if found is not None and found.kind == "lazy":
            found = self.resolve_lazy(frame, found, attribute) if found is not value else None
        resolved = found if found is not None else Value("external", ref=path)
        frame.env[name] = resolved
        return resolved

    def _module(self, filename: str) -> WalkedFile | None:
        """A file of the project as this walk sees it; what another walk has defined in it is not known here."""
        if filename not in self.modules:
            source = self.project.imported_file(filename)
            self.modules[filename] = WalkedFile(source) if source is not None else None
        return self.modules[filename]

    def load(self, frame: Frame, module: WalkedFile) -> None:
        """Runs a module's body once, so that its functions, classes and constants are known."""
        if module.is_loaded:
            return
        module.is_loaded = module.is_importing = True
        inner = Frame(self.options, module, Trace(f"<import {module.name}>", module), module.env)
        self.run_block(inner, module.tree.body)
        module.is_importing = False

    def follow(self, frame: Frame, info: OwnFunction, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        """Runs a function of the project with these arguments; its events go into the caller's trace."""
        if info in frame.at.stack or len(frame.at.stack) >= MAX_DEPTH:
            return UNKNOWN
        key = (info, frame.at.regions, frame.at.has_grad, bool(frame.at.loops), signature(args, kwargs))
        known = self.memory.get(key)
        if known is not None:
            value, events = known
            for event in events:
                frame.trace.events.append(replace(event, at=_moved(event.at, frame.at)))
            return value
        start = len(frame.trace.events)
        before = frame.at
        at = frame.inside(stack=(*frame.at.stack, info))
        value = self.run_function(frame, info, args, kwargs, at)
        kept = tuple(_rebased(e, before) for e in frame.trace.events[start:] if e.op.startswith(_PROTOCOL))
        self.memory[key] = (value, kept)
        return value

    def run_function(
        self, frame: Frame, info: OwnFunction, args: Args, kwargs: Kwargs, at: Context, is_entry: bool = False
    ) -> Value:
        info.runs += 1
        inner = Frame(self.options, info.module, frame.trace, Env(), at, info.closure, info.owner)
        self.bind(inner, info, args, kwargs, is_entry)
        if isinstance(info.node, ast.Lambda):
            return self.evaluate(inner, info.node.body)
        for decorator in info.node.decorator_list:
            context = self.decorator_context(inner, decorator)
            self.enter(inner, context)
            if "casts_inputs" in context.tags:
                for name, value in inner.env.items():
                    if value.is_half:
                        inner.env[name] = replace(value, dtype="fp32", why=f"cast by custom_fwd at line {decorator.lineno}")
        self.run_block(inner, info.node.body)
        entered = self.made_context(inner, info, at)
        if entered is not None:
            return entered
        if not inner.returns:
            return NONE
        value = inner.returns[0]
        for other in inner.returns[1:]:
            value = join(value, other)
        return value

    def bind(self, frame: Frame, info: OwnFunction, args: Args, kwargs: Kwargs, is_entry: bool) -> None:
        spec: Any = info.node.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(reversed(names), reversed(spec.defaults)))
        for keyword, default in zip(spec.kwonlyargs, spec.kw_defaults):
            if default is not None:
                defaults[keyword.arg] = default
        given = {**dict(zip(names, args)), **kwargs}
        for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
            name = argument.arg
            if name in given:
                frame.env[name] = given[name]
            else:
                frame.env[name] = self._default(frame, name, defaults.get(name), argument.annotation, is_entry)
        if spec.vararg:
            frame.env[spec.vararg.arg] = Value("list", inputs=tuple(args[len(names) :]))
        if spec.kwarg:
            named = {a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
            rest = {key: value for key, value in kwargs.items() if key not in named}
            frame.env[spec.kwarg.arg] = Value("dict", ref=rest) if rest else Value(thing=Thing(spec.kwarg.arg))

    def _default(self, frame: Frame, name: str, default: ast.expr | None, annotation: ast.expr | None, is_entry: bool) -> Value:
        known = self.evaluate(frame, default) if default is not None else UNKNOWN
        if default is not None and not is_entry:
            return known  # the caller did not give it: the default holds
        if known.is_number or known.kind == "dtype":
            return known
        owner = self._annotated(frame, annotation)
        if owner is not None:
            value = Value("instance", ref=owner, thing=Thing(name, "module" if owner.is_module else ""))
            self.build(frame, owner, value, [], {}, owner.node)
            return value
        kind = torch_calls.kind_of_annotation(annotation)
        tags = frozenset({"default_off"}) if known.const is False else frozenset()
        return Value(kind, thing=Thing(name, kind=kind), tags=tags)

    def _annotated(self, frame: Frame, annotation: ast.expr | None) -> OwnClass | None:
        """The class of the project that a parameter is annotated with."""
        if not isinstance(annotation, (ast.Name, ast.Attribute)):
            return None
        found = self.evaluate(frame, annotation) if frame.lookup(dotted(annotation).partition(".")[0]) is not None else UNKNOWN
        owner = found.ref if found.kind == "class" and isinstance(found.ref, OwnClass) else None
        return owner if owner is not None and owner not in {f.owner for f in frame.at.stack} else None

    def made_context(self, frame: Frame, info: OwnFunction, outer: Context) -> Value | None:
        """What a `with` gets from a generator that yields inside regions, or from an `__enter__` that enters some."""
        if info.name in _ENTERS and info.owner is not None:
            return _context(tuple(frame.entered), outer.has_grad, outer)
        if not is_manager(info) or not frame.yields:
            return None
        value = UNKNOWN
        for position, place in enumerate(frame.yields):
            found = _context(place.regions[len(outer.regions) :], place.has_grad, outer)
            value = found if position == 0 else join_contexts(value, found)
        return value

    def entered_instance(self, frame: Frame, value: Value) -> Value:
        """The context behind `with Zone():` for a class of the project."""
        if not isinstance(value.ref, OwnClass):
            return UNKNOWN
        method = next((m for name in _ENTERS if (m := value.ref.find(name)) is not None), None)
        if method is not None:
            return self.follow(frame, method, [value], {}, method.node)
        return attributes.field_of(value, INNER) or UNKNOWN

    def remember_base(self, frame: Frame, owner: OwnClass, this: Thing, args: Args, kwargs: Kwargs, node: ast.Call) -> None:
        """`super().__init__("cuda", dtype=...)` in a class derived from autocast."""
        path = next((base for base in owner.bases if base in AUTOCAST), "")
        if path:
            this.attrs[INNER] = self.call_external(frame, node, path, args, kwargs)

    def _getattr(self, frame: Frame, node: ast.Call, args: list[Value]) -> Value:
        if len(args) >= 2 and isinstance(args[1].const, str):
            found = self.attribute(frame, args[0], args[1].const, node)
            return found if args[1].sure else replace(found, sure=False)
        if args and args[0].kind == "external" and args[0].ref == "torch":
            return Value("dtype", const="half" if len(args) > 2 else "")
        return Value(thing=Thing(""))

    def _checkpoint(self, frame: Frame, node: ast.Call, args: Args, kwargs: Kwargs) -> Value:
        if not args:
            return UNKNOWN
        inner = {k: v for k, v in kwargs.items() if k not in ("use_reentrant", "preserve_rng_state", "context_fn", "debug")}
        return self.call_value(frame, node, args[0], args[1:], inner)

    def decorator_context(self, frame: Frame, decorator: ast.expr) -> Value:
        """The context that a decorator puts a function's body into."""
        name = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if not name:
            return UNKNOWN
        value = self.evaluate(frame, decorator.func if isinstance(decorator, ast.Call) else decorator)
        path = value.ref if value.kind == "external" else ""
        if path in NO_GRAD:
            return Value("context", tags=frozenset({"no_grad"}))
        if isinstance(path, str) and path.rpartition(".")[2] == "custom_fwd":
            return torch_calls.custom_fwd(decorator, path)
        if isinstance(decorator, ast.Call):
            return self.evaluate(frame, decorator)
        if path in AUTOCAST:
            return Value(
                "context",
                ref=Region(AUTOCAST[path] or "", "fp16" if AUTOCAST[path] == "cuda" else "half", True, decorator.lineno, path),
            )
        return UNKNOWN

    def _known_method(self, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
        if name == "backward":
            return objects.backward(frame, node, base, args, kwargs)
        if base.kind == "trainer":
            return self._run_hf_trainer(frame, node, base, name)
        if base.kind == "framework" and base.ref == "lightning":
            return self._run_trainer(frame, node, base, name, args, kwargs)
        if objects.is_framework(frame, base):
            return objects.framework_method(frame, node, base, name, args, kwargs)
        if objects.is_scaler(frame, base, name):
            return objects.scaler_method(frame, node, base, name, args, kwargs)
        if name == "enter_context" and args:
            self.enter(frame, args[0])
            return enter_by_hand(frame, args[0])
        if base.kind == "context" and name == "__enter__":
            self.enter(frame, base)
            return enter_by_hand(frame, base)
        if base.kind == "context" and name == "__exit__":
            return leave_by_hand(frame, base)
        if name in ("register_hook", "register_post_accumulate_grad_hook") and args and isinstance(args[0].ref, OwnFunction):
            return self._gradient_hook(frame, node, base, name, args[0])
        if (
            name == "step" and objects.is_optimizer(frame, base) and args and args[0].kind == "function"
        ):  # LBFGS calls the closure itself
            self.follow(frame, args[0].ref, list(args[0].inputs), {}, node)
        if name in ("step", "zero_grad", "state_dict", "load_state_dict") and objects.is_optimizer(frame, base):
            if base.thing is not None:
                base.thing.kind = base.thing.kind or "optimizer"
            return frame.emit(f"optimizer.{name}", node, (base, *args), kwargs, Value(op=f"optimizer.{name}", inputs=(base,)))
        if name in FRAMEWORK_REGIONS and base.kind in ("", "instance"):
            return objects.framework_region(frame, node)
        if name == "from_pretrained":
            return objects.call_pretrained(frame, node, name, kwargs) or UNKNOWN
        if name in ("to", "type") or name in objects.CASTS:
            return objects.cast(frame, node, base, name, args, kwargs)
        if objects.is_module(frame, base) and (name in MODULE_METHODS or name in ("cuda", "cpu")):
            return self._module_method(frame, node, base, name, args, kwargs)
        return objects.tensor_method(frame, node, base, name, args, kwargs)

    def _run_trainer(self, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
        """`trainer.fit(model)`: Lightning runs the steps of the model inside its autocast region."""
        model = kwargs.get("model", args[0] if args else UNKNOWN)
        frame.emit("unknown_call", node, (base, *args), kwargs)
        if name != "fit" or model.kind != "instance":
            return UNKNOWN
        region, saved = objects.mixed_region(frame, node, base), frame.at
        if region is not None:
            frame.at = frame.inside(regions=(*saved.regions, region))
        for step in ("training_step", "validation_step"):
            method = model.ref.find(step)
            if method is not None:
                frame.at = replace(frame.at, has_grad=step == "training_step")
                batch = [Value(thing=Thing(step)), Value(thing=Thing(""), dtype="int")]
                self.follow(frame, method, [model, *batch], {}, node)
        frame.at = saved
        return UNKNOWN

    def _run_hf_trainer(self, frame: Frame, node: ast.Call, base: Value, name: str) -> Value:
        """`trainer.train()`: Hugging Face runs the forward of the model inside its autocast region."""
        model = base.inputs[0]
        if name != "train" or model.kind != "instance":
            return UNKNOWN
        self._run_mixed(frame, node, base, model.ref.find("forward"), [model], {})
        return UNKNOWN

    def _run_mixed(
        self, frame: Frame, node: ast.Call, framework: Value, method: OwnFunction | None, args: Args, kwargs: Kwargs
    ) -> None:
        """Runs a method inside the region that a framework opens."""
        region, saved = objects.mixed_region(frame, node, framework), frame.at
        if method is not None and region is not None:
            frame.at = frame.inside(regions=(*saved.regions, region))
            self.follow(frame, method, args, kwargs, node)
            frame.at = saved

    def _gradient_hook(self, frame: Frame, node: ast.Call, base: Value, name: str, hook: Value) -> Value:
        """Runs a hook on the gradient it will get: it fires inside backward, so the gradient is scaled if the loss is."""
        gradient = Value("tensor", op="grad", inputs=(base,), tags=frozenset({"grad", "hook"}), line=node.lineno, node=node)
        given = gradient if name == "register_hook" else Value("tensor", op="param", thing=Thing("p"))
        self.follow(frame, hook.ref, [*hook.inputs, given], {}, node)
        return UNKNOWN

    def _module_method(self, frame: Frame, node: ast.Call, base: Value, name: str, args: Args, kwargs: Kwargs) -> Value:
        thing = base.thing
        if thing is not None:
            if name == "eval" or (name == "requires_grad_" and args and args[0].const is False):
                thing.is_frozen = True
            elif name == "train" and not (args and args[0].const is False):
                thing.is_set_to_train = True
            elif name in ("cuda", "cpu"):
                thing.device = name
        if name in ("parameters", "named_parameters"):
            return Value(op=name, inputs=(base,), thing=thing, node=node)
        if name == "clip_grad_norm_":
            return frame.emit("clip_grad", node, (Value(op="parameters", thing=thing), *args), kwargs)
        if name == "register_buffer" and len(args) > 1:
            if base.kind == "instance" and thing is not None and isinstance(args[0].const, str):
                thing.attrs[args[0].const] = args[1]
            return frame.emit("register_buffer", node, (base, *args), kwargs)
        if name == "state_dict":
            return Value(op="module.state_dict", inputs=(base,))
        frame.emit(f"module.{name}", node, (base, *args), kwargs)
        if name == "apply" and thing is not None and args and isinstance(args[0].ref, OwnFunction):
            self.follow(frame, args[0].ref, [*args[0].inputs, attributes.child_of(base)], {}, node)
        return (
            base
            if name in ("train", "eval", "requires_grad_", "cuda", "cpu", "apply")
            else Value(op=f"call:{name}", inputs=(base,))
        )

    def call_layer(self, frame: Frame, node: ast.Call, target: Value, args: Args, kwargs: Kwargs) -> Value:
        """A call of a torch.nn layer, or of a Sequential of them."""
        if target.ref == "Sequential" and target.inputs and args:
            value = args[0]
            for layer in target.inputs:
                value = self.call_value(frame, node, layer, [value], {})
            objects.emit_call(frame, node, target, args, kwargs, value)
            return replace(value, inputs=(*value.inputs, target))
        op = LAYERS.get(target.ref) if isinstance(target.ref, str) else None
        if op is None:
            return objects.module_call(frame, node, target, args, kwargs)
        out = result(frame, op, node, tuple(args), {})
        half = objects.layer_half(frame, target)
        if op == "embedding" and frame.at.region is not None and not half:  # a lookup keeps the dtype of the weights
            out = replace(out, dtype="fp32", why=f"{target.ref} keeps float32 weights", line=node.lineno)
        if half and frame.at.region is None and op not in ("cross_entropy", "mse_loss"):
            tags = out.tags - {"autocast"}
            out = replace(out, dtype=half, why=f"{target.ref} holds {half} weights", line=node.lineno, tags=tags)
        objects.emit_call(frame, node, target, args, kwargs, out)
        frame.emit(op, node, tuple(args), {**kwargs, "": target}, out)
        if op in ("lstm", "gru", "multi_head_attention"):
            return Value("tuple", inputs=(out, replace(out, op="part")))
        return out

    def settings_value(self, frame: Frame, name: str) -> Value | None:
        """What a settings file that the code names says, as a value whose parts know their lines."""
        read = getattr(self.project.sources, "settings", None)
        found = read(name, frame.module.filename) if read is not None else None
        if found is None:
            return None
        path, data, spans = found

        def made(item: Any, at: tuple[str | int, ...]) -> Value:
            node = ast.Constant(value=None, lineno=spans.get(at, (1,))[0], col_offset=0)
            node.file = path  # type: ignore[attr-defined]
            if isinstance(item, dict):
                return Value("dict", ref={str(k): made(v, (*at, str(k))) for k, v in item.items()}, node=node)
            if isinstance(item, list):
                return Value("list", inputs=tuple(made(v, (*at, n)) for n, v in enumerate(item)), node=node)
            return Value("const", const=item, node=node)

        return made(data, ())

    def _from_file(self, frame: Frame, path: str) -> dict[str, Value]:
        """What the one settings file of a framework near the code says about its precision, as the argument IN_FILE."""
        near = getattr(self.project.sources, "settings_near", None)
        found = near(frame.module.filename, *_BY_FILE[path]) if near is not None else []
        if len(found) != 1:
            return {}
        value, file, row = found[0]
        node = ast.Constant(value=value, lineno=row, col_offset=0)
        node.file = file  # type: ignore[attr-defined]
        return {IN_FILE: Value("const", const=value, node=node)}

    def _run_cli(self, frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
        """`LightningCLI(Model)`: the trainer, and with it the precision, comes from a settings file."""
        frame.emit("external", node, (Value("external", ref=path), *args), kwargs)
        asked = self._from_file(frame, "LightningCLI").get(IN_FILE, UNKNOWN)
        trainer = Value("framework", ref="lightning", const=asked.const, node=asked.node or node)
        model = self.construct(frame, args[0].ref, [], {}, node)
        return self._run_trainer(frame, node, trainer, "fit", [model], {})

    def _loaded(self, frame: Frame, args: Args) -> Value | None:
        """`yaml.safe_load(open("train.yaml"))`: the one file that is named in it."""
        names = [v.const for a in args for v in ancestors(a, 12) if isinstance(v.const, str) and v.sure]
        named = [name for name in names if name.endswith((".json", ".yaml", ".yml", ".toml"))]
        return self.settings_value(frame, named[0]) if len(named) == 1 else None

    def call_external(self, frame: Frame, node: ast.Call, path: str, args: Args, kwargs: Kwargs) -> Value:
        """A call of something that is not the project's; the three that call back into it are followed here."""
        if path in _LOADERS:
            loaded = self._loaded(frame, args)
            if loaded is not None:
                return loaded
        for name in ("config", "config_params", "deepspeed"):  # a path where a dict may stand
            if name in kwargs and isinstance(kwargs[name].const, str) and (name == "deepspeed" or path.startswith("deepspeed.")):
                kwargs = {**kwargs, name: self.settings_value(frame, kwargs[name].const) or kwargs[name]}
        if path in _BY_FILE:
            kwargs = {**kwargs, **self._from_file(frame, path)}
        if path.rpartition(".")[2] == "LightningCLI" and args and isinstance(args[0].ref, OwnClass):
            return self._run_cli(frame, node, path, args, kwargs)
        if path == "builtins.map":
            return self._mapped(frame, node, args)
        if path == "builtins.getattr":
            return self._getattr(frame, node, args)
        if path == "torch.utils.checkpoint.checkpoint":
            return self._checkpoint(frame, node, args, kwargs)
        return torch_calls.call_external(frame, node, path, args, kwargs)


_LOADERS = frozenset(
    ("json.load", "json.loads", "yaml.safe_load", "yaml.load", "yaml.full_load", "tomllib.load", "tomllib.loads", "toml.load",
     "tomli.load", "omegaconf.OmegaConf.load", "OmegaConf.load")
)  # fmt: skip
_BY_FILE = {
    "accelerate.Accelerator": ("accelerate", "mixed_precision"),
    "accelerate.accelerator.Accelerator": ("accelerate", "mixed_precision"),
    "LightningCLI": ("lightning", "precision"),
}
_LEAVES = (ast.Raise, ast.Continue, ast.Break)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def _handlers(prefix: str, **shared: tuple[type[ast.AST], ...]) -> dict[type[ast.AST], Callable[..., Any]]:
    """Kind of node -> the method named after it (`run_if` for ast.If), or the one that several kinds share."""
    kinds = (ast.stmt if prefix == "run" else ast.expr).__subclasses__()
    table = {kind: m for kind in kinds if (m := getattr(Interpreter, f"{prefix}_{kind.__name__.lower()}", None))}
    return table | {kind: getattr(Interpreter, f"_{name}") for name, sharing in shared.items() for kind in sharing}


_STATEMENTS = _handlers("run", leave=_LEAVES, loop=(ast.For, ast.AsyncFor))
_STATEMENTS |= {ast.AsyncWith: Interpreter.run_with, ast.AsyncFunctionDef: Interpreter.run_functiondef}
if hasattr(ast, "TryStar"):
    _STATEMENTS[ast.TryStar] = Interpreter.run_try
_EXPRESSIONS = _handlers(
    "value",
    sequence=(ast.Tuple, ast.List, ast.Set),
    wrapped=(ast.Starred, ast.Await, ast.YieldFrom),
    comprehension=_COMPREHENSIONS,
)
