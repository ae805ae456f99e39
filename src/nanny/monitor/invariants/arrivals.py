"""Gradients that do not arrive: which parameters have had none, or only zeros, and what their modules did meanwhile."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from sys import _getframe

from torch import Tensor, nn

from ...core.step import Breach
from ...measure import transfer
from ...measure.flatten import local_part
from ...measure.rows import which_are_zero
from ...watch.names import held_by, unwrap
from ...watch.places import is_users_own
from ...watch.tensors import gradient_of, is_readable
from ..trace import StepTrace
from .watched import Watched

MANAGED = frozenset(  # what is done to a module without running it
    ["parameters", "named_parameters", "state_dict", "load_state_dict", "to", "train", "eval", "requires_grad_", "apply"]
)
BY_ANY_NAME = frozenset(["children", "named_children", "modules", "named_modules", "_modules", "get_submodule", "__dict__"])


class Arrivals:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.arrived: set[str] = set()
        self._alive: set[str] = set()  # of them those that are still trained: a part may be frozen, or replaced
        self._missing: dict[str, int] = {}  # looks at which there was none, or only zeros
        self._since: dict[str, tuple[int, int]] = {}  # looks, and steps of optimizers, before the first of these
        self._zero: set[str] = set()  # of them those that had one, of zeros
        self._ran: set[str] = set()
        self._ran_without_grad: set[str] = set()
        self._ran_in: set[str] = set()  # both, and the modules around them
        self._unread: dict[str, bool] = {}  # modules that no line of the program but their assignment names
        self._known: list[Breach] | None = None  # of those that have had none; None: something has changed since
        self._looks = 0
        self.experts: tuple[str, ...] = ()

    def look(self, mine: list[Tensor]) -> None:
        self._looks += 1
        self._known = None
        names = self._watched.parameters
        new = [p for p in mine if p.requires_grad and names[id(p)] not in self.arrived]
        asked = [(names[id(p)], gradient_of(p)) for p in new if local_part(p.detach()).numel()]  # else others have it
        read = [g for _, g in asked if g is not None and is_readable(g) and transfer.reads_freely(g.device)]
        zero = {id(g) for g, is_zero in zip(read, which_are_zero(read)) if is_zero}
        for name, grad in asked:
            if id(grad) in zero:
                self._zero.add(name)
            elif grad is not None:
                self.arrived.add(name)
                self._missing.pop(name, None)
                continue
            self._missing[name] = self._missing.get(name, 0) + 1
            self._since.setdefault(name, (self._looks - 1, self._watched.total - 1))
        if self._missing:
            self._alive = self.arrived & {names[id(p)] for p in self._watched.trainable()}
        self._look_for_unread()

    def _look_for_unread(self) -> None:
        """Here the program's own frames are on the stack, and with them the files that may name a module."""
        if self._looks <= 3:
            return
        for name in self._missing:
            site = self._idle_part(name)
            if site and site not in self._unread:
                adapted = any(not p.requires_grad for held in self._watched.owners.values() if (p := held()) is not None)
                self._unread[site] = not adapted and is_unread(self._watched.models, site)  # else it is left over from elsewhere

    def _idle_part(self, name: str) -> str:
        """The outermost module around a parameter that was never called; '' if one was."""
        site, at = "", name.find(".")
        while at >= 0:
            site, at = name[:at], name.find(".", at + 1)
            if site not in self._ran_in:
                return site
        return ""

    def traced(self, trace: StepTrace) -> None:
        new = (trace.called | trace.called_without_grad) - self._ran - self._ran_without_grad
        self._ran |= trace.called
        self._ran_without_grad |= trace.called_without_grad
        self._ran_in |= new | modules_of(new)
        self._known = None
        self.experts = tuple(experts_of(self._watched.models, trace))

    def breaches(self) -> Iterator[Breach]:
        watched = self._watched
        unused_is_meant = any(held_by(model, "find_unused_parameters") for model, _ in watched.models)
        nowhere = self._zero & self._missing.keys()
        if not self._alive and nowhere:
            steps = watched.total - min(self._since[name][1] for name in nowhere)
            yield watched.breach("no_gradient", sorted(nowhere), steps, watched.total, ("nowhere", "zero"))
        if unused_is_meant or not self._alive:
            return
        if self._known is None:
            kinds = self._kinds_of_missing()
            traits = {kind: (kind, "zero") if self._zero.intersection(names) else (kind,) for kind, names in kinds.items()}
            self._known = [watched.breach("no_gradient", names, 0, 0, traits[kind]) for kind, names in kinds.items()]
        for one in self._known:
            yield replace(one, steps=watched.total, of=watched.total, where=watched.where)

    def _kinds_of_missing(self) -> dict[str, list[str]]:
        """Parameters that have had none at any look, by what their modules did meanwhile."""
        kinds: dict[str, list[str]] = {}
        prefixes = tuple(prefix for _, prefix in self._watched.models if prefix)
        own = any(not name.startswith(prefixes) for name in self._alive)  # of the model without a prefix
        reached = modules_of(self._alive)
        for name, looks in self._missing.items():
            if looks < self._looks - self._since[name][0]:
                continue
            inside = name.rpartition(".")[0]
            site = inside or self._root_site
            kind = "ran" if site in self._ran else "without_grad" if site in self._ran_without_grad else "idle"
            if kind == "idle" and self._unread.get(self._idle_part(name)):
                kind = "unread"
            if kind == "ran" and name not in self._zero and is_called_by_library(self._watched.models, site, reached):
                kind = "unused"
            chosen = any(name.startswith(f"{expert}.") for expert in self.experts)
            # else it is a bias that cancels out, or a parameter that is left over
            alone = inside not in reached if inside else not own
            if alone and not chosen:
                kinds.setdefault(kind, []).append(name)
        return kinds

    @property
    def _root_site(self) -> str:
        return type(unwrap(self._watched.models[0][0])).__name__ if self._watched.models else ""


def modules_of(names: Iterable[str]) -> set[str]:
    """The modules that these parameters are in, with those around them."""
    found: set[str] = set()
    for name in names:
        module = name.rpartition(".")[0]
        while module and module not in found:
            found.add(module)
            module = module.rpartition(".")[0]
    return found


def is_called_by_library(models: Sequence[tuple[nn.Module, str]], site: str, reached: set[str]) -> bool:
    """Does no line of the program call the part of which nothing has a gradient? It is a library's, within a model of a library,
    which gives its result among others."""
    for model, prefix in models:
        if not site.startswith(prefix):
            continue
        module, path, around = unwrap(model), prefix, ""
        for name in site[len(prefix) :].split("."):
            maker = _maker(module)
            around = around if maker == "torch" else maker
            part = module._modules.get(name)
            if part is None:
                break
            module, path = part, path + name
            if path not in reached:
                return around == "library" and _maker(module) != "program"
            path += "."
    return False


def _maker(module: nn.Module) -> str:
    """Whose code its forward pass is: torch's (a container may hold anybody's), another library's, or the program's own."""
    name = type(module).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return "torch" if name.partition(".")[0] == "torch" else "program" if not file or is_users_own(file) else "library"


def is_unread(models: Sequence[tuple[nn.Module, str]], site: str) -> bool:
    """Does no line of the program name this part of a model, but the one that makes it? By the source of all who could."""
    for model, prefix in models:
        path = site[len(prefix) :] if site.startswith(prefix) else ""
        parent, _, attribute = path.rpartition(".")
        try:
            owner = unwrap(model).get_submodule(parent)
        except AttributeError:
            continue
        if not isinstance(owner._modules.get(attribute), nn.Module):
            continue
        classes = [one for one in type(owner).__mro__ if not one.__module__.startswith("torch.")]
        files = {getattr(sys.modules.get(one.__module__), "__file__", None) for one in classes if one is not object}
        files |= _files_on_stack()
        if not classes or not all(name and is_users_own(name) for name in files):
            return False
        return not any(_names(str(name), attribute, {one.__name__ for one in classes}) for name in files)
    return False


def _files_on_stack() -> set[str | None]:
    frame, found = _getframe(1), set()
    while frame is not None:
        if is_users_own(frame.f_code.co_filename):
            found.add(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _names(file: str, attribute: str, classes: set[str]) -> bool:
    """Is a module of this name read in here, or may it be, by a name that is made up? What only manages it does not count."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return True
    if not tree.body:
        return True
    managed = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Attribute) and one.attr in MANAGED}
    for one in ast.walk(tree):
        if isinstance(one, ast.Attribute) and one.attr == attribute and not isinstance(one.ctx, ast.Store):
            if id(one) not in managed:
                return True
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in ("getattr", "vars", "attrgetter"):
            named = one.args[1] if len(one.args) > 1 else None
            if not isinstance(named, ast.Constant) or named.value == attribute:
                return True
        elif isinstance(one, ast.ClassDef) and one.name in classes:
            inside = (part for method in one.body if getattr(method, "name", "") != "__init__" for part in ast.walk(method))
            if any(isinstance(part, ast.Attribute) and part.attr in BY_ANY_NAME for part in inside):
                return True
    return False


def experts_of(models: Sequence[tuple[nn.Module, str]], trace: StepTrace) -> Iterator[str]:
    """Members of a list of alike modules that did not run, or on nothing, or on what another got: one of many is chosen."""
    given = _given_to(trace)
    for model, prefix in models:
        for name, group in unwrap(model).named_modules():
            if not isinstance(group, (nn.ModuleList, nn.ModuleDict)):
                continue
            members = {f"{prefix}{name}.{key}" if name else f"{prefix}{key}": child for key, child in group.named_children()}
            kinds = Counter(map(type, members.values()))
            alike = Counter((type(child), given.get(path)) for path, child in members.items())
            for path, child in members.items():
                what = given.get(path)
                if what is None and path in trace.called_without_grad:
                    continue  # it ran
                if kinds[type(child)] > 1 and (what is None or what[1] == 0 or alike[type(child), what] > 1):
                    yield path
            parent = name.rpartition(".")[0]
            for key, child in unwrap(model).get_submodule(parent).named_children():
                if isinstance(child, nn.Linear) and child.out_features == len(members) > 1:  # it chooses among them
                    yield prefix + (f"{parent}.{key}" if parent else key)


def _given_to(trace: StepTrace) -> dict[str, tuple[int, int]]:
    """Identity and size of the first tensor that a module, or what is in it, was called with."""
    found: dict[str, tuple[int, int]] = {}
    for site, what in trace.given.items():
        while site and site not in found:
            found[site] = what
            site = site.rpartition(".")[0]
    return found
