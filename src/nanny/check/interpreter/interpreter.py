"""The interpreter: walks one program in order, both arms of a branch, a loop's body once, calls followed into the project.

Nothing is executed. Expressions become `Value`s (constants folded, dtypes carried), operations become `Event`s in a `Trace`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import attributes, contexts, guards, imports, objects, torch_calls, trainers, values
from .expressions import EXPRESSIONS, binary
from .source import OwnClass, OwnFunction, Project, WalkedFile, starts_program
from .torch_names import TRAINERS
from .trace import MAX_DEPTH, MAX_STATEMENTS, Context, Event, FileView, Frame, Guard, Options, Trace
from .uses import bound_in, dotted_name
from .values import NONE, NOTHING, UNKNOWN, Args, Env, Kwargs, Thing, Value, ancestors, constant, copy_of, join, replace


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
    return start, dotted_name(node.targets[0])


def _after_exit(at: Context, implied: tuple[Guard, ...]) -> Context:
    return replace(at, guards=at.guards + implied, exits=at.exits | {key for key, _ in implied})


# what a cached call still has to tell: calls that change gradients, scalers and optimizers
_FAR = 300  # values on the way from a sum back to what it began with
_PROTOCOL = ("scaler.", "optimizer.", "framework.", "backward", "clip_grad", "grad_read", "autograd.grad", "module_call")


def signature(values: list[Value], kwargs: Kwargs) -> tuple[object, ...]:
    def key(v: Value) -> tuple[object, ...]:
        const = v.const if isinstance(v.const, (int, float, str, bool, type(None))) else None
        return (v.kind, v.dtype, v.op, const, v.thing, v.tags, id(v.ref) if v.ref else 0)

    return (*map(key, values), *((k, key(v)) for k, v in kwargs.items()))


def _rebase(event: Event, base: Context) -> Event:
    at = event.at
    own = {name: getattr(at, name)[len(getattr(base, name)) :] for name in ("guards", "loops", "stack")}
    return replace(event, at=replace(at, **own, exits=at.exits - base.exits, left=at.left - base.left))


def _move(inner: Context, outer: Context) -> Context:
    own = {name: getattr(outer, name) + getattr(inner, name) for name in ("guards", "loops", "stack")}
    return replace(inner, **own, exits=outer.exits | inner.exits, left=outer.left | inner.left)


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
        self.ran: set[ast.AST] = set()  # functions
        self.stored: dict[str, list[Value]] | None = None  # for a probe: what was put where other functions find it

    def walk(self, module: WalkedFile) -> FileView:
        """Runs the module body, then every function that nothing has called yet, and keeps what was seen."""
        self.run_body(module)
        called = {path.rpartition(".")[2] for path in module.uses.called}
        tried: set[ast.AST] = set()
        while waiting := [f for f in module.functions if f.module is module and f.node not in tried]:
            for function in sorted(waiting, key=lambda f: f.called_as in called):  # entry points first: they run their helpers
                ran = function.node in tried or function.node in self.ran
                tried.add(function.node)
                if not ran:
                    self.run_entry(function, function.owner)
            for function in waiting:
                for owner in heirs(function, module):
                    self.run_entry(function, owner)
        return FileView(module, self.traces, self.options)

    def run_body(self, module: WalkedFile) -> None:
        self.follows_imports = module.uses.is_active or starts_program(module.source.text)
        self.modules[module.filename] = module
        module.is_loaded = module.is_entry = True
        body = Trace("<module>", module)
        self.traces.append(body)
        self.run_block(Frame(self.options, module, body, module.env), module.tree.body)

    def forget(self) -> None:
        """Lets go of what was walked: it is full of cycles, which the garbage collector takes long to find."""
        for value in self.instances.values():
            if value.thing is not None:
                value.thing.attrs.clear()
        for module in self.modules.values():
            if module is None:
                continue
            for function in module.functions + module.lambdas:
                function.closure = function.owner = None
            for info in module.classes:
                if info.example is not None:
                    info.example.attrs.clear()
                info.methods.clear()
                info.attrs.clear()
            module.env.clear()
            module.functions.clear()
            module.lambdas.clear()
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
        held = [(part, part.device) for value in args for part in objects.parts(value)]
        made = self.run_function(outer, function, args, {}, Context(stack=(function,)), is_entry=True)
        for part, device in held:  # nothing calls it: what it moves is not there when others run
            part.device = device
        return made

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
            elif isinstance(index.const, str) and dotted_name(target.value):
                frame.env[f"{dotted_name(target.value)}[{index.const}]"] = value
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
        path = dotted_name(target)
        if base.op.endswith(".CfgNode") and value.kind == "const":
            value = values.as_default(value, path)  # a file may say something else
        if value.thing is not None and not value.thing.name:
            value.thing.name = path
        if target.attr == "data" and base.thing is not None and value.is_half:
            base.thing.dtype = value.dtype
        if base.thing is not None:
            known = base.thing.attrs.get(target.attr)
            is_conditional = bool(frame.at.guards) or value.is_none
            base.thing.attrs[target.attr] = join(known, value) if known is not None and is_conditional else value
        if base.kind == "instance" and base.thing is not None:
            return
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
        """`acc = acc * d + x` and `p.data = m * p.data + ...` are running sums; `x = a * x + b @ x` is a step of an iteration."""
        known = frame.lookup(dotted_name(target)) if isinstance(target, ast.Name) else self.evaluate(frame, target)
        if known is None or not known.is_half:
            return
        origin = known.inputs[0] if known.op == "view" and known.inputs else known
        on_it = [any(v is known or v is origin for v in ancestors(part, _FAR)) for part in value.inputs]
        if any(on_it) and not all(on_it):
            frame.emit("accumulate", node, (known, value), out=value)

    def run_annassign(self, frame: Frame, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(frame, node.target, self.evaluate(frame, node.value))

    def run_augassign(self, frame: Frame, node: ast.AugAssign) -> None:
        left = self.evaluate(frame, node.target)
        right = self.evaluate(frame, node.value)
        value = binary(frame, node, node.op, left, right, in_place=True)
        frame.emit("augassign", node, (left, right, constant(type(node.op).__name__)), out=value)
        if not (isinstance(node.target, ast.Attribute) and node.target.attr in ("grad", "data")):
            self.assign(frame, node.target, value)

    def run_expr(self, frame: Frame, node: ast.Expr) -> None:
        self.evaluate(frame, node.value)

    def run_return(self, frame: Frame, node: ast.Return) -> None:
        value = self.evaluate(frame, node.value) if node.value else NONE
        if frame.at.island is not None and value.kind == "tensor" and not value.dtype:
            value = replace(value, tags=value.tags | {"island"})  # whatever it is, autocast has not made it half
        frame.returns.append(value)
        frame.is_over = True

    def run_leave(self, frame: Frame, node: ast.stmt) -> None:
        if isinstance(node, ast.Raise) and node.exc:
            self.evaluate(frame, node.exc)
        elif isinstance(node, ast.Continue):
            frame.emit("leave", node, ())
        frame.is_over = True

    def run_if(self, frame: Frame, node: ast.If) -> None:
        test = self.evaluate(frame, node.test)
        known = guards.truth(frame, node.test, test)
        if known is not None:
            self.run_block(frame, node.body if known else node.orelse)
            return
        saved, env, ways = frame.at, frame.env, len(frame.left)
        yes, no = guards.arms_of(frame, node.test, test)
        window = guards.window_of(frame, node)
        if window:
            yes, no = (*yes, (window, True)), (*no, (window, False))

        env.begin()
        guards.narrow(self, frame, node.test, True)
        frame.at = replace(saved, guards=saved.guards + yes)
        self.run_block(frame, node.body)
        changed_yes, over_yes = env.take_back(), frame.is_over

        env.begin()
        guards.narrow(self, frame, node.test, False)
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
            if len(frame.left) > ways:
                frame.at = replace(saved, left=saved.left.union(frame.left[ways:]))
        around = saved.guards[frame.base :]
        frame.left += [frozenset(around + arm) for arm, over in ((yes, over_yes), (no, over_no)) if over and not frame.is_over]

    def run_for(self, frame: Frame, node: ast.For | ast.AsyncFor) -> None:
        source = self.evaluate(frame, node.iter)
        saved = frame.at
        frame.mark(node)
        known = attributes.objects_in(source)
        if not known:
            frame.at = replace(saved, loops=(*saved.loops, node))
        for item in known or (attributes.element_of(frame, source, node.target),):
            self.assign(frame, node.target, item)
            self.run_block(frame, node.body)
        frame.at = saved
        self.run_block(frame, node.orelse)
        frame.is_over = False

    def run_while(self, frame: Frame, node: ast.While) -> None:
        self.evaluate(frame, node.test)
        saved = frame.at
        frame.mark(node)
        frame.at = replace(saved, loops=(*saved.loops, node))
        self.run_block(frame, node.body)
        frame.at = saved
        self.run_block(frame, node.orelse)
        frame.is_over = False

    def run_with(self, frame: Frame, node: ast.With | ast.AsyncWith) -> None:
        saved, entered = frame.at, len(frame.entered)
        for item in node.items:
            value = self.evaluate(frame, item.context_expr)
            if value.kind == "context":
                frame.emit("enter", item.context_expr, (value,))
            contexts.enter(self, frame, value)
            if item.optional_vars is not None:
                self.assign(frame, item.optional_vars, value if value.kind != "context" else UNKNOWN)
        self.run_block(frame, node.body)
        frame.at = saved
        del frame.entered[entered:]

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
                names.append(value.ref if isinstance(value.ref, str) else dotted_name(base))
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
                self._fill_field(body, statement)
        made = frame.env[node.name] = Value("class", ref=info, thing=Thing(node.name))
        for decorator in node.decorator_list:  # a registry may keep the class
            given = self.evaluate(frame, decorator)
            if given.kind == "function" and isinstance(given.ref, OwnFunction):
                self.follow(frame, given.ref, [*given.inputs, made], {}, decorator)

    def _fill_field(self, body: Frame, statement: ast.stmt) -> None:
        """`amp: Amp = field(default_factory=Amp)` in the body of a dataclass: an `Amp` of its defaults."""
        call = statement.value if isinstance(statement, ast.AnnAssign) else None
        if isinstance(call, ast.Call) and dotted_name(call.func).rpartition(".")[2] == "field":
            for keyword in call.keywords:
                given = self.evaluate(body, keyword.value)
                if keyword.arg == "default_factory" and isinstance(given.ref, OwnClass):
                    given = self.construct(body, given.ref, [], {}, call)
                if keyword.arg in ("default", "default_factory"):
                    self.assign(body, statement.target, given)  # type: ignore[attr-defined]

    def run_delete(self, frame: Frame, node: ast.Delete) -> None:
        for target in node.targets:
            frame.env.drop(dotted_name(target))

    def run_global(self, frame: Frame, node: ast.Global) -> None:
        frame.globals.update(node.names)

    def run_assert(self, frame: Frame, node: ast.Assert) -> None:
        self.evaluate(frame, node.test)

    def evaluate(self, frame: Frame, node: ast.AST | None) -> Value:
        handler = EXPRESSIONS.get(type(node)) if node is not None else None
        return handler(self, frame, node) if handler else UNKNOWN

    def construct(self, frame: Frame, info: OwnClass, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        """An instance of a class of the project; its __init__ is run once for the same arguments."""
        key = (info, frame.at.regions, signature(args, kwargs))
        known = self.instances.get(key)
        if known is not None:
            value = replace(copy_of(known), node=node)
        else:
            value = Value("instance", ref=info, thing=Thing("", kind="module" if info.is_module else ""), node=node)
            info.example = info.example or value.thing
            self.build(frame, info, value, args, kwargs, node)
            self.instances[key] = copy_of(value)
        thing = value.thing
        assert thing is not None
        if isinstance(node, ast.Call) and info.derives_from(TRAINERS):
            return trainers.own_trainer(self, frame, info, value, args, kwargs, node)
        base = objects.optimizer_base(info)
        if base and isinstance(node, ast.Call):
            passed = thing.attrs.get(objects.SUPER, Value("dict", ref=kwargs, inputs=tuple(args)))
            return objects.new_optimizer(frame, node, base, list(passed.inputs) or args, passed.ref)
        for item in (*args, *kwargs.values()):
            if item.kind in ("scaler", "optimizer"):
                frame.emit(f"{item.kind}.passed", node, (item,))
        if info.is_module and isinstance(node, ast.Call):
            frame.emit("module.new", node, tuple(args), kwargs, value)
        return value

    def build(self, frame: Frame, info: OwnClass, value: Value, args: Args, kwargs: Kwargs, node: ast.AST) -> None:
        thing = value.thing
        if thing is None or thing.is_built:
            return
        thing.is_built = True
        init = info.find("__init__")
        if init is not None and isinstance(node, ast.ClassDef) and init not in frame.at.stack:
            at = frame.inside(stack=(*frame.at.stack, init))  # an example: who builds it may give what is not the default
            self.run_function(frame, init, [value], {}, at, is_entry=True)
            return
        if init is not None:
            self.follow(frame, init, [value, *args], kwargs, node)
            return
        fields = [s.target.id for s in info.node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        thing.attrs.update({**dict(zip(fields, args)), **{name: kwargs[name] for name in fields if name in kwargs}})

    def follow(self, frame: Frame, info: OwnFunction, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
        """Runs a function of the project with these arguments; its events go into the caller's trace."""
        if info in frame.at.stack or len(frame.at.stack) >= MAX_DEPTH:
            return UNKNOWN
        kwargs = _with_literals(kwargs, node)
        key = (info, frame.at.regions, frame.at.has_grad, bool(frame.at.loops), signature(args, kwargs))
        known = self.memory.get(key)
        if known is not None:
            value, events = known
            for event in events:
                frame.trace.events.append(replace(event, at=_move(event.at, frame.at)))
            return value
        start = len(frame.trace.events)
        before = frame.at
        at = frame.inside(stack=(*frame.at.stack, info))
        value = self.run_function(frame, info, args, kwargs, at)
        kept = tuple(_rebase(e, before) for e in frame.trace.events[start:] if e.op.startswith(_PROTOCOL))
        self.memory[key] = (value, kept)
        return value

    def run_function(
        self, frame: Frame, info: OwnFunction, args: Args, kwargs: Kwargs, at: Context, is_entry: bool = False
    ) -> Value:
        info.runs += 1
        self.ran.add(info.node)
        inner = Frame(self.options, info.module, frame.trace, Env(), at, info.closure, info.owner)
        self.bind(inner, info, args, kwargs, is_entry)
        if isinstance(info.node, ast.Lambda):
            return self.evaluate(inner, info.node.body)
        for decorator in info.node.decorator_list:
            context = contexts.decorator_context(self, inner, decorator)
            if context.kind == "dict" and not args and info.node.args.args:  # the settings that `@hydra.main` gives
                inner.env[info.node.args.args[0].arg] = context
            contexts.enter(self, inner, context)
            if "casts_inputs" in context.tags:
                for name, value in inner.env.items():
                    if value.is_half:
                        inner.env[name] = replace(value, dtype="fp32", why=f"cast by custom_fwd at line {decorator.lineno}")
        self.run_block(inner, info.node.body)
        entered = contexts.made_context(inner, info, at)
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
                frame.env[name] = self._default(frame, info, name, defaults.get(name), argument.annotation, is_entry)
        if spec.vararg:
            frame.env[spec.vararg.arg] = Value("list", inputs=tuple(args[len(names) :]))
        if spec.kwarg:
            named = {a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
            rest = {key: value for key, value in kwargs.items() if key not in named}
            frame.env[spec.kwarg.arg] = Value("dict", ref=rest) if rest else Value(thing=Thing(spec.kwarg.arg))

    def _default(
        self, frame: Frame, info: OwnFunction, name: str, default: ast.expr | None, annotation: ast.expr | None, is_entry: bool
    ) -> Value:
        known = self.evaluate(frame, default) if default is not None else UNKNOWN
        if default is not None and not is_entry:  # the caller did not give it: the default holds
            is_kept = known.is_none and name not in bound_in(info.node)
            return replace(known, tags=known.tags | {"left_out"}) if is_kept else known
        if known.is_number or known.kind == "dtype":
            return known
        owner = self._annotated_class(frame, annotation)
        if owner is not None:
            value = Value("instance", ref=owner, thing=Thing(name, "module" if owner.is_module else ""))
            self.build(frame, owner, value, [], {}, owner.node)
            return value
        kind = torch_calls.kind_of_annotation(annotation)
        tags = frozenset({"default_off"}) if known.const is False else frozenset()
        return Value(kind, thing=Thing(name, kind=kind), tags=tags)

    def _annotated_class(self, frame: Frame, annotation: ast.expr | None) -> OwnClass | None:
        """The class of the project that a parameter is annotated with."""
        if not isinstance(annotation, (ast.Name, ast.Attribute)):
            return None
        first = dotted_name(annotation).partition(".")[0]
        found = self.evaluate(frame, annotation) if frame.lookup(first) is not None else UNKNOWN
        owner = found.ref if found.kind == "class" and isinstance(found.ref, OwnClass) else None
        return owner if owner is not None and owner not in {f.owner for f in frame.at.stack} else None


def _with_literals(kwargs: Kwargs, node: ast.AST) -> Kwargs:
    """The arguments of a call, of which it writes down True or False itself: what it then does is no choice of the user's."""
    written = {
        k.arg for k in getattr(node, "keywords", ()) if isinstance(k.value, ast.Constant) and isinstance(k.value.value, bool)
    }
    return {k: replace(v, tags=v.tags | {"written"}) if k in written else v for k, v in kwargs.items()} if written else kwargs


_STATEMENTS: dict[type[ast.AST], Callable[..., None]] = {
    ast.Assign: Interpreter.run_assign, ast.AnnAssign: Interpreter.run_annassign, ast.AugAssign: Interpreter.run_augassign,
    ast.Expr: Interpreter.run_expr, ast.Return: Interpreter.run_return, ast.If: Interpreter.run_if,
    ast.While: Interpreter.run_while, ast.Try: Interpreter.run_try, ast.Match: Interpreter.run_match,
    ast.ClassDef: Interpreter.run_classdef, ast.Delete: Interpreter.run_delete, ast.Global: Interpreter.run_global,
    ast.Assert: Interpreter.run_assert, ast.Import: imports.bind_import, ast.ImportFrom: imports.bind_from_import,
    **dict.fromkeys((ast.Raise, ast.Continue, ast.Break), Interpreter.run_leave),
    **dict.fromkeys((ast.For, ast.AsyncFor), Interpreter.run_for),
    **dict.fromkeys((ast.With, ast.AsyncWith), Interpreter.run_with),
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef), Interpreter.run_functiondef),
}  # fmt: skip
if hasattr(ast, "TryStar"):
    _STATEMENTS[ast.TryStar] = Interpreter.run_try
